"""Interleaved rounds: every contender in every round, starting with another one each time."""

from __future__ import annotations

import os
import re
import subprocess
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psycopg
from psycopg import sql
from psycopg.conninfo import conninfo_to_dict

from bench.contenders import BASE, CONTENDERS, Connection, Contender
from bench.packages import BenchError

OPERATIONS = ("insert", "update", "delete")
CLIENTS = (1, 2)

# The row keeps its size.
_SET = "amount = amount + 1, changed = changed + interval '1 s', note = 'changed ' || right(note, -8)"
_STATEMENTS = {
    "insert": "insert into app.{} select * from app.feed",
    "update": "update app.{} set " + _SET,
    "delete": "delete from app.{}",
}
_HEX = "0123456789abcdef"
# Three transactions of one row each.
_SCRIPT = f"""\
\\set id random(1, 9000000000000000000)
insert into app.{{table}}
  values (:id, 17, 4711.25, '2024-01-01', 'C-4711', 'customer {_HEX * 2}', '{_HEX * 4} note', true);
update app.{{table}} set {_SET} where id = :id;
delete from app.{{table}} where id = :id;
"""


@dataclass(frozen=True, slots=True)
class Statement:
    """One timed statement: seconds it took and bytes of WAL it wrote."""

    contender: Contender
    operation: str
    seconds: float
    wal: int


@dataclass(frozen=True, slots=True)
class Run:
    """One pgbench run: one-row transactions a second with so many clients."""

    contender: Contender
    clients: int
    rate: float


class Meter:
    """Measures on one server; `logs` are the log tables of each contender, `progress` gets one line a round."""

    def __init__(
        self,
        conninfo: str,
        logs: dict[Contender, list[str]],
        progress: Callable[[str], None],
    ) -> None:
        self.conninfo = conninfo
        self.logs = logs
        self.progress = progress

    def statements(self, rows: int, rounds: int) -> list[Statement]:
        """`rounds` rounds of one INSERT, one UPDATE and one DELETE of `rows` rows for each contender.

        A round before them warms up and is not counted. BenchError when a statement did not log every row.
        """
        measured: list[Statement] = []
        with psycopg.connect(self.conninfo, autocommit=True) as connection:
            for number in range(rounds + 1):
                for contender in _turn(number):
                    for operation in OPERATIONS:
                        self._clear(connection, contender)
                        statement = _timed(connection, contender, operation)
                        self._check(connection, contender, operation, rows)
                        if number > 0:
                            measured.append(statement)
                self.progress(f"statements of {rows:,} rows: round {number} of {rounds}")
        return measured

    def runs(self, pgbench: Path, seconds: int, rounds: int) -> list[Run]:
        """`rounds` rounds of pgbench for `seconds` seconds for each contender and number of clients."""
        measured: list[Run] = []
        with psycopg.connect(self.conninfo, autocommit=True) as connection:
            for number in range(rounds):
                for contender in _turn(number):
                    for clients in CLIENTS:
                        self._clear(connection, contender)
                        rate = _pgbench(pgbench, self.conninfo, contender, clients, seconds)
                        measured.append(Run(contender, clients, rate))
                self.progress(f"one-row transactions: round {number + 1} of {rounds}")
        return measured

    def _clear(self, connection: Connection, contender: Contender) -> None:
        """Start from empty logs, a vacuumed table and a fresh checkpoint, whoever is next."""
        for log in self.logs[contender]:
            connection.execute(f"truncate {log}".encode())
        connection.execute(sql.SQL("vacuum app.{}").format(sql.Identifier(contender.table)))
        connection.execute("checkpoint")

    def _check(self, connection: Connection, contender: Contender, operation: str, rows: int) -> None:
        if contender is BASE:
            return
        logged = sum(_one(connection, f"select count(*) from {log}") for log in self.logs[contender])
        if logged != rows:
            raise BenchError(f"{contender.name}: {operation} of {rows} rows was logged as {logged} rows")


def _turn(number: int) -> Sequence[Contender]:
    start = number % len(CONTENDERS)
    return CONTENDERS[start:] + CONTENDERS[:start]


def _timed(connection: Connection, contender: Contender, operation: str) -> Statement:
    statement = sql.SQL(_STATEMENTS[operation]).format(sql.Identifier(contender.table))
    before = _one(connection, "select pg_current_wal_insert_lsn() - '0/0'")
    start = time.perf_counter()
    connection.execute(statement)
    seconds = time.perf_counter() - start
    after = _one(connection, "select pg_current_wal_insert_lsn() - '0/0'")
    return Statement(contender, operation, seconds, int(after - before))


def _one(connection: Connection, query: str) -> Any:
    row = connection.execute(query.encode()).fetchone()
    assert row is not None
    return row[0]


def _pgbench(pgbench: Path, conninfo: str, contender: Contender, clients: int, seconds: int) -> float:
    """Run the one-row script with `clients` clients; return its transactions a second, BenchError when it fails."""
    parameters = conninfo_to_dict(conninfo)
    names = {"host": "PGHOST", "port": "PGPORT", "user": "PGUSER", "dbname": "PGDATABASE", "password": "PGPASSWORD"}
    environment = os.environ | {names[key]: str(value) for key, value in parameters.items() if key in names}
    with tempfile.NamedTemporaryFile("w", suffix=".sql") as script:
        script.write(_SCRIPT.format(table=contender.table))
        script.flush()
        command = [str(pgbench), "--no-vacuum", "--protocol=prepared", f"--client={clients}", f"--jobs={clients}"]
        done = subprocess.run(
            [*command, f"--time={seconds}", f"--file={script.name}"],
            check=False, capture_output=True, text=True, env=environment,
        )  # fmt: skip
    found = re.search(r"^tps = ([0-9.]+)", done.stdout, re.MULTILINE)
    if done.returncode != 0 or found is None:
        said = (done.stderr.strip() or "no output").splitlines()[-1]
        raise BenchError(f"pgbench on app.{contender.table} failed with exit code {done.returncode}: {said}")
    # The script is three transactions.
    return 3 * float(found[1])
