"""Sources of changes: the protocols that a queue and a logical slot share, so that one reader takes either.

Write a reader against BatchSource and SourceBatch. Consumer reads a queue, SlotSource a slot; both give batches of
events.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any, Literal, Protocol, Self

from gdq.errors import GdqError
from gdq.shown import Shown
from gdq.typed.pgtypes import OnUnsupported
from gdq.typed.values import json_image

if TYPE_CHECKING:
    import pyarrow as pa

# Default for the number of changes up to which ticks or transactions are joined in one batch.
MAX_EVENTS = 50_000

Images = Literal["both", "new"]
Operation = Literal["insert", "update", "delete", "truncate", "ddl", "message", "read"]


@dataclass(frozen=True, slots=True, repr=False)
class Event(Shown):
    """One change, in the order of the queue.

    `op`: insert, update, delete, truncate, ddl or message (read by Message.of()), or read for a row of a copy. `key`:
    the new key of an insert, update or read, the old one of a delete. `old` and `new`: row images, or the included
    columns in pk mode. Each is None if missing. Values are Python's, or PostgreSQL's text if Python cannot hold every
    value of the type (docs/types.md). `unchanged`: columns that an update left as they were and whose large values the
    source has not sent: they are in neither image (capture with unchanged "omit"; slots). Of a retried event these are
    columns that the table has by now. `types`: the type in the log of each column, by name; None where there is no row,
    and after in_json(). `time` has a time zone. `retries`: number of times the event was put aside before, 0 at first.
    `origin`: the writer's gdq.origin, if the table is captured with it. Events of a copy have the number 0.
    """

    _shown = "id xid time op table key old new retries origin"

    id: int
    xid: int
    time: datetime
    op: Operation
    table: str | None
    key: dict[str, Any] | None
    old: dict[str, Any] | None
    new: dict[str, Any] | None
    retries: int = 0
    origin: str | None = None
    types: Mapping[str, str] | None = field(default=None, compare=False, kw_only=True)
    unchanged: tuple[str, ...] = field(default=(), kw_only=True)

    def in_json(self) -> Event:
        """The event with JSON's values, as `gdq consume` prints them: text for bigint, numeric and times."""
        types = self.types
        if types is None:
            return self
        images = (json_image(image, types) for image in (self.key, self.old, self.new))
        more = (self.retries, self.origin, None, self.unchanged)
        return make_event(self.id, self.xid, self.time, self.op, self.table, *images, *more)


class _EventFields(Shown):
    """The fields of an Event before it is frozen; both classes have the same slots."""

    __slots__ = tuple(one.name for one in fields(Event))

    def __init__(self, *values: Any) -> None:
        self.id, self.xid, self.time, self.op, self.table, self.key, self.old, self.new, *more = values
        self.retries, self.origin, self.types, self.unchanged = more


def make_event(*values: Any) -> Event:
    """An Event of all its fields, in a sixth of the time that its own constructor takes."""
    made: Any = _EventFields(*values)
    made.__class__ = Event  # what a frozen dataclass does for each field costs more than reading the row
    event: Event = made
    return event


def iso_utc(time: datetime) -> str:
    """A time in UTC as ISO text, the form of all output."""
    return time.astimezone(UTC).isoformat(timespec="microseconds").replace("+00:00", "Z")


@dataclass(frozen=True, slots=True)
class Position:
    """The position of a reader; opaque to the reader, stored as text by str().

    `kind` names the source ("queue"), `tick` is the place in the source, `snapshot` sees exactly the changes read.
    `nonce` is random for each tick: after a failover that lost ticks the source may reuse a number, but not a nonce.
    `era` ends when the source is restored from a dump, since its numbers are then invalid.
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
    """The changes between two positions: whole transactions; reading them again gives the same."""

    @property
    def position(self) -> Position:
        """The reader's position once it has applied the batch."""

    def tables(self) -> list[str]:
        """The tables that have rows in the batch, as `schema.table` quoted where needed."""

    def events(self, *, images: Images = "both", columns: Sequence[str] | None = None) -> Iterator[Event]:
        """All changes in order, with Python's values, streamed.

        `images`: "new" leaves the old images out. `columns`: only these columns of the images. A key is always whole.
        """

    def arrow(
        self,
        table: str,
        *,
        images: Images = "both",
        columns: Collection[str] | None = None,
        unsupported: OnUnsupported = "error",
        as_text: Collection[str] = (),
    ) -> pa.Table:
        """The log rows of one table, typed, in no order; `images` and `columns` as for events().

        A type or value that Arrow cannot hold is an error. To read text instead, set unsupported="text" for types, or
        name the column in `as_text` for values.
        """

    def arrow_batches(
        self,
        table: str,
        *,
        images: Images = "both",
        columns: Collection[str] | None = None,
        unsupported: OnUnsupported = "error",
        as_text: Collection[str] = (),
    ) -> Iterator[pa.RecordBatch]:
        """As arrow(), streamed."""

    def delta(self, table: str, *, unsupported: OnUnsupported = "error", as_text: Collection[str] = ()) -> pa.Table:
        """The net change of one table: row images with a signed count in `_weight`, without zero counts."""

    def commit(self) -> None:
        """Move the reader past the batch."""


class BatchSource(Protocol):
    """Gives batches one after the other; each stays open until the next is requested."""

    def batches(
        self, *, once: bool = False, timeout: float | None = None, stop: Callable[[], bool] = lambda: False
    ) -> Iterator[SourceBatch]:
        """The batches from the reader's position on.

        `once`: end with the changes that are committed now. `timeout`: end after this many seconds without a batch;
        None: wait for ever. `stop` is called between batches and while waiting: True ends the iteration.
        """
