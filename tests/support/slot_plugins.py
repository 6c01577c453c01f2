"""What the output plugins test_decoding and wal2json say of changes, as events in the queue's form.

gdq reads pgoutput; its users get nothing of this. Each plugin's slot is read by SQL, with the settings by which values
have the texts of docs/types.md.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from typing import Any, cast

import psycopg
from psycopg import errors
from psycopg.rows import scalar_row

from gdq.consumers.slot.replication import lsn_number
from gdq.source import Event, Operation
from gdq.typed.values import json_integer

# Values are written by the session that asks; with this path a type that is not the server's own is named in full.
_SETTINGS = (
    "-c datestyle=ISO -c intervalstyle=postgres -c timezone=UTC -c bytea_output=hex -c lc_monetary=C"
    " -c extra_float_digits=1 -c search_path=pg_catalog"
)
_BASE_TYPE = """
    with recursive b(oid) as (
      select to_regtype(%s)::oid union all select t.typbasetype from b join pg_type t on t.oid = b.oid
       where t.typbasetype <> 0)
    select typname::text from b join pg_type t on t.oid = b.oid where t.typbasetype = 0"""
_KEY = """
    select array(select a.attname::text from pg_index i
                   join pg_attribute a on a.attrelid = i.indrelid and a.attnum = any (i.indkey)
                  where i.indrelid = to_regclass(%s) and i.indisprimary)"""

Texts = dict[str, tuple[str, str | None]]
"""By column, the name of its type and the value's text; a large value that an update left as it was is not there."""


_NOT_YET = datetime.min.replace(tzinfo=UTC)


@dataclass(frozen=True, slots=True)
class Change:
    """A change as a plugin says it; `table` is qualified and quoted where needed, `time` that of the commit.

    `pk`: the columns of the primary key where the plugin tells them.
    """

    lsn: int
    xid: int
    op: str
    table: str | None = None
    old: Texts | None = None
    new: Texts | None = None
    time: datetime = _NOT_YET
    origin: str | None = None
    pk: tuple[str, ...] = ()
    message: dict[str, Any] | None = None


def slot_of(plugin: str) -> str:
    return f"beside_{plugin}"


def attach(su: psycopg.Connection[Any], plugin: str) -> bool:
    """Make the plugin's slot; False where the server does not have the plugin."""
    try:
        su.execute("select pg_create_logical_replication_slot(%s, %s)", [slot_of(plugin), plugin])
    except errors.UndefinedFile:
        return False
    return True


def detach(su: psycopg.Connection[Any], plugin: str) -> None:
    su.execute("select pg_drop_replication_slot(%s)", [slot_of(plugin)])


def events_from(dsn: str, plugin: str) -> list[Event]:
    """What was committed since the last time, but for gdq's own tables."""
    with psycopg.connect(dsn, autocommit=True, options=_SETTINGS) as connection:
        catalog = _Catalog(connection)
        return [catalog.event(change) for change in _READERS[plugin](connection) if not _own(change.table)]


def _own(table: str | None) -> bool:
    return (table or "").startswith("gdq")


class _Catalog:
    """Makes events of changes, with what only the catalog knows."""

    def __init__(self, connection: psycopg.Connection[Any]) -> None:
        self._connection = connection
        self._bases: dict[str, str | None] = {}
        self._keys: dict[str, tuple[str, ...]] = {}

    def event(self, change: Change) -> Event:
        if change.op == "message":
            return Event(change.lsn, change.xid, change.time, "message", None, None, None, change.message)
        old, new = self._image(change.old), self._image(change.new)
        if old is not None and new is not None:
            # What an update left as it was is in the old row, where that is whole.
            new = {**{name: value for name, value in old.items() if name not in new}, **new}
        held = (old if new is None else new) or {}
        key = {name: held[name] for name in change.pk or self._key(change.table or "") if name in held}
        given = change.lsn, change.xid, change.time, cast("Operation", change.op), change.table, key or None, old, new
        return Event(*given, origin=change.origin)

    def _key(self, table: str) -> tuple[str, ...]:
        if table not in self._keys:
            self._keys[table] = tuple(self._scalar(_KEY, table))
        return self._keys[table]

    def _image(self, texts: Texts | None) -> dict[str, Any] | None:
        return None if texts is None else {name: self._json(*given) for name, given in texts.items()}

    def _json(self, kind: str, text: str | None) -> Any:
        if kind not in self._bases:
            self._bases[kind] = self._scalar(_BASE_TYPE, kind)
        base = self._bases[kind]
        if text is None:
            return None
        if base == "bool":
            return {"t": True, "true": True, "f": False, "false": False}[text]
        if base in ("int2", "int4"):
            return int(text)
        if base in ("float4", "float8") and text not in ("NaN", "Infinity", "-Infinity", "-0"):
            return json_integer(text) if text.lstrip("-").isdecimal() else float(text)
        return text

    def _scalar(self, query: str, *values: object) -> Any:
        with self._connection.cursor(row_factory=scalar_row) as cursor:
            return cursor.execute(query.encode(), values).fetchone()


