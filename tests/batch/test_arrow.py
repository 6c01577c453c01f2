"""Typed reading: what PostgreSQL holds arrives in Arrow unchanged, or is an error that names the column."""

from __future__ import annotations

import datetime as dt
import math
import re
import traceback
from decimal import Decimal
from typing import Any

import psycopg
import pyarrow as pa
import pytest

from gdq import Consumer
from gdq.errors import GdqError, UnsupportedValue
from gdq.typed.pgtypes import TYPES
from tests.support.arrow import capture, one_batch
from tests.support.server import Database
from tests.support.waiting import until


def new_values(database: Database, **options: Any) -> list[Any]:
    """The column new_x of the events of one batch, by their number."""
    for batch in one_batch(database):
        table = batch.arrow("t", **options).sort_by("ev_id")
        return [value.as_py() for value in table.column("new_x")]
    raise AssertionError("no batch")


# type, literals, what Arrow gives
EXACT: list[tuple[str, list[str], list[Any]]] = [
    ("boolean", ["true", "false"], [True, False]),
    ("smallint", ["-32768", "32767"], [-32768, 32767]),
    ("integer", ["-2147483648", "2147483647"], [-(2**31), 2**31 - 1]),
    ("bigint", ["-9223372036854775808", "9223372036854775807"], [-(2**63), 2**63 - 1]),
    ("oid", ["4294967295"], [2**32 - 1]),
    ("numeric(10,2)", ["1.10", "-0.01", "99999999.99"], [Decimal("1.10"), Decimal("-0.01"), Decimal("99999999.99")]),
    ("numeric(38,0)", ["9" * 38], [Decimal("9" * 38)]),
    ("numeric(3,5)", ["0.00999"], [Decimal("0.00999")]),
    ("numeric(2,-3)", ["99000"], [Decimal(99000)]),
    ("text", ["''", "'Zoë'", "E'\\n\\t'", "repeat('x', 100000)"], ["", "Zoë", "\n\t", "x" * 100000]),
    ("varchar(5)", ["'abc'"], ["abc"]),
    ("char(5)", ["'abc'", "'abcde'"], ["abc  ", "abcde"]),
    ('"char"', ["'x'"], ["x"]),
    ("name", ["'n'"], ["n"]),
    ("bytea", [r"'\x00ff27'", "''"], [b"\x00\xff'", b""]),
    ("uuid", ["'00112233-4455-6677-8899-aabbccddeeff'"], ["00112233-4455-6677-8899-aabbccddeeff"]),
    ("date", ["'2024-02-29'", "'0001-01-01'"], [dt.date(2024, 2, 29), dt.date(1, 1, 1)]),
    ("timestamp", ["'2024-02-29 23:59:59.999999'"], [dt.datetime(2024, 2, 29, 23, 59, 59, 999999)]),
    (
        "timestamptz",
        ["'2024-02-29 23:59:59.999999+05:30'"],
        [dt.datetime(2024, 2, 29, 18, 29, 59, 999999, tzinfo=dt.UTC)],
    ),
    ("json", ["""'{"b": 1.0, "a":1e400}'"""], ['{"b": 1.0, "a":1e400}']),
    ("jsonb", ["""'{"b": 1.0, "a": 12345678901234567890.10}'"""], ['{"a": 12345678901234567890.10, "b": 1.0}']),
    ("inet", ["'10.0.0.1'", "'10.0.0.0/8'", "'::1'"], ["10.0.0.1", "10.0.0.0/8", "::1"]),
    ("cidr", ["'10.0.0.0/8'"], ["10.0.0.0/8"]),
    ("integer[]", ["'{1,NULL,3}'", "'{}'"], ["{1,NULL,3}", "{}"]),
    ("timestamptz[]", ["array['2024-01-01 00:00+01'::timestamptz]"], ['{"2023-12-31 23:00:00+00"}']),
    ("double precision[]", ["array[0.1::float8 + 0.2]"], ["{0.30000000000000004}"]),
    ("int4range", ["'[1,5)'"], ["[1,5)"]),
    ("point", ["'(0.1,-0)'"], ["(0.1,-0)"]),
    ("bit(3)", ["B'101'"], ["101"]),
    ("tsvector", ["'a b'"], ["'a' 'b'"]),
    ("pg_lsn", ["'1/2'"], ["1/2"]),
]


