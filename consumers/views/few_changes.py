"""Few changes: joins and sums follow them by one prepared statement, which makes no temporary table.

    with gdq_delta_1 as (select ... from unnest($1::int[], $2::bigint[]) ...), gdq_rows_1 as (select ...),
         gdq_out as (...), gdq_deleted as (delete from target ...), gdq_inserted as (insert into target ...)
    select ...

The netted changes of a table pass through this process, as one array for each column. So the text of the statement
depends on the view alone, and each session plans it once. For plans that recompute keys the arrays are parts of the
statements that Computation runs. More changes are in tables with statistics.
"""

from __future__ import annotations

import re
from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import psycopg

from gdq.consumers.views.change_source import LogColumn, LoggedRows
from gdq.consumers.views.computation import Computation
from gdq.consumers.views.difference import row_image_sql
from gdq.consumers.views.kept_state import KeptSums, same_group
from gdq.consumers.views.netting import (
    BEGIN_NETTING,
    END_NETTING,
    UNKNOWN_ROWS,
    as_part,
    netted_images_sql,
    netted_rows_sql,
)
from gdq.consumers.views.row_deletion import found_rows_sql
from gdq.consumers.views.signals import Diverged, NeedsFull, NeedsTables
from gdq.consumers.views.target_rows import TargetRows
from gdq.errors import PlanError
from gdq.plan.postgres import ChangePlan
from gdq.plan.steps import SignedOutcome
from gdq.plan.table import WEIGHT_COLUMN, UsedTable
from gdq.sql_text import PIN_TRANSACTION, literal, quote, raw
from gdq.typed.pgtypes import READ_SETTINGS
from gdq.view.table_schema import apply_view_settings

# Changes of one table in the log that count as few, bytes of their netted columns as they are stored, and as text.
_FEW, _FEW_BYTES, _SENT_BYTES = UNKNOWN_ROWS, 2**20, 2**23

# Types whose arrays have the same values again when they are read from text.
_SENT = re.compile(
    r'smallint|integer|bigint|oid|real|double precision|boolean|uuid|date|text|name|"char"|bytea|json|jsonb|inet|cidr'
    r"|character varying(\(\d+\))?|character\(\d+\)|numeric(\(\d+,-?\d+\))?|interval"
    r"|time(stamp)?(\(\d\))? with(out)? time zone"
)

# What a plan with more than one statement reads.
_NO_PART = re.compile(r"\bpg_temp\b|\bgdq_(?:keys|null|old|any)_\d+\b")

# A plan made for the ten rows that PostgreSQL expects of an array is good for all that are few.
_BEGIN = f"{END_NETTING}; set local jit = off; set local plan_cache_mode = force_generic_plan"
_END = "set local jit to default; set local plan_cache_mode to default"

_RESULT = "expected bigint, deleted bigint, inserted bigint, refused boolean"

# Statements by what they are made of.
_KNOWN_MAX = 1000
_known: dict[Hashable, str] = {}


@dataclass(frozen=True, slots=True)
class _Netted:
    """The netted changes of one table: `rows` of them, with one array, as text, for each of `columns` and the weight.

    `number`: the table's in the plan.
    """

    number: int
    table: UsedTable
    columns: tuple[LogColumn, ...]
    rows: int
    arrays: tuple[str, ...]

    @property
    def name(self) -> str:
        return f"gdq_delta_{self.number}"

    def select(self, arrays: Sequence[str]) -> str:
        """SELECT of the changes from these arrays in SQL."""
        types = [*(column.type for column in self.columns), "bigint"]
        typed = ", ".join(f"{array}::{kind}[]" for array, kind in zip(arrays, types, strict=True))
        names = [*(quote(column.name) for column in self.columns), quote(WEIGHT_COLUMN)]
        collated = [f" collate {c.collation}" if c.collation else "" for c in self.columns]
        shown = [f"d.{name}{collate} as {name}" for name, collate in zip(names, [*collated, ""], strict=True)]
        return f"select {', '.join(shown)} from unnest({typed}) as d({', '.join(names)})"

    def literal(self) -> str:
        """The same from literals, with the text of whole rows where a table without a key is to be found by it."""
        select = self.select([literal(array) for array in self.arrays])
        if self.table.key:
            return select
        return f"select *, {row_image_sql(self.table.logged)} as __image from ({select}) as d"


