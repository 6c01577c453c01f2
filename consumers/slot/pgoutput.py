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
class Value:
    """One value of a tuple: its text, or its binary form, in `data`.

    None where there is none: it is NULL, or, with `unchanged`, a large value that the change left as it was and that
    was therefore not sent.
    """

    data: bytes | None
    binary: bool = False
    unchanged: bool = False


Tuple = tuple[Value, ...]


@dataclass(frozen=True, slots=True)
class Begin:
    """A transaction follows; `xid` has 32 bits."""

    xid: int


@dataclass(frozen=True, slots=True)
class Commit:
    """The transaction is over; the log goes on at `end_lsn`."""

    end_lsn: int
    time: datetime


@dataclass(frozen=True, slots=True)
class Prepared:
    """BEGIN PREPARED, PREPARE, STREAM PREPARE or COMMIT PREPARED of `xid`, as `gid`."""

    kind: Literal["begin", "prepare", "stream", "commit"]
    end_lsn: int
    time: datetime
    xid: int
    gid: str


@dataclass(frozen=True, slots=True)
class RollbackPrepared:
    """ROLLBACK PREPARED of the transaction that was prepared as `gid`."""

    gid: str


@dataclass(frozen=True, slots=True)
class Origin:
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
class Relation:
    """A table as it is from here on. `identity`: d(efault), n(othing), f(ull) or i(ndex)."""

    oid: int
    schema: str
    name: str
    identity: str
    columns: tuple[RelationColumn, ...]


@dataclass(frozen=True, slots=True)
class Type:
    """A type that is not built in."""

    oid: int
    schema: str
    name: str


@dataclass(frozen=True, slots=True)
class Row:
    """A row that was inserted, updated or deleted.

    `old` is the row before an update or delete with replica identity full; `old_key` a tuple in which only the columns
    of the identity count. An update without either left the identity as it was.
    """

    op: Literal["insert", "update", "delete"]
    oid: int
    old: Tuple | None
    old_key: Tuple | None
    new: Tuple | None


@dataclass(frozen=True, slots=True)
class Truncate:
    """Tables that one TRUNCATE emptied."""

    oids: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class LogicalMessage:
    """What pg_logical_emit_message() wrote; without `transactional` it stands outside of any transaction."""

    transactional: bool
    lsn: int
    prefix: str
    content: bytes


@dataclass(frozen=True, slots=True)
class StreamStart:
    """Messages of the running transaction `xid` follow."""

    xid: int


@dataclass(frozen=True, slots=True)
class StreamStop:
    """The block of a running transaction is over."""


@dataclass(frozen=True, slots=True)
class StreamCommit:
    """A transaction that was streamed while it ran is committed."""

    xid: int
    end_lsn: int
    time: datetime


@dataclass(frozen=True, slots=True)
class StreamAbort:
    """A running transaction was rolled back, or only its subtransaction `subxid` if `subxid` differs from `xid`."""

    xid: int
    subxid: int


