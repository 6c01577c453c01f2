"""Everything that gdq does, once through, in a database whose settings somebody has chosen badly.

run() installs gdq, captures tables of every kind, writes, reads by every reader, rotates, maintains, looks, refreshes
views and removes gdq again. It returns what was seen, which must be the same under all settings.
"""

from __future__ import annotations

import json
import re
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import datetime
from typing import Any

import psycopg
from click.testing import CliRunner
from psycopg import sql

import gdq
from gdq.cli import main
from gdq.source import iso_utc
from tests.support.server import Database

QUEUE = "q"

# Values whose text follows settings. Every literal here is read alike under all settings.
_VALUES = """
    d date, t timestamp, tz timestamptz, iv interval, f real, g float8, b bytea, a text[], fa float8[], j jsonb,
    n numeric(12,3), u uuid, r tstzrange, c char(3), q "char", m mood, p pair, ta timestamptz[], x text
"""
_ROW = """
    date '2024-02-03', timestamp '2024-02-03 04:05:06.789', timestamptz '2024-02-03 04:05:06.789+00',
    interval '-1 year -2 days +03:04:05.6', 0.1::real + {i}, 0.1::float8 + 0.2::float8 * {i},
    decode('00ff5c41', 'hex'), array['a', null, 'NULL', chr(92), ''], array[0.1::float8 + 0.2::float8, null],
    jsonb '{{"at": "2024-02-03T04:05:06+00:00", "f": 0.30000000000000004}}', 1.5 * {i},
    '00000000-0000-0000-0000-00000000000a'::uuid, tstzrange('2024-02-03 04:05:06+00', null),
    'ab', 'z', 'sad', row(0.1::float8 + 0.2::float8, timestamptz '2024-02-03 04:05:06+00', null)::pair,
    array[timestamptz '2024-02-03 04:05:06+00', null], chr(92) || 'x''"' || chr(10)
"""
_DDL = f"""
    create type mood as enum ('sad', 'glad');
    create type pair as (f float8, at timestamptz, note text);
    create table plain (id int primary key, {_VALUES});
    create table keyed (id int primary key, v text, w float8, d date);
    create table whole (id int primary key, {_VALUES});
    create table stated (id int primary key, at timestamptz, iv interval);
    create table "Odd ""name" (id int primary key, "select" text, "a b" interval);
    create table part (id int primary key, k int, n numeric, at date) partition by range (id);
    create table part_1 partition of part for values from (0) to (100);
    create table part_2 partition of part for values from (100) to (200);
    create table fact (id int primary key, k int, n int, f float8, at timestamptz, iv interval, b bytea, txt text);
    create table dim (k int primary key, label text);
    insert into dim values (0, 'zero'), (1, 'one'), (2, 'two');
    insert into fact select i, i % 3, i, i * 0.1::float8, timestamptz '2024-02-03 04:05:06+00' + i * interval '1 day',
      i * interval '-1 day +2 hours', decode('5c00', 'hex'), chr(92) || i from generate_series(1, 60) i;
"""
TABLES: dict[str, list[str]] = {
    "public.plain": [],
    "public.keyed": ["--mode", "pk", "--include", "v,d", "--where", "d >= '2024-01-02' and v <> 'x\\y'"],
    "public.whole": ["--format", "json"],
    "public.stated": ["--granularity", "statement", "--origin"],
    'public."Odd ""name"': ["--pin-search-path"],
    "public.part": [],
    "public.fact": [],
    "public.dim": [],
}
VIEWS = {
    "bag": "select id, f * 2 as f, at, iv, b, txt from fact where n > 5 and at > '2024-02-04 00:00:00+00'",
    "sums": "select k, count(*) as rows, sum(n) as n, max(at) as at, min(iv) as iv from fact group by k",
    "joined": "select label, count(*) as rows, max(f) as f from fact join dim using (k) group by label",
    "ranked": "select id, k, rank() over (partition by k order by at) as place from fact",
    "texts": "select distinct k, n % 4 as n, 'a\\b' as c from fact",
    "outer_joined": "select d.k, d.label, f.id, f.at from dim d left join fact f on f.k = d.k and f.n < 9",
}
LISTINGS = [
    *("queues", "tables", "consumers", "members q all", "retries q all", "dead-letters q all", "sequences q", "groups"),
    *("views", "view-history bag", "status", "slots"),
]


