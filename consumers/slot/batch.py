"""One batch of a slot: whole committed transactions, as events, typed rows and a net change."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from contextlib import ExitStack
from typing import TYPE_CHECKING, Protocol

from gdq.consumers.slot.catalog import SlotCatalog
from gdq.consumers.slot.events import slot_events
from gdq.consumers.slot.replication import lsn_text
from gdq.consumers.slot.rows import SlotRows
from gdq.consumers.slot.transaction import SlotTransaction
from gdq.event_rows import EventChoice
from gdq.extra import extra_named
from gdq.source import Event, Images, Position
from gdq.typed.pgtypes import OnUnsupported

if TYPE_CHECKING:
    import pyarrow as pa


class SlotReader(Protocol):
    """Who gives batches of `slot`, on the server with the identifier `system`. `stored`: the LSN of its position."""

    slot: str
    system: str
    stored: int
    catalog: SlotCatalog

    def move(self, lsn: int) -> None:
        """Store a position, in the open transaction."""

    def committed(self, transactions: Sequence[SlotTransaction]) -> None:
        """Tell the server that the transactions of a batch were committed."""


class SlotBatch:
    """Some whole committed transactions; reading them again gives the same."""

    def __init__(self, source: SlotReader, transactions: Sequence[SlotTransaction], transaction: ExitStack) -> None:
        self._source = source
        self.transactions = transactions
        self._transaction = transaction
        self.lsn = transactions[-1].end_lsn
        self.finished = False

    @property
    def position(self) -> Position:
        """The reader's position once the batch is finished; its `tick` and its snapshot are the LSN."""
        return Position("slot", self._source.system, self.lsn, self._source.slot, lsn_text(self.lsn))

    @property
    def size(self) -> int:
        """Number of changes in the batch."""
        return sum(one.rows for one in self.transactions)

    def tables(self) -> list[str]:
        """The tables that have rows in the batch, as `%I.%I`."""
        return sorted({event.table for event in self.events() if event.table is not None})

    def events(self, *, images: Images = "both", columns: Sequence[str] | None = None) -> Iterator[Event]:
        """All changes, streamed: transactions in commit order. The server sends what is left out, too."""
        choice = EventChoice.of(images, columns)
        for one in self.transactions:
            yield from slot_events(one, self._source.catalog, choice)

    @extra_named()
    def arrow(
        self,
        table: str,
        *,
        images: Images = "both",
        columns: Collection[str] | None = None,
        unsupported: OnUnsupported = "error",
        as_text: Collection[str] = (),
    ) -> pa.Table:
        """The changes of one table, typed, with the columns of the queue's log rows.

        An `old_` column is NULL if the replica identity gives no old value, a `new_` column for a large value that an
        update left unchanged. GdqError if a column changed its type within the batch.
        """
        return self._rows(table, unsupported, as_text, EventChoice.of(images, columns)).arrow()

    @extra_named()
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
        import pyarrow as pa  # noqa: F401, PLC0415 (missed here, not at the first row)

        return self._rows(table, unsupported, as_text, EventChoice.of(images, columns)).batches()

    @extra_named()
    def delta(self, table: str, *, unsupported: OnUnsupported = "error", as_text: Collection[str] = ()) -> pa.Table:
        """The net change of one table: row images with a signed count in `_weight`, without zero counts.

        GdqError without REPLICA IDENTITY FULL, ResyncRequired after a TRUNCATE.
        """
        return self._rows(table, unsupported, as_text, EventChoice()).delta()

    def commit(self) -> None:
        """Commit the new position together with everything written in the batch's transaction."""
        if self.finished:
            return
        self._source.move(self.lsn)
        self._transaction.close()
        self.finished = True
        self._source.stored = self.lsn
        self._source.committed(self.transactions)

    def _rows(self, table: str, unsupported: OnUnsupported, as_text: Collection[str], choice: EventChoice) -> SlotRows:
        return SlotRows(self.transactions, self._source.catalog, table, unsupported, as_text, choice)
