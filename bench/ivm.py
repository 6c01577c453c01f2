"""`python -m bench.ivm`: what a fresh join with sums costs by `CALL gdq.refresh()`, beside pg_ivm.

    python -m bench.ivm [--rounds 50] [--write docs/benchmarks-ivm.md]

pg_ivm changes its view in the writer's statement, gdq after it. So the writer's time is told by itself, beside that of
a table that is captured without a view; and the sum until the view is fresh. pg_ivm is in no package: build it for the
PostgreSQL of `--pg`, which must be Debian's.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import click
import psycopg
from psycopg.conninfo import make_conninfo

from bench.latency import prepare_at
from bench.packages import BenchError
from gdq.consumers.refresh.refresher import Refresher
from gdq.embedded.files import PostgresBinaries, find_binaries
from gdq.embedded.server import EmbeddedServer
from gdq.errors import EmbeddedError, GdqError
from gdq.sql_text import literal
from gdq.view.view import create_view, set_view_audit

ROWS = (1, 10, 1000)
# The most that the writer may take of capture alone, and the sum of pg_ivm's statement.
_WRITER_MOST, _SUM_MOST = 1.1, {1: 3.0, 10: 2.0, 1000: 0.6}
_WARM_UP = 5
_SALES = 100_000

_TABLES = (
    "create table app.customer (id int primary key, country text not null)",
    "create table app.sale (id int primary key, customer int not null, amount numeric(12,2), note text)",
    "insert into app.customer select i, 'country ' || i % 100 from generate_series(1, 1000) i",
    f"insert into app.sale select i, 1 + i % 1000, i % 500, 'a note' from generate_series(1, {_SALES}) i",
    "create index on app.sale (customer)",
)
_QUERY = """select c.country, count(*) as sales, sum(s.amount) as amount
              from app.sale s join app.customer c on c.id = s.customer group by c.country"""
# So many rows that are spread over the table, found by their key.
_CHANGE = """update app.sale set amount = amount + 1
              where id = any (array(select 1 + ({1} + i * ({2} / {0})) % {2} from generate_series(1, {0}) i))"""

PAGE = """\
# Benchmark beside pg_ivm

