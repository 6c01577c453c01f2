"""A view that this process has refreshed is refreshed again by a few prepared statements, in one transaction.

    is_intact():                     has capture missed anything?
    lock, begin_prepared_refresh():  is all as it was, and which logs have changes?
    net each table's log rows:       FewStatement's arrays
    change target and state:         FewStatement
    finish_prepared_refresh():       target's position, consumer's position, tick, history; then the commit

Whatever is not so, as DDL, many changes or a plan of several steps, is left to a whole refresh, which also tells what
is wrong: nothing of this transaction stays then.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import psycopg
from psycopg import Connection, sql

from gdq.call import scalar
from gdq.consumers.refresh.view_refresh import PlannedView, PreparedResult, RefreshPoint
from gdq.consumers.views.change_source import LoggedRows, log_columns_of
from gdq.consumers.views.engine import ROWS_READ_SQL
from gdq.consumers.views.few_statement import FewStatement, Netted, netting_sql
from gdq.consumers.views.own_objects import ALL_OURS
from gdq.consumers.views.progress import Progress
from gdq.consumers.views.signals import ManyRows, NeedsFull, NeedsTables
from gdq.consumers.views.snapshot_holder import LOCK_TIMEOUT, log_segments
from gdq.consumers.views.target import Target, target_types
from gdq.consumers.views.target_rows import TargetRows
from gdq.errors import GdqError
from gdq.plan.postgres import PostgresPlan
from gdq.plan.table import UsedTable
from gdq.source import Position
from gdq.sql_text import literal, raw
from gdq.typed.pgtypes import READ_SETTINGS
from gdq.view.view import ViewInfo

# No lock is waited for long, as others may wait for those that the transaction has. SELECT takes the snapshot. Logs are
# read by their index, as after BEGIN_NETTING; the other settings of few changes hold for the whole transaction.
_BEGIN = "begin isolation level repeatable read; set local lock_timeout = {timeout}; lock table {read} in access share "
_BEGIN += "mode; lock table only {written} in row exclusive mode; select {settings}"
_SETTINGS = {"enable_seqscan": "off", "jit": "off", "plan_cache_mode": "force_generic_plan"}
_INTACT = "select gdq.is_intact(%s)"
_LOOK = """
select p.at, gdq.begin_prepared_refresh(%(view)s, p.at, %(stamp)s, %(definitions)s, %(audited)s)::oid[]::bigint[]
  from (select POSITION as at offset 0) as p"""
# What came before was read by its index; here begins what reads and writes tables.
_NETTED = f"""
select set_config('enable_seqscan', 'on', true), {ALL_OURS}, ({ROWS_READ_SQL.replace("%s", "%(tables)s")})"""
_FINISH = f"""
update gdq_target.position p
   set position = gdq.finish_prepared_refresh(%s, p.position, %s, %s, r.n - %s, %s), updated_at = pg_catalog.now()
  from ({ROWS_READ_SQL}) as r(n)
 where p.view = %s and p.source = %s and p.position = %s
returning r.n - %s"""

# What would fail again, such as a rule of the target, which allows no WITH.
_REFUSED = psycopg.DataError | psycopg.ProgrammingError | psycopg.NotSupportedError


class _WholeWantedError(Exception):
    """A whole refresh is to look; nothing is wrong with prepared ones."""


@dataclass(frozen=True, slots=True)
class _Reader:
    """The log rows of a table after any snapshot, and the statement that nets them, with the snapshot's parameters."""

    rows: LoggedRows
    netting: sql.SQL