class Scenario:
    """One run in one database. `hand_over`: also give connections with the hostile settings to the library."""

    def __init__(self, database: Database, dsn: str, *, hand_over: bool = True) -> None:
        self.database = database
        self.dsn = dsn
        self.hand_over = hand_over
        self.seen: dict[str, Any] = {}

    def gdq(self, *arguments: str, stdin: str | None = None, codes: tuple[int, ...] = (0,)) -> str:
        """Run a command, which must end with one of these codes; returns its stdout."""
        handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
        try:
            done = CliRunner().invoke(main, [*arguments, "-d", self.dsn], input=stdin)
        finally:
            for number, handler in handlers.items():
                signal.signal(number, handler)
        if done.exit_code not in codes or (done.exception is not None and not isinstance(done.exception, SystemExit)):
            raise AssertionError(f"gdq {' '.join(arguments)}: {done.output}") from done.exception
        return done.stdout

    @contextmanager
    def session(self, *, calm: bool = False) -> Iterator[psycopg.Connection[Any]]:
        """A session as an application opens it; `calm`: one that can read as fast and write as it likes."""
        with psycopg.connect(self.dsn, autocommit=True) as connection:
            connection.isolation_level = psycopg.IsolationLevel.READ_COMMITTED
            if calm:
                _calm(connection)
            yield connection

    def write(self, *statements: str) -> None:
        with self.session(calm=True) as connection:
            for statement in statements:
                for try_again in range(5):
                    try:
                        connection.execute(statement.encode())
                    except psycopg.errors.SerializationFailure:
                        if try_again == 4:
                            raise
                    else:
                        break

    # the parts, in order

    def install(self) -> None:
        self.gdq("install")
        with self.database.connect("su") as su:
            _calm(su)
            su.execute("select gdq.create_event_triggers()")
            su.execute(sql.SQL("grant create on schema public to {}").format(sql.Identifier("gdq_owner")))
        self.gdq("install")  # finds nothing to do
        self.write(*_DDL.split(";\n"))
        self.gdq("create-queue", QUEUE)
        for consumer in ("all", "cli", "sql", "given", "arrow", "late"):
            self.gdq("register-consumer", QUEUE, consumer)
        for table, options in TABLES.items():
            self.gdq("add-table", QUEUE, table, *options)
        self.gdq("set-queue", QUEUE, "rotation_period=1 microsecond", "rotation_bytes=1")
        self.write("create sequence numbers")
        self.gdq("add-sequence", QUEUE, "public.numbers")

    def change(self, first: int) -> None:
        """Writes of every kind, with rows numbered from `first`."""
        i = first
        self.write(
            f"insert into plain values ({i}, {_ROW.format(i=i)}), ({i + 1}, {_ROW.format(i=i + 1)})",
            f"update plain set f = f * 3, tz = tz + interval '1 hour', a = null where id = {i}",
            f"delete from plain where id = {i + 1}",
            f"insert into keyed values ({i}, chr(92) || 'x', 0.1::float8 + {i}, '2024-02-03')",
            f"insert into keyed values ({i + 1}, null, 1, null)",
            f"update keyed set v = 'b', d = '2024-02-04' where id = {i}",
            f"insert into whole values ({i}, {_ROW.format(i=i)})",
            f"update whole set g = g + 0.2::float8, x = null where id = {i}",
            f"insert into stated select i, '2024-02-03 04:05:06+00', i * interval '-1 day +1 hour'"
            f" from generate_series({i}, {i + 2}) i",
            f"update stated set at = at + interval '1 day' where id = {i}",
            f"""insert into "Odd ""name" values ({i}, chr(92), interval '+1 year -1 hour')""",
            f"insert into part values ({i}, 1, 1.5, '2024-02-03'), ({i + 100}, 1, 2.5, '2024-02-03')",
            f"update part set n = n + 1, at = '2024-12-11' where id >= {i}",
            f"insert into fact select i, i % 3, i, i * 0.1::float8, timestamptz '2024-02-03 04:05:06+00',"
            f" interval '-1 day +2 hours', decode('5c00', 'hex'), 'x' from generate_series({i + 1000}, {i + 1003}) i",
            f"update fact set n = n + 1, f = f + 0.1::float8 where id % 7 = {i} % 7",
            f"delete from fact where id % 29 = {i} % 29",
            "select nextval('numbers')",
            f"select gdq.insert_event('{QUEUE}', 'greeting', jsonb"
            f""" '{{"at": "2024-02-03T04:05:06+00:00", "f": 0.30000000000000004, "i": {i}}}')""",
        )

    def change_schema(self) -> None:
        self.write(
            "alter table plain add column late interval default '-1 day +1 hour'",
            "insert into plain (id, late) values (50, '1 hour')",
            "alter table keyed rename column v to vv",
            "alter table whole drop column g",
            "create table part_3 partition of part for values from (200) to (300)",
            "insert into part values (200, 1, 1, '2024-02-03')",
            "truncate stated",
            "truncate part_2",
        )

    def bypass(self) -> None:
        """A change that no trigger sees, in an old snapshot: consumers must copy the table."""
        with self.session(calm=True) as connection:
            connection.isolation_level = psycopg.IsolationLevel.REPEATABLE_READ
            with connection.transaction():
                connection.execute("select 1")
                connection.execute("alter table keyed disable trigger all")
                connection.execute("update keyed set w = w + 1")
                connection.execute("alter table keyed enable trigger all")

    def maintain(self, *, calls: int = 60) -> None:
        with self.session(calm=True) as connection:
            for _ in range(calls):
                with connection.transaction():
                    if not gdq.maintain(connection):
                        return

    def make_quiet(self) -> None:
        """All logs quiet: what the functions of quiet logs are made of depends on more."""
        self.write(
            "set jit = off",  # nobody calls these by themselves
            "select gdq.set_activity(table_id, 'cooling') from gdq.captured_table",
            "select gdq.update_activity()",
        )

    def read(self, name: str) -> None:
        """What every reader sees."""
        self.gdq("tick", QUEUE)
        seen: dict[str, Any] = {}
        with gdq.Consumer(self.dsn, QUEUE, "all") as consumer:
            seen["events"] = _drained(consumer)
        with gdq.Consumer(self.dsn, QUEUE, "arrow") as consumer:
            for batch in consumer.batches(once=True):
                if name in ("altered", "bypassed"):
                    continue  # rows of a table that must be copied again are refused
                for table in ("public.plain", "public.stated", "public.part"):
                    if table in batch.tables():
                        rows = batch.arrow(table, unsupported="text")
                        kept = [column for column in rows.column_names if column not in ("ev_txid", "ev_time")]
                        seen[f"arrow {table}"] = sorted(map(repr, rows.select(kept).to_pylist()))
        printed = self.gdq("consume", QUEUE, "cli", "--once", "--json", codes=(0, 3))
        seen["printed"] = [_without(json.loads(line)) for line in printed.splitlines()]
        with self.session(calm=True) as connection:
            seen["sql"] = _by_sql(connection)
            if self.hand_over:
                with gdq.Consumer(connection, QUEUE, "given") as consumer:
                    seen["given"] = _drained(consumer)
        self.seen[name] = seen

    def look(self, name: str) -> None:
        """Every listing, by the command and by the library over a connection of the user's."""
        findings = json.loads(self.gdq("doctor", "--json", "--patience", "86400", codes=(0, 3)))
        self.seen[f"{name}: doctor"] = sorted({(f["code"], f["severity"]) for f in findings})
        for listing in LISTINGS:
            json.loads(self.gdq(*listing.split(), "--json") or "[]")
            self.gdq(*listing.split())
        self.gdq("position", QUEUE, "all")
        self.gdq("peek", QUEUE, "late", codes=(0, 3))
        if not self.hand_over:
            return
        with self.session(calm=True) as connection:
            gdq.status(connection)
            gdq.doctor(connection)
            for function in (gdq.queue_info, gdq.table_info, gdq.sequence_info, gdq.consumer_info, gdq.view_info):
                function(connection)
            gdq.view_history(connection, "bag")
            gdq.retry_info(connection, QUEUE, "all")
            gdq.dead_letters(connection, QUEUE, "all")
            gdq.group_info(connection)

    def retry(self) -> None:
        """One event is put aside, one is given up."""
        self.write("insert into dim values (7, chr(92))", "insert into dim values (8, 'eight')")
        with gdq.Consumer(self.dsn, QUEUE, "late") as consumer:
            for batch in consumer.batches(once=True):
                events = list(batch.events())
                batch.retry(events[-1])
                batch.dead_letter(events[-2], "no such thing")
        self.gdq("retries", QUEUE, "late", "--json")
        self.gdq("dead-letters", QUEUE, "late")
        self.gdq("replay-dead-letters", QUEUE, "late", "--all")

    def make_views(self) -> None:
        for view, query in VIEWS.items():
            self.gdq("create-view", view, "--queue", QUEUE, "--sql", "-", "--target", f"public.{view}", stdin=query)
        self.gdq("refresh")
        self.gdq("create-group", "both", "sums", "joined")

    def refresh(self, name: str) -> None:
        done = json.loads(self.gdq("refresh", "--json"))
        self.seen[name] = sorted((one["view_name"], one["action"], one.get("kind"), one["reason"]) for one in done)
        for view in VIEWS:
            self.gdq("explain-view", view)
        for view in ("bag", "ranked", "texts", "outer_joined"):
            self.gdq("verify-view", view)
        with self.session(calm=True) as connection, connection.cursor(binary=True) as cursor:
            for view in VIEWS:
                rows = cursor.execute(sql.SQL("select * from {}").format(sql.Identifier(view))).fetchall()
                self.seen[f"{name}: {view}"] = sorted(repr([_in_utc(value) for value in row]) for row in rows)

    def remove(self) -> None:
        for view in VIEWS:
            if view in ("sums", "joined"):
                continue
            self.gdq("drop-view", view)
        self.gdq("drop-group", "both")
        for view in ("sums", "joined"):
            self.gdq("drop-view", view)
        self.gdq("remove-table", QUEUE, "public.dim", "--force")
        self.gdq("rebase", QUEUE)
        self.gdq("uninstall", "--yes")
        self.write("insert into dim values (9, 'nine')", "drop table plain, keyed, part")

    def run(self) -> dict[str, Any]:
        """The whole of it."""
        self.install()
        self.make_views()
        self.change(1)
        self.read("first")
        self.refresh("refreshed")
        self.maintain()
        self.look("busy")
        self.make_quiet()
        self.change(10)
        self.read("quiet")
        self.retry()
        self.change_schema()
        self.read("altered")
        self.bypass()
        self.read("bypassed")
        self.refresh("refreshed again")
        self.maintain()
        self.write("insert into keyed values (80, chr(92), 1, '2024-02-03')", "delete from fact where id = 30")
        self.look("at the end")
        self.remove()
        return self.seen


