"""The values of events: Python's by every way from a batch, and in JSON, character by character, those of SQL."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from datetime import UTC, date, datetime, time, timedelta
from decimal import Decimal
from typing import Any
from uuid import UUID

import psycopg
import pytest
from psycopg.rows import tuple_row
from psycopg.types.json import set_json_loads

from gdq import AsyncConsumer, Batch, Consumer, CopyBatch, Event, register_consumer, require_copy
from gdq.json_text import json_text
from gdq.typed.values import load_json
from tests.support.events import Tap

pytestmark = pytest.mark.server

_ID = "a0eebc99-9c0b-4ef8-bb6d-6bb9bd380a11"

# For each type: values, and what Python has of the first.
VALUES: dict[str, tuple[list[str], Any]] = {
    "bool": (["t", "f"], True),
    "int2": (["-5"], -5),
    "int8": (["9223372036854775807", "-1"], 9223372036854775807),
    "oid": (["4294967295"], 4294967295),
    "float4": (["0.1", "1e-44", "16777216", "-0", "NaN", "Infinity", "3.4028235e38", "1e20", "1.17549435e-38"], 0.1),
    "float8": (["0.30000000000000004", "2", "-0", "NaN", "-Infinity", "123456789012345678", "1e300"], 0.1 + 0.2),
    "numeric": (["1.50", "NaN", "0.00000000", "1e-20", "12e30", "-Infinity"], Decimal("1.50")),
    "text": (['é\t"x"', ""], 'é\t"x"'),
    "bpchar": (["ab  "], "ab  "),
    "name": (["a name"], "a name"),
    '"char"': (["x"], "x"),
    "bytea": ([r"\x00ff5c27", ""], b"\x00\xff\\'"),
    "uuid": ([_ID], UUID(_ID)),
    "date": (["2024-02-29", "infinity", "-infinity", "0044-03-15 BC", "12345-01-31", "0001-01-01"], date(2024, 2, 29)),
    "time": (["04:05:06.070", "24:00", "00:00"], time(4, 5, 6, 70000)),
    "timetz": (["04:05:06+05:30", "24:00-01", "04:05:06-00:00:07"], time.fromisoformat("04:05:06+05:30")),
    "timestamp": (
        ["2024-02-29 01:02:03.5", "infinity", "-infinity", "0044-03-15 01:02:03.25 BC", "12345-01-31", "9999-12-31"],
        datetime(2024, 2, 29, 1, 2, 3, 500000),
    ),
    "timestamptz": (
        ["2024-02-29 01:02:03+09", "infinity", "0044-03-15 BC", "294276-01-01", "9999-12-31 23:59:59-05"],
        datetime(2024, 2, 28, 16, 2, 3, tzinfo=UTC),
    ),
    "interval": (["1 year -2 mons 3 days -04:05:06.789"], "10 mons 3 days -04:05:06.789"),
    "money": (["-1234.56"], "-$1,234.56"),
    "jsonb": (['{"b": [1.50, null]}'], '{"b": [1.50, null]}'),
    "inet": (["10.1.2.3/8", "10.1.2.3"], "10.1.2.3/8"),
    "point": (["(1.5,-2)"], "(1.5,-2)"),
    "int4[]": (["[0:1]={1,2}"], "[0:1]={1,2}"),
    "timestamptz[]": (['{"2024-02-29 01:02:03+09"}'], '{"2024-02-28 16:02:03+00"}'),
    "tstzrange": (["[2024-01-01 00:00+00,)"], '["2024-01-01 00:00:00+00",)'),
    "shop.mood": (["glad"], "glad"),
    "shop.pounds": (["7.00"], Decimal("7.00")),
}


@contextmanager
def opened(tap: Tap, dsn: str | None = None, consumer: str = "c") -> Iterator[Batch]:
    """The next batch, which is read and comes again."""
    with Consumer(dsn or tap.db.dsn, "q", consumer) as source:
        for batch in source.batches(once=True):
            yield batch
            return
        raise AssertionError("no batch")


Line = tuple[int, str, str | None, str, int, str | None]


def in_json(events: Iterable[Event]) -> list[Line]:
    """The events as `gdq consume` prints them."""
    return [_line(event.in_json()) for event in events]


def of_sql(batch: Batch) -> list[Line]:
    """The same events by gdq.get_events()."""
    cursor = batch.connection.cursor(row_factory=tuple_row)
    set_json_loads(load_json, cursor)
    rows = cursor.execute(
        """select ev_id, ev_txid, ev_time, op, tbl, key, old, case when op <> 'message' then new end,
                  case when op = 'message' then new::text end, retries, origin from gdq.get_events(%s, %s)""",
        [batch.id, batch.token],
    )
    listed: list[list[Any]] = [[*row[:7], row[7] if row[8] is None else json.loads(row[8]), *row[9:]] for row in rows]
    return [_line(Event(*values)) for values in listed]


def _line(event: Event) -> Line:
    images = json_text([event.key, event.old, event.new])
    return event.id, event.op, event.table, images, event.retries, event.origin


def kinds_of(event: Event) -> list[tuple[str, Any, type]]:
    return [(name, repr(value), type(value)) for name, value in (event.new or event.old or {}).items()]


def write_values(tap: Tap, shape: str = "typed") -> None:
    """A captured table t with every value, under settings that give values other texts."""
    tap.write("create type shop.mood as enum ('glad')", "create domain shop.pounds as numeric(9,2)")
    columns = ", ".join(f"c{n} {type_}" for n, type_ in enumerate(VALUES))
    tap.write(f"create table t (id int primary key, {columns})")
    tap.add("shop.t", format=shape)
    for row in range(max(len(values) for values, _ in VALUES.values())):
        values = [values[row % len(values)] for values, _ in VALUES.values()]
        tap.app.execute(f"insert into t values ({row}{', %s' * len(values)})".encode(), values)
    with tap.db.connect("su") as su:
        for setting in (
            *("datestyle = 'german'", "timezone = 'America/New_York'", "bytea_output = 'escape'"),
            *("extra_float_digits = 0", "intervalstyle = 'iso_8601'", "search_path = 'shop'"),
        ):
            su.execute(f"alter role gdq_owner in database {tap.db.name} set {setting}".encode())


@pytest.mark.parametrize("shape", ["typed", "json"])
def test_values_are_psycopgs_and_in_json_those_of_events(tap: Tap, shape: str) -> None:
    """Also in a session whose settings give values other texts."""
    write_values(tap, shape)
    tap.write("insert into t (id) values (100)", "update t set c0 = null", "delete from t where id < 3")
    tap.owner.execute("select gdq.create_readers()")
    with opened(tap) as batch:
        # of few rows as JSON, by readers; with the columns named from the log's own columns
        events = list(batch.events())
        typed = list(batch.events(columns=["id", *(f"c{n}" for n in range(len(VALUES)))]))
        assert in_json(events) == of_sql(batch) == in_json(typed)
        assert [kinds_of(event) for event in events] == [kinds_of(event) for event in typed]
        assert events[0].time.utcoffset() == timedelta()
        new = events[0].new or {}
        for n, (type_, (_, wanted)) in enumerate(VALUES.items()):
            assert (type_, new[f"c{n}"], type(new[f"c{n}"])) == (type_, wanted, type(wanted))
        assert events[0].types == {**(events[0].types or {}), "id": "integer", "c2": "bigint"}


def test_retries_and_copies_have_the_same_values(tap: Tap) -> None:
    with tap.db.connect("su") as su:
        su.execute("alter default privileges for role app grant select on tables to gdq_owner")
    write_values(tap)
    register_consumer(tap.owner, "q", "new")
    require_copy(tap.owner, "q", "new")
    with Consumer(tap.db.dsn, "q", "new") as consumer:
        [copied] = [list(copy.events())[1:] for copy in consumer.copies()]
        [[some]] = [[e.new for e in copy.events(columns=["c2"])][1:2] for copy in again(consumer)]
    assert some == {"c2": 9223372036854775807}
    with Consumer(tap.db.dsn, "q", "c") as consumer:
        [events] = [put_aside(batch) for batch in consumer.batches(once=True)]
        [retried] = [list(batch.events()) for batch in consumer.batches(once=True)]
    assert len(events) > 3
    assert [kinds_of(e) for e in retried] == [kinds_of(e) for e in events]
    assert [e.retries for e in retried] == [1] * len(events)
    assert sorted(map(kinds_of, copied), key=str) == sorted(map(kinds_of, events), key=str)
    assert {line[3] for line in in_json(copied)} == {line[3] for line in in_json(events)}


def again(consumer: Consumer) -> Iterator[CopyBatch]:
    require_copy(consumer.connection, "q", "new")
    return consumer.copies()


def put_aside(batch: Batch) -> list[Event]:
    events = list(batch.events())
    for event in events:
        batch.retry(event, timedelta(0))
    return events


def test_order_of_all_kinds_of_events_and_what_is_left_out(tap: Tap) -> None:
    """Two tables, two versions, a changed key in mode pk, TRUNCATE, a message; more rows than one fetch brings."""
    tap.write("create table t (id bigint primary key, a int, b text)", "create table u (id int primary key, a int)")
    tap.write("create table quiet (id int primary key)")
    tap.add("shop.t")
    tap.add("shop.u", mode="pk", include=["a"])
    tap.add("shop.quiet")
    for turn in range(3):
        tap.write(
            f"insert into t select n, n, 'b' from generate_series({turn * 700}, {turn * 700 + 699}) n",
            f"insert into u values ({turn}, 1)",
            f"update u set id = id + 100 where id = {turn}",
        )
    tap.owner.execute("select gdq.insert_event('q', 'hello', '{\"n\": 12345678901234567890}'::jsonb)")
    tap.write("insert into quiet values (1)", "truncate u", "alter table t add c int")
    tap.write("insert into u values (9, 9)", "update t set a = -1, c = 2 where id < 3", "delete from t where id = 5")
    with opened(tap) as batch:
        wanted = list(batch.events())
        assert in_json(wanted) == of_sql(batch)
        assert {"truncate", "ddl", "message", "update", "delete"} < {event.op for event in wanted}
        new = list(batch.events(images="new", columns=["a"]))
        assert [(e.op, e.key) for e in new] == [(e.op, e.key) for e in wanted]
        rows = [event for event in new if event.table == "shop.t" and event.op in ("insert", "update", "delete")]
        assert {event.old for event in rows} == {None}
        assert (rows[0].new, rows[-2].new, rows[-1].new) == ({"a": 0}, {"a": -1}, None)
        assert rows[-1].key == {"id": 5}
        old = [event for event in batch.events(columns=["b"]) if event.op == "delete"][-1]
        assert (old.key, old.old, old.new) == ({"id": 5}, {"b": "b"}, None)
        with pytest.raises(psycopg.errors.InvalidParameterValue, match="images must be both, new or none, not old"):
            list(batch.events(images="old"))  # type: ignore[arg-type]


def test_a_role_without_rights_on_logs_reads_batch_after_batch_and_retries(tap: Tap) -> None:
    tap.write("create table t (id bigint primary key, at timestamptz)")
    tap.add("shop.t")
    with tap.db.connect("su") as su:
        su.execute("grant gdq_consumer to app")
    tap.app.execute("select gdq.register_consumer('q', 'own')")
    at = "2024-02-29 00:00+00"
    with Consumer(tap.db.app_dsn, "q", "own") as consumer:
        for number in range(1, 4):
            # from the second batch on, its first events come with it
            tap.write(f"insert into t values ({number}, '{at}')")
            for batch in consumer.batches(once=True):
                found = list(batch.events())
                assert found[-1].new == {"id": number, "at": datetime(2024, 2, 29, tzinfo=UTC)}
                if number == 2:
                    # the new event, and the one that was put aside
                    assert [(e.retries, e.key) for e in found] == [(1, {"id": 1}), (0, {"id": 2})]
                    assert found[0].new == {"id": 1, "at": datetime(2024, 2, 29, tzinfo=UTC)}
                elif number == 1:
                    batch.retry(found[0], timedelta(0))
        with pytest.raises(psycopg.errors.InsufficientPrivilege):
            consumer.connection.execute("select * from gdq_log.q1_event_0")


def test_async_batches(tap: Tap) -> None:
    tap.write("create table t (id bigint primary key, at date)", "create table u (id int primary key)")
    tap.add("shop.t")
    tap.add("shop.u")
    tap.write("insert into t select n, 'infinity' from generate_series(1, 600) n", "insert into u values (1)")

    async def read() -> list[tuple[Any, Any]]:
        async with AsyncConsumer(tap.db.dsn, "q", "c") as consumer:
            return [(e.table, e.new) async for b in consumer.batches(once=True) async for e in b.events()]

    wanted: list[tuple[str, Any]] = [("shop.t", {"id": n, "at": "infinity"}) for n in range(1, 601)]
    assert asyncio.run(read()) == [*wanted, ("shop.u", {"id": 1})]


def test_images_too_wide_for_one_select(tap: Tap) -> None:
    """A row's two images have more columns than the cursor reads: it comes as JSON, and is converted."""
    columns = ", ".join(f"c{n} bigint" for n in range(820))
    tap.write(f"create table w (id int primary key, at timestamptz, {columns})")
    tap.add("shop.w")
    tap.write("insert into w (id, at, c0, c819) values (1, '2024-02-29 00:00+00', 2, 3)", "update w set c5 = 9")
    with tap.db.connect("su") as su:
        su.execute(f"alter role gdq_owner in database {tap.db.name} set timezone = 'Asia/Tokyo'".encode())
        su.execute(f"alter role gdq_owner in database {tap.db.name} set datestyle = 'german'".encode())
    with opened(tap) as batch:
        assert in_json(batch.events()) == of_sql(batch)
        # of few rows by the function that reads these, and by a SELECT that is planned for the batch
        for events in (list(batch.events()), list(batch.events(columns=["at", *(f"c{n}" for n in range(820))]))):
            new = events[0].new or {}
            assert (new["c819"], new["at"]) == (3, datetime(2024, 2, 29, tzinfo=UTC))
        assert [e.new for e in batch.events(images="new", columns=["c5"])] == [{"c5": None}, {"c5": 9}]