@dataclass(slots=True)
class PreparedRefresh:
    """Refreshes of one view by prepared statements of `connection`, a session in autocommit in the view's database.

    `position`: SQL of the target's position if the target is as the last refresh left it, with parameters `values`;
    among these the view's stamp and definitions. `at`: as for Refresher. `given_up`: another try would fail as well.
    """

    connection: Connection[Any]
    view: ViewInfo
    planned: PlannedView
    position: str
    values: Mapping[str, Any]
    at: Callable[[RefreshPoint], None]
    tell: Progress
    given_up: bool = field(default=False, init=False)
    _statement: FewStatement = field(init=False)
    _begin: str = field(default="", init=False)
    _readers: dict[tuple[str, tuple[int, ...]], _Reader | None] = field(default_factory=dict, init=False)
    _changes: dict[Hashable, sql.SQL] = field(default_factory=dict, init=False)

    def __post_init__(self) -> None:
        view, plan = self.view, self.planned.plan
        assert isinstance(plan, PostgresPlan)
        types = target_types(self.planned.columns, same_database=True)
        target = Target(view.view_name, view.source, view.target)
        self._statement = FewStatement(plan, TargetRows(self.connection, target, types, self.tell))

    @property
    def is_suited(self) -> bool:
        """True if prepared statements can follow changes of some table of the view."""
        return any(self._statement.planned([table.name]) is not None for table in self._statement.plan.tables)

    def refresh(self) -> PreparedResult | None:
        """Refresh the view; None if nothing was done, as a whole refresh is to look."""
        try:
            with self._ended():
                done = self._refresh()
        except (NeedsFull, NeedsTables, psycopg.Error, GdqError, _WholeWantedError) as why:
            self.given_up = isinstance(why, NeedsTables | _REFUSED) and not isinstance(why, ManyRows)
            return None
        if done.action != "none":
            self.at("committed")
            self.at("done")
        return done

    def _refresh(self) -> PreparedResult:
        # a statement of its own, as it may have something to write
        intact = self.connection.execute(_INTACT, [self.view.view_name], prepare=True).fetchone()
        if intact != (True,):
            raise _WholeWantedError
        self.connection.execute(raw(self._beginning()), prepare=False)
        look = raw(_LOOK.replace("POSITION", self.position))
        at, segments = self.connection.execute(look, self.values, prepare=True).fetchone() or (None, None)
        if at is None or segments is None:
            raise self._left()
        if not segments:
            self.connection.execute("commit")
            return PreparedResult()
        self.at("begun")
        started = time.monotonic()
        self.tell("netting")
        netted = self._netted(sorted(segments), Position.parse(at).snapshot)
        tables = [table.name for table in self._statement.plan.tables]
        values = {"source": True, "names": self._written, "tables": tables}
        _, ours, before = self.connection.execute(raw(_NETTED), values, prepare=True).fetchone() or (None, False, 0)
        if not ours:
            raise self._left()
        self.tell("writing")
        total, rows = sum(one.rows for one in netted), self._change(netted) if netted else 0
        seconds = time.monotonic() - started
        name = self.view.view_name
        found = [name, rows, total, before, seconds, tables, tables, name, self.view.source, at, before]
        read = self.connection.execute(raw(_FINISH), found, prepare=True).fetchone()
        if read is None:
            raise _WholeWantedError
        self.at("applied")
        self.connection.execute("commit")
        return PreparedResult("delta", "incremental" if netted else "none", rows, total, read[0])

    @contextmanager
    def _ended(self) -> Iterator[None]:
        """End the transaction with the block."""
        try:
            yield
        finally:
            if not self.connection.closed:
                self.connection.rollback()

    def _left(self) -> _WholeWantedError:
        """End the transaction before it has written: by a commit, as psycopg forgets prepared statements otherwise."""
        self.connection.execute("commit")
        return _WholeWantedError()

    @property
    def _written(self) -> list[str]:
        """The tables that the refresh writes into."""
        target = self._statement.rows.target
        return [target.table] if self._statement.plan.state is None else [target.table, target.state]

    def _beginning(self) -> str:
        """The statements up to the snapshot. The segments are those of the view's stamp, which is compared later."""
        if not self._begin:
            segments = log_segments(self.connection, self.view.queue_name, self.view.tables)
            settings = {**READ_SETTINGS, **self.view.settings, **_SETTINGS}
            self._begin = _BEGIN.format(
                timeout=literal(LOCK_TIMEOUT),
                read=", ".join([*self.view.tables, *segments]),
                written=", only ".join(self._written),
                settings=", ".join(
                    f"pg_catalog.set_config({literal(name)}, {literal(value)}, true)"
                    for name, value in settings.items()
                ),
            )
        return self._begin

    def _netted(self, segments: Sequence[int], since: str) -> list[Netted]:
        """The netted changes of the tables that have some, after a snapshot, from these segments."""
        _, xmax, running = since.split(":")
        values = [int(xmax), [int(number) for number in running.split(",") if number]]
        netted, cursor = [], psycopg.RawCursor(self.connection)
        for number, table in enumerate(self._statement.plan.tables, 1):
            reader = self._reader(table, segments)
            if reader is None:
                continue
            found = cursor.execute(reader.netting, values, prepare=True).fetchone()
            one = Netted.of(number, table, reader.rows, found or (0, 0, True))
            if one is None:
                raise self._left()
            if one.rows:
                netted.append(one)
        return netted

    def _reader(self, table: UsedTable, segments: Sequence[int]) -> _Reader | None:
        """What reads the log rows of a table in these segments; None if they are all of other tables."""
        key = (table.name, tuple(segments))
        if key not in self._readers:
            names = [schema.qualified for schema in self._statement.plan.schemas]
            name, queue = self.view.tables[names.index(table.name)], self.view.queue_name
            query = "select gdq.later_rows_sql(%s, %s::regclass, %s::oid[]::regclass[])"
            select = str(scalar(self.connection, query, queue, name, list(segments)))
            known = self.planned.logged
            if name not in known:
                known |= log_columns_of(self.connection, queue, [name])
            columns = tuple(column for column in known[name] if column.name in table.logged)
            rows = LoggedRows(select, columns)
            if not self._statement.is_suited([rows]):
                raise NeedsTables
            empty = select.rstrip().endswith("where false")
            self._readers[key] = None if empty else _Reader(rows, raw(netting_sql(table, rows)))
        return self._readers[key]

    def _change(self, netted: Sequence[Netted]) -> int:
        """Execute the statement of these changes; returns the rows deleted plus inserted."""
        key = tuple((one.number, one.columns) for one in netted)
        if key not in self._changes:
            changes = self._statement.planned([one.table.name for one in netted])
            if changes is None:  # changes of other tables may be of one statement
                raise self._left()
            self._changes[key] = raw(self._statement.text(netted, changes))
        arrays = [array for one in netted for array in one.arrays]
        row = psycopg.RawCursor(self.connection).execute(self._changes[key], arrays, prepare=True).fetchone()
        return self._statement.changed(row or (0, 0, 0, False, False))
