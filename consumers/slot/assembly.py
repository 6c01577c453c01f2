"""Assembles the messages of a slot's stream into committed transactions."""

from __future__ import annotations

from datetime import UTC, datetime
from itertools import count
from types import MappingProxyType

from gdq.consumers.slot import pgoutput
from gdq.consumers.slot.replication import ReplicationData
from gdq.consumers.slot.transaction import NO_RELATIONS, ORIGIN_PREFIX, KnownRelations, SlotTransaction
from gdq.errors import GdqError


class Assembly:
    """Collects the arrived parts of uncommitted transactions, and the tables that the stream has described.

    A small transaction comes whole at its commit. A large one comes in blocks while it runs, with subtransactions that
    may be rolled back later. On a two-phase slot, a prepared one comes at PREPARE.

    The server also sends ends of transactions whose beginning it left out: the abort of a large one that was rolled
    back before the slot was read, or COMMIT PREPARED where the PREPARE was confirmed. Such an end has no changes.
    """

    def __init__(self, slot: str) -> None:
        self._slot = slot
        self._relations: KnownRelations = NO_RELATIONS
        self._numbers = count(1)
        self._described: dict[int, int] = {}
        self._open: SlotTransaction | None = None
        self._streams: dict[int, SlotTransaction] = {}
        self._block: SlotTransaction | None = None
        self._prepared: dict[tuple[int, str], SlotTransaction] = {}

    @property
    def empty(self) -> bool:
        """True if no part of a running transaction has arrived."""
        return not (self._open or self._streams)

    def confirmable(self, lsn: int) -> int:
        """The LSN up to which the server may forget its log, at most `lsn`: not past a PREPARE that waits for its end.

        After a restart past the PREPARE the server would send only the COMMIT PREPARED.
        """
        return min([lsn, *(one.prepared_lsn for one in self._prepared.values() if one.prepared_lsn is not None)])

    def close(self) -> None:
        """Drop uncommitted transactions."""
        for one in [self._open, *self._streams.values(), *self._prepared.values()]:
            if one is not None:
                one.close()

    def take(self, message: ReplicationData) -> SlotTransaction | None:
        """Add one message to its transaction; returns the transaction if the message commits it, else None."""
        if self._block is not None and message.data[:1] in b"RYIUDTMO":
            self._keep(message, self._block)
            return None
        found = pgoutput.decode_message(message.data)
        if isinstance(found, pgoutput.StreamMessage):
            return self._stream(found)
        if isinstance(found, pgoutput.PreparedMessage | pgoutput.RollbackPreparedMessage):
            return self._two_phases(found)
        if isinstance(found, pgoutput.BeginMessage):
            self._open = SlotTransaction(found.xid, self._relations)
        elif isinstance(found, pgoutput.CommitMessage):
            return self._committed(self._ended(), found)
        elif isinstance(found, pgoutput.LogicalMessage) and not found.transactional:
            return self._alone(message, found)
        else:
            if isinstance(found, pgoutput.RelationMessage):
                self._learn(next(self._numbers), found)
            self._keep(message, self._open)
        return None

    def _stream(self, found: pgoutput.StreamMessage) -> SlotTransaction | None:
        if isinstance(found, pgoutput.StreamStartMessage):
            if found.xid not in self._streams:
                self._streams[found.xid] = SlotTransaction(found.xid, self._relations, streamed=True)
            self._block = self._streams[found.xid]
        elif isinstance(found, pgoutput.StreamStopMessage):
            self._block = None
        elif isinstance(found, pgoutput.StreamCommitMessage):
            return self._committed(self._streams.pop(found.xid, None), found)
        elif found.xid == found.subxid:
            _close(self._streams.pop(found.xid, None))
        elif found.xid in self._streams:
            self._streams[found.xid].abort(found.subxid)
        return None

    def _two_phases(self, found: pgoutput.PreparedMessage | pgoutput.RollbackPreparedMessage) -> SlotTransaction | None:
        """Handle a message about a prepared transaction, which counts from COMMIT PREPARED on."""
        name = (found.xid, found.gid)
        if isinstance(found, pgoutput.RollbackPreparedMessage):
            _close(self._prepared.pop(name, None))
        elif found.kind == "begin":
            self._open = SlotTransaction(found.xid, self._relations)
        elif found.kind == "commit":
            return self._committed(self._prepared.pop(name, None), found)
        else:
            one = self._ended() if found.kind == "prepare" else self._streams.pop(found.xid, None)
            _close(self._prepared.pop(name, None))
            if one is not None and one.rows:
                one.prepared_lsn = found.lsn
                self._prepared[name] = one
            else:
                _close(one)
        return None

    def _committed(
        self,
        transaction: SlotTransaction | None,
        found: pgoutput.CommitMessage | pgoutput.StreamCommitMessage | pgoutput.PreparedMessage,
    ) -> SlotTransaction | None:
        if transaction is not None:
            transaction.end_lsn, transaction.time = found.end_lsn, found.time
            for number, relation in transaction.described.values():
                self._learn(number, relation)
        return transaction

    def _learn(self, number: int, relation: pgoutput.RelationMessage) -> None:
        """Use a table's description from now on, unless a later one has arrived.

        One in a streamed transaction is for others from its commit on; meanwhile the table may be described anew.
        """
        if number > self._described.get(relation.oid, 0):
            self._described[relation.oid] = number
            self._relations = MappingProxyType({**self._relations, relation.oid: relation})

    def _ended(self) -> SlotTransaction | None:
        ended, self._open = self._open, None
        return ended

    def _keep(self, message: ReplicationData, transaction: SlotTransaction | None) -> None:
        if transaction is None:
            raise GdqError(f"slot {self._slot} sent a change outside of a transaction: {message.data[:40]!r}")
        kind = message.data[:1]
        if kind in b"OM" and _notes_origin(message.data, transaction):
            return
        if kind == b"R" and transaction.streamed:
            relation = pgoutput.decode_message(message.data, streamed=True)
            if isinstance(relation, pgoutput.RelationMessage):
                transaction.described[relation.oid] = next(self._numbers), relation
        transaction.add(message.lsn, message.data)

    def _alone(self, message: ReplicationData, found: pgoutput.LogicalMessage) -> SlotTransaction:
        """Wrap a non-transactional message in a transaction; the stream gives no time, so it gets the current one."""
        alone = SlotTransaction(0, self._relations)
        alone.add(message.lsn, message.data)
        alone.end_lsn, alone.time = found.lsn, datetime.now(UTC)
        return alone


def _close(transaction: SlotTransaction | None) -> None:
    if transaction is not None:
        transaction.close()


def _notes_origin(data: bytes, transaction: SlotTransaction) -> bool:
    """Note a transaction's origin if a message says it; that of a replica of gdq counts more than the server's."""
    found = pgoutput.decode_message(data, streamed=transaction.streamed)
    if isinstance(found, pgoutput.OriginMessage):
        transaction.origin = transaction.origin or found.name
        return True
    if isinstance(found, pgoutput.LogicalMessage) and found.prefix == ORIGIN_PREFIX:
        transaction.origin = found.content.decode()
        return True
    return False