_NAME = r'(?:"[^"]*(?:""[^"]*)*"|[^"\s.,:\[\]]+)'
_TABLE = rf"{_NAME}\.{_NAME}"
_ROW = re.compile(rf"table ({_TABLE}): (INSERT|UPDATE|DELETE):")
_TRUNCATE = re.compile(rf"table ({_TABLE}(?:, {_TABLE})*): TRUNCATE: ")
_COLUMN = re.compile(
    rf" ({_NAME})\[((?:\"[^\"]*(?:\"\"[^\"]*)*\"|[^\"])*?)\]:(B?'[^']*(?:''[^']*)*'|[^\s'\"]+)(?= |$)", re.DOTALL
)
_MESSAGE = re.compile(r"message: transactional: ([01]) prefix: (.*), sz: \d+ content:(.*)", re.DOTALL)
_END = re.compile(r"(BEGIN|COMMIT) \d+(?: \(at (.+)\))?")
_UNCHANGED = "unchanged-toast-datum"


def decoded_changes(connection: psycopg.Connection[Any]) -> Iterator[Change]:
    """Read the slot. The plugin tells no origin, but with `only-local` it leaves out what has one."""
    query = "select lsn::text, xid::text::bigint, data from pg_logical_slot_{}_changes(%s, null, null, {})"
    slot = slot_of("test_decoding")
    only_local = query.format("peek", "'only-local', 'on', 'skip-empty-xacts', 'on'")
    local = {xid for _, xid, _ in connection.execute(only_local.encode(), [slot])}
    changes: list[Change] = []
    for lsn, xid, text in connection.execute(query.format("get", "'include-timestamp', 'on'").encode(), [slot]):
        if end := _END.fullmatch(text):
            for change in changes:
                time = datetime.fromisoformat(end[2])
                yield replace(change, time=time, origin=None if change.xid in local else "unknown")
            changes = []
        else:
            changes += parse_decoded(lsn_number(lsn), xid, text)
    assert not changes, "the slot gave no COMMIT"


def parse_decoded(lsn: int, xid: int, text: str) -> list[Change]:
    """The changes of one line, without time: one, but for a TRUNCATE of several tables."""
    if found := _TRUNCATE.match(text):
        return [Change(lsn, xid, "truncate", table) for table in re.findall(_TABLE, found[1])]
    if found := _MESSAGE.fullmatch(text):
        # Others have no transaction, and pgoutput's reader does not give them either.
        content = {"type": found[2], "data": found[3]}
        return [Change(lsn, xid, "message", message=content)] if found[1] == "1" else []
    found = _ROW.match(text)
    assert found, f"not understood: {text!r}"
    op, rest = found[2].lower(), text[found.end() :]
    if rest == " (no-tuple-data)":
        return [Change(lsn, xid, op, found[1])]
    old = None
    if rest.startswith(" old-key:"):
        old, rest = _columns(rest.removeprefix(" old-key:"))
        assert rest.startswith(" new-tuple:"), f"not understood: {text!r}"
        rest = rest.removeprefix(" new-tuple:")
    image, rest = _columns(rest)
    assert not rest, f"not understood: {rest!r} of {text!r}"
    return [Change(lsn, xid, op, found[1], *((image, None) if op == "delete" else (old, image)))]


def _columns(text: str) -> tuple[Texts, str]:
    """The columns that a text begins with, and the rest of it."""
    columns: Texts = {}
    place = 0
    while found := _COLUMN.match(text, place):
        place = found.end()
        name = found[1][1:-1].replace('""', '"') if found[1].startswith('"') else found[1]
        if found[3] != _UNCHANGED:
            columns[name] = found[2], _literal(found[3])
    return columns, text[place:]


def _literal(text: str) -> str | None:
    if text.endswith("'"):
        return text[text.index("'") + 1 : -1].replace("''", "'")
    return None if text == "null" else text


_OPS = {"I": "insert", "U": "update", "D": "delete", "T": "truncate", "M": "message"}
_WAL2JSON = """
    select c.lsn::text, c.xid::text::bigint, c.data, quote_ident(j ->> 'schema') || '.' || quote_ident(j ->> 'table')
      from pg_logical_slot_get_changes(%s, null, null, 'format-version', '2', 'include-timestamp', 'on',
             'include-origin', 'on', 'include-pk', 'on', 'include-transaction', 'off') c,
           lateral (select c.data::json) l(j)"""


def wal2json_changes(connection: psycopg.Connection[Any]) -> Iterator[Change]:
    """Read the slot."""
    # The plugin warns of what it leaves out.
    connection.execute("set client_min_messages = error")
    for lsn, xid, text, table in connection.execute(_WAL2JSON, [slot_of("wal2json")]):
        # as they are written: a numeric has digits that a float has not
        change = json.loads(text, parse_int=str, parse_float=str)
        op = _OPS[change["action"]]
        if op == "message" and change["transactional"] is False:
            continue
        message = {"type": change["prefix"], "data": change["content"]} if op == "message" else None
        yield Change(
            lsn_number(lsn),
            xid,
            op,
            None if message else table,
            _texts(change.get("identity")),
            _texts(change.get("columns")),
            datetime.fromisoformat(change["timestamp"]),
            None if change["origin"] == "0" else change["origin"],
            tuple(column["name"] for column in change.get("pk", ())),
            message,
        )


def _texts(columns: list[dict[str, Any]] | None) -> Texts | None:
    if columns is None:
        return None
    return {one["name"]: (one["type"], _wal2json_text(one["type"], one["value"])) for one in columns}


def _wal2json_text(kind: str, value: str | bool | None) -> str | None:
    if isinstance(value, bool):
        return "t" if value else "f"
    return f"\\x{value}" if kind == "bytea" and value is not None else value


_READERS: dict[str, Callable[[psycopg.Connection[Any]], Iterator[Change]]] = {
    "test_decoding": decoded_changes,
    "wal2json": wal2json_changes,
}
