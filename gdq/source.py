"""Sources of changes: what a queue and a logical slot have in common, so that one reader takes either.

A reader is written against BatchSource and SourceBatch. Consumer reads a queue, SlotSource a slot: both give batches of
events.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any, Protocol, Self

from gdq.errors import GdqError
from gdq.typed.pgtypes import Unsupported

if TYPE_CHECKING:
    import pyarrow as pa

# A batch joins ticks or transactions up to this number of changes, unless its reader wants another.
MAX_EVENTS = 50_000


@dataclass(frozen=True, slots=True)
class Event:
    """One change, in the order of the queue.

    `op` is insert, update, delete, truncate, ddl or message (Message.of() reads the last). `key` is the new key of an
    insert or update, the old one of a delete; `old` and `new` are row images, or the included columns in pk mode; None
    where there is none. Values are JSON's: what JSON cannot hold is PostgreSQL's text (docs/types.md). `time` has a
    time zone. `retries`: how often the event was put aside before; 0 for one that comes for the first time. `origin` is
    where the change came from, if the table is captured with its origin and the writer said it.
    """

    id: int
    xid: int
    time: datetime
    op: str
    table: str | None
    key: dict[str, Any] | None
    old: dict[str, Any] | None
    new: dict[str, Any] | None
    retries: int = 0
    origin: str | None = None


def iso_utc(time: datetime) -> str:
    """A time in UTC, as it is printed everywhere."""
    return time.astimezone(UTC).isoformat(timespec="microseconds").replace("+00:00", "Z")


@dataclass(frozen=True, slots=True)
class Position:
    """The place that a reader has come to; opaque to the reader, and text outside the server.

    `kind` names the source ("queue"), `snapshot` is what has been read, `tick` the place in the source. `nonce` was
    drawn for that tick: a source that lost its tail in a failover may give the number again, but not the nonce.
    `era` ends when the source is restored from a dump, which makes its numbers void.
    """

    kind: str
    era: str
    tick: int
    nonce: str
    snapshot: str

    def __str__(self) -> str:
        return f"{self.kind}/{self.era}/{self.tick}/{self.nonce}/{self.snapshot}"

    @classmethod
    def parse(cls, text: str) -> Self:
        """The position that str() wrote; GdqError for any other text."""
        parts = text.split("/")
        if len(parts) != 5 or not parts[2].isdecimal():
            raise GdqError(f"not a position: {text!r}")
        kind, era, tick, nonce, snapshot = parts
        return cls(kind, era, int(tick), nonce, snapshot)


class SourceBatch(Protocol):
    """The changes between two positions: whole transactions, the same again when read again."""

    @property
    def position(self) -> Position:
        """The reader's place once it has applied the batch."""

    def tables(self) -> list[str]:
        """The tables that have rows in the batch, as `schema.table` quoted where needed."""

    def events(self) -> Iterator[Event]:
        """All changes in order, streamed."""

    def arrow(self, table: str, *, unsupported: Unsupported = "error", as_text: Collection[str] = ()) -> pa.Table:
        """The log rows of one table, typed, in no order.

        What Arrow cannot hold is an error, or text: for types with unsupported="text", for values by naming the
        column in `as_text`.
        """

    def arrow_batches(
        self, table: str, *, unsupported: Unsupported = "error", as_text: Collection[str] = ()
    ) -> Iterator[pa.RecordBatch]:
        """The same, streamed."""

    def delta(self, table: str, *, unsupported: Unsupported = "error", as_text: Collection[str] = ()) -> pa.Table:
        """The net change of one table: row images with a signed count in `_weight`, zeros left out."""

    def commit(self) -> None:
        """Move the reader past the batch."""


class BatchSource(Protocol):
    """Gives batches, one after the other, each open until the next is asked for."""

    def batches(
        self, *, once: bool = False, timeout: float | None = None, stop: Callable[[], bool] = lambda: False
    ) -> Iterator[SourceBatch]:
        """The batches from the reader's position on.

        `once`: end with the changes that are committed by now. `timeout`: end when there was no batch for that many
        seconds; None: wait for ever. `stop` is asked between batches and while waiting: True ends the iteration.
        """