@dataclass(slots=True)
class FewChanges:
    """Brings the target of one view to the held snapshot by one statement, if it has few changes and its plan allows.

    `computation` must have begun.
    """

    computation: Computation
    rows: TargetRows

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

    def _change(self, netted: Sequence[_Netted]) -> int | None:
        made, total = self.computation, sum(one.rows for one in netted)
        changes = self._planned([one.table.name for one in netted])
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
        if made.task.audited:
            for one in netted:
                made.temporary(one.name, one.literal())
        return rows

    def _is_suited(self, logged: Mapping[str, LoggedRows]) -> bool:
        """True if all values can be sent as arrays, and few changes of these tables need no table of their own."""
        if any(_SENT.fullmatch(column.type) is None for rows in logged.values() for column in rows.columns):
            return False
        if "pg_temp" in self.computation.plan.query:
            return False
        return not self.computation.task.audited or self._planned([*logged]) is not None

    def _sums(self) -> KeptSums:
        state = self.computation.plan.state
        assert state is not None
        return KeptSums(state, state.loose)

    def _planned(self, changed: Sequence[str]) -> ChangePlan | None:
        """The plan after changes of these tables, if all of it can be one statement."""
        plan, state = self.computation.plan, self.computation.plan.state
        if plan.full or plan.top is not None or (state is not None and (state.order or state.extremes)):
            return None
        try:
            changes = plan.plan_changes(changed)
        except PlanError:
            return None
        if not isinstance(changes.outcome, SignedOutcome) or any(step.kind != "delta" for step in changes.steps):
            return None
        texts = [changes.outcome.rows, *(step.sql for step in changes.steps)]
        if any(_NO_PART.search(as_part(text)) for text in texts):
            return None
        return changes

    def _netted(self, logged: Mapping[str, LoggedRows]) -> list[_Netted] | None:
        """The netted changes of the tables that have some; None if those of a table are many."""
        tables = [(n, table) for n, table in enumerate(self.computation.plan.tables, 1) if table.name in logged]
        self.computation.task.tell("netting")
        view, connection = self.computation.task.view, self.computation.connection
        if view.acts_as is not None:
            # the owner may not read the logs; so no condition of the view is tested here, which may be code of his
            connection.execute(raw(f"set local role to default; {PIN_TRANSACTION}"))
            tables = [(number, replace(table, passing="")) for number, table in tables]
        queries = [_netting(table, logged[table.name]) for _, table in tables]
        # one message, with a result for each statement
        cursor = connection.execute(raw("; ".join([BEGIN_NETTING, *queries, _BEGIN])), prepare=False)
        rows = [found for _ in _results(cursor) if cursor.description for found in cursor.fetchall()]
        if view.acts_as is not None:
            apply_view_settings(connection, READ_SETTINGS | view.settings)
        found = []
        for (number, table), (seen, netted, small, *arrays) in zip(tables, rows, strict=True):
            if seen > _FEW or not small:
                return None
            columns = {column.name: column for column in logged[table.name].columns}
            if netted:
                one = _Netted(number, table, tuple(columns[name] for name in table.logged), netted, tuple(arrays))
                found.append(one)
        return found

    def _statement(self, netted: Sequence[_Netted], changes: ChangePlan) -> str:
        """The statement for these changes, with a parameter for each array; written once."""
        plan, target = self.computation.plan, self.rows.target
        columns = tuple((one.number, one.columns) for one in netted)
        key = (plan.fingerprint(), plan.schemas, changes, columns, target.table, target.state, tuple(self.rows.types))
        if key not in _known:
            if len(_known) >= _KNOWN_MAX:
                _known.clear()
            _known[key] = self._written(netted, changes, [f"${n}" for n in range(1, _arrays_of(netted) + 1)])
        return _known[key]

    def _written(self, netted: Sequence[_Netted], changes: ChangePlan, arrays: Sequence[str]) -> str:
        """The statement, with these arrays in SQL."""
        left = iter(arrays)
        parts = {one.name: one.select([next(left) for _ in one.arrays]) for one in netted}
        parts |= {as_part(step.name): as_part(step.sql) for step in changes.steps}
        assert isinstance(changes.outcome, SignedOutcome)
        rows, refused = as_part(changes.outcome.rows), "false"
        if self.computation.plan.state is not None:
            kept = self._sums()
            parts |= _state_parts(kept, self.rows.target.state, rows)
            rows = _shown_rows(kept, len(self.rows.types))
            if kept.plan.unnumbered:
                refused = f"exists (select from gdq_sums where {kept.plan.unnumbered})"
        else:
            rows = f"select {', '.join([*_numbered(len(self.rows.types)), 'w'])} from {rows} as r"
        parts |= self._target_parts(rows)
        written = ", ".join(f"{name} as ({part})" for name, part in parts.items())
        # after a function was replaced the text is another, as a session's plan may hold a value of the old one
        return (
            f"/* {self.computation.plan.fingerprint()} */ "
            f"with {written} select (select n from gdq_expected), (select count(*) from gdq_deleted), "
            f"(select count(*) from gdq_inserted), {refused}"
        )

    def _target_parts(self, rows: str) -> dict[str, str]:
        """The parts that change the target. All rows that went go before the first comes: a key may be unique."""
        table, types = self.rows.target.table, self.rows.types
        found = found_rows_sql(table, [column.name for column in types], self.computation.plan.match, "gdq_out")
        names = ", ".join(_numbered(len(types)))
        return {
            "gdq_out": netted_rows_sql(types, rows),
            "gdq_expected": "select coalesce(-sum(net), 0)::bigint as n from gdq_out where net < 0",
            "gdq_gone": f"select ctid from ({found}) as f where copy <= n",
            "gdq_deleted": f"""
                delete from {table}
                 where ctid = any (array(select ctid from gdq_gone
                                          where (select count(*) from gdq_gone) = (select n from gdq_expected)))
                returning 1""",
            "gdq_inserted": f"""
                insert into {table} ({self.rows.columns})
                select {names} from gdq_out, generate_series(1, net)
                 where net > 0 and (select count(*) from gdq_deleted) >= 0
                returning 1""",
        }

    def _run(self, netted: Sequence[_Netted], changes: ChangePlan) -> int:
        """Execute the statement; returns the rows deleted plus inserted."""
        made, state = self.computation, self.rows.target.state
        arrays = [array for one in netted for array in one.arrays]
        try:
            if made.sql.role is None:
                cursor = psycopg.RawCursor(made.connection)
                row = cursor.execute(raw(self._statement(netted, changes)), arrays, prepare=True).fetchone()
            else:
                # what runs SQL as another role takes no parameters
                row = made.sql.changed(self._written(netted, changes, [literal(array) for array in arrays]), _RESULT)
        except psycopg.errors.CheckViolation as error:
            if not state.endswith(f".{quote(error.diag.table_name or '')}"):
                raise
            raise Diverged(f"{state} counts fewer rows than the delta takes away") from error
        expected, deleted, inserted, refused = row or (0, 0, 0, False)
        if refused:
            raise NeedsFull("NaN or infinity came into or went from a sum")
        if deleted != expected:
            raise NeedsTables
        return int(deleted + inserted)


