"""The messages of one transaction, kept until it is read: in memory, or on disk if they are many."""

from __future__ import annotations

import struct
import tempfile
from collections import Counter
from collections.abc import Iterator, Mapping
from datetime import datetime
from types import MappingProxyType

from gdq.consumers.slot.pgoutput import DecodedMessage, RelationMessage, decode_message, message_subxid

# Memory of one transaction before its messages go to a file.
_MEMORY_BYTES = 8 * 1024 * 1024
_FRAME = struct.Struct("!QII")

# The prefix of the message by which a replica says from which database a transaction's rows are.
ORIGIN_PREFIX = "gdq.origin"

KnownRelations = Mapping[int, RelationMessage]
NO_RELATIONS: KnownRelations = MappingProxyType({})


class SlotTransaction:
    """One transaction: its messages in order, and the tables as known at its start.

    `xid` has 32 bits. `end_lsn` and `time` belong to its commit, set when that arrives. `prepared_lsn`: the LSN of its
    PREPARE if the server sent it then, else None. `origin`: the database from which a replica of gdq has brought the
    rows, or the replication origin of PostgreSQL's own, by its name; None if it is of neither. `described`: the tables
    described in a streamed one, each with the number of the description, as the last one to arrive counts.
    """

    def __init__(self, xid: int, relations: KnownRelations, *, streamed: bool = False) -> None:
        self.xid = xid
        self.relations = relations
        self.streamed = streamed
        self.origin: str | None = None
        self.prepared_lsn: int | None = None
        self.described: dict[int, tuple[int, RelationMessage]] = {}
        self.end_lsn = 0
        self.time: datetime
        self._rows: Counter[int] = Counter()
        self._aborted: set[int] = set()
        self._spool = tempfile.SpooledTemporaryFile(max_size=_MEMORY_BYTES, prefix="gdq-slot-")  # noqa: SIM115

    def add(self, lsn: int, data: bytes) -> None:
        """Keep one message, whose change is at `lsn`."""
        subxid = message_subxid(data) if self.streamed and data[:1] in b"RYIUDTM" else self.xid
        self._spool.write(_FRAME.pack(lsn, subxid, len(data)))
        self._spool.write(data)
        if data[:1] in b"IUDTM":
            self._rows[subxid] += 1

    @property
    def rows(self) -> int:
        """Number of changes that were not rolled back."""
        return sum(self._rows.values())

    def abort(self, subxid: int) -> None:
        """Leave out a subtransaction that was rolled back."""
        self._aborted.add(subxid)
        self._rows.pop(subxid, None)

    def messages(self) -> Iterator[tuple[int, DecodedMessage]]:
        """The messages that were not rolled back, each with its LSN; may be read again."""
        at = 0
        while True:
            self._spool.seek(at)
            frame = self._spool.read(_FRAME.size)
            if not frame:
                break
            lsn, subxid, length = _FRAME.unpack(frame)
            data = self._spool.read(length)
            at += _FRAME.size + length
            # a table is described only once, so a description counts even in a rolled back subtransaction
            if subxid not in self._aborted or data[:1] in b"RY":
                yield lsn, decode_message(data, streamed=self.streamed)

    def close(self) -> None:
        """Free the messages."""
        self._spool.close()
