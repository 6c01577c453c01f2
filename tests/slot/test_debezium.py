"""`gdq consume --format debezium`: the envelope field by field, from the queue and from a slot."""

from __future__ import annotations

import base64
import json
from collections.abc import Iterator
from datetime import UTC, datetime
from typing import Any

import psycopg
import pytest

from gdq import __version__
from gdq.consumer import register_consumer
from gdq.consumers.debezium.values import DebeziumKind, debezium_value
from gdq.consumers.slot.slot import create_slot, drop_slot
from gdq.message import insert_event
from tests.support.programs import gdq
from tests.support.server import Database

pytestmark = pytest.mark.server

# A column's type, what is written, what Debezium gives.
TYPES: list[tuple[str, str, Any]] = [
    ("boolean", "true", True),
    ("smallint", "-3", -3),
    ("bigint", "9223372036854775807", 9223372036854775807),
    ("oid", "4000000000", 4000000000),
    ("real", "1.5", 1.5),
    ("double precision", "-0", -0.0),
    ("double precision", "NaN", "NaN"),
    ("numeric(10,2)", "12.50", "12.50"),
    ("numeric", "NaN", "NaN"),
    ("money", "-1234.5", "-1234.50"),
    ("char(3)", "a", "a  "),
    ("varchar", "é", "é"),
    ("bytea", "\\x00ff10", base64.b64encode(b"\x00\xff\x10").decode()),
    ("uuid", "a0eebc99-9c0b-4ef8-bb6d-6bb9bd380a11", "a0eebc99-9c0b-4ef8-bb6d-6bb9bd380a11"),
    ("json", '{"a":  1}', '{"a":  1}'),
    ("jsonb", '{"a":  1}', '{"a": 1}'),
    ("inet", "10.0.0.1/8", "10.0.0.1/8"),
    ("int4range", "[1,3]", "[1,4)"),
    ("date", "2000-02-29", 11016),
    ("date", "1969-12-31", -1),
    ("date", "12000-01-01", 3663382),
    ("date", "infinity", "infinity"),
    ("time", "01:02:03.000004", 3_723_000_004),
    ("time(3)", "01:02:03.004", 3_723_004),
    ("timetz", "01:30:00.5+02", "23:30:00.5Z"),
    ("timestamp", "2018-06-20 15:13:16.945104", 1529507596945104),
    ("timestamp(3)", "2018-06-20 15:13:16.945", 1529507596945),
    ("timestamp", "1969-12-31 23:59:59.999999", -1),
    ("timestamp", "-infinity", -9223372036832400000),
    ("timestamptz", "2020-01-01 01:00:00.25+01", "2020-01-01T00:00:00.250000Z"),
    ("timestamptz", "2020-01-01 00:00:00+00", "2020-01-01T00:00:00.000000Z"),
    ("timestamptz(3)", "2020-01-01 00:00:00.25+00", "2020-01-01T00:00:00.250Z"),
    ("timestamptz(0)", "2020-01-01 00:00:00+00", "2020-01-01T00:00:00Z"),
    ("timestamptz", "0001-12-31 00:00:00+00 BC", "0000-12-31T00:00:00.000000Z"),
    ("timestamptz", "0044-03-15 12:00:00+00 BC", "-0043-03-15T12:00:00.000000Z"),
    ("timestamptz", "12000-01-01 00:00:00+00", "+12000-01-01T00:00:00.000000Z"),
    ("timestamptz", "-infinity", "-infinity"),
    ("timestamptz[]", "{2020-01-01 00:00:00+00}", ["2020-01-01T00:00:00.000000Z"]),
    ("interval", "1 year 2 mons 3 days 00:00:04.5", 14 * 2_629_800_000_000 + 3 * 86_400_000_000 + 4_500_000),
    ("interval", "-1 days -00:00:01", -86_400_000_000 - 1_000_000),
    ("bit(1)", "1", True),
    ("bit(10)", "1000000001", base64.b64encode(b"\x01\x02").decode()),
    ("point", "(1,2.5)", {"x": 1.0, "y": 2.5, "wkb": "AQEAAAAAAAAAAADwPwAAAAAAAARA", "srid": None}),
    ("point", "(NaN,Infinity)", {"x": "NaN", "y": "Infinity", "wkb": "AQEAAAAAAAAAAAD4fwAAAAAAAPB/", "srid": None}),
    ("integer[]", "{1,NULL,3}", [1, None, 3]),
    ("integer[]", "{{1},{2}}", [[1], [2]]),
    ("integer[]", "[0:1]={1,2}", "[0:1]={1,2}"),
    ("text[]", '{"a,b","NULL","q\\"\\\\",""}', ["a,b", "NULL", 'q"\\', ""]),
    ("date[]", "{1970-01-02}", [1]),
    ("box[]", "{(1,1),(0,0)}", "{(1,1),(0,0)}"),
    ("positive", "7", 7),
    ("mood", "glad", "glad"),
]


