"""The planner of the engine postgres: any SELECT in, and for each set of changed tables the statements of a refresh.

A pure function of the view's canonical SQL and the schema of its tables, like gdq.plan; the rules are those of
gdq.plan.delta and gdq.plan.kept_state.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Literal

from sqlglot import exp

from gdq.errors import PlanError
from gdq.plan.constants import LEVELS, fix_changed, fix_unchanged
from gdq.plan.delta import DeltaPlanner
from gdq.plan.filter import ROW, filter_of
from gdq.plan.kept_state import StatePlan, plan_state
from gdq.plan.leaf import is_correlated, output_names
from gdq.plan.own_key import missing_columns, own_key, refusal
from gdq.plan.query import Query, parse_query
from gdq.plan.steps import Recompute, Replace, Signed, Step
from gdq.plan.table import TableSchema
from gdq.sql_text import quote

How = Literal["state", "replace", "signed"]

# Raised when the same SQL is planned to another state or target than before: those are filled afresh.
_VERSION = 1


@dataclass(frozen=True, slots=True)
class UsedTable:
    """A table of the view, the columns that the view reads and those of its key (none: it has no key).

    `looked_up`: columns by which correlated subqueries find its rows, one at a time. `passing`: what a row must meet to
    matter, see gdq.plan.filter. `keys_only`: the log lacks other columns, so the delta holds the keys of the rows that
    changed, see gdq.plan.own_key.
    """

    name: str
    columns: tuple[str, ...]
    key: tuple[str, ...]
    looked_up: tuple[str, ...] = ()
    passing: str = ""
    keys_only: bool = False

    def matter(self, images: str) -> str:
        """Of the table's rows in `images`, for FROM, those that may matter."""
        return f"(select * from {images} as {ROW} where {self.passing})" if self.passing else images

    @property
    def logged(self) -> tuple[str, ...]:
        """The columns of its delta."""
        return self.key if self.keys_only else tuple(dict.fromkeys([*self.columns, *self.key]))


@dataclass(frozen=True, slots=True)
class ChangePlan:
    """What a refresh does when certain tables changed: the steps, and how the target's rows follow from them.

    `outcome` None: the rows do not change. Signed for a view with a state: the changes of what its groups are made of.
    """

    steps: tuple[Step, ...]
    outcome: Signed | Replace | Recompute | None