def test_values_arrive_unchanged(db: Database) -> None:
    with capture(db, ", ".join(f"c{i} {kind}" for i, (kind, _, _) in enumerate(EXACT))) as connection:
        for i, (_, literals, _) in enumerate(EXACT):
            for literal in [*literals, "null"]:
                connection.execute(f"insert into t (c{i}) values ({literal})")
    for batch in one_batch(db):
        table = batch.arrow("t").sort_by("ev_id")
    first = 0
    for i, (kind, _, values) in enumerate(EXACT):
        column = table.column(f"new_c{i}").slice(first, len(values) + 1)
        assert column.to_pylist() == [*values, None], kind
        first += len(values) + 1
    assert first == table.num_rows


@pytest.mark.parametrize("kind", ["real", "double precision"])
def test_floats_arrive_bit_by_bit(db: Database, kind: str) -> None:
    with capture(db, f"x {kind}") as connection:
        for value in ("'-0'", "'NaN'", "'Infinity'", "'-Infinity'", "0.1::float8 + 0.2", "1e-40", "1.5"):
            connection.execute(f"insert into t values ({value})")
    zero, nan, up, down, third, tiny, plain = new_values(db)
    assert (zero, math.copysign(1, zero)) == (0, -1)
    assert math.isnan(nan)
    assert (up, down, plain) == (math.inf, -math.inf, 1.5)
    assert third == (0.1 + 0.2 if kind == "double precision" else pa.scalar(0.1 + 0.2, pa.float32()).as_py())
    assert 0 < tiny < 1.1e-40


def test_user_types_arrive_as_text(db: Database) -> None:
    with db.connect() as connection:
        connection.execute(
            """create type mood as enum ('sad', 'so so'); create domain positive as int not null check (value > 0);
               create domain price as numeric(10,2); create type pair as (a int, b text);
               create type span as range (subtype = float8)"""
        )
    columns = "x mood, d positive, p price, c pair, s span, e mood[]"
    with capture(db, columns) as connection:
        connection.execute("insert into t values ('so so', 5, 1.5, (1,''), '[1,2)', '{sad,NULL}')")
    for batch in one_batch(db):
        with pytest.raises(UnsupportedValue, match='"p"'):
            batch.arrow("t")
        [row] = batch.delta("t", unsupported="text").to_pylist()
        expected = {"x": "so so", "d": 5, "p": "1.50", "c": '(1,"")', "s": "[1,2)", "e": "{sad,NULL}", "_weight": 1}
        assert row == expected


# type, literal, its text
HOMELESS = [
    ("numeric", "1.500", "1.500"),
    ("numeric", "'NaN'", "NaN"),
    ("numeric(39,1)", "1", "1.0"),
    ("interval", "'1 mon -2 days 03:00'", "1 mon -2 days +03:00:00"),
    ("time", "'24:00'", "24:00:00"),
    ("timetz", "'12:00+05:30'", "12:00:00+05:30"),
    ("money", "1234.5", "1,234.50"),
]


def test_types_without_a_home_are_refused_or_text(db: Database) -> None:
    names = [f"c{i}" for i in range(len(HOMELESS))]
    kinds = [f"c{i} {kind}" for i, (kind, _, _) in enumerate(HOMELESS)]
    with capture(db, ", ".join(kinds)) as connection:
        connection.execute(f"insert into t values ({', '.join(literal for _, literal, _ in HOMELESS)})")
    for batch in one_batch(db):
        for name in names:
            with pytest.raises(UnsupportedValue, match=f'column "{name}"') as refused:
                batch.arrow("t", as_text=[other for other in names if other != name])
            [line] = [line for line in traceback.format_exception(refused.value) if line.startswith("Hint: ")]
            assert 'unsupported="text"' in line
            assert f'as_text="{name}"' in line
        for table in (batch.arrow("t", unsupported="text"), batch.arrow("t", as_text=names)):
            [row] = table.to_pylist()
            assert [row[f"new_{name}"].removeprefix("$") for name in names] == [text for _, _, text in HOMELESS]


# type, literal, its text
MISFITS = [
    ("numeric(10,2)", "'NaN'", "NaN"),
    ("date", "'infinity'", "infinity"),
    ("date", "'-infinity'", "-infinity"),
    ("timestamp", "'infinity'", "infinity"),
    ("timestamp", "'-infinity'", "-infinity"),
    ("timestamp", "'294276-12-31 23:59:59.999999'", "294276-12-31 23:59:59.999999"),
    ("timestamptz", "'infinity'", "infinity"),
    ("timestamptz", "'294276-12-31 00:00+00'", "294276-12-31 00:00:00+00"),
]


