"""What a refresh from changes costs beside REFRESH MATERIALIZED VIEW: the 22 queries of TPC-H, engine postgres.

    python -m bench.views [--scale 0.5] [--churn 0.001] [--rounds 3] [QUERY...]

Each round changes a share of the lines (a third each inserted with their orders, updated, and deleted with their
orders), then refreshes each view both ways, one after the other. Medians of seconds, their ratio, the rows of the
tables that either read, and whether both ended with the same rows.
"""

from __future__ import annotations

import json
import statistics
import sys
import tempfile
import time
from collections.abc import Collection
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import click
import psycopg
from rich import box
from rich.console import Console
from rich.table import Table

from gdq import schema
from gdq.consumers.refresh import Refresher
from gdq.embedded import Server, find_binaries
from gdq.view import create_view
from tests import tpch

_CHURN = (
    """insert into orders select o_orderkey + {r} * 100000000, o_custkey, 'O', o_totalprice, o_orderdate,
         o_orderpriority, o_clerk, o_shippriority, o_comment
       from orders where o_orderkey < 100000000 and o_orderkey % {step} = {r} * 3""",
    """insert into lineitem select l_orderkey + {r} * 100000000, l_partkey, l_suppkey, l_linenumber, l_quantity,
         l_extendedprice, l_discount, l_tax, l_returnflag, 'O', l_shipdate, l_commitdate, l_receiptdate,
         l_shipinstruct, l_shipmode, l_comment
       from lineitem where l_orderkey < 100000000 and l_orderkey % {step} = {r} * 3""",
    """update lineitem set l_quantity = 51 - l_quantity, l_extendedprice = l_extendedprice + 1
        where l_orderkey % {step} = {r} * 3 + 1""",
    "delete from lineitem where l_orderkey % {step} = {r} * 3 + 2",
    "delete from orders where o_orderkey % {step} = {r} * 3 + 2",
)


@dataclass(slots=True)
class Measured:
    """One view: medians of seconds and of rows read from the tables, for gdq and for REFRESH; what gdq did.

    `concurrently`: seconds of REFRESH CONCURRENTLY, None when the rows of the view are not unique.
    """

    view: str
    action: str
    gdq: float
    refresh: float
    concurrently: float | None
    gdq_rows: int
    refresh_rows: int
    equal: bool

    @property
    def ratio(self) -> float:
        return self.refresh / self.gdq


def prepare(connection: psycopg.Connection[Any], scale: float, queries: dict[str, str]) -> set[str]:
    """TPC-H, captured, with each query as a view of gdq and as two materialized ones.

    The names of those whose rows are unique, which REFRESH CONCURRENTLY wants.
    """
    concurrent = set()
    with tempfile.TemporaryDirectory() as folder:
        tpch.load(connection, Path(folder), scale)
    connection.execute("select gdq.create_event_triggers(); select gdq.create_queue('bench')")
    for table in tpch.TABLES:
        connection.execute("select gdq.add_table('bench', %s::regclass)", [table])
    for name, query in queries.items():
        create_view(connection, name, "bench", query, f"public.{name}", engine="postgres")
        connection.execute(f"create materialized view m_{name} as {query}")
        connection.execute(f"create materialized view c_{name} as {query}")
        columns = connection.execute(f"select * from m_{name} limit 0").description or ()
        try:
            connection.execute(f"create unique index on c_{name} ({', '.join(column.name for column in columns)})")
        except psycopg.errors.UniqueViolation:
            continue
        concurrent.add(name)
    return concurrent


def rows_read(connection: psycopg.Connection[Any]) -> int:
    """The rows that were read from the tables of TPC-H so far."""
    connection.execute("select pg_stat_force_next_flush()")
    connection.execute("select pg_stat_clear_snapshot()")
    query = """select coalesce(sum(seq_tup_read + coalesce(idx_tup_fetch, 0)), 0)::bigint from pg_stat_user_tables
                where schemaname = 'public' and relname = any (%s)"""
    row = connection.execute(query, [list(tpch.TABLES)]).fetchone()
    return int(row[0]) if row else 0


def measure(server: Server, scale: float, churn: float, rounds: int, queries: dict[str, str]) -> list[Measured]:
    """Load, then `rounds` times change a share of the lines and refresh everything both ways."""
    schema.install(server.conninfo())
    with psycopg.connect(server.conninfo(), autocommit=True) as connection, Refresher(server.conninfo()) as refresher:
        concurrent = prepare(connection, scale, queries)
        for name in queries:
            refresher.refresh(name)
        step = max(round(3 / churn / 3), 3 * rounds + 6)
        taken: dict[str, list[Measured]] = {name: [] for name in queries}
        for number in range(1, rounds + 1):
            with connection.transaction():
                for statement in _CHURN:
                    connection.execute(statement.format(r=number, step=step))
            for name in queries:
                taken[name].append(_both(connection, refresher, name, concurrent))
            print(f"round {number} of {rounds} done", file=sys.stderr, flush=True)
    return [_median(name, found) for name, found in taken.items()]


