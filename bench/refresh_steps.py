"""`python -m bench.refresh_steps`: what a refresh of a join with sums costs the server and its client."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from statistics import median
from typing import Any
from unittest.mock import patch

import click
import psycopg
from rich import box
from rich.console import Console
from rich.table import Table

from bench.latency import prepare
from gdq.consumers.refresh.kept_views import KeptViews
from gdq.consumers.refresh.refresher import Refresher
from gdq.consumers.views.few_changes import FewChanges
from gdq.embedded.files import find_binaries
from gdq.embedded.server import EmbeddedServer
from gdq.errors import EmbeddedError
from gdq.view.view import create_view, set_view_audit

WAYS = ("call", "tables")
_CHANGED = (0, 10, 1000)
_WARM_UP = 10
_NANOSECONDS = 1_000_000  # in a millisecond

_TABLES = (
    "create table app.customer (id int primary key, country text not null)",
    "create table app.sale (id int primary key, customer int not null, amount numeric(12,2), note text)",
    "insert into app.customer select i, 'country ' || i % 100 from generate_series(1, 1000) i",
    "insert into app.sale select i, 1 + i % 1000, i % 500, 'a note' from generate_series(1, 100000) i",
    "create index on app.sale (customer)",
    "select gdq.add_table('bench', 'app.customer'), gdq.add_table('bench', 'app.sale')",
    "analyze app.customer, app.sale",
)
_QUERY = """select c.country, count(*) as sales, sum(s.amount) as amount
              from app.sale s join app.customer c on c.id = s.customer group by c.country"""
_CHANGE = "update app.sale set amount = amount + 1 where id % (100000 / %s) = %s"
_SESSIONS = "select pid from pg_stat_activity where application_name ~ '^gdq:refresh' and pid <> pg_backend_pid()"


@contextmanager
def _by(way: str) -> Iterator[None]:
    """Refresh in this way; "tables" is the way of many changes."""
    if way == "tables":
        with (
            patch.object(KeptViews, "_called", lambda *_: None),
            patch.object(FewChanges, "apply", lambda *_: None),
        ):
            yield
    else:
        yield


def measure(conninfo: str, rounds: int) -> dict[str, dict[int, dict[str, float]]]:
    """Milliseconds of processor time of server and client for a refresh, by way and changed rows, as medians.

    Both ways take turns, each with a view of its own, over the same changes.
    """
    used: dict[str, dict[int, dict[str, list[float]]]] = {
        way: {changed: {"server": [], "client": [], "wall": []} for changed in _CHANGED} for way in WAYS
    }
    views = {way: f"v{number}" for number, way in enumerate(WAYS)}
    with ExitStack() as stack:
        writer = stack.enter_context(psycopg.connect(conninfo, autocommit=True))
        for statement in _TABLES:
            writer.execute(statement.encode())
        refreshers = {way: stack.enter_context(Refresher(conninfo)) for way in WAYS}
        for way, view in views.items():
            create_view(writer, view, "bench", _QUERY, f"app.{view}", engine="postgres")
            set_view_audit(writer, view, 0)
            refreshers[way].refresh(view)
        for number in range(rounds + _WARM_UP):
            # as a ticker does: else each look at a log reads all that was written since
            while writer.execute("select gdq.maintain()").fetchone() == (True,):
                pass
            for changed in _CHANGED:
                if changed:
                    writer.execute(_CHANGE.replace("%s", "{}").format(changed, number % 100).encode())
                for way in WAYS[:: 1 if number % 2 else -1]:
                    with _by(way):
                        found = _refresh(writer, refreshers[way], views[way], "delta" if changed else "none")
                    if number >= _WARM_UP:
                        for side, milliseconds in found.items():
                            used[way][changed][side].append(milliseconds)
    return {
        way: {n: {side: median(times) for side, times in sides.items()} for n, sides in by_size.items()}
        for way, by_size in used.items()
    }


def _refresh(writer: psycopg.Connection[Any], refresher: Refresher, view: str, action: str) -> dict[str, float]:
    """Milliseconds of processor time of the refresher's sessions and of this process, and of the clock."""
    pids = [pid for (pid,) in writer.execute(_SESSIONS).fetchall()]
    server, client, wall = _server(pids), time.process_time(), time.perf_counter()
    result = refresher.refresh(view)
    # this process first: reading what the server has used is no work of the client
    used = {
        "client": (time.process_time() - client) * 1000,
        "wall": (time.perf_counter() - wall) * 1000,
        "server": (_server(pids) - server) / _NANOSECONDS,
    }
    assert result.action == action
    return used


def _server(pids: list[int]) -> int:
    return sum(int(Path(f"/proc/{pid}/schedstat").read_text().split()[0]) for pid in pids)


def show(used: dict[str, dict[int, dict[str, float]]], console: Console) -> None:
    table = Table(box=box.SIMPLE_HEAD, title="a refresh, ms", title_justify="left")
    for name in ("changed rows", "by", "server", "client", "wall"):
        table.add_column(name, justify="right")
    for changed in _CHANGED:
        for way in WAYS:
            sides = used[way][changed]
            table.add_row(str(changed), way, *(f"{sides[side]:.1f}" for side in ("server", "client", "wall")))
    console.print(table)


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@click.option("--rounds", type=click.IntRange(1), default=50, show_default=True, help="Refreshes of each kind.")
@click.option("--pg", type=int, default=18, show_default=True, help="Major version of PostgreSQL.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON instead of a table.")
def main(rounds: int, pg: int, as_json: bool) -> None:
    """Measure refreshes of a join with sums over 100,000 rows after 0, 10 and 1,000 updated rows.

    Few changes are applied by CALL gdq.refresh(), and beside that by tables, as many changes always are.
    """
    try:
        settings: dict[str, str | float | bool] = {"autovacuum": False, "synchronous_commit": False}
        with EmbeddedServer(binaries=find_binaries(pg), settings=settings) as server:
            used = measure(prepare(server), rounds)
    except (EmbeddedError, psycopg.Error) as error:
        raise click.ClickException(str(error).strip().splitlines()[0]) from error
    if as_json:
        print(json.dumps(used, indent=2))
        return
    console = Console()
    console.print(f"PostgreSQL {pg}, load {os.getloadavg()[0]:.1f}")
    show(used, console)


if __name__ == "__main__":
    main(prog_name="python -m bench.refresh_steps")
