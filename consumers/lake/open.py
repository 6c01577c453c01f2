"""Opens the lake table that is the target of a view: the one module that knows Delta, Iceberg and Parquet.

The libraries of a format are loaded when a table of that format is opened.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

from gdq.consumers.lake.table import Lake
from gdq.consumers.views.target import StoredPosition, TargetState
from gdq.errors import GdqError
from gdq.view.lake_name import LakeName

if TYPE_CHECKING:
    import pyarrow as pa

    from gdq.consumers.lake.files import ArrowDifference

_LIBRARIES = {"_internal", "deltalake", "pyarrow", "pyiceberg", "sqlalchemy"}


def open_lake(name: LakeName, view: str, source: str) -> Lake:
    """The lake table `name` as the target of a view; `source` is the view's own mark. Nothing is read or written.

    Its methods raise GdqError for what goes wrong in the lake.
    """
    return _OneLineErrors(_open(name, view, source), name)


@dataclass(frozen=True, slots=True)
class _OneLineErrors:
    """A lake table whose libraries' errors become a GdqError of one line."""

    lake: Lake
    name: LakeName

    def state(self) -> TargetState:
        with self._errors():
            return self.lake.state()

    def commit(self, change: ArrowDifference, stored: StoredPosition | None, new: StoredPosition) -> int:
        with self._errors():
            return self.lake.commit(change, stored, new)

    def scan(self) -> Iterator[pa.RecordBatch]:
        with self._errors():
            yield from self.lake.scan()

    def sweep(self) -> None:
        with self._errors():
            self.lake.sweep()

    def drop(self) -> None:
        with self._errors():
            self.lake.drop()

    @contextmanager
    def _errors(self) -> Iterator[None]:
        try:
            yield
        except Exception as error:
            # the libraries' errors have no class in common
            if isinstance(error, OSError) or type(error).__module__.partition(".")[0] in _LIBRARIES:
                text = (str(error).strip() or type(error).__name__).splitlines()[0]
                raise GdqError(f"{self.name}: {text}") from error
            raise


def _open(name: LakeName, view: str, source: str) -> Lake:
    try:
        match name.kind:
            case "delta":
                from gdq.consumers.lake.delta import DeltaLake  # noqa: PLC0415

                return DeltaLake(name, view, source)
            case "parquet":
                from gdq.consumers.lake.parquet import ParquetLake  # noqa: PLC0415

                return ParquetLake(name, view, source)
            case "iceberg":
                from gdq.consumers.lake.iceberg import IcebergLake  # noqa: PLC0415

                return IcebergLake(name, view, source)
    except ModuleNotFoundError as error:
        raise GdqError(f"a {name.kind} target needs {error.name}", hint="pip install 'gdq[lake]'") from error