def _both(
    connection: psycopg.Connection[Any], refresher: Refresher, name: str, concurrent: Collection[str]
) -> Measured:
    before = rows_read(connection)
    start = time.monotonic()
    result = refresher.refresh(name)
    mine = time.monotonic() - start
    for purpose in ("target", "leader"):
        # a session tells what it has read once a second at most, unless it is asked
        refresher.connection(purpose, refresher.dsn).execute("select pg_stat_force_next_flush()")
        refresher.connection(purpose, refresher.dsn).commit()
    middle = rows_read(connection)
    start = time.monotonic()
    connection.execute(f"refresh materialized view m_{name}")
    theirs = time.monotonic() - start
    after = rows_read(connection)
    beside = None
    if name in concurrent:
        start = time.monotonic()
        connection.execute(f"refresh materialized view concurrently c_{name}")
        beside = time.monotonic() - start
    bare = f"(table {name} except all table m_{name}) union all (table m_{name} except all table {name})"
    equal = connection.execute(f"select not exists ({bare})").fetchone() == (True,)
    return Measured(name, result.action, mine, theirs, beside, middle - before, after - middle, equal)


def _median(name: str, found: list[Measured]) -> Measured:
    return Measured(
        name,
        "/".join(sorted({one.action for one in found})),
        statistics.median(one.gdq for one in found),
        statistics.median(one.refresh for one in found),
        statistics.median(one.concurrently for one in found if one.concurrently is not None)
        if found[0].concurrently is not None
        else None,
        int(statistics.median(one.gdq_rows for one in found)),
        int(statistics.median(one.refresh_rows for one in found)),
        all(one.equal for one in found),
    )


def show(measured: list[Measured], console: Console) -> None:
    table = Table(box=box.SIMPLE_HEAD)
    for name in (
        "view",
        "did",
        "gdq s",
        "REFRESH s",
        "CONCURRENTLY s",
        "times faster",
        "rows read",
        "of REFRESH's",
        "same rows",
    ):
        table.add_column(name, justify="right")
    for one in measured:
        share = f"{one.gdq_rows / max(one.refresh_rows, 1):.1%}"
        beside = "-" if one.concurrently is None else f"{one.concurrently:.3f}"
        seconds = [f"{one.gdq:.3f}", f"{one.refresh:.3f}", beside, f"{one.ratio:.1f}"]
        table.add_row(one.view, one.action, *seconds, str(one.gdq_rows), share, "yes" if one.equal else "NO")
    console.print(table)
    faster = [one.ratio for one in measured if one.action == "delta"]
    few = sum(one.action == "delta" and one.gdq_rows < 0.2 * one.refresh_rows for one in measured)
    if faster:
        console.print(
            f"from changes: {len(faster)}, median {statistics.median(faster):.1f} times faster; {few} read under 20 %"
        )


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@click.argument("query", nargs=-1)
@click.option("--scale", type=float, default=0.5, show_default=True, help="TPC-H's scale factor.")
@click.option("--churn", type=float, default=0.001, show_default=True, help="Share of the lines that change.")
@click.option("--rounds", type=click.IntRange(1), default=3, show_default=True, help="Rounds of changes.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON instead of a table.")
def main(query: tuple[str, ...], scale: float, churn: float, rounds: int, *, as_json: bool) -> None:
    """Measure refreshes of the TPC-H queries beside REFRESH MATERIALIZED VIEW. Exit code 1 when rows differ."""
    queries = {name: text for name, text in tpch.QUERIES.items() if not query or name in query}
    settings: dict[str, str | float | bool] = {
        "shared_buffers": "2GB",
        "synchronous_commit": False,
        "work_mem": "64MB",
        "random_page_cost": 1.1,  # all is in memory
    }
    with Server(binaries=find_binaries(18), settings=settings) as server:
        measured = measure(server, scale, churn, rounds, queries)
    if as_json:
        print(json.dumps([asdict(one) for one in measured], indent=2))
    else:
        show(measured, Console())
    if not all(one.equal for one in measured):
        sys.exit(1)


if __name__ == "__main__":
    main(prog_name="python -m bench.views")
