"""The messages of one transaction, kept until it is read: in memory, on disk when they are many."""

from __future__ import annotations

import struct
import tempfile
from collections import Counter
from collections.abc import Iterator, Mapping
from datetime import datetime
from types import MappingProxyType

from gdq.consumers.slot.pgoutput import Decoded, Relation, decode, subxid_of

# What one transaction holds in memory before it goes to a file.
_MEMORY_BYTES = 8 * 1024 * 1024
_FRAME = struct.Struct("!QII")

Relations = Mapping[int, Relation]
NO_RELATIONS: Relations = MappingProxyType({})


class Transaction:
    """One transaction: its messages in order, with the tables as they were known at its start.

    `xid` has 32 bits. `end_lsn` and `time` are of its commit, once it is known; `gid` of a prepared one.
    """

    def __init__(self, xid: int, relations: Relations, *, streamed: bool = False) -> None:
        self.xid = xid
        self.relations = relations
        self.streamed = streamed
        self.origin: str | None = None
        self.gid = ""
        self.end_lsn = 0
        self.time: datetime
        self._rows: Counter[int] = Counter()
        self._aborted: set[int] = set()
        self._spool = tempfile.SpooledTemporaryFile(max_size=_MEMORY_BYTES, prefix="gdq-slot-")  # noqa: SIM115

    def add(self, lsn: int, data: bytes) -> None:
        """Keep one message, whose change is at `lsn`."""
        subxid = subxid_of(data) if self.streamed and data[:1] in b"RYIUDTM" else self.xid
        self._spool.write(_FRAME.pack(lsn, subxid, len(data)))
        self._spool.write(data)
        if data[:1] in b"IUDTM":
            self._rows[subxid] += 1

    @property
    def rows(self) -> int:
        """How many changes count."""
        return sum(self._rows.values())

    def abort(self, subxid: int) -> None:
        """Leave out a subtransaction that was rolled back."""
        self._aborted.add(subxid)
        self._rows.pop(subxid, None)

    def messages(self) -> Iterator[tuple[int, Decoded]]:
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
            # tables are as a rolled back subtransaction told them, too: they are told once
            if subxid not in self._aborted or data[:1] in b"RY":
                yield lsn, decode(data, streamed=self.streamed)

    def close(self) -> None:
        """Forget the messages."""
        self._spool.close()
