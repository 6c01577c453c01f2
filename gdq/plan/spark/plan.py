"""The planner of the engine spark for views of several tables: joins, semi and anti joins, UNION ALL, GROUP BY.

A pure function of the view's canonical SQL and its table schemas, like gdq.plan.postgres. PostgreSQL computes
expressions over one table, in the statement that reads it. Spark joins, counts and adds. PostgreSQL computes
expressions over several tables (a product of two columns, say) from the joined rows, before the merge.

Every row of a table carries two numbers: its copies now (n) and before (o). A row of the log changes only o. A joined
row has the products of its rows' n and of their o; its weight is the difference. For the padded side of a LEFT JOIN and
for EXISTS only matters whether a key has rows, now and before.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

from sqlglot import exp

from gdq.errors import PlanError
from gdq.plan.dialect import render_sql
from gdq.plan.kept_state import GroupRewriter, StatePlan, plan_state
from gdq.plan.leaf import output_names
from gdq.plan.number import Number
from gdq.plan.postgres import PostgresPlan, plan_postgres
from gdq.plan.query import Query, parse_query, selects_of, subqueries_of, value_of
from gdq.plan.shape import group_all, group_of, is_grouped, windows_of
from gdq.plan.spark.branch import BranchPlanner
from gdq.plan.spark.parts import Branch, Detail
from gdq.plan.table import TableSchema, UsedTable
from gdq.plan.text_types import query_column_types, text_form
from gdq.plan.whitelist import UNREAD, UNSETTLED, QueryReading, Settled
from gdq.sql_text import is_not_null

# Increase it if the same SQL gets another state or target than before: targets are then reloaded.
_VERSION = 2

# Aggregates that depend neither on the number of equal values nor on their texts.
_OF_VALUES = (exp.Min, exp.Max, exp.LogicalAnd, exp.LogicalOr)


@dataclass(frozen=True, slots=True)
class SparkPlan:
    """How one view is refreshed by Spark. `state` or `detail`: kept beside the target; neither for plain rows.

    `sums`: Spark's types for the sums of the state's arguments, None for an argument without a sum. The whole tuple is
    None if Spark cannot add exactly; then PostgreSQL adds the joined rows.
    `loose`: the state's key columns whose equal values may have different texts; a hash of the text is a key too.
    `functions` and `settled`: as for QueryReading.
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
    functions: str = ""
    settled: Settled = UNSETTLED

    @property
    def strategy(self) -> str:
        """The strategy: state (keeps sums), values (keeps the groups' values) or incremental (keeps nothing)."""
        return "state" if self.state else "values" if self.detail else "incremental"

    @property
    def state_columns(self) -> list[str]:
        """The groups of the state s."""
        return [f"s.{name}" for name in self.state.group_columns] if self.state is not None else []

    def fingerprint(self) -> str:
        """Hash of the plan: a target that was filled by a plan with another hash is reloaded."""
        tables = [(table.name, table.columns, table.key) for table in self.tables]
        more = [self.functions] if self.functions else []
        text = json.dumps(["spark", _VERSION, self.query, tables, self.strategy, *more])
        return hashlib.sha256(text.encode()).hexdigest()[:16]

    def statements(self) -> list[tuple[str, str, str]]:
        """Name, engine and SQL of the statements, in order."""
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
        """The plan as plain values for JSON."""
        return {
            "engine": "spark",
            "way": "joins",
            "strategy": self.strategy,
            "reason": None,
            "not_audited": self.settled.reason,
            "tables": [{"name": t.name, "columns": list(t.columns), "key": list(t.key)} for t in self.tables],
            "state": _kept(self),
            "statements": [{"name": name, "engine": engine, "sql": sql} for name, engine, sql in self.statements()],
        }

    def __str__(self) -> str:
        way = "way: joins; PostgreSQL reads and merges, Spark joins, counts and adds, which its values allow"
        lines = [
            way,
            f"strategy: {self.strategy}",
            *self.settled.lines(self.columns),
            *(f"table {table.name}" for table in self.tables),
        ]
        kept = _kept(self)
        if kept is not None:
            lines.append(f"state: {', '.join(kept)}")
        return "\n".join([*lines, *(f"{name} ({engine}): {sql}" for name, engine, sql in self.statements())])


def plan_spark(canonical: str, tables: Sequence[TableSchema], reading: QueryReading = UNREAD) -> SparkPlan:
    """The plan of a view by its canonical SQL; PlanError, with a code, for a construct that Spark does not cover."""
    if reading.refused is not None:
        raise PlanError("spark-expression", reading.refused)
    return replace(_plan(canonical, tuple(tables)), functions=reading.functions, settled=reading.settled)


# cached for a process that refreshes again and again
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
        items = [[value_of(item) for item in select.expressions] for select in selects]
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
        items = [[value_of(item) for item in selects[0].expressions]]
    keys = len(state.groups) if state is not None else detail.width if detail is not None else 0
    loose = tuple(f"c{n + 1}" for n in range(keys) if not _have_one_text(query, [some[n] for some in items]))
    branches = tuple(BranchPlanner(query).plan(select, some) for select, some in zip(selects, items, strict=True))
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
    """The plan of the engine postgres; PlanError if that shows that Spark cannot join the logs' rows."""
    known = plan_postgres(canonical, tables, tops=False)
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
    """True if equal values of a column, given by one expression per SELECT, always have the same text."""
    forms = {text_form(one, query_column_types(query)) for one in column}
    return len(forms) == 1 and "" not in forms


