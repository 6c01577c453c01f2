"""Plans a view that is a GROUP BY at its top whose counts and sums can be kept by adding and subtracting.

    select a, sum(b) from t group by a      state: c1 (a), n (rows), n1 (rows with b not NULL), s1 (sum of b)

The state is a table beside the target, with one row per group. The view's rows follow from it: HAVING, expressions over
aggregates, ORDER BY with LIMIT.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from sqlglot import exp

from gdq.errors import PlanError
from gdq.plan.dialect import render_sql
from gdq.plan.extreme import StateExtreme
from gdq.plan.leaf import output_names
from gdq.plan.number import Number, column_number, number_of
from gdq.plan.query import Query, leaves_of, subqueries_of, value_of
from gdq.plan.shape import aggregates_of, has_grouping_sets
from gdq.plan.text_types import query_column_types, text_form
from gdq.sql_text import is_not_null

# Types of sums of these types; the sum of any other type is numeric.
_INTEGERS = {"smallint": "bigint", "integer": "bigint"}

# Fields for which EXTRACT gives whole numbers.
_WHOLE_FIELDS = {"YEAR", "QUARTER", "MONTH", "WEEK", "DAY", "DOW", "DOY", "HOUR", "MINUTE"}


@dataclass(frozen=True, slots=True)
class StateArgument:
    """An aggregate's argument. `summed`: the state keeps its sum, not only its count; `number` is its type then."""

    expression: exp.Expr
    number: Number | None
    summed: bool


@dataclass(frozen=True, slots=True)
class StatePlan:
    """The state of a view, and the view's rows in terms of the state.

    `groups`, `arguments` and `extremes` are computed from each row of FROM and WHERE. `visible`: the view's columns as
    expressions over the state s; `having` and `order` (with LIMIT) likewise, or empty. `keys`: the view's columns that
    are groups, each with the group's number. `loose`: the state's group columns whose equal values may have different
    texts (1.0 and 1.00), as far as the planner knows. `empty`: the view's SQL if it has rows even over no rows at all,
    that is for a grouping set without expressions. `ranked`: the items of `order` as an index on the state has them.
    """

    select: exp.Select
    groups: tuple[exp.Expr, ...]
    arguments: tuple[StateArgument, ...]
    extremes: tuple[StateExtreme, ...]
    visible: tuple[str, ...]
    having: str
    order: str
    keys: tuple[tuple[str, int], ...]
    loose: tuple[str, ...] = ()
    empty: str = ""
    ranked: tuple[str, ...] = ()

    @property
    def items(self) -> list[exp.Expr]:
        """Expressions computed for every row of FROM and WHERE: groups, arguments, arguments of extremes."""
        arguments, extremes = ([p.expression for p in parts] for parts in (self.arguments, self.extremes))
        return [*self.groups, *arguments, *extremes]

    @property
    def source(self) -> str:
        """SQL of FROM and WHERE."""
        bare = self.select.copy()
        for clause in ("group", "having", "order", "limit", "expressions"):
            bare.set(clause, None)
        return render_sql(bare).removeprefix("SELECT").strip()

    @property
    def group_columns(self) -> list[str]:
        """The state's key columns."""
        return [f"c{n}" for n in range(1, len(self.groups) + 1)]

    @property
    def numbers(self) -> list[str]:
        """The state's number columns: n rows, and for each argument its count and perhaps its sum."""
        names = ["n"]
        for n, argument in enumerate(self.arguments, 1):
            names += [f"n{n}", f"s{n}"] if argument.summed else [f"n{n}"]
        return names

    def valued_extremes(self) -> list[tuple[StateExtreme, str]]:
        """The extremes, each with the column of rows() that has its values."""
        first = len(self.groups) + len(self.arguments) + 1
        return [(extreme, f"c{n}") for n, extreme in enumerate(self.extremes, first)]

    def rows(self) -> str:
        """All rows of FROM and WHERE with weight 1, for FROM."""
        items = "".join(f"{render_sql(item)} as c{n}, " for n, item in enumerate(self.items, 1))
        return f"(select {items}1 as w {self.source})"

    def whole(self) -> str:
        """SELECT of the whole state from the tables."""
        extremes = "".join(
            f", {extreme.kind}({value}) as {extreme.column}" for extreme, value in self.valued_extremes()
        )
        return self.sums(self.rows(), extremes)

    def follow_extremes(self, state: str, rows: str) -> list[str]:
        """The statements that update the extremes in the table `state` from signed rows."""
        return [extreme.follow(state, rows, value, self.source) for extreme, value in self.valued_extremes()]

    def sums(self, rows: str, extremes: str = "", also: Sequence[str] = ()) -> str:
        """SELECT of the sums over signed rows (c1, c2, ..., w), to add to the state. `also`: further group columns."""
        columns, sums = [*self.group_columns, *also], ["coalesce(sum(w), 0)::bigint as n"]
        for n, argument in enumerate(self.arguments, 1):
            name = f"c{len(self.groups) + n}"
            sums.append(f"coalesce(sum(case when {is_not_null(name)} then w else 0 end), 0)::bigint as n{n}")
            if argument.summed:
                sums.append(f"coalesce(sum({name}::numeric * w), 0) as s{n}")
        group = f" group by {', '.join(columns)}" if columns else ""
        return f"select {', '.join([*columns, *sums])}{extremes} from {rows} as r{group}"

    @property
    def unnumbered(self) -> str:
        """Condition that a sum is NaN or infinity, which subtraction cannot undo; empty if no sum can be."""
        sums = [
            f"s{n}" for n, a in enumerate(self.arguments, 1) if a.summed and a.number and a.number.type == "numeric"
        ]
        return " or ".join(f"{name} in ('NaN', 'Infinity', '-Infinity')" for name in sums)

    def no_number(self, rows: str) -> str:
        """SELECT that is true if signed rows hold NaN or infinity for a sum; empty if none can."""
        found = [
            f"c{len(self.groups) + n}::numeric in ('NaN', 'Infinity', '-Infinity')"
            for n, a in enumerate(self.arguments, 1)
            if a.summed and a.number is not None and a.number.type == "numeric"
        ]
        return f"select exists (select from {rows} as r where {' or '.join(found)})" if found else ""


