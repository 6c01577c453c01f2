"""Demo of gdq on one machine: `python -m gdq.consumers.demo [--scale 0.05] [--rounds 3]`.

It starts an embedded server with captured TPC-H tables and two views, and refreshes the views by Spark while writers
go on. Then it loads the views in full and proves that they equal their queries.
"""

from __future__ import annotations

import argparse
import random
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psycopg
from rich.console import Console
from rich.table import Table

from gdq import queue as queues
from gdq.call import scalar
from gdq.consumers.refresh.refresher import Refresher, RefreshResult
from gdq.consumers.refresh.verify import verify_with
from gdq.embedded.server import EmbeddedServer
from gdq.installer.install import install
from gdq.ticker import maintain, tick_all
from gdq.view.view import create_view

_QUEUE = "shop"
_TABLES = ("customer", "orders", "lineitem")
_WRITERS = 2

DEMO_SCHEMA = """
create table customer (
  c_custkey int primary key, c_name text not null, c_address text not null, c_nationkey int not null,
  c_phone text not null, c_acctbal numeric(12,2) not null, c_mktsegment text not null, c_comment text not null);
create table orders (
  o_orderkey int primary key, o_custkey int not null, o_orderstatus text not null, o_totalprice numeric(12,2) not null,
  o_orderdate date not null, o_orderpriority text not null, o_clerk text not null, o_shippriority int not null,
  o_comment text not null);
create table lineitem (
  l_orderkey int not null, l_partkey int not null, l_suppkey int not null, l_linenumber int not null,
  l_quantity numeric(6,2) not null, l_extendedprice numeric(12,2) not null, l_discount numeric(4,2) not null,
  l_tax numeric(4,2) not null, l_returnflag text not null, l_linestatus text not null, l_shipdate date not null,
  l_commitdate date not null, l_receiptdate date not null, l_shipinstruct text not null, l_shipmode text not null,
  l_comment text not null, primary key (l_orderkey, l_linenumber))"""

DEMO_VIEWS = {
    "urgent_orders": """select o_orderkey, o_custkey, o_orderdate, o_totalprice, upper(o_orderstatus) as status
  from orders where o_orderpriority = '1-URGENT'""",
    "pricing": """select l_returnflag, l_linestatus, count(*) as lines, sum(l_quantity) as quantity,
       sum(l_extendedprice * (1 - l_discount)) as revenue,
       sum(l_extendedprice * (1 - l_discount) * (1 + l_tax)) as charge, avg(l_discount) as discount
  from lineitem where l_shipdate <= date '1998-09-02' group by l_returnflag, l_linestatus""",
}

_INSERT = (
    (
        "insert into orders select %(new)s, o_custkey, 'O', o_totalprice, o_orderdate, o_orderpriority, o_clerk,"
        " o_shippriority, o_comment from orders where o_orderkey = %(old)s"
    ),
    (
        "insert into lineitem select %(new)s, l_partkey, l_suppkey, l_linenumber, l_quantity, l_extendedprice,"
        " l_discount, l_tax, 'N', 'O', l_shipdate, l_commitdate, l_receiptdate, l_shipinstruct, l_shipmode, l_comment"
        " from lineitem where l_orderkey = %(old)s"
    ),
)
_UPDATE = (
    "update lineitem set l_returnflag = 'R', l_discount = l_discount + 0.01 where l_orderkey = %(old)s",
    "update orders set o_orderpriority = '1-URGENT', o_totalprice = o_totalprice + 1 where o_orderkey = %(old)s",
    (
        "update customer set c_acctbal = c_acctbal - 1"
        " where c_custkey = (select o_custkey from orders where o_orderkey = %(old)s)"
    ),
)
_DELETE = (
    "delete from lineitem where l_orderkey = %(old)s",
    "delete from orders where o_orderkey = %(old)s",
)


class DemoError(Exception):
    """A check of the demo failed."""


