"""The planner of the engine spark for views of several tables: joins, semi and anti joins, UNION ALL, GROUP BY.

A pure function of the view's canonical SQL and the schema of its tables, like gdq.plan.postgres. PostgreSQL computes
what concerns one table, in the statement that reads it. Spark joins, counts and adds. What is computed of several
tables (a product of two columns, a condition over both) PostgreSQL computes of the joined rows, before they are merged.

Every row of a table travels with two numbers: how many copies of it there are now (n) and how many there were (o). A
row of the log changes o alone. A joined row has the products, and its weight is their difference. For the padded side
of a LEFT JOIN and for EXISTS what counts is whether a key has rows, now and then.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

from sqlglot import exp

from gdq.errors import PlanError
from gdq.plan.kept_state import StatePlan, plan_state
from gdq.plan.leaf import output_names
from gdq.plan.number import Number
from gdq.plan.postgres import PostgresPlan, UsedTable, plan_postgres
from gdq.plan.query import Query, parse_query, render, selects_of, subqueries_of, value
from gdq.plan.shape import aggregates_of, group_all, group_of, is_grouped, windows_of
from gdq.plan.spark.branch import plan_branch
from gdq.plan.spark.parts import Branch, Detail
from gdq.plan.table import TableSchema
from gdq.plan.text_types import query_types, text_form

# Raised when the same SQL is planned to another state or target than before: those are filled afresh.
_VERSION = 2

# Aggregates that do not depend on how often a value is there, nor on which of equal values it is.
_OF_VALUES = (exp.Min, exp.Max, exp.LogicalAnd, exp.LogicalOr)


@dataclass(frozen=True, slots=True)
class SparkPlan:
    """How one view is refreshed by Spark. `state` or `detail`: what is kept beside the target; neither: rows alone.

    `sums`: the Spark types of the sums of the state's arguments, None for those of which none is kept; None in all
    when Spark cannot add them up, so that PostgreSQL does, of the joined rows.
    `loose`: key columns of the state of which equal values may be written differently; a hash of how is a key too.
    """

    query: str
    columns: tuple[str, ...]
    tables: tuple[UsedTable, ...]
    branches: tuple[Branch, ...]
    state: StatePlan | None
    detail: Detail | None
    loose: tuple[str, ...]
    sums: tuple[str | None, ...] | None
    aggregates: tuple[str, ...]
    match: tuple[str, ...]
    schemas: tuple[TableSchema, ...]

    @property
    def strategy(self) -> str:
        """What a refresh keeps beside the target: state (sums), values (of groups) or nothing, incremental."""
        return "state" if self.state else "values" if self.detail else "incremental"

    @property
    def state_columns(self) -> list[str]:
        """The groups of the state s."""
        return [f"s.{name}" for name in self.state.group_columns] if self.state is not None else []

    def fingerprint(self) -> str:
        """Changes when the plan does: a target that was filled by another plan is filled afresh."""
        tables = [(table.name, table.columns, table.key) for table in self.tables]
        text = json.dumps(["spark", _VERSION, self.query, tables, self.strategy])
        return hashlib.sha256(text.encode()).hexdigest()[:16]

    def statements(self) -> list[tuple[str, str, str]]:
        """Name, engine and SQL of what is run, in order."""
        found = []
        for branch in self.branches:
            found += [
                (f"gdq_{leaf.alias}", "postgres", leaf.render(leaf.table, "1 as n, 1 as o")) for leaf in branch.leaves
            ]
            found.append(("rows", "spark", branch.spark))
            where = f" where {branch.where}" if branch.where else ""
            found.append(("merge", "postgres", f"select {', '.join(branch.items)}, w from rows{where}"))
        return found

    def as_dict(self) -> dict[str, object]:
        """The plan as plain values that json takes."""
        return {
            "engine": "spark",
            "way": "joins",
            "strategy": self.strategy,
            "reason": None,
            "tables": [{"name": t.name, "columns": list(t.columns), "key": list(t.key)} for t in self.tables],
            "state": _kept(self),
            "statements": [{"name": name, "engine": engine, "sql": sql} for name, engine, sql in self.statements()],
        }

    def __str__(self) -> str:
        way = "way: joins; PostgreSQL reads and merges, Spark joins, counts and adds, which its values allow"
        lines = [way, f"strategy: {self.strategy}", *(f"table {table.name}" for table in self.tables)]
        kept = _kept(self)
        if kept is not None:
            lines.append(f"state: {', '.join(kept)}")
        return "\n".join([*lines, *(f"{name} ({engine}): {sql}" for name, engine, sql in self.statements())])


def plan_spark(canonical: str, tables: Sequence[TableSchema]) -> SparkPlan:
    """The plan of a view by its canonical SQL. PlanError, whose code names what Spark does not cover."""
    return _plan(canonical, tuple(tables))


# Whoever refreshes again and again plans once.
@lru_cache(maxsize=256)
def _plan(canonical: str, tables: tuple[TableSchema, ...]) -> SparkPlan:
    known = _known(canonical, tables)
    query = parse_query(canonical, tables)
    root = query.root
    selects = _branches(root)
    state: StatePlan | None = None
    detail: Detail | None = None
    if len(selects) > 1 or _is_distinct(root):
        if any(is_grouped(select) for select in selects):
            raise PlanError("spark-set-of-groups", "Spark takes UNION and DISTINCT of rows, not of groups")
        items = [[value(item) for item in select.expressions] for select in selects]
        if _is_distinct(root):
            _refuse_vague(query, [item for some in items for item in some])
            state = _distinct(selects[0], items[0], output_names(root))
    elif is_grouped(selects[0]):
        state = plan_state(query)
        if state is not None and state.extremes:
            raise PlanError("no-group-by", "Spark keeps no min or max over all rows")
        if state is not None:
            items = [state.items]
        else:
            detail, parts = _detail(query, selects[0])
            items = [parts]
    else:
        items = [[value(item) for item in selects[0].expressions]]
    keys = len(state.groups) if state is not None else detail.width if detail is not None else 0
    loose = tuple(f"c{n + 1}" for n in range(keys) if not _have_one_text(query, [some[n] for some in items]))
    branches = tuple(plan_branch(query, select, some) for select, some in zip(selects, items, strict=True))
    if {leaf.table for branch in branches for leaf in branch.leaves} != query.tables(root):
        raise PlanError("spark-subquery", "Spark reads tables in FROM, EXISTS and IN only")
    return SparkPlan(
        query=known.query,
        columns=known.columns,
        tables=known.tables,
        branches=branches,
        state=state,
        detail=detail,
        loose=loose,
        sums=_sums(state, branches) if state is not None else None,
        aggregates=known.aggregates,
        match=known.match,
        schemas=known.schemas,
    )


def _known(canonical: str, tables: tuple[TableSchema, ...]) -> PostgresPlan:
    """The plan of the engine postgres. PlanError where that says that Spark cannot join what the logs hold."""
    known = plan_postgres(canonical, tables)
    if known.full and known.full.endswith("[collation]"):
        raise PlanError("collation", known.full.removesuffix(" [collation]"))
    for table in known.tables:
        if table.keys_only:
            raise PlanError("spark-own-key", f"the log of {table.name} holds no more than keys of what the view reads")
    return known


def _kept(plan: SparkPlan) -> list[str] | None:
    image = ["image"] if plan.loose else []
    if plan.state is not None:
        return [*plan.state.group_columns, *image, *plan.state.numbers]
    return [*plan.detail.columns, *image, "n"] if plan.detail is not None else None


def _have_one_text(query: Query, column: Sequence[exp.Expr]) -> bool:
    """Whether equal values of a column, of which each SELECT has an expression, are always written alike."""
    forms = {text_form(one, query_types(query)) for one in column}
    return len(forms) == 1 and "" not in forms


def _branches(root: exp.Query) -> list[exp.Select]:
    """The SELECTs of a UNION ALL, or of a UNION whose parts are all UNIONs; a SELECT is one."""
    for operation in root.find_all(exp.SetOperation):
        if not isinstance(operation, exp.Union):
            raise PlanError("spark-set-operation", "Spark takes no EXCEPT or INTERSECT")
        if operation.args.get("distinct") and operation is not root:
            raise PlanError("spark-set-operation", "Spark takes UNION at the top of a view only")
    selects = selects_of(root)
    for select in selects:
        if windows_of(select) or any(windows_of(item) for item in select.expressions):
            raise PlanError("spark-window", "Spark takes no window functions")
        distinct = select.args.get("distinct")
        if distinct is not None and (distinct.args.get("on") or len(selects) > 1):
            raise PlanError("spark-distinct", "Spark takes DISTINCT at the top of a view, without ON")
        if select.args.get("from_") is None:
            raise PlanError("spark-from", "Spark takes no SELECT without FROM")
        if (select.args.get("limit") or select.args.get("offset")) and len(selects) > 1:
            raise PlanError("order-limit", "Spark takes LIMIT only over sums that are kept")
    return selects


def _is_distinct(root: exp.Query) -> bool:
    """Whether equal rows are one row of the view."""
    if isinstance(root, exp.SetOperation):
        return bool(root.args.get("distinct"))
    if root.args.get("distinct") and is_grouped(selects_of(root)[0]):
        raise PlanError("spark-distinct", "Spark takes no DISTINCT over groups")
    if (root.args.get("limit") or root.args.get("offset")) and not is_grouped(selects_of(root)[0]):
        raise PlanError("order-limit", "Spark takes LIMIT only over sums that are kept")
    return bool(root.args.get("distinct"))


def _distinct(select: exp.Select, items: Sequence[exp.Expr], names: Sequence[str]) -> StatePlan:
    """Rows with how often each occurs: a GROUP BY of all columns."""
    visible = tuple(f"s.c{n}" for n in range(1, len(items) + 1))
    keys = tuple((name, n) for n, name in enumerate(names, 1))
    return StatePlan(select, tuple(items), (), (), visible, "", "", keys)


def _detail(query: Query, select: exp.Select) -> tuple[Detail, list[exp.Expr]]:
    """A GROUP BY with min, max, count(distinct) and the like: the values of each group are kept."""
    group_all(select)
    groups = group_of(select)
    if not groups:
        raise PlanError("no-group-by", "Spark takes no aggregate without GROUP BY whose value is not a kept sum")
    if select.args.get("limit") or select.args.get("offset"):
        raise PlanError("order-limit", "Spark takes LIMIT only over sums that are kept")
    having = select.args.get("having")
    outputs = [value(item) for item in select.expressions]
    if any(subqueries_of(part) for part in [*outputs, *groups, *([having] if having is not None else [])]):
        raise PlanError("spark-subquery", "Spark takes no subquery beside aggregates")
    parts: list[exp.Expr] = list(groups)
    builder = _Values(parts, len(groups))
    visible = tuple(builder.shown(output) for output in outputs)
    condition = builder.shown(having.this) if having is not None else ""
    _refuse_vague(query, parts)
    return Detail(len(groups), len(parts), visible, condition), parts


def _refuse_vague(query: Query, parts: Sequence[exp.Expr]) -> None:
    """PlanError for groups or values that cannot be told apart by an index on array[value]."""
    for column in (column for part in parts for column in part.find_all(exp.Column)):
        leaf = query.leaves[column.table]
        found = leaf.table.column(column.name) if leaf.table is not None else None
        if found is not None and (found.folded or found.type.endswith("[]") or found.type in ("citext", "json")):
            raise PlanError("spark-group-type", f"Spark keeps no groups or values of {found.type}")


class _Values:
    """Rewrites expressions over groups and aggregates into expressions over the kept values s."""

    def __init__(self, parts: list[exp.Expr], groups: int) -> None:
        self._parts = parts
        self._groups = groups

    def shown(self, expression: exp.Expr) -> str:
        holder = exp.Paren(this=expression.copy())
        self._replace(holder.this)
        if holder.find(exp.Column):
            raise PlanError("column-not-grouped", f"{render(expression)} is not in GROUP BY")
        return render(holder.this)

    def _replace(self, node: exp.Expr) -> None:
        if node in self._parts[: self._groups]:
            node.replace(exp.Var(this=f"s.c{self._parts.index(node) + 1}"))
            return
        if aggregates_of(node) == [node]:
            self._aggregate(node)
            return
        for child in list(node.iter_expressions()):
            self._replace(child)

    def _aggregate(self, node: exp.Expr) -> None:
        call, condition = node, None
        if isinstance(call, exp.Filter):
            condition, call = call.expression.this, call.this
        argument = call.this
        distinct = isinstance(argument, exp.Distinct) and isinstance(call, exp.Count | exp.Sum)
        if isinstance(call, exp.Count) and not distinct and not call.expressions:
            test = "true" if isinstance(argument, exp.Star) else f"{self._kept(argument)} is not null"
            also = f" and {self._kept(condition)}" if condition is not None else ""
            node.replace(exp.Var(this=f"coalesce(sum(s.n) filter (where {test}{also}), 0)::bigint"))
            return
        if not (distinct or isinstance(call, _OF_VALUES)) or isinstance(argument, exp.Order) or call.expressions:
            raise PlanError("spark-aggregate", f"Spark does not keep {render(call)}")
        if distinct and len(argument.expressions) != 1:
            raise PlanError("spark-aggregate", f"Spark does not keep {render(call)}")
        inner = argument.expressions[0] if distinct else argument
        if isinstance(call, exp.Sum) and not isinstance(inner, exp.Column):
            raise PlanError("spark-aggregate", f"Spark does not keep {render(call)}")
        kept = exp.Var(this=self._kept(inner))
        if distinct:
            argument.set("expressions", [kept])
        else:
            call.set("this", kept)
        if condition is not None:
            node.set("expression", exp.Where(this=exp.Var(this=self._kept(condition))))

    def _kept(self, argument: exp.Expr) -> str:
        """The column of the state that holds an argument."""
        if argument not in self._parts:
            self._parts.append(argument.copy())
        return f"s.c{self._parts.index(argument) + 1}"


def _sums(state: StatePlan, branches: Sequence[Branch]) -> tuple[str | None, ...] | None:
    """The Spark types of the sums where Spark can add them up exactly; None when PostgreSQL must."""
    if len(branches) > 1 or not branches[0].bare:
        return None
    types: list[str | None] = []
    for argument in state.arguments:
        if not argument.summed:
            types.append(None)
            continue
        kind = _spark_number(argument.number)
        if kind is None:
            return None
        types.append(kind)
    return tuple(types)


# A decimal of Spark has 38 digits, and 10 of them are left for adding up.
_DIGITS_MAX = 28


def _spark_number(number: Number | None) -> str | None:
    if number is None or number.whole + number.scale > _DIGITS_MAX:
        return None
    return f"decimal(38,{number.scale})"
