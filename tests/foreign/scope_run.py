"""One scope of foreign statements run in a schema of its own, its queries made views, churned, refreshed, compared."""

from __future__ import annotations

import random
import re
import time
import traceback
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psycopg
from psycopg import Connection

from gdq.consumers.refresh.refresher import Refresher
from gdq.errors import GdqError
from gdq.sql_text import quote, raw
from gdq.view.view import create_view, drop_view
from tests.foreign.compare import differences, is_determined
from tests.foreign.data import Churn
from tests.foreign.queries import step_of
from tests.foreign.scripts import Scope, Statement, read_text
from tests.foreign.tally import Outcome, Verdict

ROUNDS = 3
_BATCH_MAX = 40
_ROWS_MAX = 200
_RESULT_MAX = 20_000
_SEED_ROWS = 8
_SLOW_SECONDS = 1.0
_COPY_FILE = re.compile(r"copy\s+(?P<into>.+?)\s+from\s+'(?P<path>/[^']+)'(?P<rest>.*)$", re.IGNORECASE | re.DOTALL)
_COMMENTS = re.compile(r"--[^\n]*|/\*.*?\*/", re.DOTALL)

_READ_TABLES = """
    with recursive d(relid) as (
      select %s::pg_catalog.regclass::oid
      union
      select p.refobjid from d join pg_catalog.pg_rewrite r on r.ev_class = d.relid
        join pg_catalog.pg_depend p on p.classid = 'pg_catalog.pg_rewrite'::regclass and p.objid = r.oid
                                       and p.refclassid = 'pg_catalog.pg_class'::regclass and p.refobjid <> d.relid)
    select pg_catalog.format('%%I.%%I', n.nspname, c.relname) from d join pg_catalog.pg_class c on c.oid = d.relid
      join pg_catalog.pg_namespace n on n.oid = c.relnamespace
     where c.relkind <> 'v' and n.nspname not in ('pg_catalog', 'information_schema', 'pg_toast') order by 1"""
_LEAVES = """
    with recursive h(relid) as (
      select %s::pg_catalog.regclass::oid
      union select i.inhrelid from h join pg_catalog.pg_inherits i on i.inhparent = h.relid)
    select pg_catalog.format('%%I.%%I', n.nspname, c.relname) from h join pg_catalog.pg_class c on c.oid = h.relid
      join pg_catalog.pg_namespace n on n.oid = c.relnamespace where c.relkind = 'r' order by 1"""


@dataclass(slots=True)
class _View:
    """A foreign query that is a view to PostgreSQL: as the suite has it, as gdq gets it, the tables that it reads."""

    query: str
    text: str
    tables: tuple[str, ...]
    name: str = ""
    target: str = ""
    strategy: Outcome = "full"
    detail: str = ""
    verdict: tuple[Outcome, str] | None = None
    history: list[str] = field(default_factory=list)


