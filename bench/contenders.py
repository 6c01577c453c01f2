"""The contenders: one table of the same shape each, and a way to capture its changes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import psycopg
from psycopg import sql

Connection = psycopg.Connection[Any]

# About 180 bytes a row. Autovacuum is off for the tables because the benchmark vacuums them itself, outside the timing;
# gdq and PgQ switch it off for their logs.
_FEED = """
create schema app;
create table app.feed (
  id bigint primary key, customer integer not null, amount numeric(12,2) not null, changed timestamptz not null,
  code text not null, name text not null, note text, active boolean not null
) with (autovacuum_enabled = off)
"""
_FILL = """
insert into app.feed
select i, i % 1000, i * 7919 % 10000000 / 100.0, timestamptz '2024-01-01 00:00Z' + i * interval '61 s',
       'C-' || i * 31 % 100000, 'customer ' || md5(i::text), repeat(md5((i + 1)::text), 2) || ' note', i % 3 = 0
  from generate_series(1, {rows}::bigint) i
"""


@dataclass(frozen=True, slots=True)
class Contender:
    """One way to capture a table: its name in reports, its table in schema app, and how to set it up.

    `capture` arms the table (named by its argument) and returns the log tables, which may be truncated by hand.
    """

    name: str
    table: str
    capture: Callable[[Connection, str], list[str]]


def _no_trigger(connection: Connection, table: str) -> list[str]:
    del connection, table
    return []


def _gdq(mode: str) -> Callable[[Connection, str], list[str]]:
    def capture(connection: Connection, table: str) -> list[str]:
        queue, name = f"bench_{table}", f"app.{table}"
        connection.execute("select gdq.create_queue(%s)", [queue])
        connection.execute("select gdq.add_table(%s, %s::regclass, %s)", [queue, name, mode])
        found = connection.execute("select gdq.log_segments(%s, array[%s::regclass])::text", [queue, name])
        return [row[0] for row in found]

    return capture


def _pgq(*arguments: str) -> Callable[[Connection, str], list[str]]:
    def capture(connection: Connection, table: str) -> list[str]:
        queue = f"bench_{table}"
        connection.execute("select pgq.create_queue(%s)", [queue])
        connection.execute(
            sql.SQL(
                "create trigger capture after insert or update or delete on app.{}"
                " for each row execute function pgq.logutriga({})"
            ).format(sql.Identifier(table), sql.SQL(", ").join([sql.Literal(queue), *map(sql.Literal, arguments)]))
        )
        found = connection.execute(
            "select queue_data_pfx || '_' || i from pgq.queue, generate_series(0, queue_ntables - 1) i"
            " where queue_name = %s",
            [queue],
        )
        return [row[0] for row in found]

    return capture


BASE = Contender("no trigger", "none", _no_trigger)
GDQ_FULL = Contender("gdq full", "gdq_full", _gdq("full"))
GDQ_PK = Contender("gdq pk", "gdq_pk", _gdq("pk"))
PGQ_BACKUP = Contender("PgQ with backup", "pgq_backup", _pgq("backup"))
PGQ_PLAIN = Contender("PgQ", "pgq_plain", _pgq())
CONTENDERS = (BASE, GDQ_FULL, GDQ_PK, PGQ_BACKUP, PGQ_PLAIN)


def prepare(connection: Connection, rows: int) -> dict[Contender, list[str]]:
    """Make the feed of `rows` rows and every contender's empty table; capture them.

    gdq is installed already. Result: the log tables of each contender. Writes: schema app, extension pgq, one queue
    for each contender.
    """
    connection.execute("create extension pgq")
    connection.execute(_FEED)
    connection.execute(sql.SQL(_FILL).format(rows=sql.Literal(rows)))
    connection.execute("vacuum analyze app.feed")
    logs: dict[Contender, list[str]] = {}
    for contender in CONTENDERS:
        connection.execute(
            sql.SQL("create table app.{} (like app.feed including all)").format(sql.Identifier(contender.table))
        )
        connection.execute(
            sql.SQL("alter table app.{} set (autovacuum_enabled = off)").format(sql.Identifier(contender.table))
        )
        logs[contender] = contender.capture(connection, contender.table)
    return logs
