"""`python -m bench.idle`: what a ticker and a waiting consumer cost while nothing is written."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import click
import psycopg
from rich.console import Console

from bench.latency import prepare
from gdq.embedded.files import find_binaries
from gdq.embedded.server import EmbeddedServer
from gdq.errors import EmbeddedError

_HOUR_SECONDS = 3600


def cpu_seconds(pid: int) -> float:
    """Processor time of a process so far."""
    # the name, in brackets, may hold spaces
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def measure(conninfo: str, seconds: float) -> dict[str, float]:
    """Percent of one processor of each program and its server process, and WAL bytes an hour."""
    environment = os.environ | {"GDQ_DSN": conninfo}
    commands = {"ticker": ["ticker"], "consumer": ["consume", "bench", "reader"]}
    programs = {
        name: subprocess.Popen([sys.executable, "-m", "gdq", *command], env=environment, stdout=subprocess.DEVNULL)
        for name, command in commands.items()
    }
    try:
        with psycopg.connect(conninfo, autocommit=True) as connection:
            query = (
                "select case when application_name = 'gdq ticker' then 'ticker' else 'consumer' end, pid"
                " from pg_stat_activity where application_name ~ '^gdq'"
            )
            pids: dict[Any, Any] = {}
            deadline = time.monotonic() + 60
            while len(pids) < len(programs) and time.monotonic() < deadline:
                time.sleep(0.1)
                pids = dict(connection.execute(query).fetchall())
            # the first look at everything, and the first writes to its pages since the checkpoint
            for _ in range(2):
                connection.execute("select gdq.force_tick('bench')")
                time.sleep(6)
            watched = {name: program.pid for name, program in programs.items()}
            watched |= {f"{name}'s server process": pid for name, pid in pids.items()}
            before = {name: cpu_seconds(pid) for name, pid in watched.items()}
            wal_before = _wal(connection)
            time.sleep(seconds)
            used = {name: (cpu_seconds(pid) - before[name]) / seconds * 100 for name, pid in watched.items()}
            return used | {"wal_bytes_hour": (_wal(connection) - wal_before) / seconds * _HOUR_SECONDS}
    finally:
        for program in programs.values():
            program.terminate()
            program.wait()


def _wal(connection: psycopg.Connection[Any]) -> int:
    row = connection.execute("select (pg_current_wal_insert_lsn() - '0/0')::bigint").fetchone()
    assert row is not None
    return int(row[0])


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@click.option("--seconds", type=float, default=65, show_default=True, help="How long; an idle queue ticks each minute.")
@click.option("--tick", type=int, default=100, show_default=True, help="ticker_max_lag in ms.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON instead of lines.")
def main(seconds: float, tick: int, as_json: bool) -> None:
    """Measure a ticker and a consumer of one queue with one table, while nothing is written."""
    try:
        # autovacuum would be busy with what the install has just written
        with EmbeddedServer(binaries=find_binaries(18), settings={"autovacuum": False}) as server:
            conninfo = prepare(server)
            with psycopg.connect(conninfo, autocommit=True) as connection:
                connection.execute("update gdq.queue set ticker_max_lag = make_interval(secs => %s)", [tick / 1000])
                connection.execute("insert into app.ping values (1)")
                connection.execute("checkpoint")
            used = measure(conninfo, seconds)
    except (EmbeddedError, psycopg.Error) as error:
        raise click.ClickException(str(error).strip().splitlines()[0]) from error
    if as_json:
        print(json.dumps(used, indent=2))
        return
    console = Console()
    wal = used.pop("wal_bytes_hour")
    for name, percent in used.items():
        console.print(f"{name}: {percent:.2f} % of one processor")
    console.print(f"WAL: {wal / 1024:.0f} kB an hour")


if __name__ == "__main__":
    main(prog_name="python -m bench.idle")
