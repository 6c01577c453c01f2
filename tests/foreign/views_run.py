"""The view queries of foreign suites on an embedded server: a database for each file, a schema for each scope."""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psycopg
from psycopg import Connection, sql

import gdq.view.cost
from gdq.consumers.refresh.refresher import Refresher
from gdq.embedded.server import EmbeddedServer
from gdq.installer.install import install
from gdq.sql_text import raw
from tests.foreign.material import MaterialFile, psql_variables
from tests.foreign.scope_run import ScopeRun, load
from tests.foreign.scripts import read_text, split_sql
from tests.foreign.tally import Tally, Verdict

_SETTINGS: dict[str, str | float | bool] = {
    "max_connections": 60, "shared_buffers": "256MB", "autovacuum": False, "max_locks_per_transaction": 256,
    "jit": False, "client_min_messages": "error", "log_min_messages": "fatal",
}  # fmt: skip
# Rows of a table that a set-up script loads.
_ROWS_MAX = 400


@dataclass(slots=True)
class ViewsRun:
    """Runs foreign files on `server`. `tell` gets a line for each file."""

    server: EmbeddedServer
    seed: int
    tell: Callable[[str], None] = print
    tally: Tally = field(default_factory=Tally)
    templates: dict[Path | None, str] = field(default_factory=dict)

    def run(self, files: Sequence[MaterialFile], *, until: float | None = None) -> Tally:
        """The verdicts of all queries in `files`; no new file begins after `until`, by time.monotonic()."""
        # what a busy machine makes slow is no reason for a full load
        gdq.view.cost._SECONDS_MIN = 3600.0
        for number, one in enumerate(files, 1):
            if until is not None and time.monotonic() > until:
                self.tell(f"stopped before file {number} of {len(files)}")
                break
            started = time.monotonic()
            verdicts = self.run_file(one)
            self.tally.add(verdicts)
            bad = sum(verdict.outcome in ("wrong", "crash") for verdict in verdicts)
            seconds = time.monotonic() - started
            self.tell(f"{one.suite} {one.path.name}: {len(verdicts)} queries, {bad} bad, {seconds:.0f} s")
        return self.tally

    def run_file(self, one: MaterialFile) -> list[Verdict]:
        """The verdicts of one file's queries."""
        verdicts: list[Verdict] = []
        scopes = one.read()
        if not scopes:
            return verdicts
        with self._database(self._template(one.setup)) as name:
            dsn = self.server.conninfo(dbname=name)
            with psycopg.connect(dsn, autocommit=True) as connection, Refresher(dsn) as refresher:
                for number, scope in enumerate(scopes):
                    connection.execute("set client_min_messages = error; set statement_timeout = '20s'")
                    verdicts += ScopeRun(connection, refresher, scope, number, self.seed).run()
        return verdicts

    def _template(self, setup: Path | None) -> str:
        """A database with gdq, and what a script makes."""
        if setup not in self.templates:
            name = f"template_{secrets.token_hex(4)}"
            self._create(name, "template0")
            dsn = self.server.conninfo(dbname=name)
            install(dsn)
            with psycopg.connect(dsn, autocommit=True) as connection:
                connection.execute("create schema gdq_views")
                if setup is not None:
                    self._set_up(connection, setup)
            self.templates[setup] = name
        return self.templates[setup]

    @staticmethod
    def _set_up(connection: Connection[Any], script: Path) -> None:
        for statement in split_sql(read_text(script), psql_variables(script.parent.parent)):
            try:
                load(connection, statement)
            except psycopg.Error:
                continue  # it needs what is not here, such as functions in C
        tables = connection.execute(
            "select oid::regclass::text from pg_class where relkind = 'r' and relnamespace = 'public'::regnamespace"
        ).fetchall()
        for (table,) in tables:
            kept = f"select ctid from only {table} order by ctid limit {_ROWS_MAX}"
            connection.execute(raw(f"delete from only {table} where ctid not in ({kept})"))

    @contextmanager
    def _database(self, template: str) -> Iterator[str]:
        name = f"foreign_{secrets.token_hex(4)}"
        self._create(name, template)
        try:
            yield name
        finally:
            with psycopg.connect(self.server.conninfo(), autocommit=True) as su:
                su.execute(sql.SQL("drop database {} with (force)").format(sql.Identifier(name)))

    def _create(self, name: str, template: str) -> None:
        with psycopg.connect(self.server.conninfo(), autocommit=True) as su:
            su.execute(sql.SQL("create database {} template {}").format(*map(sql.Identifier, (name, template))))
