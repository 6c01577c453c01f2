"""`python -m bench`: the cost of capture, gdq beside PgQ. Exit code 3 when gdq misses a limit."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from typing import Any

import click
import psycopg
from psycopg.conninfo import make_conninfo
from rich.console import Console

from bench import packages, report
from bench.contenders import prepare
from bench.measure import Meter
from gdq.embedded import EmbeddedError, Server
from gdq.errors import GdqError
from gdq.schema import install

MISSED = 3


def _progress(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def _about(connection: psycopg.Connection[Any], rows: int, rounds: int) -> dict[str, Any]:
    names = [*packages.SETTINGS, "autovacuum"]
    settings = connection.execute(
        "select string_agg(format('%%s=%%s', name, current_setting(name)), ' ' order by name)"
        " from pg_settings where name = any(%s)",
        [names],
    ).fetchone()
    versions = connection.execute(
        "select current_setting('server_version'), extversion, (select avg(pg_column_size(f)) from app.feed f)"
        " from pg_extension where extname = 'pgq'"
    ).fetchone()
    assert settings is not None
    assert versions is not None
    return {
        "server": f"PostgreSQL {versions[0]}, PgQ {versions[1]}",
        "settings": settings[0],
        "row_bytes": round(versions[2]),
        "rows": rows,
        "rounds": rounds,
        "cpus": os.cpu_count(),
    }


def measure(
    server: Server, rows: int, rounds: int, seconds: int, progress: Callable[[str], None]
) -> tuple[report.Costs, list[Any], dict[str, Any]]:
    """Set everything up on `server` and measure; see the options of `main` for the numbers."""
    # The socket: a loopback connection would add its own share to one-row transactions.
    conninfo = make_conninfo(server.conninfo(), host=str(server.socket_folder))
    install(conninfo)
    with psycopg.connect(conninfo, autocommit=True) as connection:
        connection.execute("select gdq.create_event_triggers()")
        logs = prepare(connection, rows)
        about = _about(connection, rows, rounds)
    meter = Meter(conninfo, logs, progress)
    costs = report.Costs(meter.statements(rows, rounds), rows)
    about["load"] = round(os.getloadavg()[0], 1)  # 1 is the benchmark's own: more, and the times are worth less
    runs = meter.runs(server.binaries.program("pgbench"), seconds, rounds) if seconds else []
    return costs, runs, about


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@click.option("--rows", type=click.IntRange(1), default=100_000, show_default=True, help="Rows of each statement.")
@click.option("--rounds", type=click.IntRange(1), default=7, show_default=True, help="Rounds over all contenders.")
@click.option(
    "--seconds", type=click.IntRange(0), default=3, show_default=True, help="Length of one pgbench run; 0: none."
)
@click.option("--json", "as_json", is_flag=True, help="Print JSON instead of tables.")
def main(rows: int, rounds: int, seconds: int, as_json: bool) -> None:
    """Measure what capture adds to a write: gdq's triggers beside PgQ's, against a table without trigger.

    Times depend on the machine: read them as ratios. Exit code 3 when gdq costs more than it promises.
    """
    try:
        with packages.start(packages.provide(_progress)) as server:
            costs, runs, about = measure(server, rows, rounds, seconds, _progress)
    except (packages.BenchError, EmbeddedError, GdqError, psycopg.Error) as error:
        raise click.ClickException(str(error).strip().splitlines()[0]) from error
    if as_json:
        print(json.dumps(report.as_dict(costs, runs, about), indent=2))
    else:
        report.show(Console(), costs, runs, about)
    if not all(verdict.met for verdict in costs.verdicts()):
        sys.exit(MISSED)


if __name__ == "__main__":
    main(prog_name="python -m bench")
