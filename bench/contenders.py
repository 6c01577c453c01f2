"""The contenders: one table of the same shape each, and a way to capture its changes."""

from __future__ import annotations

import re
from collections.abc import Callable, Container
from dataclasses import dataclass
from typing import Any, Literal

import psycopg
from psycopg import sql

from bench.packages import PGQ, PGQ_PL, PGQ_PL_SQL, SLONY, SLONY_SQL

Connection = psycopg.Connection[Any]

# About 180 bytes a row. Autovacuum is off for the tables because the benchmark vacuums them itself, outside the timing;
# gdq and PgQ switch it off for their logs.
_FEED = """
create schema if not exists app;
create table if not exists app.feed (
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


# One large value a row that compresses badly, kept out of line, which the measured UPDATE leaves as it is.
WIDE_BYTES = 100_000
_WIDE = """
create table app.{0} (id bigint primary key, amount integer not null, body text)
  with (autovacuum_enabled = off);
alter table app.{0} alter body set storage external
"""
_FILL_WIDE = """
insert into app.{}
select i, 0, (select string_agg(md5(i || '/' || j), '') from generate_series(1, {bytes} / 32) j)
  from generate_series(1, {rows}::bigint) i
"""

Slot = Literal["", "idle", "consumed"]


@dataclass(frozen=True, slots=True)
class Contender:
    """One way to capture a table: its name in reports, its table in schema app, and how to set it up.

    `capture` arms the table (named by its argument) and returns the log tables, which may be truncated by hand.
    `peer`: the package that it needs. `slot`: a logical slot exists while it is measured, with or without a reader.
    `halves`: its log has two rows for an update. `share`: of so many rows it is given one, being slow.
    """

    name: str
    table: str
    capture: Callable[[Connection, str], list[str]]
    peer: str | None = None
    slot: Slot = ""
    halves: bool = False
    share: int = 1

    def rows(self, of: int) -> int:
        """The number of rows that it is given where others are given `of`."""
        return max(of // self.share, 1)


def _no_trigger(connection: Connection, table: str) -> list[str]:
    del connection, table
    return []


def _identity_full(connection: Connection, table: str) -> list[str]:
    connection.execute(sql.SQL("alter table app.{} replica identity full").format(sql.Identifier(table)))
    return []


def _gdq(options: str, queue_options: str = "") -> Callable[[Connection, str], list[str]]:
    def capture(connection: Connection, table: str) -> list[str]:
        queue, name = f"bench_{table}", f"app.{table}"
        connection.execute(f"select gdq.create_queue(%s{queue_options})".encode(), [queue])
        connection.execute(f"select gdq.add_table(%s, %s::regclass, {options})".encode(), [queue, name])
        found = connection.execute("select gdq.log_segments(%s, array[%s::regclass])::text", [queue, name])
        return [row[0] for row in found]

    return capture


def _pgq(function: str, *arguments: str, schema: str = "pgq") -> Callable[[Connection, str], list[str]]:
    def capture(connection: Connection, table: str) -> list[str]:
        queue = f"bench_{table}"
        pgq = sql.Identifier(schema)
        connection.execute(sql.SQL("select {}.create_queue({})").format(pgq, sql.Literal(queue)))
        given = sql.SQL(", ").join([sql.Literal(queue), *map(sql.Literal, arguments)])
        connection.execute(
            sql.SQL(
                "create trigger capture after insert or update or delete on app.{}"
                " for each row execute function {}.{}({})"
            ).format(sql.Identifier(table), pgq, sql.Identifier(function), given)
        )
        found = connection.execute(
            sql.SQL(
                "select queue_data_pfx || '_' || i from {}.queue, generate_series(0, queue_ntables - 1) i"
                " where queue_name = {}"
            ).format(pgq, sql.Literal(queue))
        )
        return [row[0] for row in found]

    return capture


def _install_pgq_pl(connection: Connection) -> None:
    """PgQ without its C code, beside the other: in a schema of its own, since the names are the same."""
    text = PGQ_PL_SQL.read_text(encoding="utf-8")
    connection.execute(re.sub(r"\bpgq\b", "pgq_pl", text).encode())


def _slony(connection: Connection, table: str) -> list[str]:
    """The trigger as Slony's own configuration makes it: the first column is the key."""
    connection.execute(
        sql.SQL(
            "create trigger _bench_logtrigger after insert or update or delete on app.{}"
            " for each row execute function _bench.logtrigger('_bench', '1', 'k')"
        ).format(sql.Identifier(table))
    )
    return ["_bench.sl_log_1", "_bench.sl_log_2"]


