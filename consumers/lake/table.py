"""Lake tables as targets of views: what Delta, Iceberg and Parquet versions have in common.

A lake table holds its view's position itself: the commit that changes the rows moves it. It is committed only onto the
state that was looked at, so of two refreshes one gives up, and another writer's commit in between is noticed.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import asdict
from typing import TYPE_CHECKING, Protocol

from gdq.consumers.views.signals import Diverged
from gdq.consumers.views.target import StoredPosition, TargetState
from gdq.errors import GdqError, RefreshConflict
from gdq.view.lake_name import LakeName

if TYPE_CHECKING:
    import pyarrow as pa

    from gdq.consumers.lake.files import ArrowDifference

# How often a commit is tried while commits of others come before it.
_TRIES = 20


class Lake(Protocol):
    """A lake table that is the target of one view."""

    def state(self) -> TargetState:
        """The table's state. GdqError when the table is not this view's target."""

    def commit(self, change: ArrowDifference, stored: StoredPosition | None, new: StoredPosition) -> int:
        """Apply a change and move the position in one commit; the rows deleted and inserted.

        RefreshConflict unless the position is still `stored`, Diverged when the rows are not those of that position.
        """

    def scan(self) -> Iterator[pa.RecordBatch]:
        """The rows of the table as it is now."""

    def sweep(self) -> None:
        """Remove the remains of killed refreshes, and versions that no reader can need any more."""

    def drop(self) -> None:
        """Remove the table; nothing when it is not there. GdqError when it is not this view's target."""


def pack(position: StoredPosition) -> str:
    """A position as the text that is kept in the commit."""
    return json.dumps(asdict(position))


def unpack(text: str) -> StoredPosition:
    """The position that pack() has written."""
    return StoredPosition(**json.loads(text))


def check_state(name: LakeName, view: str, state: TargetState, stored: StoredPosition | None, kind: str) -> None:
    """Check that a change of this kind, computed from `stored`, fits the table's present state.

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
    """The error for an existing table that is not the target of this view."""
    return GdqError(f"{name} exists and is not the target of view {view}", hint="Choose another target.")
