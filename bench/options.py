"""`python -m bench.options`: what options of capture cost a writer.

The server process's own time a row, over the same table without capture, for statements of many rows and of one row.
Rounds are interleaved; the medians are printed.
"""

from __future__ import annotations

import json
import statistics
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import click
import psycopg
from rich.console import Console
from rich.table import Table

from gdq.embedded.server import EmbeddedServer
from gdq.installer.install import install
from gdq.queue import add_table, create_queue

COLUMNS = "id bigint primary key, kind int, amount numeric, day date, code text, name text, note text, flag boolean"
VALUES = "17, 4711.25, '2024-01-01'::date, 'C-4711', repeat('customer', 4), repeat('note', 16), true"
CONTENDERS: dict[str, dict[str, Any] | None] = {
    "no capture": None,
    "row": {},
    "statement": {"granularity": "statement"},
    "row, where that matches": {"where": "kind = 17 and not (code in ('a', 'b') or amount < 5)"},
    "row, where that does not": {"where": "kind = 18"},
    "row, origin": {"origin": True},
    "row, pinned search_path": {"pin_search_path": True},
    "row, unlogged queue": {},
}


@dataclass(slots=True)
class Cost:
    """Microseconds of the server process a row, one number a round."""

    many: list[float] = field(default_factory=list)
    one: list[float] = field(default_factory=list)


def workloads(table: str, rows: int) -> dict[str, tuple[str, int]]:
    """{name: (statement, rows that it writes)}; each leaves the table empty."""
    one = f"insert into {table} values (i, {VALUES}); update {table} set kind = 17 where id = i; delete from {table};"
    return {
        "many": (
            f"""insert into {table} select g, {VALUES} from generate_series(1, {rows}) g;
                update {table} set kind = 17; delete from {table}""",
            3 * rows,
        ),
        "one": (f"do $$ begin for i in 1..{rows // 5} loop {one} end loop; end $$", 3 * (rows // 5)),
    }


def measure(conninfo: str, rows: int, rounds: int) -> dict[str, Cost]:
    """The cost of every contender; a round before the others warms up."""
    costs = {name: Cost() for name in CONTENDERS}
    with psycopg.connect(conninfo, autocommit=True) as connection:
        status = Path(f"/proc/{connection.info.backend_pid}/schedstat")
        create_queue(connection, "q")
        create_queue(connection, "unlogged", unlogged=True)
        for number, (name, options) in enumerate(CONTENDERS.items()):
            connection.execute(f"create table public.t{number} ({COLUMNS})".encode())
            if options is not None:
                queue = "unlogged" if "unlogged" in name else "q"
                add_table(connection, queue, f"public.t{number}", **options)
        for turn in range(rounds + 1):
            for number, name in enumerate(CONTENDERS):
                for work, (statement, written) in workloads(f"public.t{number}", rows).items():
                    connection.execute(f"vacuum public.t{number}".encode())
                    before = _seconds(status)
                    connection.execute(statement.encode())
                    if turn:
                        getattr(costs[name], work).append((_seconds(status) - before) / written * 1e6)
    return costs


def _seconds(status: Path) -> float:
    return int(status.read_text().split()[0]) / 1e9


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@click.option("--rows", type=click.IntRange(1000), default=50_000, show_default=True, help="Rows of a large statement.")
@click.option("--rounds", type=click.IntRange(1), default=5, show_default=True, help="Rounds over all contenders.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON instead of a table.")
def main(rows: int, rounds: int, as_json: bool) -> None:
    """What options of capture cost a writer, in microseconds a row over no capture."""
    settings: dict[str, str | float | bool] = {"autovacuum": False, "fsync": False, "jit": False}
    with EmbeddedServer(settings=settings) as server:
        install(server.conninfo())
        costs = measure(server.conninfo(), rows, rounds)
    base = costs.pop("no capture")
    medians = {
        name: {
            work: round(statistics.median(getattr(cost, work)) - statistics.median(getattr(base, work)), 1)
            for work in ("many", "one")
        }
        for name, cost in costs.items()
    }
    if as_json:
        click.echo(json.dumps(medians))
        return
    table = Table("us a row over no capture", "many rows", "one row")
    for name, cost in medians.items():
        table.add_row(name, *(str(value) for value in cost.values()))
    Console().print(table)


if __name__ == "__main__":
    main()