def test_values_that_do_not_fit_are_refused_or_text(db: Database) -> None:
    names = [f"c{i}" for i in range(len(MISFITS))]
    kinds = [f"c{i} {kind}" for i, (kind, _, _) in enumerate(MISFITS)]
    with capture(db, ", ".join(kinds)) as connection:
        connection.execute(f"insert into t values ({', '.join(literal for _, literal, _ in MISFITS)})")
        connection.execute("insert into t default values")
    for batch in one_batch(db):
        for name in names:
            others = [other for other in names if other != name]
            for read in (batch.arrow, batch.delta):
                with pytest.raises(UnsupportedValue, match=f'column "{name}"'):
                    read("t", as_text=others)
        row, empty = batch.arrow("t", as_text=names).sort_by("ev_id").to_pylist()
        assert [row[f"new_{name}"] for name in names] == [text for _, _, text in MISFITS]
        assert {empty[f"new_{name}"] for name in names} == {None}


# type, literal, what Arrow counts
ENDS = [
    ("date", "'4714-11-24 BC'", -2440588),
    ("date", "'5874897-12-31'", 2145031948 + 10957),
    ("timestamp", "'294247-01-10 04:00:54.775807'", 2**63 - 1),
    ("timestamp", "'4714-11-24 00:00 BC'", -210866803200000000),
]


def test_the_ends_of_the_range_fit(db: Database) -> None:
    kinds = [f"c{i} {kind}" for i, (kind, _, _) in enumerate(ENDS)]
    with capture(db, ", ".join(kinds)) as connection:
        connection.execute(f"insert into t values ({', '.join(literal for _, literal, _ in ENDS)})")
    for batch in one_batch(db):
        table = batch.arrow("t")
        for i, (kind, _, number) in enumerate(ENDS):
            array = table.column(f"new_c{i}").combine_chunks()
            assert array.view(pa.int32() if kind == "date" else pa.int64()).to_pylist() == [number], kind


HOSTILE = (
    "-c datestyle=SQL,DMY -c intervalstyle=sql_standard -c timezone=Asia/Kathmandu -c extra_float_digits=-5 "
    "-c bytea_output=escape -c lc_monetary=C -c quote_all_identifiers=on -c search_path=nowhere"
)


def test_session_settings_change_nothing(db: Database) -> None:
    columns = "x timestamptz[], i interval, f float8[], b bytea[], d date[]"
    row = """('{2024-02-03 04:05+00}', '1 day -1 hour', array[0.1::float8 + 0.2], array['\\x00ff'::bytea],
              '{2024-02-03}')"""
    expected = {
        "x": '{"2024-02-03 04:05:00+00"}',
        "i": "1 day -01:00:00",
        "f": "{0.30000000000000004}",
        "b": '{"\\\\x00ff"}',
        "d": "{2024-02-03}",
    }
    with capture(db, columns), psycopg.connect(db.dsn, options=HOSTILE, autocommit=True) as writer:
        writer.execute(f"insert into public.t values {row}")
        writer.execute("select gdq.force_tick('q')")
    with Consumer(f"{db.dsn} options='{HOSTILE}'", "q", "c") as consumer:
        for batch in consumer.batches(once=True):
            [event] = batch.events()
            assert event.new == expected
            [net] = batch.delta("public.t", unsupported="text").to_pylist()
            assert net == expected | {"_weight": 1}


def test_events_in_python(db: Database) -> None:
    """The Python column of docs/types.md: what events hold."""
    samples = {
        "boolean": "true",
        "smallint": "1",
        "integer": "1",
        "bigint": "1",
        "oid": "1",
        "real": "0.5",
        "double precision": "0.5",
        "bytea": "'\\x00'",
        "uuid": "gen_random_uuid()",
        "date": "now()",
        "json": "'1'",
        "jsonb": "'1'",
        "inet": "'::1'",
        "interval": "'1 s'",
        "money": "1",
    }
    names = {row.postgres: row.python for row in TYPES}
    with capture(db, ", ".join(f'"{kind}" {kind}' for kind in samples)) as connection:
        connection.execute(f"insert into t values ({', '.join(samples.values())})")
    for batch in one_batch(db):
        [event] = batch.events()
        assert event.new is not None
        for kind, value in event.new.items():
            assert type(value).__name__ in re.findall(r"\w+", names[kind]), kind