@dataclass
class DemoLoad:
    """The threads that write beside the refreshes, and counts of their work."""

    stop: threading.Event = field(default_factory=threading.Event)
    transactions: list[int] = field(default_factory=lambda: [0] * _WRITERS)
    truncations: int = 0
    errors: list[BaseException] = field(default_factory=list)

    def write(self, conninfo: str, number: int, keys: Sequence[int], fresh: int) -> None:
        """Insert, change and delete orders with their lines, one transaction each, until stopped."""
        rng = random.Random(number)
        with psycopg.connect(conninfo, autocommit=True) as connection:
            while not self.stop.is_set():
                values = {"new": fresh, "old": rng.choice(keys)}
                with connection.transaction():
                    for statement in rng.choice((_INSERT, _UPDATE, _DELETE)):
                        connection.execute(statement, values)
                fresh += _WRITERS
                self.transactions[number] += 1
                self.stop.wait(0.01)

    def keep_house(self, conninfo: str) -> None:
        """Tick, rotate and truncate logs until stopped."""
        with psycopg.connect(conninfo, autocommit=True) as connection:
            while not self.stop.wait(0.25):
                tick_all(connection)
                while maintain(connection):
                    self.truncations += 1

    def run(self, work: Callable[..., None], *arguments: Any) -> None:
        """Body of a thread; an error in it ends the demo."""
        try:
            work(*arguments)
        except BaseException as error:
            self.errors.append(error)
            self.stop.set()


def main(arguments: Sequence[str]) -> int:
    """Run the demo; exit code 1 if a check fails."""
    parser = argparse.ArgumentParser(prog="python -m gdq.consumers.demo", description=__doc__)
    parser.add_argument("--scale", type=float, default=0.05, help="TPC-H scale factor (default %(default)s)")
    parser.add_argument("--rounds", type=int, default=3, help="incremental refreshes of each view")
    chosen = parser.parse_args(arguments)
    console = Console(width=110, highlight=False)
    settings: dict[str, str | float | bool] = {"shared_buffers": "256MB", "max_wal_size": "2GB", "timezone": "UTC"}
    try:
        with EmbeddedServer(settings=settings) as server:
            _show(console, server.conninfo(), chosen.scale, chosen.rounds)
    except DemoError as error:
        console.print(f"[red]failed:[/red] {error}")
        return 1
    return 0


def _show(console: Console, conninfo: str, scale: float, rounds: int) -> None:
    with psycopg.connect(conninfo, autocommit=True) as connection, ExitStack() as stack:
        keys = _load_tables(console, connection, scale)
        install(conninfo)
        with connection.transaction():
            queues.create_queue(connection, _QUEUE, rotation_period="1 s", rotation_bytes=8 * 2**20)
        for table in _TABLES:
            queues.add_table(connection, _QUEUE, f"public.{table}")
        for name, query in DEMO_VIEWS.items():
            plan = create_view(connection, name, _QUEUE, query, f"public.{name}", engine="spark")
            console.print(f"view {name}: {plan.strategy if plan else 'exists'}")
        refresher = stack.enter_context(Refresher(conninfo))
        started = time.monotonic()
        _ = refresher.spark_run.spark
        console.print(f"Spark session: {time.monotonic() - started:.1f} s")
        with _load(conninfo, keys) as load:
            results = _refreshes(console, refresher, load, rounds)
            _checked(load)
            full = {name: refresher.refresh(name, full=True) for name in DEMO_VIEWS}
            inside = {name: _materialized(connection, name) for name in DEMO_VIEWS}
        for name in DEMO_VIEWS:
            refresher.refresh(name)
        _report(console, results, full, inside)
        _prove(console, connection)
        _checked(load)
        console.print(
            f"meanwhile {sum(load.transactions):,} transactions of {_WRITERS} writers were captured, "
            f"and {load.truncations} log segments emptied"
        )
        _judge(load, results)