class ScopeRun:
    """Runs one scope over `connection`, a superuser's; `number` names its schema and queue."""

    def __init__(self, connection: Connection[Any], refresher: Refresher, scope: Scope, number: int, seed: int) -> None:
        self.connection = connection
        self.refresher = refresher
        self.scope = scope
        self.schema = f"s{number}"
        self.queue = f"q{number}"
        self.rng = random.Random(zlib.crc32(f"{seed} {scope.suite} {scope.origin}".encode()))
        self.pending: list[str] = []
        self.seen: set[str] = set()
        self.captured: dict[str, tuple[int, str | None]] = {}
        self.verdicts: list[Verdict] = []
        self.views = 0

    def run(self) -> list[Verdict]:
        """The verdicts of the scope's queries, each once."""
        self.connection.execute(raw(f"create schema {self.schema}"))
        self.connection.execute(raw(f"set search_path = {self.schema}, public"))
        self.connection.execute("select gdq.create_queue(%s)", [self.queue])
        try:
            for statement in self.scope.statements:
                self._step(statement)
            self._try_queries()
        finally:
            self._clean()
        return self.verdicts

    def _step(self, statement: Statement) -> None:
        step = step_of(statement)
        if step.kind == "end" or len(self.pending) >= _BATCH_MAX:
            self._try_queries()
        if step.query:
            plain = " ".join(_COMMENTS.sub(" ", step.query).split()).rstrip("; ")
            if plain not in self.seen:
                self.seen.add(plain)
                self.pending.append(step.query.rstrip("; \n"))
        if step.text:
            self._run(step.text, statement.data)

    def _run(self, text: str, data: str | None) -> None:
        """Run a statement of the suite; what fails there is its own matter."""
        for _ in range(2):
            try:
                load(self.connection, Statement(text, data))
            except (psycopg.errors.DuplicateTable, psycopg.errors.DuplicateObject):
                name = re.match(r"create\s+(table|view)\s+(?:if\s+not\s+exists\s+)?([\w.\"]+)", text, re.IGNORECASE)
                if name is None or not self._drop(*name.groups()):
                    return
                continue
            except psycopg.Error:
                if self.connection.closed:
                    raise
            return

    def _drop(self, kind: str, name: str) -> bool:
        """Drop what a transaction of the suite would have rolled back."""
        self._try_queries()
        try:
            self.connection.execute(raw(f"drop {kind} {name} cascade"))
        except psycopg.Error:
            return False
        return True

    def _try_queries(self) -> None:
        queries, self.pending = self.pending, []
        views = [view for query in queries if (view := self._as_view(query)) is not None]
        for table in sorted({table for view in views for table in view.tables}):
            number = self._number(table)
            if self.captured.get(table, (0, None))[0] != number:
                self.captured[table] = number, self._capture(table)
        made = [view for view in views if self._make(view)]
        if made:
            self._churn(made)
        for view in views:
            outcome, detail = view.verdict or (view.strategy, view.detail)
            self._tell(view.query, outcome, detail, view.history)
            if view.name:
                drop_view(self.connection, view.name)
                self.connection.execute(raw(f"drop table if exists {view.target}"))

    def _tell(self, query: str, outcome: Outcome, detail: str, history: Sequence[str] = ()) -> None:
        kept = tuple(history) if outcome in ("wrong", "crash", "undetermined") else ()
        self.verdicts.append(Verdict(self.scope.suite, self.scope.origin, query, outcome, detail, kept))

    def _as_view(self, query: str) -> _View | None:
        """The query as a view that reads tables; None, and a verdict, if it is none to PostgreSQL."""
        for renamed in (False, True):
            try:
                with self.connection.transaction(force_rollback=True):
                    self.connection.execute("set local statement_timeout = '10s'")
                    text = self._renamed(query) if renamed else query
                    self.connection.execute(f"create view gdq_probe as {text}\n".encode())
                    tables = [name for (name,) in self.connection.execute(_READ_TABLES, ["gdq_probe"])]
                    tables = [name for name in tables if name != f"{self.schema}.gdq_probe"]
                    started = time.monotonic()
                    (rows,) = self.connection.execute(raw("select count(*) from gdq_probe")).fetchone() or (0,)
                    large = rows > _RESULT_MAX or time.monotonic() - started > _SLOW_SECONDS
            except psycopg.errors.DuplicateColumn:
                continue
            except psycopg.Error as error:
                if self.connection.closed:
                    raise
                self._tell(query, "invalid", type(error).__name__)
                return None
            if not tables or large:
                self._tell(query, "too large" if large else "no table", "")
                return None
            return _View(query, text, tuple(tables))
        self._tell(query, "invalid", "DuplicateColumn")
        return None

    def _renamed(self, query: str) -> str:
        """The query with a name of its own for each column."""
        number = len(self.connection.execute(f"select * from ({query}\n) as q limit 0".encode()).description or ())
        names = ", ".join(f"c{at}" for at in range(1, number + 1))
        return f"with named ({names}) as ({query}\n) select * from named"

    def _number(self, table: str) -> int:
        """The number that the server gave a table: a table may go, and another come by its name."""
        (number,) = self.connection.execute("select %s::text::regclass::oid", [table]).fetchone() or (0,)
        return int(number)

    def _capture(self, table: str) -> str | None:
        """Capture a table, made small; why not, if it cannot be."""
        self.connection.execute("set session_replication_role = replica")
        with_rows = f"select tableoid, ctid from {table} order by tableoid, ctid limit {_ROWS_MAX}"
        Churn(self.connection, [table], self.rng).attempt(
            f"delete from {table} where (tableoid, ctid) not in ({with_rows})"
        )
        self.connection.execute("reset session_replication_role")
        try:
            self.connection.execute(
                "select gdq.add_table(%s, %s::text::regclass, allow_rls => true)", [self.queue, table]
            )
        except psycopg.errors.InternalError_ as error:
            return f"crash: add_table: {error.diag.message_primary}"
        except psycopg.Error as error:
            return f"add_table: {error.sqlstate} {_nameless(str(error.diag.message_primary))}"
        return None

    def _make(self, view: _View) -> bool:
        """Make a view of gdq and load it; False, with its verdict, if it is refused or fails."""
        why = next((self.captured[table][1] for table in view.tables if self.captured[table][1]), None)
        if why is not None:
            view.verdict = ("crash" if why.startswith("crash") else "refused", why)
            return False
        self.views += 1
        name = f"{self.schema}_v{self.views}"
        try:
            plan = create_view(self.connection, name, self.queue, view.text, f"gdq_views.{name}", engine="postgres")
        except GdqError as error:
            view.verdict = ("refused", _code(str(error)))
            return False
        except Exception:
            view.verdict = ("crash", f"create_view: {_last_line()}")
            view.history.append(traceback.format_exc())
            return False
        view.name, view.target = name, f"gdq_views.{quote(name)}"
        full = getattr(plan, "full", None)
        view.strategy, view.detail = ("full", _code(str(full))) if full else ("incremental", "")
        self._refresh(view, "first load")
        return view.verdict is None

    def _churn(self, views: Sequence[_View]) -> None:
        churn = Churn(self.connection, sorted({table for view in views for table in view.tables}), self.rng)
        churn.look()
        churn.seed(_SEED_ROWS)
        for number in range(ROUNDS):
            for _ in range(self.rng.choice((1, 2, 4)) + len(churn.tables) // 2):
                churn.transaction()
            for view in views:
                if view.verdict is None:
                    view.history += churn.done
                    self._refresh(view, f"round {number + 1}")
            churn.done.clear()

    def _refresh(self, view: _View, when: str) -> None:
        """Refresh a view and compare it with its query."""
        try:
            result = self.refresher.refresh(view.name)
        except Exception as error:
            failure = f"{when}: {_last_line()}"
            if not isinstance(error, AssertionError) and self._fails(view.text):
                return  # as the query itself does on these rows; a later round may take them away
            view.verdict = ("crash", failure)
            view.history.append(traceback.format_exc())
            return
        view.history.append(f"-- {when}: {result.action} {result.kind} {result.reason}")
        try:
            with self.connection.transaction():
                found = differences(self.connection, view.target, view.text)
        except psycopg.Error as error:
            if self.connection.closed:
                raise
            view.verdict = ("crash", f"compare: {type(error).__name__} {str(error).splitlines()[0]}")
            return
        if found != (0, 0):
            leaves = dict.fromkeys(leaf for table in view.tables for leaf in self._leaves(table))
            determined = is_determined(self.connection, view.text, list(leaves))
            said = f"{when} ({result.action}, {result.kind}): {found[0]} missing, {found[1]} too many"
            view.verdict = ("wrong" if determined else "undetermined", said)

    def _leaves(self, table: str) -> Iterator[str]:
        yield from (name for (name,) in self.connection.execute(_LEAVES, [table]))

    def _fails(self, query: str) -> bool:
        """True if the query itself fails on the rows as they are."""
        try:
            with self.connection.transaction():
                self.connection.execute(f"select count(q::text) from ({query}\n) as q".encode())
        except psycopg.Error:
            if self.connection.closed:
                raise
            return True
        return False

    def _clean(self) -> None:
        """Take the scope's queue, views and schema away."""
        for statement in (
            f"select gdq.drop_queue('{self.queue}', force => true)",
            f"drop schema {self.schema} cascade",
            "reset all",
        ):
            try:
                self.connection.execute(raw(statement))
            except psycopg.Error:
                if self.connection.closed:
                    raise


def _code(message: str) -> str:
    """The stable code at the end of a reason, or the reason without names."""
    found = re.search(r"\[([\w-]+)\]\s*$", message.splitlines()[0])
    return found.group(1) if found else _nameless(message.splitlines()[0])


def _nameless(message: str) -> str:
    return re.sub(r'"[^"]*"|\b\w+\.\w+\b|\d+', "*", message)[:100]


def _last_line() -> str:
    return traceback.format_exc().strip().splitlines()[-1][:200]


def load(connection: Connection[Any], statement: Statement) -> None:
    """Run a statement; COPY from a file reads the file here."""
    match = _COPY_FILE.match(statement.text)
    data = statement.data
    text = statement.text
    if match and Path(match.group("path")).is_file():
        data = read_text(Path(match.group("path")))
        text = f"copy {match.group('into')} from stdin{match.group('rest')}"
    if data is None:
        connection.execute(text.encode())
        return
    with connection.cursor().copy(text.encode()) as copy:
        copy.write(data)
