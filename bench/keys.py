"""`python -m bench.keys`: where recomputing keys costs more than a full load.

A table of so many rows in groups of four, and a view of the groups that is refreshed by their keys. Each round changes
one row of so many groups and refreshes the view both ways: with the bound on keys out of the way, and in full; with an
index on the key and without one.
"""

from __future__ import annotations

import json
import statistics
import sys
from dataclasses import asdict, dataclass

import click
import psycopg
from rich import box
from rich.console import Console
from rich.table import Table

from bench.views import SETTINGS
from gdq.consumers.refresh.refresher import Refresher
from gdq.consumers.views import computation
from gdq.embedded.files import find_binaries
from gdq.embedded.server import EmbeddedServer
from gdq.installer import install
from gdq.view.view import create_view, view_history

_GROUP = 4
# neither maximum nor distinct values are kept: the rows of each changed group are read again
_VIEW = "select k, count(distinct v) as n, max(v) as most from item group by k"


@dataclass(frozen=True, slots=True)
class Cost:
    """Seconds of work by keys and in full, medians; `spread`: the slowest by-key refresh over the quickest."""

    indexed: bool
    keys: int
    by_key: float
    full: float
    spread: float

    @property
    def ratio(self) -> float:
        return self.by_key / self.full


def measure(server: EmbeddedServer, rows: int, keys: tuple[int, ...], rounds: int) -> list[Cost]:
    """The cost of every number of keys, first with the index."""
    install.install(server.conninfo())
    groups, found = rows // _GROUP, []
    with psycopg.connect(server.conninfo(), autocommit=True) as connection, Refresher(server.conninfo()) as refresher:
        connection.execute("create table item (id int primary key, k int not null, v int not null)")
        # the rows of a group lie apart
        connection.execute("insert into item select i, i %% %s, i from generate_series(1, %s) i", [groups, rows])
        connection.execute("create index item_k on item (k)")
        connection.execute("vacuum analyze item")
        connection.execute("select gdq.create_event_triggers(); select gdq.create_queue('q')")
        connection.execute("select gdq.add_table('q', 'item'::regclass)")
        create_view(connection, "v", "q", _VIEW, "public.v", engine="postgres")
        refresher.refresh("v")
        for indexed in (True, False):
            if not indexed:
                connection.execute("drop index item_k")
                refresher.refresh("v")
            for many in keys:
                pairs = [_both(connection, refresher, many, number) for number in range(rounds)]
                by_key = [mine for mine, _ in pairs]
                full = statistics.median(theirs for _, theirs in pairs)
                found.append(Cost(indexed, many, statistics.median(by_key), full, max(by_key) / min(by_key)))
                print(f"{many} keys, index: {indexed}: done", file=sys.stderr, flush=True)
    return found


def _both(
    connection: psycopg.Connection[tuple[object, ...]], refresher: Refresher, keys: int, number: int
) -> tuple[float, float]:
    """Seconds of work of a refresh by keys, and of a full load."""
    seconds = []
    connection.execute("delete from gdq.view_run")  # or the history would choose
    connection.execute("update item set v = v + 1 where id between %s and %s", [number * 7 + 1, number * 7 + keys])
    connection.execute("vacuum analyze item")
    for full in (False, True):
        result = refresher.refresh("v", full=full)
        if result.kind != ("full" if full else "by-key"):
            raise click.ClickException(f"the refresh was {result.kind}: {result.reason}")
        seconds.append(float(view_history(connection, "v", 1)[0].work_seconds or 0))
    return seconds[0], seconds[1]


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@click.option("--rows", type=click.IntRange(1000), default=2_000_000, show_default=True, help="Rows of the table.")
@click.option(
    "--keys", type=click.IntRange(1), multiple=True, default=(1000, 10_000, 50_000, 100_000, 200_000),
    show_default=True, help="Groups that change; may be given more than once.",
)  # fmt: skip
@click.option("--rounds", type=click.IntRange(1), default=3, show_default=True, help="Rounds of each.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON instead of a table.")
def main(rows: int, keys: tuple[int, ...], rounds: int, *, as_json: bool) -> None:
    """Measure refreshes by keys beside full loads."""
    computation.KEYS_MAX = 10**9
    with EmbeddedServer(binaries=find_binaries(18), settings=SETTINGS) as server:
        found = measure(server, rows, keys, rounds)
    if as_json:
        print(json.dumps([asdict(one) | {"ratio": one.ratio} for one in found], indent=2))
        return
    table = Table(box=box.SIMPLE_HEAD)
    for name in ("index", "keys", "of all", "by key s", "full s", "by key / full", "slowest / quickest"):
        table.add_column(name, justify="right")
    for one in found:
        share = f"{one.keys / (rows // _GROUP):.1%}"
        cost = [f"{one.by_key:.2f}", f"{one.full:.2f}", f"{one.ratio:.2f}", f"{one.spread:.2f}"]
        table.add_row("yes" if one.indexed else "no", f"{one.keys:,}", share, *cost)
    Console().print(table)


if __name__ == "__main__":
    main(prog_name="python -m bench.keys")
