"""Opens the lake table of a view or a mirror; only this module knows Delta, Iceberg and Parquet.

A format's libraries are imported when a table of that format is opened.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from threading import Thread
from typing import TYPE_CHECKING

from gdq.consumers.lake.table import ICEBERG_CATALOG, LakeTable, OwnedLakeTable
from gdq.consumers.views.target import StoredPosition, TargetState
from gdq.errors import GdqError
from gdq.object_store import error_line, store_hint
from gdq.view.lake_name import LakeKind, LakeName

if TYPE_CHECKING:
    import pyarrow as pa
    from pyarrow import fs

    from gdq.consumers.lake.columns import EvolvedColumn
    from gdq.consumers.lake.files import ArrowDifference


# Iceberg's libraries take most of the start of a program; the catalog's own are imported by its name.
_AHEAD: dict[LakeKind, tuple[str, ...]] = {
    "delta": ("gdq.consumers.lake.delta",),
    "iceberg": ("gdq.consumers.lake.iceberg", "pyiceberg.catalog.sql"),
}
_imports: dict[LakeKind, Thread] = {}


def import_ahead(kind: LakeKind) -> None:
    """Import a format's libraries in a thread, while the caller waits for a server; a lake table waits for its end.

    What is missing is an error then.
    """

    def work() -> None:
        with suppress(ImportError):
            for module in _AHEAD[kind]:
                import_module(module)

    if kind in _AHEAD and kind not in _imports:
        _imports[kind] = Thread(target=work, name=f"imports of {kind}")
        _imports[kind].start()


def open_lake(name: LakeName, owner: str, source: str) -> LakeTable:
    """The lake table `name` of an `owner`, "view totals", with the unique mark `source`; reads and writes nothing.

    Its methods turn the libraries' errors into GdqError.
    """
    return _OneLineErrors(name, owner, source)


@dataclass(frozen=True, slots=True)
class _NoTable(OwnedLakeTable):
    """A table of an Iceberg folder without a catalog, of which all is known before the libraries are imported."""

    def state(self) -> TargetState:
        return TargetState(None)

    def file_schema(self, schema: pa.Schema) -> pa.Schema:
        from gdq.consumers.lake.columns import with_numbers  # noqa: PLC0415 (pyarrow is slow to load)

        return with_numbers(schema, range(1, len(schema) + 1))


@dataclass(slots=True)
class _OneLineErrors:
    """Wraps a lake table: its libraries' errors become a GdqError of one line."""

    name: LakeName
    owner: str
    source: str
    _opened: LakeTable | None = None

    @property
    def lake(self) -> LakeTable:
        if self._opened is None:
            self._opened = _open(self.name, self.owner, self.source)
        return self._opened

    @property
    def _looked_at(self) -> LakeTable | _NoTable:
        """What tells of the table as it is, without waiting for imports if it is not there."""
        if self.name.kind == "iceberg" and self._opened is None and find_spec("pyiceberg"):
            where = self.name.iceberg[0]
            if where.startswith("/") and not Path(where, ICEBERG_CATALOG).exists():
                return _NoTable(self.name, self.owner, self.source)
        return self.lake

    @property
    def library_errors(self) -> tuple[type[Exception], ...]:
        return self.lake.library_errors

    def state(self) -> TargetState:
        with self._errors():
            return self._looked_at.state()

    def commit(self, change: ArrowDifference, stored: StoredPosition | None, new: StoredPosition) -> int:
        with self._errors():
            return self.lake.commit(change, stored, new)

    def schema(self) -> pa.Schema:
        with self._errors():
            return self.lake.schema()

    def file_schema(self, schema: pa.Schema) -> pa.Schema:
        with self._errors():
            return self._looked_at.file_schema(schema)

    def evolve(
        self, columns: Sequence[EvolvedColumn], stored: StoredPosition, new: StoredPosition, *, adopt: bool = False
    ) -> None:
        with self._errors():
            self.lake.evolve(columns, stored, new, adopt=adopt)

    def scan(self) -> Iterator[pa.RecordBatch]:
        with self._errors():
            yield from self.lake.scan()

    def sweep(self) -> None:
        with self._errors():
            self.lake.sweep()

    def expire(self, keep: float) -> None:
        with self._errors():
            self.lake.expire(keep)

    def beside(self) -> tuple[fs.FileSystem, str] | None:
        with self._errors():
            return self._looked_at.beside()

    def drop(self) -> None:
        with self._errors():
            self.lake.drop()

    @contextmanager
    def _errors(self) -> Iterator[None]:
        try:
            yield
        except Exception as error:
            if not isinstance(error, (OSError, *self.lake.library_errors)):
                raise
            raise GdqError(f"{self.name}: {error_line(error)}", hint=store_hint(self.name.place)) from error


def _open(name: LakeName, owner: str, source: str) -> LakeTable:
    if name.kind in _imports:
        _imports[name.kind].join()
    try:
        match name.kind:
            case "delta":
                from gdq.consumers.lake.delta import DeltaLake  # noqa: PLC0415

                return DeltaLake(name, owner, source)
            case "parquet" if "://" in name.place:
                from gdq.consumers.lake.parquet_objects import ParquetObjects  # noqa: PLC0415

                return ParquetObjects(name, owner, source)
            case "parquet":
                from gdq.consumers.lake.parquet import ParquetLake  # noqa: PLC0415

                return ParquetLake(name, owner, source)
            case "iceberg":
                from gdq.consumers.lake.iceberg import IcebergLake  # noqa: PLC0415

                return IcebergLake(name, owner, source)
    except ModuleNotFoundError as error:
        message = f"a target of kind {name.kind} needs the Python package {error.name}"
        raise GdqError(message, hint="pip install 'gdq[lake]'") from error
