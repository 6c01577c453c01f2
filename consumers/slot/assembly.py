"""Puts the messages of a slot's stream together to committed transactions."""

from __future__ import annotations

from datetime import UTC, datetime
from types import MappingProxyType

from gdq.consumers.slot.pgoutput import (
    Begin,
    Commit,
    Decoded,
    LogicalMessage,
    Origin,
    Prepared,
    Relation,
    RollbackPrepared,
    StreamAbort,
    StreamCommit,
    StreamStart,
    StreamStop,
    decode,
)
from gdq.consumers.slot.replication import Data
from gdq.consumers.slot.transaction import NO_RELATIONS, Relations, Transaction
from gdq.errors import GdqError


class Assembly:
    """The parts of uncommitted transactions that have arrived, and the tables that the stream has described.

    Transactions come whole at their commit, or, when they are large, in blocks while they run, rolled back
    subtransactions included; prepared ones at PREPARE where the slot is of two phases.
    """

    def __init__(self, slot: str) -> None:
        self._slot = slot
        self._relations: Relations = NO_RELATIONS
        self._open: Transaction | None = None
        self._streams: dict[int, Transaction] = {}
        self._block: Transaction | None = None
        self.prepared: dict[str, Transaction] = {}

    @property
    def empty(self) -> bool:
        """Whether no part of an uncommitted transaction has arrived."""
        return not (self._open or self._streams or self.prepared)

    def close(self) -> None:
        """Drop uncommitted transactions."""
        for one in [self._open, *self._streams.values(), *self.prepared.values()]:
            if one is not None:
                one.close()

    def take(self, message: Data) -> Transaction | None:
        """Add one message to its transaction; returns the transaction if the message commits it, else None."""
        if self._block is not None and message.data[:1] in b"RYIUDTMO":
            self._keep(message, self._block)
            return None
        found = decode(message.data)
        if isinstance(found, StreamStart | StreamStop | StreamCommit | StreamAbort):
            return self._stream(found)
        if isinstance(found, Prepared | RollbackPrepared):
            return self._two_phases(found)
        if isinstance(found, Begin):
            self._open = Transaction(found.xid, self._relations)
        elif isinstance(found, Commit):
            return self._committed(self._ended(), found)
        elif isinstance(found, LogicalMessage) and not found.transactional:
            return self._alone(message, found)
        else:
            if isinstance(found, Relation):
                self._relations = MappingProxyType({**self._relations, found.oid: found})
            self._keep(message, self._open)
        return None

    def _stream(self, found: StreamStart | StreamStop | StreamCommit | StreamAbort) -> Transaction | None:
        if isinstance(found, StreamStart):
            if found.xid not in self._streams:
                self._streams[found.xid] = Transaction(found.xid, self._relations, streamed=True)
            self._block = self._streams[found.xid]
        elif isinstance(found, StreamStop):
            self._block = None
        elif isinstance(found, StreamCommit):
            return self._committed(self._streams.pop(found.xid), found)
        elif found.xid == found.subxid:
            self._streams.pop(found.xid).close()
        else:
            self._streams[found.xid].abort(found.subxid)
        return None

    def _two_phases(self, found: Prepared | RollbackPrepared) -> Transaction | None:
        """What a slot that sends prepared transactions says of them: they count from COMMIT PREPARED on."""
        if isinstance(found, RollbackPrepared):
            if found.gid in self.prepared:
                self.prepared.pop(found.gid).close()
        elif found.kind == "begin":
            self._open = Transaction(found.xid, self._relations)
        elif found.kind == "prepare":
            self.prepared[found.gid] = self._ended()
        elif found.kind == "stream":
            self.prepared[found.gid] = self._streams.pop(found.xid)
        elif found.gid in self.prepared:
            ended = self.prepared.pop(found.gid)
            ended.gid = found.gid
            return self._committed(ended, found)
        else:
            raise GdqError(
                f"slot {self._slot} sent the commit of prepared transaction {found.gid}, but not its changes",
                hint="Drop the slot, make it anew and copy the tables.",
            )
        return None

    def _committed(self, transaction: Transaction, found: Commit | StreamCommit | Prepared) -> Transaction:
        transaction.end_lsn, transaction.time = found.end_lsn, found.time
        if transaction.streamed:
            # tables that were described inside of a streamed transaction are so for all from its commit on
            described = {one.oid: one for _, one in transaction.messages() if isinstance(one, Relation)}
            self._relations = MappingProxyType({**self._relations, **described})
        return transaction

    def _ended(self) -> Transaction:
        ended, self._open = self._open, None
        if ended is None:
            raise GdqError(f"slot {self._slot} sent the end of a transaction that did not begin")
        return ended

    def _keep(self, message: Data, transaction: Transaction | None) -> None:
        if transaction is None:
            raise GdqError(f"slot {self._slot} sent a change outside of a transaction: {message.data[:40]!r}")
        if message.data[:1] == b"O":
            origin: Decoded = decode(message.data)
            transaction.origin = origin.name if isinstance(origin, Origin) else None
        else:
            transaction.add(message.lsn, message.data)

    def _alone(self, message: Data, found: LogicalMessage) -> Transaction:
        """A message that belongs to no transaction is one by itself; nothing tells its time."""
        alone = Transaction(0, self._relations)
        alone.add(message.lsn, message.data)
        alone.end_lsn, alone.time = found.lsn, datetime.now(UTC)
        return alone