def _install_slony(connection: Connection) -> None:
    """A cluster of one node, from the files that slonik would load."""
    version = "2.2.11"
    values = {"CLUSTERNAME": "bench", "NAMESPACE": "_bench", "MODULEVERSION": version, "FUNCVERSION": "2_2_11_"}
    connection.execute("create schema _bench")
    for part in ("base", "funcs"):
        text = (SLONY_SQL / f"slony1_{part}.{version}.sql").read_text(encoding="utf-8")
        for name, value in values.items():
            text = text.replace(f"@{name}@", value)
        connection.execute(text.encode())
    connection.execute("select _bench.initializelocalnode(1, 'bench')")


BASE = Contender("no trigger", "none", _no_trigger)
GDQ_FULL = Contender("gdq full", "gdq_full", _gdq("'full'"))
GDQ_PK = Contender("gdq pk", "gdq_pk", _gdq("'pk'"))
GDQ_STATEMENT = Contender("gdq statement", "gdq_stmt", _gdq("'full', granularity => 'statement'"), halves=True)
GDQ_UNLOGGED = Contender("gdq unlogged", "gdq_unlogged", _gdq("'full'", ", unlogged => true"))
GDQ_JSON = Contender("gdq json", "gdq_json", _gdq("'full', format => 'json'"))
PGQ_BACKUP = Contender("PgQ with backup", "pgq_backup", _pgq("logutriga", "backup"), PGQ)
PGQ_PLAIN = Contender("PgQ", "pgq_plain", _pgq("logutriga"), PGQ)
PGQ_JSON = Contender("PgQ json", "pgq_json", _pgq("jsontriga"), PGQ)
PGQ_PL_BACKUP = Contender(
    "PgQ PL with backup", "pgq_pl_backup", _pgq("logutriga", "backup", schema="pgq_pl"), PGQ_PL, share=100
)
PGQ_PL_PLAIN = Contender("PgQ PL", "pgq_pl_plain", _pgq("logutriga", schema="pgq_pl"), PGQ_PL, share=100)
SLONY_TRIGGER = Contender("Slony", "slony", _slony, SLONY)
SLOT_IDLE = Contender("slot idle", "slot_idle", _no_trigger, slot="idle")
SLOT_IDLE_FULL = Contender("slot idle, identity full", "slot_idle_full", _identity_full, slot="idle")
SLOT_CONSUMED = Contender("slot consumed", "slot_used", _no_trigger, slot="consumed")
SLOT_CONSUMED_FULL = Contender("slot consumed, identity full", "slot_used_full", _identity_full, slot="consumed")
CONTENDERS = (
    BASE, GDQ_FULL, GDQ_PK, GDQ_STATEMENT, GDQ_UNLOGGED, GDQ_JSON, PGQ_BACKUP, PGQ_PLAIN, PGQ_JSON, PGQ_PL_BACKUP,
    PGQ_PL_PLAIN, SLONY_TRIGGER, SLOT_IDLE, SLOT_IDLE_FULL, SLOT_CONSUMED, SLOT_CONSUMED_FULL,
)  # fmt: skip
_EXTENSIONS: dict[str, Callable[[Connection], object]] = {
    PGQ: lambda connection: connection.execute("create extension pgq"),
    PGQ_PL: _install_pgq_pl,
    SLONY: _install_slony,
}


def prepare(connection: Connection, rows: int, wide_rows: int, missing: Container[str]) -> dict[Contender, list[str]]:
    """Make the feed of `rows` rows and every contender's tables, an empty one and one of wide rows; capture them.

    gdq is installed already. `missing` peers are left out. Result: the log tables of each contender. Writes: schema
    app, the peers' own, one queue for each contender of gdq and PgQ and table.
    """
    for peer, install in _EXTENSIONS.items():
        if peer not in missing:
            install(connection)
    create_feed(connection, rows)
    logs: dict[Contender, list[str]] = {}
    for contender in CONTENDERS:
        if contender.peer in missing:
            continue
        table, wide = sql.Identifier(contender.table), sql.Identifier(wide_table(contender))
        connection.execute(sql.SQL("create table app.{} (like app.feed including all)").format(table))
        connection.execute(sql.SQL("alter table app.{} set (autovacuum_enabled = off)").format(table))
        connection.execute(sql.SQL(_WIDE).format(wide))
        filled = sql.SQL(_FILL_WIDE).format(
            wide, bytes=sql.Literal(WIDE_BYTES), rows=sql.Literal(contender.rows(wide_rows))
        )
        connection.execute(filled)
        # Slony has the same logs for both tables
        found = [
            log
            for captured in (contender.table, wide_table(contender))
            for log in contender.capture(connection, captured)
        ]
        logs[contender] = list(dict.fromkeys(found))
    return logs


def create_feed(connection: Connection, rows: int) -> None:
    """Make app.feed with `rows` rows."""
    connection.execute(_FEED)
    connection.execute(sql.SQL(_FILL).format(rows=sql.Literal(rows)))
    connection.execute("vacuum analyze app.feed")


def wide_table(contender: Contender) -> str:
    """The table of wide rows of a contender."""
    return f"{contender.table}_wide"