@dataclass(frozen=True, slots=True)
class PostgresPlan:
    """How one view is refreshed inside PostgreSQL.

    `query` is its canonical SQL, `columns` its columns, none where that was not taken apart; `tables` are numbered from
    1 in the names of relations. `state`: the counts and sums that are kept, None when rows are recomputed or added up
    otherwise. `full`: the reason why it can only be loaded in full. `aggregates`: columns that may be sums of floats.
    `match`: columns by which rows of the target are found. `elsewhere`: the target is not in the tables' database.
    `checked`: with `full`, changes that do not reach the view's rows need nothing all the same.
    """

    query: str
    columns: tuple[str, ...]
    tables: tuple[UsedTable, ...]
    state: StatePlan | None
    full: str | None
    aggregates: tuple[str, ...]
    match: tuple[str, ...]
    schemas: tuple[TableSchema, ...]
    elsewhere: bool = False
    checked: bool = False

    @property
    def strategy(self) -> str:
        """state, incremental or full."""
        return "full" if self.full else "state" if self.state else "incremental"

    def plan_changes(self, changed: Collection[str], *, replace: bool = True) -> ChangePlan:
        """The refresh when these tables (quoted and qualified) changed. PlanError when it takes a full load.

        `replace`: rows may be found by their keys alone; else they are always signed.
        """
        names = tuple(table.name for table in self.tables)
        how: How = "state" if self.state is not None else "replace" if replace else "signed"
        return _plan_changes(self.query, self.schemas, names, frozenset(changed), how)

    def reaches(self, table: str) -> bool:
        """Whether a look at the changes of a table tells if they reach the rows of a view that is loaded in full."""
        try:
            return isinstance(self.plan_changes([table]).outcome, Recompute)
        except PlanError:
            return False

    def fingerprint(self) -> str:
        """Changes when the plan does: a target that was filled by another plan is filled afresh."""
        tables = [(table.name, table.columns, table.key) for table in self.tables]
        kept = [self.state.loose] if self.state is not None and self.state.loose else []
        text = json.dumps([_VERSION, self.query, tables, self.strategy, *kept])
        return hashlib.sha256(text.encode()).hexdigest()[:16]

    def alone(self) -> dict[str, str]:
        """For every table what a refresh does when it changed alone: state, replace, signed, or why a full load."""
        return {table.name: self._rule([table.name]) for table in self.tables}

    def as_dict(self) -> dict[str, object]:
        """The plan as plain values that json takes."""
        return {
            "engine": "postgres",
            "strategy": self.strategy,
            "reason": self.full,
            "elsewhere": self.elsewhere,
            "tables": [
                {"name": t.name, "columns": list(t.columns), "key": list(t.key), "rule": rule}
                for t, rule in zip(self.tables, self.alone().values(), strict=True)
            ],
            "state": [*self.state.group_columns, *self.state.numbers] if self.state else None,
            "statements": [{"name": s.name, "engine": "postgres", "kind": s.kind, "sql": s.sql} for s in self._steps()],
        }

    def __str__(self) -> str:
        lines = [f"strategy: {self.strategy}"] + ([f"reason: {self.full}"] if self.full else [])
        if self.elsewhere:
            lines.append("target: elsewhere; rows are computed beside the tables and copied there, no state is kept")
        lines += [f"table {name}: {rule}" for name, rule in self.alone().items()]
        if self.state is not None:
            lines.append(f"state: {', '.join([*self.state.group_columns, *self.state.numbers])}")
        return "\n".join([*lines, *(f"{step.kind} {step.name}: {step.sql}" for step in self._steps())])

    def _steps(self) -> list[Step]:
        """The steps when all tables changed; none when that takes a full load."""
        try:
            changes = self.plan_changes([table.name for table in self.tables])
        except PlanError:
            return []
        steps = list(changes.steps)
        if isinstance(changes.outcome, Replace):
            steps.append(Step("delta", "target", changes.outcome.sql))
        return steps

    def _rule(self, changed: Collection[str]) -> str:
        try:
            outcome = self.plan_changes(changed).outcome
        except PlanError as error:
            return f"full: {error}"
        if isinstance(outcome, Recompute):
            return f"full: {outcome.reason}"
        if self.state is not None:
            return "state"
        return "replace" if isinstance(outcome, Replace) else "signed"


def plan_postgres(canonical: str, tables: Sequence[TableSchema], *, elsewhere: bool = False) -> PostgresPlan:
    """The plan of a view by its canonical SQL. PlanError when the log lacks a column that the view reads.

    What cannot be refreshed from changes has a plan too: `full` says why. `elsewhere`: the target is not in the
    database of the tables, so nothing is kept beside it: groups are recomputed.
    """
    return _plan(canonical, tuple(tables), elsewhere)


# Whoever refreshes again and again plans once.
@lru_cache(maxsize=256)
def _plan_changes(
    canonical: str,
    tables: tuple[TableSchema, ...],
    names: tuple[str, ...],
    changed: frozenset[str],
    how: How,
) -> ChangePlan:
    first: PlanError | None = None
    for kinds, held in [(kinds, held) for kinds in LEVELS for held in (True, False)]:
        query = parse_query(canonical, tables)
        planner = DeltaPlanner(query, {name: n for n, name in enumerate(names, 1)}, changed)
        try:
            if kinds and not fix_changed(planner, kinds):
                continue
            if held:
                fix_unchanged(planner)
            outcome = _outcome(planner, how)
            # rows that come may be selected in other sessions too
            if not isinstance(outcome, Replace) or "pg_temp." not in outcome.sql:
                return ChangePlan(tuple(planner.steps), outcome)
        except PlanError as error:
            first = first or error
    raise first or AssertionError("the first level plans or fails")


