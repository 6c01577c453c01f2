"""The planner of the engine postgres: for any SELECT and any set of changed tables, the statements of a refresh.

A pure function of the view's canonical SQL and its table schemas; the rules are in gdq.plan.delta and
gdq.plan.kept_state.
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
from gdq.plan.constants import CONSTANT_LEVELS, fix_changed_subqueries, fix_unchanged_subqueries
from gdq.plan.delta import DeltaPlanner
from gdq.plan.filter import row_filter
from gdq.plan.grouping import empty_checks, parse_grouped
from gdq.plan.kept_state import StatePlan, plan_state
from gdq.plan.leaf import is_correlated, output_names
from gdq.plan.own_key import missing_columns, missing_columns_error, own_key
from gdq.plan.query import Query
from gdq.plan.steps import PlanStep, RecomputeOutcome, ReplaceOutcome, SignedOutcome
from gdq.plan.table import TableSchema, UsedTable
from gdq.plan.top import TopPlan, plan_top, without_limit
from gdq.plan.whitelist import UNREAD, UNSETTLED, QueryReading, Settled
from gdq.sql_text import quote

_How = Literal["state", "top", "replace", "signed"]

# Increase it if the same SQL gets another state or target than before: targets are then reloaded.
_VERSION = 1


@dataclass(frozen=True, slots=True)
class ChangePlan:
    """A refresh after changes of certain tables: the steps, and how the target's rows follow from them.

    `outcome` None: the rows do not change. With a state, SignedOutcome holds the changes of the groups' input rows.
    """

    steps: tuple[PlanStep, ...]
    outcome: SignedOutcome | ReplaceOutcome | RecomputeOutcome | None


@dataclass(frozen=True, slots=True)
class PostgresPlan:
    """How one view is refreshed inside PostgreSQL.

    `query`: its canonical SQL. `columns`: its columns, empty if the SQL cannot be parsed. `tables`: numbered from 1
    in the names of relations. `state`: the counts and sums that are kept, or None. `full`: why the view can only be
    loaded in full. `aggregates`: columns that may be sums of floats. `match`: columns by which rows of the target
    are found. `top`: the first rows that are kept, or None. `elsewhere`: the target is in another database than the
    tables. `checked`: with `full`, a check shows whether changes reach the view's rows, so that the others need no
    load. `functions`, `settled` and `is_own`: as for QueryReading.
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
    functions: str = ""
    settled: Settled = UNSETTLED
    top: TopPlan | None = None
    is_own: bool = False

    @property
    def strategy(self) -> str:
        """The strategy: state, incremental or full."""
        return "full" if self.full else "state" if self.state or self.top else "incremental"

    def plan_changes(self, changed: Collection[str], *, replace: bool = True, local: bool = False) -> ChangePlan:
        """The refresh after changes of these tables (quoted, qualified); PlanError if it takes a full load.

        `replace`: rows may be deleted by their keys; else they are always signed. `local`: the session of the steps
        selects the rows that replace others. Spark's tasks select them in sessions that lack the steps' relations.
        """
        names = tuple(table.name for table in self.tables)
        how: _How = "replace" if replace else "signed"
        if self.state is not None or self.top is not None:
            how = "top" if self.state is None else "state"
        return _plan_changes(self.query, self.schemas, names, frozenset(changed), how, local=local)

    def reaches(self, table: str) -> bool:
        """True if a check can show whether a table's changes reach the rows of a view that is loaded in full."""
        try:
            return isinstance(self.plan_changes([table]).outcome, RecomputeOutcome)
        except PlanError:
            return False

    def fingerprint(self) -> str:
        """Hash of the plan: a target that was filled by a plan with another hash is reloaded."""
        tables = [(table.name, table.columns, table.key) for table in self.tables]
        more: list[object] = [self.state.loose] if self.state is not None and self.state.loose else []
        more += [self._unlogged] if self._unlogged else []
        more += [self.functions] if self.functions else []
        text = json.dumps([_VERSION, self.query, tables, self.strategy, *more])
        return hashlib.sha256(text.encode()).hexdigest()[:16]

    @property
    def _unlogged(self) -> list[tuple[str, str, str, int]]:
        """The columns that the view may read and the log does not hold: DDL on these need not leave an event."""
        read = {table.name: table.columns for table in self.tables}
        return [
            (schema.qualified, column.name, column.type, column.number)
            for schema in self.schemas
            for column in schema.unlogged
            if self.full or column.name in read[schema.qualified]
        ]

    def alone(self) -> dict[str, str]:
        """The rule for every table if it changed alone: state, replace, signed, or full with the reason."""
        return {table.name: self._rule([table.name]) for table in self.tables}

    def as_dict(self) -> dict[str, object]:
        """The plan as plain values for JSON."""
        return {
            "engine": "postgres",
            "strategy": self.strategy,
            "reason": self.full,
            "elsewhere": self.elsewhere,
            "not_audited": self.settled.reason,
            "tables": [
                {"name": t.name, "columns": list(t.columns), "key": list(t.key), "rule": rule}
                for t, rule in zip(self.tables, self.alone().values(), strict=True)
            ],
            "state": self._kept or None,
            "statements": [
                {"name": s.name, "engine": "postgres", "kind": s.kind, "sql": s.sql}
                | ({"instead": s.instead} if s.instead else {})
                for s in self._steps()
            ],
        }

    def __str__(self) -> str:
        lines = [f"strategy: {self.strategy}"] + ([f"reason: {self.full}"] if self.full else [])
        if self.elsewhere:
            lines.append("target: elsewhere; rows are computed beside the tables and copied there, no state is kept")
        lines += [] if self.full and not self.checked else self.settled.lines(self.columns)
        lines += [f"table {name}: {rule}" for name, rule in self.alone().items()]
        if self._kept:
            lines.append(f"state: {', '.join(self._kept)}")
        for step in self._steps():
            lines.append(f"{step.kind} {step.name}: {step.sql}")
            lines += [f"or, if it costs less: {step.instead}"] if step.instead else []
        return "\n".join(lines)

    @property
    def _kept(self) -> list[str]:
        """The columns of the state that is kept; empty without one."""
        if self.state is not None:
            return [*self.state.group_columns, *self.state.numbers]
        return [*self.top.columns, "n"] if self.top is not None else []

    def _steps(self) -> list[PlanStep]:
        """The steps if all tables changed; empty if that takes a full load."""
        try:
            changes = self.plan_changes([table.name for table in self.tables])
        except PlanError:
            return []
        steps = list(changes.steps)
        if isinstance(changes.outcome, ReplaceOutcome):
            steps.append(PlanStep("delta", "target", changes.outcome.sql))
        return steps

    def _rule(self, changed: Collection[str]) -> str:
        try:
            outcome = self.plan_changes(changed).outcome
        except PlanError as error:
            return f"full: {error}"
        if isinstance(outcome, RecomputeOutcome):
            return f"full: {outcome.reason}"
        if self.state is not None or self.top is not None:
            return "state"
        return "replace" if isinstance(outcome, ReplaceOutcome) else "signed"


