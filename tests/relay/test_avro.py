"""`gdq relay --form avro`: records of Kafka whose schemas a registry has, read by these schemas."""

from __future__ import annotations

import re
import socket
from collections.abc import Iterator
from datetime import UTC, date, datetime
from decimal import Decimal
from typing import Any
from uuid import UUID, uuid4

import pytest

import gdq as library
from tests.relay.conftest import relay, relaying, run_shown, sent_all, wait_for_line, write
from tests.support.kafka import KafkaBroker, kafka_broker
from tests.support.programs import gdq
from tests.support.registry import SchemaRegistry, registry_program, schema_registry
from tests.support.server import Database
from tests.support.waiting import until

__all__ = ["registry_program"]

pytestmark = [pytest.mark.server, pytest.mark.long]


@pytest.fixture(scope="module")
def broker(kafka_classpath: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[KafkaBroker]:
    with kafka_broker(kafka_classpath, tmp_path_factory.mktemp("broker") / "kafka") as running:
        yield running


@pytest.fixture(scope="module")
def registry(registry_program: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[SchemaRegistry]:
    with schema_registry(registry_program, tmp_path_factory.mktemp("registry")) as running:
        yield running


class Topic:
    """The topic of one test, the arguments with which a relay sends to it, and its records decoded."""

    def __init__(self, broker: KafkaBroker, registry: SchemaRegistry) -> None:
        self._broker = broker
        self._registry = registry
        self.name = f"t{uuid4().hex}"
        broker.make_topic(self.name)
        address = f"kafka://{broker.servers}/{self.name}"
        self.to = (address, "--set", f"positions={self.name}.positions", "--form", "avro", "--registry", registry.url)

    def records(self) -> list[tuple[Any, Any]]:
        """Keys and values, in the order of the events."""
        found = [
            (self._registry.decoded(record.key()), self._registry.decoded(record.value()))
            for record in self._broker.records(self.name)
        ]
        return sorted(found, key=lambda one: one[1]["id"])

    def schemas(self, part: str) -> list[Any]:
        return self._registry.versions(f"{self.name}-{part}")


@pytest.fixture
def topic(broker: KafkaBroker, registry: SchemaRegistry) -> Topic:
    return Topic(broker, registry)


def test_changes_are_records_of_a_schema(shop: Database, topic: Topic) -> None:
    write(shop, "insert into orders values (1, 7, 'é')", "update orders set note = null", "delete from orders")
    write(shop, "truncate orders")
    relay(shop, *topic.to)
    records = topic.records()
    assert [key for key, _ in records] == [{"id": 1}, {"id": 1}, {"id": 1}, None]
    assert [(value["op"], value["old"], value["new"]) for _, value in records] == [
        ("insert", None, {"id": 1, "customer": 7, "note": "é"}),
        ("update", {"id": 1, "customer": 7, "note": "é"}, {"id": 1, "customer": 7, "note": None}),
        ("delete", {"id": 1, "customer": 7, "note": None}, None),
        ("truncate", None, None),
    ]
    assert {value["table"] for _, value in records} == {"public.orders"}
    assert records[0][1]["time"].tzinfo is UTC
    (schema,), (key,) = topic.schemas("value"), topic.schemas("key")
    assert (schema["namespace"], schema["name"], key["name"]) == ("public.orders", "Event", "Key")
    assert key["fields"] == [{"name": "id", "type": "int"}]


TYPES = """create table types (id bigint primary key, b boolean, s smallint, r real, d double precision,
    n numeric(12, 3), plain numeric, day date, at timestamptz, plainly timestamp, u uuid, bytes bytea, j jsonb,
    "an array" int[], t time)"""
VALUES = """insert into types values (9007199254740993, true, -3, 0.1, 1e300, 123456789.125, 1.50, '2024-02-29',
    '2026-11-28 01:02:03.123456+02', '1969-12-31 23:59:59.999999', '6ba7b810-9dad-11d1-80b4-00c04fd430c8', '\\x00ff',
    '{"a": 1}', '{1,2}', '12:00')"""


@pytest.mark.parametrize("rows", [1, 700])
def test_types(shop: Database, topic: Topic, rows: int) -> None:
    """Of a small batch, which comes as JSON, and of a large one."""
    write(shop, TYPES, "select gdq.add_table('q', 'types')")
    write(shop, VALUES, f"insert into types (id) select generate_series(10, {rows + 10})")
    relay(shop, *topic.to)
    key, value = topic.records()[0]
    assert key == {"id": 9007199254740993}
    row = value["new"]
    assert row["r"] == pytest.approx(0.1)
    assert row | {"r": 0} == {
        "id": 9007199254740993, "b": True, "s": -3, "r": 0, "d": 1e300, "n": Decimal("123456789.125"), "plain": "1.50",
        "day": date(2024, 2, 29), "at": datetime(2026, 11, 27, 23, 2, 3, 123456, UTC),
        "plainly": datetime(1969, 12, 31, 23, 59, 59, 999999), "u": UUID("6ba7b810-9dad-11d1-80b4-00c04fd430c8"),
        "bytes": b"\x00\xff", "j": '{"a": 1}', "an_array": "{1,2}", "t": "12:00:00",
    }  # fmt: skip
    (schema,) = topic.schemas("value")
    (fields,) = (field["type"][1]["fields"] for field in schema["fields"] if field["name"] == "old")
    kinds = {field["name"]: field["type"][1] for field in fields}
    assert list(kinds)[:4] == ["id", "b", "s", "r"]
    assert kinds["n"] == {"type": "bytes", "logicalType": "decimal", "precision": 12, "scale": 3}
    assert {kinds[name]["logicalType"] for name in ("at", "day", "u")} == {"timestamp-micros", "date", "uuid"}


def test_new_columns_are_a_new_version(shop: Database, topic: Topic) -> None:
    """Events that were written before have the schema of their columns."""
    write(shop, "insert into orders values (1, 7, 'a')", "alter table orders add ready boolean, drop customer")
    write(shop, "insert into orders values (2, 'b', true)", "alter table orders rename note to remark")
    write(shop, "insert into orders values (3, 'c', false)")
    relay(shop, *topic.to)
    assert [value["new"] for _, value in topic.records()] == [
        {"id": 1, "note": "a", "customer": 7},
        {"id": 2, "note": "b", "ready": True},
        {"id": 3, "remark": "c", "ready": False},
    ]
    assert len(topic.schemas("value")) == 3
    relay(shop, *topic.to)
    assert len(topic.schemas("value")) == 3


def test_a_change_that_the_registry_refuses(shop: Database, topic: Topic, registry: SchemaRegistry) -> None:
    """One line; the relay waits, and goes on when the registry allows it. Nothing is lost or put aside."""
    write(shop, "insert into orders values (1, 7, 'a')")
    relay(shop, *topic.to)
    write(shop, "alter table orders alter note type int using 5", "insert into orders values (2, 7, 5)")
    write(shop, "select gdq.require_copy('q', 'c')")
    done = gdq("relay", "q", "c", *topic.to, "--copy", "--once", dsn=shop.dsn)
    assert done.returncode == 1
    line = f"Error: the schema registry refuses a schema of {topic.name}-value: HTTP 409: "
    assert [text[: len(line)] for text in done.stderr.splitlines() if "time=" not in text] == [line]
    with relaying(shop, *topic.to, "--copy") as process:
        wait_for_line(process, "the schema registry refuses")
        registry.call("PUT", "config", {"compatibility": "NONE"})
        try:
            until(lambda: sent_all(shop), "the end")
        finally:
            registry.call("PUT", "config", {"compatibility": "BACKWARD"})
    rows = [value["new"] for _, value in topic.records() if value["op"] == "read"]
    assert sorted(rows, key=lambda row: row["id"]) == [
        {"id": 1, "customer": 7, "note": 5},
        {"id": 2, "customer": 7, "note": 5},
    ]


def test_values_that_avro_does_not_hold(shop: Database, topic: Topic) -> None:
    write(shop, "create table spans (id int primary key, till date, n numeric(4, 1))")
    write(shop, "select gdq.add_table('q', 'spans')")
    write(shop, "insert into spans values (1, 'infinity', 1), (2, '2024-01-01', 'NaN'), (3, '2024-01-01', 999.9)")
    relay(shop, *topic.to)
    assert [key for key, _ in topic.records()] == [{"id": 3}]
    with shop.connect() as connection:
        reasons = [one.reason for one in library.dead_letters(connection, "q")]
        assert reasons == [
            'column "till": infinity does not fit date; --as-text sends the column as text',
            'column "n": NaN does not fit decimal; --as-text sends the column as text',
        ]
        library.replay_dead_letters(connection, "q", "c")
    other = ("--set", f"positions={topic.name}.other", "--as-text", "till,n")
    done = gdq("relay", "q", "c", *topic.to, *other, "--once", dsn=shop.dsn)
    assert "HTTP 409" in done.stderr
    assert done.returncode == 1


def test_columns_as_text(shop: Database, topic: Topic) -> None:
    write(shop, "create table spans (id int primary key, till date)", "select gdq.add_table('q', 'spans')")
    write(shop, "insert into spans values (1, 'infinity'), (2, '2024-01-01')")
    relay(shop, *topic.to, "--as-text", "till")
    assert [value["new"]["till"] for _, value in topic.records()] == ["infinity", "2024-01-01"]


def test_keys_of_other_columns(shop: Database, topic: Topic) -> None:
    write(shop, "insert into orders values (1, 7, 'a'), (2, null, 'b')")
    relay(shop, *topic.to, "--key", "public.orders=customer")
    assert [key for key, _ in topic.records()] == [{"customer": 7}, {"customer": None}]


def test_tombstones(shop: Database, broker: KafkaBroker, registry: SchemaRegistry, topic: Topic) -> None:
    """For each key that a row had: deleted, or given to another row."""
    write(shop, "insert into orders values (1, 7, 'a'), (2, 7, 'b')", "update orders set note = 'c' where id = 1")
    write(shop, "update orders set id = 3 where id = 1", "delete from orders where id = 2", "truncate orders")
    relay(shop, *topic.to, "--tombstones")
    found = [(registry.decoded(record.key()), record) for record in broker.records(topic.name)]
    last = {key["id"]: registry.decoded(record.value()) for key, record in found if key is not None}
    assert (last[1], last[2], last[3]["new"]["note"]) == (None, None, "c")
    assert len([key for key, record in found if record.value() is None]) == 2
    assert len({dict(record.headers() or [])["gdq-id"] for _, record in found}) == len(found) == 8


def test_a_registry_that_is_only_read(shop: Database, registry: SchemaRegistry, topic: Topic) -> None:
    """The relay says which schema is missing, and sends when others have registered it."""
    write(shop, "insert into orders values (1, 7, 'a')")
    for _ in range(2):
        done = gdq("relay", "q", "c", *topic.to, "--registry-read-only", "--once", dsn=shop.dsn)
        assert done.returncode == 1
        (line,) = done.stderr.splitlines()
        found = re.fullmatch(r"Error: the schema registry lacks a schema of (\S+); have it registered: (.*)", line)
        assert found is not None, line
        assert found[1] not in registry.call("GET", "subjects")
        registry.call("POST", f"subjects/{found[1]}/versions", {"schema": found[2]})
    relay(shop, *topic.to, "--registry-read-only")
    assert len(topic.records()) == 1


def test_messages(shop: Database, topic: Topic) -> None:
    write(shop, """select gdq.insert_event('q', 'paid', '{"order": 7}'::jsonb, 'order-7', 'more')""")
    write(shop, "select gdq.insert_event('q', 'note', 'text')")
    relay(shop, *topic.to)
    (key, paid), (none, note) = topic.records()
    assert (key, none) == ("order-7", None)
    assert (paid["type"], paid["data"], paid["extra"]) == (
        "paid",
        '{"order": 7}',
        {"extra1": "order-7", "extra2": "more"},
    )
    assert (note["type"], note["data"]) == ("note", '"text"')


def test_a_registry_that_is_down(shop: Database, topic: Topic) -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        url = f"http://127.0.0.1:{free.getsockname()[1]}"
    write(shop, "insert into orders values (1, 7, 'a')")
    done = gdq("relay", "q", "c", *topic.to, "--registry", url, "--once", dsn=shop.dsn)
    assert done.returncode == 1
    assert done.stderr.startswith("Error: schema registry unreachable: ")
    assert len(done.stderr.splitlines()) == 1
    relay(shop, *topic.to)
    assert len(topic.records()) == 1


def test_the_page(db: Database, broker: KafkaBroker, registry: SchemaRegistry) -> None:
    """What docs/relay.md shows of Avro works as it stands there."""
    broker.make_topic("shop.orders")
    ports = [("9092", str(broker.port)), ("http://127.0.0.1:8081", registry.url)]
    run_shown(db, "tests/relay/test_avro.py", *ports)
    (record,) = broker.records("shop.orders")
    assert registry.decoded(record.value())["new"]["amount"] == Decimal("1.00")