@pytest.mark.parametrize("mode", ["full", "pk"])
def test_what_is_left_out_is_not_read(db: Database, mode: str) -> None:
    """Keys are always there; a column that Arrow cannot hold does not matter where it is not read."""
    include = ["a", "b", "c"] if mode == "pk" else None
    with capture(db, "id int primary key, a int, b text, c interval", mode, include=include) as connection:
        connection.execute("insert into t values (1, 2, 'b', '1 day')")
        connection.execute("update t set a = 3")
        connection.execute("delete from t")
    key = ["key_id"] if mode == "pk" else []
    ids = ["old_id", "new_id"] if mode == "full" else []
    for batch in one_batch(db):
        found = batch.arrow("t", images="new", columns=["a"]).sort_by("ev_id")
        assert found.schema.names[4:] == [*key, *ids[:1], *ids[1:], "new_a"]
        assert found.column("new_a").to_pylist() == [2, 3, None]
        assert found.column((ids or key)[0]).to_pylist()[-1] == 1
        [both] = batch.arrow_batches("t", columns={"b"})
        assert both.schema.names[4:] == [*key, *ids[:1], "old_b", *ids[1:], "new_b"]
        with pytest.raises(GdqError, match="table t has no captured column z, y"):
            batch.arrow("t", columns=["a", "z", "y"])
        with pytest.raises(GdqError, match="images must be both or new, not old"):
            batch.arrow("t", images="old")  # type: ignore[arg-type]


def test_floats_in_events_are_the_same_number(db: Database) -> None:
    values = [1e300, 123456789.0, 1e16, -1e22, 5e-324, 0.1]
    with capture(db, "x double precision") as connection:
        for value in values:
            connection.execute("insert into t values (%s)", [value])
    for batch in one_batch(db):
        assert [event.new for event in batch.events()] == [{"x": value} for value in values]


def test_schema_does_not_depend_on_rows(db: Database) -> None:
    with capture(db, "x numeric(5,1), y date, z timestamptz") as connection:
        connection.execute("select gdq.force_tick('q')")
    for batch in one_batch(db):
        empty = batch.arrow("t")
        assert empty.num_rows == 0
        assert batch.delta("t").schema.names == ["x", "y", "z", "_weight"]
    with db.connect() as connection:
        connection.execute("insert into t values (null, null, null)")
    for batch in one_batch(db):
        assert batch.arrow("t").schema == empty.schema


def test_odd_names(db: Database) -> None:
    name = 'Ödd "name"\n{c} %s ' + "x" * 40
    with capture(db, "k int primary key") as connection:
        column = psycopg.sql.Identifier(name[:60])
        connection.execute(psycopg.sql.SQL("create table {} ({} int)").format(column, column))
        table = psycopg.sql.Identifier("public", name[:60]).as_string(connection)
        connection.execute("select gdq.add_table('q', %s::regclass)", [table])
        connection.execute(psycopg.sql.SQL("insert into {} values (1)").format(column))
    for batch in one_batch(db):
        [listed] = batch.tables()
        assert batch.delta(listed).to_pylist() == [{name[:60]: 1, "_weight": 1}]


def test_rows_stream_in_batches(db: Database) -> None:
    with capture(db, "x int, y text") as connection:
        connection.execute("insert into t select i, repeat('y', 2000) from generate_series(1, 30000) i")
    for batch in one_batch(db):
        sizes = [part.num_rows for part in batch.arrow_batches("t")]
        assert sum(sizes) == 30000
        assert len(sizes) > 1


SESSIONS = "select pid, state from pg_stat_activity where application_name = 'gdq:q/c' and pid <> pg_backend_pid()"


def test_one_connection_reads_all_batches(db: Database) -> None:
    readers = []
    with capture(db, "x int primary key, y text") as owner, Consumer(db.dsn, "q", "c", max_events=1) as consumer:
        for number in range(4):
            owner.execute("insert into t values (%s, 'x')", [number])
            owner.execute("select gdq.force_tick('q')")
        for batch in consumer.batches(timeout=0):
            assert batch.arrow("t").num_rows == 1
            reader = [pid for pid, _ in consumer.connection.execute(SESSIONS)]
            assert list(consumer.connection.execute(SESSIONS)) == [(reader[0], "idle")]
            readers += reader
            if len(readers) == 2:  # as a restart or a limit of idle sessions would
                owner.execute("select pg_terminate_backend(%s, 10000)", reader)
        assert readers[0] == readers[1] != readers[2] == readers[3]
        until(lambda: not consumer.connection.execute(SESSIONS).rowcount)


def test_reads_at_the_same_time_and_given_up(db: Database) -> None:
    with capture(db, "x int primary key, y text") as owner:
        owner.execute("insert into t select n, repeat('y', 2000) from generate_series(1, 20000) n")
    for batch in one_batch(db):
        some = next(batch.arrow_batches("t"))
        assert 0 < some.num_rows < 20000
        pairs = zip(batch.arrow_batches("t"), batch.arrow_batches("t"), strict=True)
        sizes = [(one.num_rows, other.num_rows) for one, other in pairs]
        assert [sum(side) for side in zip(*sizes, strict=True)] == [20000, 20000]
        assert batch.arrow("t").num_rows == 20000