def plan_postgres(
    canonical: str,
    tables: Sequence[TableSchema],
    *,
    elsewhere: bool = False,
    tops: bool = True,
    reading: QueryReading = UNREAD,
) -> PostgresPlan:
    """The plan of a view by its canonical SQL; PlanError if the log lacks a column that the view reads.

    A view that cannot be refreshed from changes has a plan too: `full` says why. `elsewhere`: the target is in another
    database than the tables, so no state is kept and groups are recomputed. `tops`: the first rows of a query with
    LIMIT may be kept.
    """
    plan = _plan(canonical, tuple(tables), elsewhere, tops=tops and not elsewhere)
    if reading.refused is not None and not (plan.full and not plan.checked):
        # what the planner read is not to be believed: not even which columns count
        plan = _whole(canonical, tuple(tables), reading.refused, elsewhere)
    return replace(plan, functions=reading.functions, settled=reading.settled, is_own=reading.is_own)


def _whole(canonical: str, tables: tuple[TableSchema, ...], reason: str, elsewhere: bool) -> PostgresPlan:
    """The plan of a view that is loaded in full, whatever its SQL may be."""
    used = tuple(UsedTable(t.qualified, tuple(c.name for c in t.columns), t.key) for t in tables)
    return PostgresPlan(canonical, (), used, None, reason, (), (), tables, elsewhere)


