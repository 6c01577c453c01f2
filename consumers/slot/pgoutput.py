"""The messages of pgoutput, PostgreSQL's own output plugin, decoded: bytes in, dataclasses out.

The format is that of PostgreSQL's documentation, "Logical Replication Message Formats", protocol versions 1 to 4:
transactions whole, streamed while they run, and prepared. Pure: needs no connection.
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Literal

from gdq.errors import GdqError

_EPOCH = datetime(2000, 1, 1, tzinfo=UTC)

_INT16, _INT32, _INT64 = struct.Struct("!H"), struct.Struct("!I"), struct.Struct("!Q")
_TIME = struct.Struct("!q")


@dataclass(frozen=True, slots=True)
class TupleValue:
    """One value of a tuple: its text, or its binary form, in `data`; None for NULL.

    `unchanged`: a large value that was not sent because the change left it as it was; `data` is None.
    """

    data: bytes | None
    binary: bool = False
    unchanged: bool = False


TupleData = tuple[TupleValue, ...]


@dataclass(frozen=True, slots=True)
class BeginMessage:
    """A transaction follows; `xid` has 32 bits."""

    xid: int


@dataclass(frozen=True, slots=True)
class CommitMessage:
    """The transaction is committed; the log goes on at `end_lsn`."""

    end_lsn: int
    time: datetime


@dataclass(frozen=True, slots=True)
class PreparedMessage:
    """BEGIN PREPARED, PREPARE, STREAM PREPARE or COMMIT PREPARED of `xid`, as `gid`.

    The record of the PREPARE or COMMIT PREPARED is at `lsn`, and the log goes on at `end_lsn`.
    """

    kind: Literal["begin", "prepare", "stream", "commit"]
    lsn: int
    end_lsn: int
    time: datetime
    xid: int
    gid: str


@dataclass(frozen=True, slots=True)
class RollbackPreparedMessage:
    """ROLLBACK PREPARED of the transaction `xid` that was prepared as `gid`."""

    xid: int
    gid: str


@dataclass(frozen=True, slots=True)
class OriginMessage:
    """The transaction came from another server: the replication origin `name`."""

    name: str


@dataclass(frozen=True, slots=True)
class RelationColumn:
    """A column of a table. `identity`: it is part of the replica identity."""

    name: str
    type_oid: int
    type_modifier: int
    identity: bool


@dataclass(frozen=True, slots=True)
class RelationMessage:
    """Description of a table for the following messages. `identity`: d(efault), n(othing), f(ull) or i(ndex)."""

    oid: int
    schema: str
    name: str
    identity: str
    columns: tuple[RelationColumn, ...]


@dataclass(frozen=True, slots=True)
class TypeMessage:
    """A type that is not built in."""

    oid: int
    schema: str
    name: str


@dataclass(frozen=True, slots=True)
class RowMessage:
    """A row that was inserted, updated or deleted.

    `old`: the row before an update or delete, with replica identity full. `old_key`: a tuple in which only the columns
    of the identity are valid. An update without both did not change the identity.
    """

    op: Literal["insert", "update", "delete"]
    oid: int
    old: TupleData | None
    old_key: TupleData | None
    new: TupleData | None


@dataclass(frozen=True, slots=True)
class TruncateMessage:
    """Tables that one TRUNCATE emptied."""

    oids: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class LogicalMessage:
    """A message written by pg_logical_emit_message(); outside any transaction unless `transactional`."""

    transactional: bool
    lsn: int
    prefix: str
    content: bytes


@dataclass(frozen=True, slots=True)
class StreamStartMessage:
    """Messages of the running transaction `xid` follow."""

    xid: int


@dataclass(frozen=True, slots=True)
class StreamStopMessage:
    """The block of a running transaction is over."""


@dataclass(frozen=True, slots=True)
class StreamCommitMessage:
    """A transaction that was streamed while it ran is committed."""

    xid: int
    end_lsn: int
    time: datetime


@dataclass(frozen=True, slots=True)
class StreamAbortMessage:
    """A running transaction was rolled back, or only its subtransaction `subxid` if `subxid` differs from `xid`."""

    xid: int
    subxid: int


StreamMessage = StreamStartMessage | StreamStopMessage | StreamCommitMessage | StreamAbortMessage
DecodedMessage = (
    BeginMessage
    | CommitMessage
    | PreparedMessage
    | RollbackPreparedMessage
    | OriginMessage
    | RelationMessage
    | TypeMessage
    | RowMessage
    | TruncateMessage
    | LogicalMessage
    | StreamMessage
)


class _Bytes:
    """Reads one message from its second byte on."""

    def __init__(self, data: bytes) -> None:
        self.data = data
        self.at = 1

    def byte(self) -> int:
        self.at += 1
        return self.data[self.at - 1]

    def int16(self) -> int:
        return self._unpack(_INT16)

    def int32(self) -> int:
        return self._unpack(_INT32)

    def int64(self) -> int:
        return self._unpack(_INT64)

    def time(self) -> datetime:
        try:
            return _EPOCH + timedelta(microseconds=self._unpack(_TIME))
        except OverflowError:  # a replication origin may give any time, infinity too
            return datetime.max.replace(tzinfo=UTC)

    def text(self) -> str:
        end = self.data.index(0, self.at)
        found = self.data[self.at : end].decode()
        self.at = end + 1
        return found

    def take(self, length: int) -> bytes:
        end = self.at + length
        if end > len(self.data):
            raise IndexError(f"{length} bytes wanted at {self.at} of {len(self.data)}")
        found = self.data[self.at : end]
        self.at = end
        return found

    def row(self) -> TupleData:
        return tuple(self._value() for _ in range(self.int16()))

    def _value(self) -> TupleValue:
        kind = self.byte()
        if kind == ord("n"):
            return TupleValue(None)
        if kind == ord("u"):
            return TupleValue(None, unchanged=True)
        if kind not in b"tb":
            raise ValueError(f"a value of kind {kind:#x}")
        return TupleValue(self.take(self.int32()), binary=kind == ord("b"))

    def _unpack(self, form: struct.Struct) -> int:
        (found,) = form.unpack_from(self.data, self.at)
        self.at += form.size
        return int(found)


def message_subxid(data: bytes) -> int:
    """The subtransaction number of a message in a streamed block; it stands before the body."""
    return int(_INT32.unpack_from(data, 1)[0])


def decode_message(data: bytes, *, streamed: bool = False) -> DecodedMessage:
    """Decode one message; GdqError if it is not one of pgoutput.

    `streamed`: the message is in a block of a running transaction, and so has a transaction number.
    """
    reader = _Bytes(data)
    try:
        kind = chr(data[0])
        if streamed and kind in "RYIUDTM":
            reader.int32()
        found = _DECODERS[kind](reader)
        if reader.at != len(data):
            raise ValueError(f"{len(data) - reader.at} bytes too many")
    except (KeyError, IndexError, ValueError, struct.error) as error:
        raise GdqError(f"not a message of pgoutput: {data[:40]!r} ({error})") from error
    return found


def _begin(reader: _Bytes) -> BeginMessage:
    reader.take(16)  # place and time of the commit
    return BeginMessage(reader.int32())


def _commit(reader: _Bytes) -> CommitMessage:
    reader.take(9)  # flags, the place of the commit
    return CommitMessage(reader.int64(), reader.time())


def _prepared(kind: Literal["begin", "prepare", "stream", "commit"]) -> Callable[[_Bytes], PreparedMessage]:
    def read(reader: _Bytes) -> PreparedMessage:
        if kind != "begin":
            reader.byte()  # flags
        return PreparedMessage(kind, reader.int64(), reader.int64(), reader.time(), reader.int32(), reader.text())

    return read


def _rollback_prepared(reader: _Bytes) -> RollbackPreparedMessage:
    reader.byte()
    reader.take(32)  # two places in the log, two times
    return RollbackPreparedMessage(reader.int32(), reader.text())


def _origin(reader: _Bytes) -> OriginMessage:
    reader.int64()  # the place of the commit there
    return OriginMessage(reader.text())


def _relation(reader: _Bytes) -> RelationMessage:
    oid, schema, name, identity = reader.int32(), reader.text(), reader.text(), chr(reader.byte())
    columns = []
    for _ in range(reader.int16()):
        key, column, type_oid = reader.byte(), reader.text(), reader.int32()
        columns.append(RelationColumn(column, type_oid, _signed(reader.int32()), bool(key & 1)))
    return RelationMessage(oid, schema or "pg_catalog", name, identity, tuple(columns))


def _insert(reader: _Bytes) -> RowMessage:
    oid, kind = reader.int32(), chr(reader.byte())
    if kind != "N":
        raise ValueError(f"a tuple of kind {kind!r}")
    return RowMessage("insert", oid, None, None, reader.row())


def _update(reader: _Bytes) -> RowMessage:
    oid, kind = reader.int32(), chr(reader.byte())
    old = key = None
    if kind in "KO":
        before = reader.row()
        old, key = (before, None) if kind == "O" else (None, before)
        kind = chr(reader.byte())
    if kind != "N":
        raise ValueError(f"a tuple of kind {kind!r}")
    return RowMessage("update", oid, old, key, reader.row())


def _delete(reader: _Bytes) -> RowMessage:
    oid, kind = reader.int32(), chr(reader.byte())
    if kind not in "KO":
        raise ValueError(f"a tuple of kind {kind!r}")
    before = reader.row()
    return RowMessage("delete", oid, before if kind == "O" else None, None if kind == "O" else before, None)


def _truncate(reader: _Bytes) -> TruncateMessage:
    count = reader.int32()
    reader.byte()  # CASCADE and RESTART IDENTITY
    return TruncateMessage(tuple(reader.int32() for _ in range(count)))


def _message(reader: _Bytes) -> LogicalMessage:
    transactional, lsn, prefix = bool(reader.byte()), reader.int64(), reader.text()
    return LogicalMessage(transactional, lsn, prefix, reader.take(reader.int32()))


def _stream_start(reader: _Bytes) -> StreamStartMessage:
    xid = reader.int32()
    reader.byte()  # whether it is the first block of the transaction
    return StreamStartMessage(xid)


def _stream_commit(reader: _Bytes) -> StreamCommitMessage:
    xid = reader.int32()
    reader.take(9)  # flags, the place of the commit
    return StreamCommitMessage(xid, reader.int64(), reader.time())


def _stream_abort(reader: _Bytes) -> StreamAbortMessage:
    xid, subxid = reader.int32(), reader.int32()
    if reader.at < len(reader.data):  # streaming = parallel says where and when
        reader.int64()
        reader.time()
    return StreamAbortMessage(xid, subxid)


def _signed(number: int) -> int:
    return number - 2**32 if number >= 2**31 else number


_DECODERS: dict[str, Callable[[_Bytes], DecodedMessage]] = {
    "B": _begin,
    "C": _commit,
    "b": _prepared("begin"),
    "P": _prepared("prepare"),
    "p": _prepared("stream"),
    "K": _prepared("commit"),
    "r": _rollback_prepared,
    "O": _origin,
    "R": _relation,
    "Y": lambda reader: TypeMessage(reader.int32(), reader.text() or "pg_catalog", reader.text()),
    "I": _insert,
    "U": _update,
    "D": _delete,
    "T": _truncate,
    "M": _message,
    "S": _stream_start,
    "E": lambda _: StreamStopMessage(),
    "c": _stream_commit,
    "A": _stream_abort,
}