def plan_state(query: Query) -> StatePlan | None:
    """The state of a query whose top is such a GROUP BY; None when its groups must be recomputed."""
    root = query.root
    if not isinstance(root, exp.Select) or root.args.get("distinct") or root.find(exp.Window):
        return None
    having = root.args.get("having")
    group = root.args.get("group")
    outputs = [value_of(item) for item in root.expressions]
    parts = [*outputs, *([having.this] if having is not None else [])]
    if group is None and not any(aggregates_of(part) for part in parts):
        return None
    if any(subqueries_of(part) for part in parts) or root.args.get("offset"):
        return None
    groups = tuple(item.unnest() for item in (group.expressions if group else ()))
    if any(_is_vague(query, g) for g in groups):
        return None
    if has_grouping_sets(root) or any(subqueries_of(g) for g in groups):
        return None
    builder = _Sums(query, groups)
    try:
        visible = tuple(builder.shown(output) for output in outputs)
        condition = builder.shown(having.this) if having is not None else ""
        order, ranked = _order(root, builder)
    except PlanError:
        return None
    names = output_names(root)
    keys = tuple((name, groups.index(o) + 1) for name, o in zip(names, outputs, strict=True) if o in groups)
    return StatePlan(
        root,
        groups,
        tuple(builder.arguments.values()),
        tuple(builder.extremes.values()),
        visible,
        condition,
        order,
        keys,
        tuple(f"c{n}" for n, group in enumerate(groups, 1) if not _has_one_text(query, group)),
        next(filter(None, (query.sets.get(leaf.alias) for leaf in leaves_of(query.tree(root)))), ""),
        ranked,
    )


def _order(select: exp.Select, builder: _Sums) -> tuple[str, tuple[str, ...]]:
    """ORDER BY and LIMIT over the state s, and the items of ORDER BY for an index on it; empty without LIMIT."""
    limit = select.args.get("limit")
    if limit is None:
        return "", ()
    order = select.args.get("order")
    parts, ranked = [], []
    for item in order.expressions if order is not None else ():
        words = " desc" if item.args.get("desc") else ""
        nulls = item.args.get("nulls_first")
        words += "" if nulls is None else " nulls first" if nulls else " nulls last"
        parts.append(builder.shown(item.this) + words)
        ranked.append(f"({builder.shown(item.this, of='')}){words}")
    listed = f" order by {', '.join(parts)}" if parts else ""
    count = render_sql(limit.expression if isinstance(limit, exp.Limit) else limit.args["count"])
    return f"{listed} limit {count}", tuple(ranked)