def _load_tables(console: Console, connection: psycopg.Connection[Any], scale: float) -> list[int]:
    """Create and fill the TPC-H tables; returns the keys of the orders."""
    started = time.monotonic()
    connection.execute(DEMO_SCHEMA)
    generator = Path(sys.executable).parent / "tpchgen-cli"
    rows = []
    with tempfile.TemporaryDirectory(prefix="gdq-demo-") as folder:
        subprocess.run(
            [generator, "csv", "-s", str(scale), f"--tables={','.join(_TABLES)}", f"--output-dir={folder}"],
            check=True,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        for table in _TABLES:
            with connection.cursor() as cursor:
                with (
                    (Path(folder) / f"{table}.csv").open("rb") as file,
                    cursor.copy(f"copy {table} from stdin (format csv, header)") as copy,
                ):
                    while block := file.read(2**20):
                        copy.write(block)
                rows.append(f"{table} {cursor.rowcount:,}")
    connection.execute("vacuum analyze")
    version = connection.execute("show server_version").fetchone()
    seconds = time.monotonic() - started
    server = f"PostgreSQL {version[0] if version else ''}"
    console.print(f"{server}, TPC-H scale {scale:g} in {seconds:.1f} s, rows: {', '.join(rows)}")
    return [key for (key,) in connection.execute("select o_orderkey from orders")]


@contextmanager
def _load(conninfo: str, keys: Sequence[int]) -> Iterator[DemoLoad]:
    """Run writers and a ticker until the block ends."""
    load = DemoLoad()
    threads = [threading.Thread(target=load.run, args=(load.keep_house, conninfo))]
    threads += [
        threading.Thread(
            target=load.run, args=(load.write, conninfo, number, keys[number::_WRITERS], max(keys) + 1 + number)
        )
        for number in range(_WRITERS)
    ]
    for thread in threads:
        thread.start()
    try:
        yield load
    finally:
        load.stop.set()
        for thread in threads:
            thread.join()


def _refreshes(console: Console, refresher: Refresher, load: DemoLoad, rounds: int) -> dict[str, list[RefreshResult]]:
    results: dict[str, list[RefreshResult]] = {name: [refresher.refresh(name)] for name in DEMO_VIEWS}
    for name, (first,) in results.items():
        console.print(f"first load of {name}: {first.rows_changed:,} rows in {first.seconds:.1f} s")
    for _ in range(rounds):
        _checked(load)
        for name in DEMO_VIEWS:
            result = refresher.refresh(name)
            results[name].append(result)
            console.print(f"refresh of {name}: {result.rows_changed:,} rows changed in {result.seconds:.2f} s")
    for name in DEMO_VIEWS:
        found = verify_with(refresher, name)
        console.print(f"verified {name} under load: {found.rows:,} rows, {found.missing + found.unexpected} wrong")
        if not found.equal:
            raise DemoError(f"view {name} differs from its query at one snapshot")
    return results


def _materialized(connection: psycopg.Connection[Any], name: str) -> float:
    """Seconds that REFRESH MATERIALIZED VIEW of the same query takes."""
    connection.execute(f"create materialized view {name}_pg as {DEMO_VIEWS[name]}")
    started = time.monotonic()
    connection.execute(f"refresh materialized view {name}_pg")
    return time.monotonic() - started


def _report(
    console: Console,
    results: dict[str, list[RefreshResult]],
    full: dict[str, RefreshResult],
    inside: dict[str, float],
) -> None:
    table = Table(title="seconds, with writers running")
    headings = ("view", "rows changed", "incremental", "in full on Spark", "REFRESH in PostgreSQL")
    for number, heading in enumerate(headings):
        table.add_column(heading, justify="right" if number else "left")
    for name, (_, *increments) in results.items():
        changed = sorted(result.rows_changed for result in increments)[len(increments) // 2]
        seconds = sorted(result.seconds for result in increments)[len(increments) // 2]
        table.add_row(name, f"{changed:,}", f"{seconds:.2f}", f"{full[name].seconds:.2f}", f"{inside[name]:.2f}")
    console.print(table)


def _prove(console: Console, connection: psycopg.Connection[Any]) -> None:
    for name, query in DEMO_VIEWS.items():
        missing = _count(connection, f"({query}) except all (select * from {name})")
        unexpected = _count(connection, f"(select * from {name}) except all ({query})")
        rows = _count(connection, f"select * from {name}")
        console.print(f"{name}: {rows:,} rows; query EXCEPT ALL view: {missing}; view EXCEPT ALL query: {unexpected}")
        if missing or unexpected:
            raise DemoError(f"view {name} differs from its query")
        if not rows:
            raise DemoError(f"view {name} is empty")


def _count(connection: psycopg.Connection[Any], query: str) -> int:
    return int(scalar(connection, f"select count(*) from ({query}) as q"))


def _checked(load: DemoLoad) -> None:
    if load.errors:
        raise DemoError(f"a thread of the load failed: {load.errors[0]}") from load.errors[0]


def _judge(load: DemoLoad, results: dict[str, list[RefreshResult]]) -> None:
    for name, (_, *increments) in results.items():
        if not any(result.action == "delta" and result.rows_changed for result in increments):
            raise DemoError(f"view {name} did not change")
    if not load.truncations:
        raise DemoError("no log segment with rows was emptied")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
