"""Lake tables (Delta, Iceberg, Parquet versions) as targets of views: the protocol, and what all formats share.

A lake table holds its view's position itself: the commit that changes the rows moves it. A commit succeeds only onto
the state that was read. So one of two refreshes gives up, and another writer's commit in between is noticed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from gdq.consumers.views.signals import Diverged
from gdq.consumers.views.target import StoredPosition, TargetState
from gdq.errors import ForeignTarget, GdqError, RefreshConflict
from gdq.object_store import find_system
from gdq.view.lake_name import LakeName

if TYPE_CHECKING:
    import pyarrow as pa
    from pyarrow import fs

    from gdq.consumers.lake.columns import EvolvedColumn
    from gdq.consumers.lake.files import ArrowDifference

# The catalog of the Iceberg tables of a folder.
ICEBERG_CATALOG = "catalog.db"
# Attempts of one commit; each failed because another commit came first.
_TRIES = 20


class LakeTable(Protocol):
    """A lake table that is the target of one view."""

    @property
    def library_errors(self) -> tuple[type[Exception], ...]:
        """The base classes of the errors that the format's libraries raise, besides OSError."""

    def state(self) -> TargetState:
        """The table's state; ForeignTarget if the table is not this view's."""

    def commit(self, change: ArrowDifference, stored: StoredPosition | None, new: StoredPosition) -> int:
        """Apply a change and move the position in one commit; returns the rows deleted plus the rows inserted.

        RefreshConflict unless the position is still `stored`, Diverged if the rows do not match that position.
        """

    def schema(self) -> pa.Schema:
        """The table's present columns; Diverged if it is gone."""

    def file_schema(self, schema: pa.Schema) -> pa.Schema:
        """What the files of a full load with these columns are written with, as the table is now."""

    def evolve(
        self, columns: Sequence[EvolvedColumn], stored: StoredPosition, new: StoredPosition, *, adopt: bool = False
    ) -> None:
        """Give the table these columns, its rows as they are, and move the position, in one commit.

        `adopt`: also if others have changed the rows. Errors as for commit().
        """

    def scan(self) -> Iterator[pa.RecordBatch]:
        """The table's current rows."""

    def sweep(self) -> None:
        """Remove the remains of killed refreshes, and versions that are too old for any reader."""

    def expire(self, keep: float) -> None:
        """Remove versions that are older than `keep` seconds, and files that killed writers have left as long ago.

        Only the owner of a whole table may: somebody else's writer might be at work.
        """

    def beside(self) -> tuple[fs.FileSystem, str] | None:
        """A folder for files that are no table's, beside the table; None if the table's catalog does not say where."""

    def drop(self) -> None:
        """Remove the table if it exists; ForeignTarget if it is not this view's."""


@dataclass(frozen=True, slots=True)
class OwnedLakeTable:
    """The lake table `name` as the target of one view, or of a mirror's table; base of all formats.

    `owner`: of the table, for messages, as "view totals"; `source`: the owner's unique mark.
    """

    name: LakeName
    owner: str
    source: str

    def check(self, state: TargetState, stored: StoredPosition | None, kind: str) -> None:
        """Check that a change of this kind, computed from `stored`, fits the table's present state.

        RefreshConflict if the position differs; Diverged if others changed the rows, except for a full load.
        """
        if state.stored != stored:
            raise RefreshConflict(f"another refresh of {self.owner} has moved its position meanwhile")
        if kind != "full" and (state.stored is None or state.foreign is not None):
            raise Diverged(state.foreign or f"{self.name} is gone")

    def commit_onto(self, taken: type[Exception], attempt: Callable[[], int]) -> int:
        """The result of `attempt`, which reads the table, checks its state and commits onto that state.

        `attempt` is called again if it raises `taken`, that is if another commit came first: a compaction, or a
        refresh, which the check in the next call finds. RefreshConflict after _TRIES calls.
        """
        for _ in range(_TRIES):
            with suppress(taken):
                return attempt()
        raise RefreshConflict(f"others have committed to {self.name} {_TRIES} times in between")

    def file_schema(self, schema: pa.Schema) -> pa.Schema:
        """As LakeTable.file_schema(): as it is."""
        return schema

    def beside(self) -> tuple[fs.FileSystem, str] | None:
        """As LakeTable.beside()."""
        system, path = find_system(self.name.place)
        return system, path.rpartition("/")[0]

    def lost(self, why: str) -> TargetState:
        """The state of a table whose position is lost."""
        return TargetState(StoredPosition(self.source, str(self.name), "", ""), why)

    def foreign_error(self) -> GdqError:
        """The error for an existing table that is not this view's target."""
        return ForeignTarget(f"{self.name} exists and is not the target of {self.owner}", hint="Choose another target.")