def _arrays_of(netted: Sequence[_Netted]) -> int:
    return sum(len(one.arrays) for one in netted)


def _results(cursor: psycopg.Cursor[Any]) -> Iterator[None]:
    """One turn for each result of a message."""
    more: bool | None = True
    while more:
        yield
        more = cursor.nextset()


def _numbered(width: int) -> list[str]:
    return [f"c{n}" for n in range(1, width + 1)]


def _netting(table: UsedTable, rows: LoggedRows) -> str:
    """SELECT of one row: the changes seen in the log, the netted ones, are they small, and their columns as arrays.

    No more than a few changes are looked at, and no large values are read.
    """
    values = [f"d.{quote(name)}" for name in table.logged]
    size = " + ".join(f"coalesce(pg_catalog.pg_column_size({value}), 0)" for value in values) or "0"
    values.append(f"d.{quote(WEIGHT_COLUMN)}")
    names = [f"a{n}" for n in range(len(values))]
    arrays = ", ".join(f"array_agg({value})::text as {name}" for name, value in zip(names, values, strict=True))
    length = " + ".join(f"coalesce(octet_length(a.{name}), 0)" for name in names)
    shown = ", ".join(f"case when fits.small then a.{name} end" for name in names)
    net = netted_images_sql(table, rows.images, exact=rows.is_exact(table.logged))
    return f"""
        with seen as materialized (
               select count(*) as n from (select from ({rows.select}) as r limit {_FEW + 1}) as r),
             net as materialized (select * from ({net}) as d where (select n from seen) <= {_FEW}),
             sized as (select count(*) as n, coalesce(sum({size}), 0) <= {_FEW_BYTES} as small from net as d),
             a as (select {arrays} from net as d where (select small from sized))
        select (select n from seen), sized.n, sized.small and fits.small, {shown}
          from sized, a, lateral (select {length} <= {_SENT_BYTES} as small) as fits"""


