"""Lake tables as targets of views: what Delta, Iceberg and Parquet versions have in common, and opening one.

A lake table holds its view's position itself: the commit that changes the rows moves it. It is committed only onto the
state that was looked at, so of two refreshes one gives up, and another writer's commit in between is noticed.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Protocol

from gdq.errors import GdqError
from gdq.view.lake_name import LakeName
from gdq.view.target import Diverged, RefreshConflict, StoredPosition

if TYPE_CHECKING:
    import pyarrow as pa

    from gdq.consumers.lake.files import ArrowDifference

# How often a commit is tried while commits of others come before it.
_TRIES = 20

_LIBRARIES = {"_internal", "deltalake", "pyarrow", "pyiceberg", "sqlalchemy"}


@dataclass(frozen=True, slots=True)
class LakeState:
    """What a target says of itself: its position, None before the first load, and who else has changed its rows.

    A position without a text is one that is lost. `gone`: there is no table, although it was filled.
    """

    stored: StoredPosition | None
    foreign: str | None = None
    gone: bool = False


class Lake(Protocol):
    """A lake table that is the target of one view."""

    def state(self) -> LakeState:
        """What the table stands for now. GdqError when there is a table that is not this view's target."""

    def commit(self, change: ArrowDifference, stored: StoredPosition | None, new: StoredPosition) -> int:
        """Apply a change and move the position in one commit; the rows deleted and inserted.

        RefreshConflict unless the position is still `stored`, Diverged when the rows are not those of that position.
        """

    def scan(self) -> Iterator[pa.RecordBatch]:
        """The rows of the table as it is now."""

    def sweep(self) -> None:
        """Remove what refreshes that were killed have left, and what no reader can need any more."""

    def drop(self) -> None:
        """Remove the table; nothing when it is not there. GdqError when it is not this view's target."""


def open_lake(name: LakeName, view: str, source: str) -> Lake:
    """The lake table `name` as the target of a view; `source` is the view's own mark. Nothing is read or written.

    Its methods raise GdqError for what goes wrong in the lake.
    """
    return _Told(_open(name, view, source), name)


@dataclass(frozen=True, slots=True)
class _Told:
    """A lake table whose errors are told in one line."""

    lake: Lake
    name: LakeName

    def state(self) -> LakeState:
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


def pack(position: StoredPosition) -> str:
    """A position as the text that is kept in the commit."""
    return json.dumps(asdict(position))


def unpack(text: str) -> StoredPosition:
    """The position that pack() has written."""
    return StoredPosition(**json.loads(text))


def check_state(name: LakeName, view: str, state: LakeState, stored: StoredPosition | None, kind: str) -> None:
    """Whether a change of this kind, computed from `stored`, fits what the table is now.

    RefreshConflict when the position is another, Diverged when the rows are; all rows fit whatever is there.
    """
    if state.stored != stored:
        raise RefreshConflict(f'another refresh of view "{view}" has moved its position meanwhile')
    if kind != "full" and (state.stored is None or state.foreign is not None):
        raise Diverged(state.foreign or f"{name} is gone")


def commit_onto(name: LakeName, taken: type[Exception], attempt: Callable[[], int]) -> int:
    """The result of `attempt`, which looks at the table `name`, checks its state and commits onto what it saw.

    `attempt` is called again when it raises `taken`: another commit came first, of a compaction, or of a refresh, which
    the check finds in the next call. RefreshConflict after _TRIES calls.
    """
    for _ in range(_TRIES):
        with suppress(taken):
            return attempt()
    raise RefreshConflict(f"others have committed to {name} {_TRIES} times in between")


def not_ours(name: LakeName, view: str) -> GdqError:
    """The error for a table that is there and is none of ours."""
    return GdqError(f"{name} exists and is not the target of view {view}", hint="Choose another target.")