# cached for a process that refreshes again and again
@lru_cache(maxsize=256)
def _plan_changes(
    canonical: str,
    tables: tuple[TableSchema, ...],
    names: tuple[str, ...],
    changed: frozenset[str],
    how: _How,
    *,
    local: bool,
) -> ChangePlan:
    first: PlanError | None = None
    for kinds, held in [(kinds, held) for kinds in CONSTANT_LEVELS for held in (True, False)]:
        query = parse_grouped(canonical, tables)
        planner = DeltaPlanner(query, {name: n for n, name in enumerate(names, 1)}, changed)
        try:
            if kinds and not fix_changed_subqueries(planner, kinds, held=held):
                continue
            if held:
                fix_unchanged_subqueries(planner)
            planner.steps += empty_checks(query, planner.relations)
            outcome = _outcome(planner, how)
            if local or not isinstance(outcome, ReplaceOutcome) or "pg_temp." not in outcome.sql:
                return ChangePlan(tuple(planner.steps), outcome)
        except PlanError as error:
            first = first or error
    raise first or AssertionError("the first level plans or fails")


def _outcome(planner: DeltaPlanner, how: _How) -> SignedOutcome | ReplaceOutcome | RecomputeOutcome | None:
    state = plan_state(planner.query) if how == "state" else None
    if how == "top":
        return _top_outcome(planner)
    if state is None:
        return planner.outcome(replace=how == "replace")
    rows = planner.core(state.select, state.items)
    return None if rows is None else SignedOutcome(rows)


def _top_outcome(planner: DeltaPlanner) -> SignedOutcome | None:
    """The changes of the rows of a query without its LIMIT."""
    root, top = planner.query.root, plan_top(planner.query)
    if top is None or not isinstance(root, exp.Select):
        raise AssertionError("a plan keeps the first rows of a SELECT with LIMIT")
    without_limit(root, top.hidden)
    rows = planner.delta(root)
    return None if rows is None else SignedOutcome(rows)


@lru_cache(maxsize=256)
def _plan(canonical: str, tables: tuple[TableSchema, ...], elsewhere: bool, *, tops: bool) -> PostgresPlan:
    try:
        query = parse_grouped(canonical, tables)
    except PlanError as error:
        return _whole(canonical, tables, str(error), elsewhere)
    used = tuple(_used(query, table) for table in tables if table.qualified in query.tables(query.root))
    columns = output_names(query.root)
    folded = _folded(query, used, tables)
    if folded is not None:
        return PostgresPlan(canonical, columns, used, None, folded, (), (), tuple(tables), elsewhere)
    state = None if elsewhere else plan_state(query)
    summed = query.root.find(exp.AggFunc, exp.Anonymous, exp.Window) is not None
    plan = PostgresPlan(canonical, columns, used, state, None, columns if summed else (), (), tuple(tables), elsewhere)
    if tops and state is None:
        kept = replace(plan, top=plan_top(query))
        if kept.top is not None and not all(rule.startswith("full: ") for rule in kept.alone().values()):
            plan = kept
    rules = plan.alone()
    full = next(iter(rules.values())) if all(rule.startswith("full: ") for rule in rules.values()) else None
    reason = full.removeprefix("full: ") if full else None
    match = () if full else _match(query, plan)
    checked = full is not None and any(plan.reaches(name) for name in rules)
    return replace(plan, full=reason, match=match, checked=checked)


def _folded(query: Query, used: Sequence[UsedTable], tables: Sequence[TableSchema]) -> str | None:
    """Why rows cannot be found by their values: a collation treats different values as equal; None if they can.

    The log and the target hold values without the collation, so their keys would miss equal values of other spelling.
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
        raise missing_columns_error(table, missing)
    looked_up = [
        side.name
        for select in query.root.find_all(exp.Select)
        if is_correlated(select)
        for equal in select.find_all(exp.EQ)
        for side in (equal.this.unnest(), equal.expression.unnest())
        if isinstance(side, exp.Column) and side.table in aliases
    ]
    names_read = tuple(column.name for column in columns)
    passing = "" if missing else row_filter(query, table)
    return UsedTable(table.qualified, names_read, table.key, tuple(dict.fromkeys(looked_up)), passing, bool(missing))


def _match(query: Query, plan: PostgresPlan) -> tuple[str, ...]:
    """Columns of the view by which changed rows are found: groups, keys of a replace, or keys of the tables."""
    if plan.state is not None:
        return tuple(name for name, _ in plan.state.keys)
    if plan.top is not None:
        return ()
    for tables in [[table.name for table in plan.tables], *([table.name] for table in plan.tables)]:
        try:
            outcome = plan.plan_changes(tables).outcome
        except PlanError:
            continue
        if isinstance(outcome, ReplaceOutcome):
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