def _outcome(planner: DeltaPlanner, how: How) -> Signed | Replace | Recompute | None:
    state = plan_state(planner.query) if how == "state" else None
    if state is None:
        return planner.outcome(replace=how == "replace")
    rows = planner.core(state.select, state.items)
    return None if rows is None else Signed(rows)


@lru_cache(maxsize=256)
def _plan(canonical: str, tables: tuple[TableSchema, ...], elsewhere: bool) -> PostgresPlan:
    try:
        query = parse_query(canonical, tables)
    except PlanError as error:
        whole = tuple(UsedTable(t.qualified, tuple(c.name for c in t.columns), t.key) for t in tables)
        return PostgresPlan(canonical, (), whole, None, str(error), (), (), tuple(tables), elsewhere)
    used = tuple(_used(query, table) for table in tables if table.qualified in query.tables(query.root))
    columns = output_names(query.root)
    folded = _folded(query, used, tables)
    if folded is not None:
        return PostgresPlan(canonical, columns, used, None, folded, (), (), tuple(tables), elsewhere)
    state = None if elsewhere else plan_state(query)
    summed = query.root.find(exp.AggFunc, exp.Anonymous, exp.Window) is not None
    plan = PostgresPlan(canonical, columns, used, state, None, columns if summed else (), (), tuple(tables), elsewhere)
    rules = plan.alone()
    full = next(iter(rules.values())) if all(rule.startswith("full: ") for rule in rules.values()) else None
    reason = full.removeprefix("full: ") if full else None
    match = () if full else _match(query, plan)
    checked = full is not None and any(plan.reaches(name) for name in rules)
    return replace(plan, full=reason, match=match, checked=checked)


def _folded(query: Query, used: Sequence[UsedTable], tables: Sequence[TableSchema]) -> str | None:
    """Why rows cannot be looked for by their values: a collation takes different ones for equal; None when they can.

    The log and the target hold values without their collation, so keys of them would miss what is spelled otherwise.
    """
    if query.root.find(exp.Collate):
        return "a view with COLLATE is loaded in full [collation]"
    read = {(table.name, name) for table in used for name in table.columns}
    for table in tables:
        for column in table.columns:
            if column.folded and (table.qualified, column.name) in read:
                return f"the collation of {quote(column.name)} takes different values for equal [collation]"
    return None


def _used(query: Query, table: TableSchema) -> UsedTable:
    aliases = {leaf.alias for leaf in query.leaves.values() if leaf.table is table}
    names = {column.name for column in query.root.find_all(exp.Column) if column.table in aliases}
    columns = [column for column in table.columns if column.name in names]
    missing = missing_columns(query, table)
    if missing and not own_key(query, table):
        raise refusal(table, missing)
    looked_up = [
        side.name
        for select in query.root.find_all(exp.Select)
        if is_correlated(select)
        for equal in select.find_all(exp.EQ)
        for side in (equal.this.unnest(), equal.expression.unnest())
        if isinstance(side, exp.Column) and side.table in aliases
    ]
    names_read = tuple(column.name for column in columns)
    passing = "" if missing else filter_of(query, table)
    return UsedTable(table.qualified, names_read, table.key, tuple(dict.fromkeys(looked_up)), passing, bool(missing))


def _match(query: Query, plan: PostgresPlan) -> tuple[str, ...]:
    """Columns of the view by which its rows are looked for when they change: keys of a replace, groups, base keys."""
    if plan.state is not None:
        return tuple(name for name, _ in plan.state.keys)
    for tables in [[table.name for table in plan.tables], *([table.name] for table in plan.tables)]:
        try:
            outcome = plan.plan_changes(tables).outcome
        except PlanError:
            continue
        if isinstance(outcome, Replace):
            return tuple(name for name, _ in outcome.keys)
    if not isinstance(query.root, exp.Select):
        return ()
    found = []
    for item in query.root.expressions:
        column = item.unalias()
        leaf = query.leaves[column.table] if isinstance(column, exp.Column) else None
        if leaf is not None and leaf.table is not None and column.name in leaf.table.key:
            found.append(item.alias)
    return tuple(found)