@pytest.fixture
def owner(db: Database) -> Iterator[psycopg.Connection[Any]]:
    """Table item in queue and slot."""
    with db.connect() as owner, db.connect("su") as su:
        owner.execute("create table item (id int primary key, n bigint)")
        owner.execute("alter table item replica identity full")
        owner.execute("select gdq.create_queue('q')")
        owner.execute("select gdq.add_table('q', 'item')")
        register_consumer(owner, "q", "c")
        create_slot(su, "q", "c", ["public.item"])
        yield owner
        drop_slot(su, "q", "c")


def consumed(db: Database, source: str, *options: str) -> list[dict[str, Any]]:
    arguments = ["consume", "q", "c", "--once", "--format", "debezium", "--source", source, *options]
    done = gdq(*arguments, dsn=db.su_dsn if source == "slot" else db.dsn)
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines()]


def brief(record: dict[str, Any]) -> tuple[Any, ...]:
    value = record["value"]
    if value is None:
        return record["key"], None
    return record["key"], value["op"], value.get("before"), value.get("after")


@pytest.mark.parametrize("source", ["queue", "slot"])
def test_changes(db: Database, owner: psycopg.Connection[Any], source: str) -> None:
    for statement in (
        "insert into item values (1, 10)",
        "update item set n = 11",
        "update item set id = 2",
        "alter table item add column later int",
        "delete from item",
        "truncate item",
    ):
        owner.execute(statement.encode())
    records = consumed(db, source, "--tombstones")
    one, two = {"id": 1}, {"id": 2}
    assert [brief(record) for record in records] == [
        (one, "c", None, {"id": 1, "n": 10}),
        (one, "u", {"id": 1, "n": 10}, {"id": 1, "n": 11}),
        (one, "d", {"id": 1, "n": 11}, None),
        (one, None),
        (two, "c", None, {"id": 2, "n": 11}),
        (two, "d", {"id": 2, "n": 11, "later": None}, None),
        (two, None),
        (None, "t", None, None),
    ]
    assert [record.get("headers") for record in records[2:5]] == [
        {"__debezium.newkey": two},
        {"__debezium.newkey": two},
        {"__debezium.oldkey": one},
    ]


@pytest.mark.parametrize("source", ["queue", "slot"])
def test_source_and_times(db: Database, owner: psycopg.Connection[Any], source: str) -> None:
    before = datetime.now(UTC).timestamp()
    with owner.transaction():
        row = owner.execute("insert into item values (1, 1) returning txid_current()").fetchone()
    assert row
    (record,) = consumed(db, source)
    after = datetime.now(UTC).timestamp()
    value = record["value"]
    assert list(value) == ["before", "after", "source", "op", "ts_ms", "ts_us", "ts_ns", "transaction"]
    assert value["transaction"] is None
    told = value["source"]
    number = json.loads(told["sequence"])[1]
    for times in (value, told):
        assert before <= times["ts_us"] / 1e6 <= after
        assert times["ts_us"] // 1000 == times["ts_ms"]
        assert times["ts_ns"] // 1000 == times["ts_us"]
    assert told["ts_us"] <= value["ts_us"]
    assert {name: told[name] for name in told if not name.startswith("ts_")} == {
        "version": __version__,
        "connector": "postgresql",
        "name": "q",
        "snapshot": "false",
        "db": db.name,
        "sequence": f'[null,"{number}"]',
        "schema": "public",
        "table": "item",
        "txId": row[0] % 2**32 if source == "slot" else row[0],
        "lsn": int(number) if source == "slot" else None,
        "xmin": None,
    }