Decoded = (
    Begin
    | Commit
    | Prepared
    | RollbackPrepared
    | Origin
    | Relation
    | Type
    | Row
    | Truncate
    | LogicalMessage
    | StreamStart
    | StreamStop
    | StreamCommit
    | StreamAbort
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
        return _EPOCH + timedelta(microseconds=self._unpack(_TIME))

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

    def row(self) -> Tuple:
        return tuple(self._value() for _ in range(self.int16()))

    def _value(self) -> Value:
        kind = self.byte()
        if kind == ord("n"):
            return Value(None)
        if kind == ord("u"):
            return Value(None, unchanged=True)
        if kind not in b"tb":
            raise ValueError(f"a value of kind {kind:#x}")
        return Value(self.take(self.int32()), binary=kind == ord("b"))

    def _unpack(self, form: struct.Struct) -> int:
        (found,) = form.unpack_from(self.data, self.at)
        self.at += form.size
        return int(found)


def subxid_of(data: bytes) -> int:
    """The subtransaction of a message inside a streamed block, which stands before its body."""
    return int(_INT32.unpack_from(data, 1)[0])


def decode(data: bytes, *, streamed: bool = False) -> Decoded:
    """One message. `streamed`: it stands in a block of a running transaction, and so has a transaction number.

    GdqError for bytes that are no message of pgoutput.
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


def _begin(reader: _Bytes) -> Begin:
    reader.take(16)  # place and time of the commit
    return Begin(reader.int32())


def _commit(reader: _Bytes) -> Commit:
    reader.take(9)  # flags, the place of the commit
    return Commit(reader.int64(), reader.time())


def _prepared(kind: Literal["begin", "prepare", "stream", "commit"]) -> Callable[[_Bytes], Prepared]:
    def read(reader: _Bytes) -> Prepared:
        reader.take(8 if kind == "begin" else 9)  # flags, the place of PREPARE or COMMIT
        return Prepared(kind, reader.int64(), reader.time(), reader.int32(), reader.text())

    return read


def _rollback_prepared(reader: _Bytes) -> RollbackPrepared:
    reader.byte()
    reader.take(36)  # two places in the log, two times, the transaction's number
    return RollbackPrepared(reader.text())


def _origin(reader: _Bytes) -> Origin:
    reader.int64()  # the place of the commit there
    return Origin(reader.text())


def _relation(reader: _Bytes) -> Relation:
    oid, schema, name, identity = reader.int32(), reader.text(), reader.text(), chr(reader.byte())
    columns = []
    for _ in range(reader.int16()):
        key, column, type_oid = reader.byte(), reader.text(), reader.int32()
        columns.append(RelationColumn(column, type_oid, _signed(reader.int32()), bool(key & 1)))
    return Relation(oid, schema or "pg_catalog", name, identity, tuple(columns))


def _type(reader: _Bytes) -> Type:
    return Type(reader.int32(), reader.text() or "pg_catalog", reader.text())


def _insert(reader: _Bytes) -> Row:
    oid, kind = reader.int32(), chr(reader.byte())
    if kind != "N":
        raise ValueError(f"a tuple of kind {kind!r}")
    return Row("insert", oid, None, None, reader.row())


def _update(reader: _Bytes) -> Row:
    oid, kind = reader.int32(), chr(reader.byte())
    old = key = None
    if kind in "KO":
        before = reader.row()
        old, key = (before, None) if kind == "O" else (None, before)
        kind = chr(reader.byte())
    if kind != "N":
        raise ValueError(f"a tuple of kind {kind!r}")
    return Row("update", oid, old, key, reader.row())


def _delete(reader: _Bytes) -> Row:
    oid, kind = reader.int32(), chr(reader.byte())
    if kind not in "KO":
        raise ValueError(f"a tuple of kind {kind!r}")
    before = reader.row()
    return Row("delete", oid, before if kind == "O" else None, None if kind == "O" else before, None)


def _truncate(reader: _Bytes) -> Truncate:
    count = reader.int32()
    reader.byte()  # CASCADE and RESTART IDENTITY
    return Truncate(tuple(reader.int32() for _ in range(count)))


def _message(reader: _Bytes) -> LogicalMessage:
    transactional, lsn, prefix = bool(reader.byte()), reader.int64(), reader.text()
    return LogicalMessage(transactional, lsn, prefix, reader.take(reader.int32()))


def _stream_start(reader: _Bytes) -> StreamStart:
    xid = reader.int32()
    reader.byte()  # whether it is the first block of the transaction
    return StreamStart(xid)


def _stream_stop(_reader: _Bytes) -> StreamStop:
    return StreamStop()


def _stream_commit(reader: _Bytes) -> StreamCommit:
    xid = reader.int32()
    reader.take(9)  # flags, the place of the commit
    return StreamCommit(xid, reader.int64(), reader.time())


def _stream_abort(reader: _Bytes) -> StreamAbort:
    xid, subxid = reader.int32(), reader.int32()
    if reader.at < len(reader.data):  # streaming = parallel says where and when
        reader.int64()
        reader.time()
    return StreamAbort(xid, subxid)


def _signed(number: int) -> int:
    return number - 2**32 if number >= 2**31 else number


_DECODERS: dict[str, Callable[[_Bytes], Decoded]] = {
    "B": _begin,
    "C": _commit,
    "b": _prepared("begin"),
    "P": _prepared("prepare"),
    "p": _prepared("stream"),
    "K": _prepared("commit"),
    "r": _rollback_prepared,
    "O": _origin,
    "R": _relation,
    "Y": _type,
    "I": _insert,
    "U": _update,
    "D": _delete,
    "T": _truncate,
    "M": _message,
    "S": _stream_start,
    "E": _stream_stop,
    "c": _stream_commit,
    "A": _stream_abort,
}
