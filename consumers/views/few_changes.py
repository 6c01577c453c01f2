"""Few changes: joins and sums follow them by one prepared statement, which makes no temporary table.

The netted changes of a table pass through this process, as one array for each column (`few_statement`). For plans that
recompute keys the arrays are parts of the statements that Computation runs. More changes are in tables with statistics.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import psycopg

from gdq.consumers.views.change_source import LoggedRows
from gdq.consumers.views.computation import Computation
from gdq.consumers.views.few_statement import RESULT, FewStatement, Netted, netting_sql
from gdq.consumers.views.netting import BEGIN_NETTING, END_NETTING
from gdq.consumers.views.signals import Diverged, NeedsTables
from gdq.consumers.views.target_rows import TargetRows
from gdq.plan.postgres import ChangePlan
from gdq.sql_text import PIN_TRANSACTION, literal, quote, raw
from gdq.typed.pgtypes import READ_SETTINGS
from gdq.view.table_schema import apply_view_settings

# A plan made for the ten rows that PostgreSQL expects of an array is good for all that are few.
_BEGIN = f"{END_NETTING}; set local jit = off; set local plan_cache_mode = force_generic_plan"
_END = "set local jit to default; set local plan_cache_mode to default"


@dataclass(slots=True)
class FewChanges:
    """Brings the target of one view to the held snapshot by one statement, if it has few changes and its plan allows.

    `computation` must have begun.
    """

    computation: Computation
    rows: TargetRows

    @property
    def _statement(self) -> FewStatement:
        return FewStatement(self.computation.plan, self.rows)

    def apply(self, changed: Mapping[str, str]) -> int | None:
        """The rows deleted plus inserted; None if nothing was done: the changes are many, or the plan needs tables.

        `changed`: the changed tables with the SELECTs of their log rows. NeedsFull and Diverged as PostgresEngine;
        NeedsTables if the refresh is to begin again.
        """
        try:
            return self._apply(changed)
        except (psycopg.DataError, psycopg.ProgrammingError, psycopg.NotSupportedError) as error:
            # such as a rule of the target, which allows no WITH
            raise NeedsTables from error

    def _apply(self, changed: Mapping[str, str]) -> int | None:
        logged = self.computation.logged(changed)
        if not self._is_suited(logged):
            return None
        netted = self._netted(logged)
        rows = None if netted is None else self._change(netted) if netted else 0
        if rows is None or self.computation.task.grouped:
            self.computation.connection.execute(_END)
        return rows

    def _change(self, netted: Sequence[Netted]) -> int | None:
        made, total = self.computation, sum(one.rows for one in netted)
        changes = self._statement.planned([one.table.name for one in netted])
        if changes is None:
            if not made.task.audited:
                made.give({one.table.name: (one.rows, one.literal()) for one in netted})
            return None
        made.task.choose(total)
        made.task.tell("computing")
        made.computed("incremental", total)
        self.rows.target.hold(self.rows.output)
        made.task.tell("writing")
        rows = self._run(netted, changes)
        if self._statement.cut:
            made.sql.run(self._statement.cut)
        if made.task.audited:
            for one in netted:
                made.temporary(one.name, one.literal())
        return rows

    def _is_suited(self, logged: Mapping[str, LoggedRows]) -> bool:
        """True if all values can be sent as arrays, and few changes of these tables need no table of their own."""
        if not self._statement.is_suited(logged.values()):
            return False
        return not self.computation.task.audited or self._statement.planned([*logged]) is not None

    def _netted(self, logged: Mapping[str, LoggedRows]) -> list[Netted] | None:
        """The netted changes of the tables that have some; None if those of a table are many."""
        tables = [(n, table) for n, table in enumerate(self.computation.plan.tables, 1) if table.name in logged]
        self.computation.task.tell("netting")
        view, connection = self.computation.task.view, self.computation.connection
        if view.acts_as is not None:
            # the owner may not read the logs; so no condition of the view is tested here, which may be code of his
            connection.execute(raw(f"set local role to default; {PIN_TRANSACTION}"))
            tables = [(number, replace(table, passing="")) for number, table in tables]
        queries = [netting_sql(table, logged[table.name]) for _, table in tables]
        # one message, with a result for each statement
        cursor = connection.execute(raw("; ".join([BEGIN_NETTING, *queries, _BEGIN])), prepare=False)
        rows = [found for _ in _results(cursor) if cursor.description for found in cursor.fetchall()]
        if view.acts_as is not None:
            apply_view_settings(connection, READ_SETTINGS | view.settings)
        found = []
        for (number, table), row in zip(tables, rows, strict=True):
            one = Netted.of(number, table, logged[table.name], row)
            if one is None:
                return None
            if one.rows:
                found.append(one)
        return found

    def _run(self, netted: Sequence[Netted], changes: ChangePlan) -> int:
        """Execute the statement; returns the rows deleted plus inserted."""
        made, state = self.computation, self.rows.target.state
        arrays = [array for one in netted for array in one.arrays]
        try:
            if made.sql.role is None:
                cursor = psycopg.RawCursor(made.connection)
                row = cursor.execute(raw(self._statement.text(netted, changes)), arrays, prepare=True).fetchone()
            else:
                # what runs SQL as another role takes no parameters
                written = self._statement.written(netted, changes, [literal(array) for array in arrays])
                row = made.sql.changed(written, RESULT)
        except psycopg.errors.CheckViolation as error:
            if not state.endswith(f".{quote(error.diag.table_name or '')}"):
                raise
            raise Diverged(f"{state} counts fewer rows than the delta takes away") from error
        return self._statement.changed(row or (0, 0, 0, False, False))


def _results(cursor: psycopg.Cursor[Any]) -> Iterator[None]:
    """One turn for each result of a message."""
    more: bool | None = True
    while more:
        yield
        more = cursor.nextset()