class GroupRewriter:
    """Rewrites expressions over groups and aggregates into expressions over a kept state s with columns c1, c2, ..."""

    def __init__(self, groups: Sequence[exp.Expr]) -> None:
        self._groups = tuple(groups)

    def shown(self, expression: exp.Expr, of: str = "s.") -> str:
        """An expression over the state, with `of` before its columns; PlanError for an aggregate no state keeps."""
        holder = exp.Paren(this=expression.copy())
        self._replace(holder.this)
        for column in holder.find_all(exp.Var):
            column.set("this", column.name.replace("s.", of))
        if holder.find(exp.Column):
            raise PlanError("column-not-grouped", f"{render_sql(expression)} is not in GROUP BY")
        return render_sql(holder.this)

    def _replace(self, node: exp.Expr) -> None:
        if node in self._groups:
            node.replace(exp.Var(this=f"s.c{self._groups.index(node) + 1}"))
            return
        if aggregates_of(node) == [node]:
            node.replace(exp.Var(this=self._aggregate(node)))
            return
        for child in list(node.iter_expressions()):
            self._replace(child)

    def _aggregate(self, node: exp.Expr) -> str:
        """SQL over the state for an aggregate call, perhaps with FILTER."""
        raise NotImplementedError


class _Sums(GroupRewriter):
    """Collects the arguments and extremes that the state must keep for the rewritten aggregates."""

    def __init__(self, query: Query, groups: tuple[exp.Expr, ...]) -> None:
        super().__init__(groups)
        self.arguments: dict[str, StateArgument] = {}
        self.extremes: dict[tuple[str, str], StateExtreme] = {}
        self._query = query

    def _aggregate(self, node: exp.Expr) -> str:
        return f"({self._kept(node)})"

    def _kept(self, call: exp.Expr) -> str:
        condition = None
        if isinstance(call, exp.Filter):
            condition, call = call.expression.this, call.this
        shown = self._extreme(call, condition) or self._truth(call, condition)
        if shown:
            return shown
        if not isinstance(call, exp.Count | exp.Sum | exp.Avg) or call.expressions:
            raise PlanError("aggregate", f"{render_sql(call)} is recomputed for the groups that changed")
        argument = call.this
        if _is_arranged(argument):
            raise PlanError("aggregate", f"{render_sql(call)} is recomputed for the groups that changed")
        if isinstance(argument, exp.Star):
            if condition is None:
                return "s.n"
            argument = exp.Boolean(this=True)
        summed = not isinstance(call, exp.Count)
        number = self._number(argument) if summed else None
        if summed and (number is None or (isinstance(call, exp.Avg) and not number.fixed)):
            raise PlanError("aggregate", f"{render_sql(call)} is recomputed: its digits follow its values")
        n = self._place(_when(condition, argument), number, summed=summed)
        if isinstance(call, exp.Count):
            return f"s.n{n}"
        if isinstance(call, exp.Avg):
            return f"case when s.n{n} > 0 then s.s{n} / s.n{n}::numeric end"
        kind = _INTEGERS.get(number.type, "numeric") if number is not None else "numeric"
        return f"case when s.n{n} > 0 then s.s{n}::{kind} end"

    def _extreme(self, call: exp.Expr, condition: exp.Expr | None) -> str:
        """The state's column for a min or max over all rows; empty for others."""
        if self._groups or not isinstance(call, exp.Min | exp.Max) or call.expressions or _is_arranged(call.this):
            return ""
        argument = _when(condition, call.this)
        kind: Literal["min", "max"] = "min" if isinstance(call, exp.Min) else "max"
        known = StateExtreme(kind, argument, f"e{len(self.extremes) + 1}")
        return f"s.{self.extremes.setdefault((kind, render_sql(argument)), known).column}"

    def _truth(self, call: exp.Expr, condition: exp.Expr | None) -> str:
        """SQL of bool_and or bool_or from the counts of all values and of true ones; empty for others."""
        name = call.name.lower() if isinstance(call, exp.Anonymous) else ""
        every = isinstance(call, exp.LogicalAnd) or name in ("bool_and", "every")
        if not every and not isinstance(call, exp.LogicalOr) and name != "bool_or":
            return ""
        argument = call.expressions[0] if isinstance(call, exp.Anonymous) else call.this
        if _is_arranged(argument):
            return ""
        argument = _when(condition, argument)
        values = self._place(argument, None, summed=False)
        true = self._place(_when(argument, exp.Boolean(this=True)), None, summed=False)
        return f"case when s.n{values} > 0 then s.n{true} {f'= s.n{values}' if every else '> 0'} end"

    def _place(self, argument: exp.Expr, number: Number | None, *, summed: bool) -> int:
        """Number of an argument in the state; equal arguments share one."""
        sql = render_sql(argument)
        known = self.arguments.get(sql)
        both = summed or (known is not None and known.summed)
        self.arguments[sql] = StateArgument(argument, number or (known.number if known else None), both)
        return list(self.arguments).index(sql) + 1

    def _number(self, argument: exp.Expr) -> Number | None:
        return number_of(_without_zeros(argument), self._column_number)

    def _column_number(self, column: exp.Column) -> Number | None:
        """The number type of a column, followed through queries in FROM."""
        leaf = self._query.leaves[column.table]
        if leaf.table is not None:
            found = leaf.table.column(column.name)
            return None if found is None else column_number(found.type)
        if not isinstance(leaf.query, exp.Select) or leaf.query.find(exp.Window):
            return None
        item = leaf.query.expressions[leaf.columns.index(column.name)].unalias()
        padded = any(join.side for join in leaf.query.find_all(exp.Join))
        own = {inner.alias for inner in leaves_of(self._query.tree(leaf.query))}
        if aggregates_of(item) or padded or any(c.table not in own for c in item.find_all(exp.Column)):
            return None
        return number_of(item, self._column_number)