def _state_parts(kept: KeptSums, state: str, rows: str) -> dict[str, str]:
    """The parts that add signed rows to the state: what is added, and the groups that it touches, before and after.

    Without groups the state is one row, which never goes.
    """
    keys, numbers = [*kept.keys], [*kept.numbers]
    listed, same = ", ".join([*keys, *numbers]), same_group(keys)
    some = " or ".join(f"{name} <> 0" for name in numbers)
    before = ", ".join(f"s.{name}" for name in [*keys, *numbers])
    totals = [f"sum({name})::{'numeric' if name[0] == 's' else 'bigint'} as {name}" for name in numbers]
    added = ", ".join(f"{name} = s.{name} + d.{name}" for name in numbers)
    values = ", ".join(f"d.{name}" for name in [*keys, *numbers])
    touched, grouped = "", ""
    if keys:
        touched = f" join (select distinct {', '.join(kept.groups)} from gdq_sums) as d on {same_group(kept.groups)}"
        grouped = f" group by {', '.join(keys)} having sum(n) <> 0"
    parts = {
        "gdq_sums": f"select * from ({kept.sums(rows)}) as s where {some}",
        "gdq_before": f"select {before} from {state} as s{touched}",
        "gdq_after": f"""
            select {", ".join([*keys, *totals])}
              from (select {listed} from gdq_before union all select {listed} from gdq_sums) as r{grouped}""",
        "gdq_summed": f"""
            update {state} as s set {added} from gdq_sums as d where {same}{" and s.n + d.n <> 0" if keys else ""}""",
        "gdq_begun": f"""
            insert into {state} ({listed})
            select {values} from gdq_sums as d where not exists (select from gdq_before as s where {same})""",
    }
    if keys:
        parts["gdq_emptied"] = f"delete from {state} as s using gdq_sums as d where {same} and s.n + d.n = 0"
    return parts


def _shown_rows(kept: KeptSums, width: int) -> str:
    """SELECT of the view's rows of the touched groups: as they are with weight 1, as they were with -1."""
    names = ", ".join(_numbered(width))
    after, before = kept.shown("gdq_after", ""), kept.shown("gdq_before", "")
    return (
        f"select {names}, 1 as w from ({after}) as a({names}) "
        f"union all select {names}, -1 as w from ({before}) as b({names})"
    )