def _calm(connection: psycopg.Connection[Any]) -> None:
    """Take away what would make the test's own statements fail."""
    connection.execute("set statement_timeout = 0")
    connection.execute("set search_path = public")
    connection.execute("set default_transaction_isolation = 'read committed'")
    connection.execute(
        "select set_config(name, '0', false) from pg_settings where name ~ '_timeout$' and context = 'user'"
    )


def _drained(consumer: gdq.Consumer) -> list[Any]:
    found: list[Any] = []
    try:
        for batch in consumer.batches(once=True):
            found += [(e.op, e.table, e.key, e.old, _untimed(e.new), e.origin) for e in batch.events()]
    except gdq.ResyncRequired as error:
        found.append(str(error))
    return found


def _by_sql(connection: psycopg.Connection[Any]) -> list[Any]:
    found: list[Any] = []
    while batch := connection.execute("select batch_id, token from gdq.next_batch('q', 'sql')").fetchone():
        query = "select op, tbl, key::text, old::text, new::text, origin from gdq.get_events(%s, %s)"
        found += [
            (op, tbl, key, old, _untimed_text(new), origin)
            for op, tbl, key, old, new, origin in connection.execute(query, batch)
        ]
        connection.execute("select gdq.finish_batch(%s, %s)", batch)
    return found


def _untimed(image: dict[str, Any] | None) -> dict[str, Any] | None:
    """An event's image without what differs from run to run: what DDL events say."""
    return image and {name: value for name, value in image.items() if name not in ("txid", "relid", "time")}


def _untimed_text(image: str | None) -> str | None:
    return image and re.sub(r'"(txid|relid|time)": ("[^"]*"|\d+)', "", image)


def _without(line: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in line.items() if name not in ("id", "xid", "time")}


def _in_utc(value: Any) -> Any:
    return iso_utc(value) if isinstance(value, datetime) else value