`CALL gdq.refresh()` beside [pg_ivm](https://github.com/sraoss/pg_ivm), which changes its view in the statement of the
writer. The page is written by `python -m bench.ivm --write docs/benchmarks-ivm.md`. All took turns with the same
statements, in databases of one server.

| | |
|---|---|
{facts}

The view is a join of {sales:,} sales with 1,000 customers, with a count and a sum for each of 100 countries. A
statement updates so many sales. Milliseconds of the clock, medians of {rounds} rounds.

- writer: the statement that updates. Without a view the table is captured and nothing more.
- refresh: the call that brings the view up to date after each statement. One call serves all statements since the
  last one, so the sum is the most that gdq can take.

| rows a statement | writer without a view | writer, gdq | refresh, gdq | writer, pg_ivm |
|---:|---:|---:|---:|---:|
{times}

## Goals

| at most | goal | found | |
|---|---:|---:|---|
{goals}
"""


@dataclass(slots=True)
class _Side:
    """A database with the tables, and its session. `refresh`: what makes its view fresh; None where nothing has to."""

    writer: psycopg.Connection[Any]
    refresh: Callable[[], object] | None = None
    captured: bool = True

    def keep_house(self) -> None:
        while self.captured and self.writer.execute("select gdq.maintain()").fetchone() == (True,):
            pass


Times = dict[int, dict[str, float]]


def measure(server: EmbeddedServer, rounds: int) -> Times:
    """Milliseconds, as medians: by rows, of the writer of each side and of the refresh."""
    with ExitStack() as stack:
        sides = {name: _opened(server, stack, name) for name in ("none", "gdq", "pg_ivm")}
        found: dict[int, dict[str, list[float]]] = {rows: {} for rows in ROWS}
        for number in range(rounds + _WARM_UP):
            for side in sides.values():
                side.keep_house()
            for rows in ROWS:
                for name in sorted(sides, reverse=bool(number % 2)):
                    times = _turn(sides[name], rows, number)
                    if number >= _WARM_UP:
                        for what, taken in times.items():
                            found[rows].setdefault(f"{name} {what}", []).append(taken)
        for name in ("gdq", "pg_ivm"):
            _check(sides[name].writer)
    return {rows: {what: median(times) for what, times in of.items()} for rows, of in found.items()}


def _opened(server: EmbeddedServer, stack: ExitStack, name: str) -> _Side:
    with psycopg.connect(server.conninfo(), autocommit=True) as owner:
        owner.execute(f"create database {name}".encode())
    conninfo = make_conninfo(server.conninfo(dbname=name), host=str(server.socket_folder))
    captured = name != "pg_ivm"
    if captured:
        prepare_at(conninfo)
    writer = stack.enter_context(psycopg.connect(conninfo, autocommit=True))
    if not captured:
        writer.execute("create schema app")
    for statement in _TABLES:
        writer.execute(statement.encode())
    if captured:
        writer.execute("select gdq.add_table('bench', 'app.customer'), gdq.add_table('bench', 'app.sale')")
    writer.execute("vacuum analyze app.sale")
    writer.execute("analyze app.customer")
    side = _Side(writer, captured=captured)
    if name == "gdq":
        create_view(writer, "v", "bench", _QUERY, "app.v", engine="postgres")
        set_view_audit(writer, "v", 0)
        stack.enter_context(Refresher(conninfo)).refresh("v")
        caller = stack.enter_context(psycopg.connect(conninfo, autocommit=True))
        side.refresh = lambda: caller.execute("call gdq.refresh('v')", prepare=True)
    elif name == "pg_ivm":
        try:
            writer.execute("create extension pg_ivm")
        except psycopg.Error as error:
            raise BenchError(f"this server has no pg_ivm: {str(error).splitlines()[0]}") from error
        writer.execute(f"select pgivm.create_immv('app.v', {literal(_QUERY)})".encode())
    return side


def _turn(side: _Side, rows: int, number: int) -> Mapping[str, float]:
    statement = _CHANGE.format(rows, number, _SALES).encode()
    start = time.perf_counter()
    changed = side.writer.execute(statement).rowcount
    written = time.perf_counter()
    if changed != rows:
        raise BenchError(f"the statement changed {changed} rows, not {rows}")
    if side.refresh is None:
        return {"writer": (written - start) * 1000}
    side.refresh()
    return {"writer": (written - start) * 1000, "refresh": (time.perf_counter() - written) * 1000}


def _check(writer: psycopg.Connection[Any]) -> None:
    """BenchError if the view lacks a row of its query, or has another one."""
    view = "select country, sales, amount from app.v"
    query = f"select count(*) from (({view} except all {_QUERY}) union all ({_QUERY} except all {view})) d"
    if writer.execute(query.encode()).fetchone() != (0,):
        raise BenchError("a view has other rows than its query")


def page(times: Times, facts: Mapping[str, object], rounds: int) -> str:
    """The page of these medians, with what missed its goal."""
    lines, goals = [], []
    for rows, of in times.items():
        shown = (of[name] for name in ("none writer", "gdq writer", "gdq refresh", "pg_ivm writer"))
        lines.append(f"| {rows:,} | {' | '.join(f'{value:.2f}' for value in shown)} |")
        writer = of["gdq writer"] / of["none writer"]
        total = (of["gdq writer"] + of["gdq refresh"]) / of["pg_ivm writer"]
        goals.append(_goal(f"writer of {rows:,} beside capture alone", _WRITER_MOST, writer))
        goals.append(_goal(f"writer of {rows:,} and refresh, beside pg_ivm's writer", _SUM_MOST[rows], total))
    told = "\n".join(f"| {name} | {value} |" for name, value in facts.items())
    return PAGE.format(facts=told, sales=_SALES, rounds=rounds, times="\n".join(lines), goals="\n".join(goals))


def _goal(what: str, most: float, found: float) -> str:
    return f"| {what} | {most:g} | {found:.2f} | {'' if found <= most else 'MISSED'} |"


def _facts(server: EmbeddedServer, binaries: PostgresBinaries) -> dict[str, object]:
    from bench.__main__ import machine  # noqa: PLC0415 (it imports all benchmarks)

    with psycopg.connect(server.conninfo(dbname="pg_ivm")) as connection:
        query = "select extversion from pg_extension where extname = 'pg_ivm'"
        (version,) = connection.execute(query).fetchone() or ("",)
    told = {name: value for name, value in machine(binaries.version).items() if name != "settings"}
    return told | {"pg_ivm": version}


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@click.option("--rounds", type=click.IntRange(1), default=50, show_default=True, help="Of all measurements.")
@click.option("--pg", type=int, default=15, show_default=True, help="Major version of PostgreSQL, with pg_ivm.")
@click.option("--write", type=click.Path(dir_okay=False, path_type=Path), help="Write the page here.")
def main(rounds: int, pg: int, write: Path | None) -> None:
    """Measure a view that is kept fresh by gdq and by pg_ivm."""
    try:
        binaries = find_binaries(pg)
        settings: dict[str, str | float | bool] = {"autovacuum": False, "synchronous_commit": False}
        with EmbeddedServer(binaries=binaries, settings=settings) as server:
            times = measure(server, rounds)
            text = page(times, _facts(server, binaries), rounds)
    except (BenchError, EmbeddedError, GdqError, psycopg.Error) as error:
        raise click.ClickException(str(error).strip().splitlines()[0]) from error
    if write is None:
        print(text)
    else:
        write.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main(prog_name="python -m bench.ivm")