def test_messages(db: Database, owner: psycopg.Connection[Any]) -> None:
    insert_event(owner, "q", "mail", "hé", "x")
    insert_event(owner, "q", "mail", {"a": 1})
    owner.execute("select pg_logical_emit_message(true, 'mail', 'hé')")
    owner.execute("select pg_logical_emit_message(true, 'bytes', '\\xff00'::bytea)")
    owner.execute("insert into item values (1, 1)")
    text = base64.b64encode("hé".encode()).decode()
    first, second, _ = consumed(db, "queue")
    assert first["key"] == {"prefix": "mail"}
    assert first["value"]["message"] == {"prefix": "mail", "content": text, "extra1": "x"}
    assert first["value"]["op"] == "m"
    assert list(first["value"]) == ["op", "ts_ms", "source", "transaction", "message"]
    assert (first["value"]["source"]["schema"], first["value"]["source"]["table"]) == ("", "")
    assert json.loads(base64.b64decode(second["value"]["message"]["content"])) == {"a": 1}
    emitted = [record["value"] for record in consumed(db, "slot")]
    messages = [value.get("message") for value in emitted]
    assert {"prefix": "mail", "content": text} in messages
    assert {"prefix": "bytes", "content": base64.b64encode(b"\xff\x00").decode()} in messages


@pytest.mark.parametrize("source", ["queue", "slot"])
def test_types(db: Database, owner: psycopg.Connection[Any], source: str) -> None:
    owner.execute("create domain positive as bigint check (value > 0); create type mood as enum ('glad')")
    columns = ", ".join(f"c{number} {type_}" for number, (type_, _, _) in enumerate(TYPES))
    owner.execute(f'create table "Od.d""" (id int primary key, {columns})'.encode())
    owner.execute("select gdq.add_table('q', '\"Od.d\"\"\"')")
    with db.connect("su") as su:
        su.execute('alter publication gdq_q add table "Od.d"""')
    marks = ", ".join(["%s"] * len(TYPES))
    owner.execute(f'insert into "Od.d""" values (1, {marks})'.encode(), [text for _, text, _ in TYPES])
    (record,) = consumed(db, source)
    assert record["value"]["source"]["table"] == 'Od.d"'
    after = record["value"]["after"]
    wrong = [
        (type_, after[f"c{number}"], expected)
        for number, (type_, _, expected) in enumerate(TYPES)
        if repr(after[f"c{number}"]) != repr(expected)
    ]
    assert wrong == []


def test_logs_of_keys_and_tables_without_one(db: Database, owner: psycopg.Connection[Any]) -> None:
    owner.execute("create table keyed (id bigint primary key, n int); create table bare (n int)")
    owner.execute("select gdq.add_table('q', 'keyed', mode => 'pk'); select gdq.add_table('q', 'bare')")
    owner.execute("insert into keyed values (1, 1); delete from keyed; insert into bare values (5)")
    assert [brief(record) for record in consumed(db, "queue", "--tombstones")] == [
        ({"id": 1}, "c", None, {"id": 1}),
        ({"id": 1}, "d", {"id": 1}, None),
        ({"id": 1}, None),
        (None, "c", None, {"n": 5}),
    ]


@pytest.mark.parametrize(
    "arguments", [["--tombstones"], ["--format", "debezium", "--json"], ["printer2", "--format", "debezium"]]
)
def test_options_that_exclude_each_other(db: Database, arguments: list[str]) -> None:
    done = gdq("consume", "q", "c", *arguments, dsn=db.dsn)
    assert (done.returncode, done.stdout) == (2, "")
    assert "--format debezium" in done.stderr


def test_a_value_without_the_form_of_its_type_stays() -> None:
    """Such as one of before its column changed its type."""
    for type_ in ("int8", "date", "timestamp", "timestamptz", "interval", "bytea", "point", "hstore", "money", "bit"):
        assert debezium_value("what?", DebeziumKind(type_)) == "what?"
    assert debezium_value("{1,x", DebeziumKind("int4", array=True)) == "{1,x"
    assert debezium_value('"a"=>"1", "b\\""=>NULL', DebeziumKind("hstore")) == '{"a":"1","b\\"":null}'