def _is_arranged(argument: exp.Expr | None) -> bool:
    """True if an aggregate is over distinct or ordered values."""
    return argument is None or isinstance(argument, exp.Distinct | exp.Order)


def _when(condition: exp.Expr | None, argument: exp.Expr) -> exp.Expr:
    """An aggregate's argument with its FILTER as CASE."""
    return argument if condition is None else exp.Case(ifs=[exp.If(this=condition.copy(), true=argument.copy())])


def _is_vague(query: Query, group: exp.Expr) -> bool:
    """True if an index on array[group] cannot tell groups apart, or a group shows any of several equal texts."""
    for node in group.find_all(exp.Column):
        leaf = query.leaves[node.table]
        column = leaf.table.column(node.name) if leaf.table is not None else None
        if column is not None and (column.folded or column.type.endswith("[]") or column.type == "citext"):
            return True
    return False


def _has_one_text(query: Query, group: exp.Expr) -> bool:
    """True if equal values of an expression always have the same text."""
    if isinstance(group, exp.Extract):
        return group.name.upper() in _WHOLE_FIELDS
    if isinstance(group, exp.Case) and group.args.get("default") is None and len(group.args["ifs"]) == 1:
        return _has_one_text(query, group.args["ifs"][0].args["true"])
    leaf = query.leaves[group.table] if isinstance(group, exp.Column) else None
    if leaf is not None and leaf.alias in query.sets:
        return True
    if leaf is not None and isinstance(leaf.query, exp.Select):
        return _has_one_text(query, value_of(leaf.query.expressions[leaf.columns.index(group.name)]))
    return text_form(group, query_column_types(query)) != ""


def _without_zeros(argument: exp.Expr) -> exp.Expr:
    """CASE ... ELSE 0 without the ELSE: the zero adds no digits to a sum."""
    node = argument.unnest()
    default = node.args.get("default") if isinstance(node, exp.Case) else None
    zero = default.unnest() if default is not None else None
    while isinstance(zero, exp.Cast):
        zero = zero.this.unnest()
    if isinstance(zero, exp.Literal) and not zero.name.strip("0."):
        node = node.copy()
        node.set("default", None)
        return node
    return argument
