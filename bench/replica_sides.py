"""The contenders of bench.replica: `gdq replicate` and PostgreSQL's own logical replication, with what they need.

Each has a source server of its own, so that neither reads the other's write-ahead log. The targets are databases of a
third server.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import psycopg
from psycopg import sql

from bench.packages import BenchError
from bench.slot_reader import wait_for
from bench.steady import one
from gdq.sql_text import raw

# Queues of gdq: of the tables that are written to, and of those that are copied.
QUEUE, COPY_QUEUE = "bench", "copy"

# Subscriptions' options. Streaming in parallel, and no wait for the target's disk, are PostgreSQL 18's defaults.
BUILT_IN, BINARY, EACH = "built-in", "built-in, binary", "built-in, binary, a subscription a table"
_OPTIONS = {BUILT_IN: "", BINARY: ", binary = true", EACH: ", binary = true"}
GDQ, GDQ_WORKERS = "gdq", "gdq, two apply workers"

_OWN = "select pid from pg_stat_activity where application_name like 'gdq:%' and datname = current_database()"
_WORKERS = "select pid from pg_stat_activity where backend_type like 'logical replication %worker'"
_SENDERS = "select pid from pg_stat_replication"


@dataclass(slots=True)
class Gdq:
    """`gdq replicate` with its defaults, or with some options where it applies changes; `replica`: its name there."""

    source: str
    target: str
    name: str = GDQ
    replica: str = "mirror"
    options: tuple[str, ...] = ()
    _program: subprocess.Popen[bytes] | None = None

    @contextmanager
    def at_work(self) -> Iterator[None]:
        """Changes are applied from the begin of the block on, until all that were there are in the target."""
        with self.replicate(QUEUE, *self.options):
            yield

    @contextmanager
    def replicate(self, queue: str, *options: str) -> Iterator[None]:
        """`gdq replicate` at work, up to its end unless it follows."""
        command = self._command("replicate", queue, *options)
        environment = os.environ | {"GDQ_DSN": self.source}
        # as installed: a shell that forbids bytecode has the program compile all its modules first
        environment.pop("PYTHONDONTWRITEBYTECODE", None)
        self._program = subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)
        try:
            yield
            if "--follow" in options:
                self._program.terminate()
            _, said = self._program.communicate()
            if self._program.returncode != 0:
                raise BenchError(f"gdq replicate: {said.decode().strip()}")
        finally:
            self._program.kill()
            self._program.wait()
            self._program = None

    def check(self) -> None:
        """BenchError if a program that follows has ended."""
        if self._program is not None and self._program.poll() is not None:
            raise BenchError(f"gdq replicate has ended: {self._program.communicate()[1].decode().strip()}")

    def drop(self, queue: str) -> None:
        """Drop the replica of a queue; its tables stay."""
        environment = os.environ | {"GDQ_DSN": self.source}
        subprocess.run(self._command("drop-replica", queue), env=environment, check=True, capture_output=True)

    def _command(self, name: str, queue: str, *options: str) -> list[str]:
        return [sys.executable, "-m", "gdq", name, queue, f"{self.replica}_{queue}", "--to", self.target, *options]

    def processes(self) -> dict[str, list[int]]:
        """The processes at work now, by what they are."""
        return {
            "program": [] if self._program is None else [self._program.pid],
            "sessions in the source": pids(self.source, _OWN),
            "sessions in the target": pids(self.target, _OWN),
        }


@dataclass(slots=True)
class BuiltIn:
    """Publications and the subscriptions to them: one of all tables, or one for each."""

    source: str
    target: str
    name: str
    _subscriptions: tuple[str, ...] = ()

    def subscribe(self, sets: Sequence[Sequence[str]], prefix: str, *, copy: bool = False) -> None:
        """Make a subscription to each set of tables. `copy`: they are at work at once, else once at_work() has them."""
        with session(self.source) as source, session(self.target) as target:
            for number, some in enumerate(sets):
                own = f"{prefix}_{target.info.dbname}_{number}"
                source.execute(f"create publication {own} for table {', '.join(some)}".encode())
                options = f"copy_data = {copy}, enabled = {copy}{_OPTIONS[self.name]}"
                create = sql.SQL("create subscription {} connection {} publication {} with ({})")
                named = sql.Identifier(own)
                target.execute(create.format(named, sql.Literal(self.source), named, raw(options)))
                self._subscriptions += (own,)

    def unsubscribe(self) -> None:
        """Drop the subscriptions with their slots, and the publications."""
        with session(self.source) as source, session(self.target) as target:
            for own in self._subscriptions:
                target.execute(f"drop subscription {own}".encode())
                source.execute(f"drop publication {own}".encode())
        self._subscriptions = ()

    @contextmanager
    def at_work(self) -> Iterator[None]:
        """Changes are applied from the begin of the block on, until all that were there are in the target."""
        with session(self.target) as target:
            self._alter(target, "enable")
            yield
            self._wait_until_applied()
            self._alter(target, "disable")
            query = "select case when not exists ({} and datname = current_database()) then 1 end"
            wait_for("the apply workers' end", query.format(_WORKERS.replace("%", "%%")), target)

    def wait_until_copied(self) -> None:
        """Wait until the first copies are there."""
        query = "select case when bool_and(srsubstate = 'r') then 1 end from pg_subscription_rel"
        with session(self.target) as target:
            wait_for("the copies", query, target, seconds=3600)

    def processes(self) -> dict[str, list[int]]:
        """The processes at work now, by what they are."""
        return {"walsenders": pids(self.source, _SENDERS), "workers": pids(self.target, _WORKERS)}

    def _alter(self, target: psycopg.Connection[Any], how: str) -> None:
        for own in self._subscriptions:
            target.execute(f"alter subscription {own} {how}".encode())

    def _wait_until_applied(self) -> None:
        with session(self.source) as source:
            (now,) = one(source, "select pg_current_wal_flush_lsn()::text")
            query = """select case when bool_and(confirmed_flush_lsn >= %s::pg_lsn) then 1 end
                         from pg_replication_slots where slot_name = any (%s)"""
            wait_for("the subscriptions", query, source, now, list(self._subscriptions), seconds=3600)


Side = Gdq | BuiltIn


def pids(conninfo: str, query: str) -> list[int]:
    """The processes that a query lists."""
    with session(conninfo) as connection:
        return [pid for (pid,) in connection.execute(query.encode())]


def session(conninfo: str) -> psycopg.Connection[Any]:
    """A session whose statements are transactions."""
    return psycopg.connect(conninfo, autocommit=True)