def _branches(root: exp.Query) -> list[exp.Select]:
    """The SELECTs of a UNION ALL, or of a UNION at the top; or the SELECT itself."""
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
    """True if equal rows are one row of the view (DISTINCT or UNION)."""
    if isinstance(root, exp.SetOperation):
        return bool(root.args.get("distinct"))
    if root.args.get("distinct") and is_grouped(selects_of(root)[0]):
        raise PlanError("spark-distinct", "Spark takes no DISTINCT over groups")
    if (root.args.get("limit") or root.args.get("offset")) and not is_grouped(selects_of(root)[0]):
        raise PlanError("order-limit", "Spark takes LIMIT only over sums that are kept")
    return bool(root.args.get("distinct"))


def _distinct(select: exp.Select, items: Sequence[exp.Expr], names: Sequence[str]) -> StatePlan:
    """The state of DISTINCT or UNION: a GROUP BY of all columns that counts the rows."""
    visible = tuple(f"s.c{n}" for n in range(1, len(items) + 1))
    keys = tuple((name, n) for n, name in enumerate(names, 1))
    return StatePlan(select, tuple(items), (), (), visible, "", "", keys)


def _detail(query: Query, select: exp.Select) -> tuple[Detail, list[exp.Expr]]:
    """The plan for a GROUP BY with min, max, count(distinct) and the like, whose groups' values are kept."""
    group_all(select)
    groups = group_of(select)
    if not groups:
        raise PlanError("no-group-by", "Spark takes no aggregate without GROUP BY whose value is not a kept sum")
    if select.args.get("limit") or select.args.get("offset"):
        raise PlanError("order-limit", "Spark takes LIMIT only over sums that are kept")
    having = select.args.get("having")
    outputs = [value_of(item) for item in select.expressions]
    if any(subqueries_of(part) for part in [*outputs, *groups, *([having] if having is not None else [])]):
        raise PlanError("spark-subquery", "Spark takes no subquery beside aggregates")
    parts: list[exp.Expr] = list(groups)
    builder = _Values(parts)
    visible = tuple(builder.shown(output) for output in outputs)
    condition = builder.shown(having.this) if having is not None else ""
    _refuse_vague(query, parts)
    return Detail(len(groups), len(parts), visible, condition), parts


def _refuse_vague(query: Query, parts: Sequence[exp.Expr]) -> None:
    """PlanError for groups or values that an index on array[value] cannot tell apart."""
    for column in (column for part in parts for column in part.find_all(exp.Column)):
        leaf = query.leaves[column.table]
        found = leaf.table.column(column.name) if leaf.table is not None else None
        if found is not None and (found.folded or found.type.endswith("[]") or found.type in ("citext", "json")):
            raise PlanError("spark-group-type", f"Spark keeps no groups or values of {found.type}")


class _Values(GroupRewriter):
    """Collects in `parts`, behind the groups, the values that the state must keep for the rewritten aggregates."""

    def __init__(self, parts: list[exp.Expr]) -> None:
        super().__init__(parts)
        self._parts = parts

    def _aggregate(self, node: exp.Expr) -> str:
        call, condition = node, None
        if isinstance(call, exp.Filter):
            condition, call = call.expression.this, call.this
        argument = call.this
        distinct = isinstance(argument, exp.Distinct) and isinstance(call, exp.Count | exp.Sum)
        if isinstance(call, exp.Count) and not distinct and not call.expressions:
            test = "true" if isinstance(argument, exp.Star) else is_not_null(self._kept(argument))
            also = f" and {self._kept(condition)}" if condition is not None else ""
            return f"coalesce(sum(s.n) filter (where {test}{also}), 0)::bigint"
        if not (distinct or isinstance(call, _OF_VALUES)) or isinstance(argument, exp.Order) or call.expressions:
            raise PlanError("spark-aggregate", f"Spark does not keep {render_sql(call)}")
        if distinct and len(argument.expressions) != 1:
            raise PlanError("spark-aggregate", f"Spark does not keep {render_sql(call)}")
        inner = argument.expressions[0] if distinct else argument
        if isinstance(call, exp.Sum) and not isinstance(inner, exp.Column):
            raise PlanError("spark-aggregate", f"Spark does not keep {render_sql(call)}")
        kept = exp.Var(this=self._kept(inner))
        if distinct:
            argument.set("expressions", [kept])
        else:
            call.set("this", kept)
        if condition is not None:
            node.set("expression", exp.Where(this=exp.Var(this=self._kept(condition))))
        return render_sql(node)

    def _kept(self, argument: exp.Expr) -> str:
        """The column of the state that holds an argument."""
        if argument not in self._parts:
            self._parts.append(argument.copy())
        return f"s.c{self._parts.index(argument) + 1}"


def _sums(state: StatePlan, branches: Sequence[Branch]) -> tuple[str | None, ...] | None:
    """Spark's types for the sums if Spark can add exactly; None if PostgreSQL must add."""
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


# Spark's decimal has 38 digits; 10 of them are reserved for the growth of a sum.
_DIGITS_MAX = 28


def _spark_number(number: Number | None) -> str | None:
    if number is None or number.whole + number.scale > _DIGITS_MAX:
        return None
    return f"decimal(38,{number.scale})"
