"""Interleaved rounds: every contender in every round, starting with another one each time."""

from __future__ import annotations

import os
import re
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import product
from typing import Any

import psycopg
from psycopg import sql

from bench.contenders import Connection, Contender, wide_table
from bench.packages import BenchError, Place
from bench.results import Results
from bench.slot_reader import SlotReader, drop_slots, libpq_environment

OPERATIONS = ("insert", "update", "delete")
WIDE = "large value untouched"
PART = "capture"

# The row keeps its size.
_SET = "amount = amount + 1, changed = changed + interval '1 s', note = 'changed ' || right(note, -8)"
_STATEMENTS = {
    "insert": "insert into app.{} select * from app.feed where id <= {rows}",
    "update": "update app.{} set " + _SET,
    "delete": "delete from app.{}",
    WIDE: "update app.{} set amount = amount + 1",
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
class Work:
    """What to measure: rows of a statement and rows with a large value, rounds, and one-row transactions.

    `clients` with each of `commits` (synchronous_commit on, off), for `seconds` a run and `run_rounds` times;
    `run_names`: the contenders in those, all when empty.
    """

    rows: int
    wide_rows: int
    rounds: int
    seconds: float
    run_rounds: int
    clients: Sequence[int]
    commits: Sequence[str]
    run_names: Sequence[str] = ()


class Meter:
    """Measures on one server what `results` does not hold yet; `logs` are the log tables of each contender."""

    def __init__(
        self, place: Place, logs: dict[Contender, list[str]], results: Results, progress: Callable[[str], None]
    ) -> None:
        self.place = place
        self.logs = logs
        self.results = results
        self.progress = progress

    def statements(self, work: Work) -> None:
        """Rounds of an INSERT, an UPDATE and a DELETE of many rows, and an UPDATE beside a large value.

        A round before them warms up and is not counted. BenchError when a statement did not log every row.
        """
        cases = (*OPERATIONS, WIDE)
        numbers = [
            number
            for number in range(1, work.rounds + 1)
            if any(not self.results.has(PART, case, c.name, number) for c in self.logs for case in cases)
        ]
        with psycopg.connect(self.place.conninfo, autocommit=True) as connection:
            for number in [0, *numbers] if numbers else []:
                for contender in _turn(list(self.logs), number):
                    # all of them: an UPDATE needs the rows of the INSERT
                    for case in cases:
                        rows = contender.rows(work.wide_rows if case == WIDE else work.rows)
                        self._clear(connection, contender)
                        values = self._timed(connection, contender, case, rows)
                        self._check(connection, contender, case, rows)
                        if number > 0:
                            self.results.add(PART, case, contender.name, number, values)
                self.progress(f"capture: statements of {work.rows:,} rows, round {number} of {work.rounds}")

    def runs(self, work: Work) -> None:
        """Rounds of pgbench for each contender, number of clients and synchronous_commit."""
        chosen = [one for one in self.logs if not work.run_names or one.name in work.run_names]
        with psycopg.connect(self.place.conninfo, autocommit=True) as connection:
            for number in range(1, work.run_rounds + 1):
                for contender in _turn(chosen, number):
                    for commit, clients in product(work.commits, work.clients):
                        case = one_row_case(clients, commit)
                        if self.results.has(PART, case, contender.name, number):
                            continue
                        self._clear(connection, contender)
                        with self._slot(connection, contender, contender.table):
                            rate = self._pgbench(contender.table, clients, commit, work.seconds)
                        self.results.add(PART, case, contender.name, number, {"rate": rate})
                self.progress(f"capture: one-row transactions, round {number} of {work.run_rounds}")

    def _pgbench(self, table: str, clients: int, commit: str, seconds: float) -> float:
        """Run the one-row script with `clients` clients; return its transactions a second, BenchError when it fails."""
        environment = libpq_environment(self.place.conninfo) | {"PGOPTIONS": f"-c synchronous_commit={commit}"}
        with tempfile.NamedTemporaryFile("w", suffix=".sql") as script:
            script.write(_SCRIPT.format(table=table))
            script.flush()
            command = [
                str(self.place.binaries.program("pgbench")),
                "--no-vacuum",
                "--protocol=prepared",
                f"--client={clients}",
            ]
            jobs = f"--jobs={min(clients, os.cpu_count() or 1)}"
            done = subprocess.run(
                [*command, jobs, f"--time={max(round(seconds), 1)}", f"--file={script.name}"],
                check=False, capture_output=True, text=True, env=environment,
            )  # fmt: skip
        found = re.search(r"^tps = ([0-9.]+)", done.stdout, re.MULTILINE)
        if done.returncode != 0 or found is None:
            said = (done.stderr.strip() or "no output").splitlines()[-1]
            raise BenchError(f"pgbench on app.{table} failed with exit code {done.returncode}: {said}")
        # The script is three transactions.
        return 3 * float(found[1])

    def _clear(self, connection: Connection, contender: Contender) -> None:
        """Start from empty logs, vacuumed tables and a fresh checkpoint, whoever is next."""
        for log in self.logs[contender]:
            connection.execute(f"truncate {log}".encode())
        for table in (contender.table, wide_table(contender)):
            connection.execute(sql.SQL("vacuum app.{}").format(sql.Identifier(table)))
        connection.execute("checkpoint")

    def _timed(self, connection: Connection, contender: Contender, case: str, rows: int) -> dict[str, float]:
        """Microseconds and bytes of WAL a row, and the processor time of the slot's reader in the server."""
        table = wide_table(contender) if case == WIDE else contender.table
        statement = sql.SQL(_STATEMENTS[case]).format(sql.Identifier(table), rows=sql.Literal(rows))
        with self._slot(connection, contender, table) as reader:
            before = _one(connection, "select pg_current_wal_insert_lsn() - '0/0'")
            start = time.perf_counter()
            connection.execute(statement)
            seconds = time.perf_counter() - start
            after = _one(connection, "select pg_current_wal_insert_lsn() - '0/0'")
            values = {"us": seconds * 1e6 / rows, "wal": float(after - before) / rows}
            if reader is not None:
                values["reader_us"] = reader.until_read() * 1e6 / rows
        return values

    @contextmanager
    def _slot(self, connection: Connection, contender: Contender, table: str) -> Iterator[SlotReader | None]:
        """The contender's slot while it is measured; its reader, if it has one."""
        if not contender.slot:
            yield None
            return
        publication = sql.Identifier(f"bench_{table}")
        connection.execute(sql.SQL("create publication {} for table app.{}").format(publication, sql.Identifier(table)))
        try:
            connection.execute("select pg_create_logical_replication_slot('bench_slot', 'pgoutput')")
            try:
                if contender.slot == "idle":
                    yield None
                else:
                    with SlotReader(connection, self.place, "bench_slot", f"bench_{table}") as reader:
                        yield reader
            finally:
                drop_slots(connection, "bench_slot")
        finally:
            connection.execute(sql.SQL("drop publication {}").format(publication))

    def _check(self, connection: Connection, contender: Contender, case: str, rows: int) -> None:
        if not self.logs[contender]:
            return
        logged = sum(_one(connection, f"select count(*) from {log}") for log in self.logs[contender])
        halves = 2 if contender.halves and case in {"update", WIDE} else 1
        if logged != rows * halves:
            raise BenchError(f"{contender.name}: {case} of {rows} rows was logged as {logged} rows")


def one_row_case(clients: int, commit: str) -> str:
    """The name of a case of one-row transactions in the results."""
    return f"one-row {clients} {commit}"


def _turn(contenders: Sequence[Contender], number: int) -> Sequence[Contender]:
    start = number % len(contenders)
    return [*contenders[start:], *contenders[:start]]


def _one(connection: Connection, query: str) -> Any:
    row = connection.execute(query.encode()).fetchone()
    assert row is not None
    return row[0]
