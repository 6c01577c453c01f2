"""SQL of a SELECT's rows for some keys, at a state: the rows that replace what the view shows of these keys."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import reduce

from sqlglot import exp

from gdq.plan.graph import GraphKey, build_graph
from gdq.plan.leaf import Leaf
from gdq.plan.query import aliased, value_of
from gdq.plan.relation_sql import RelationBounds, RelationSql, RelationState, among_keys
from gdq.plan.shape import group_all


def recomputed_sql(
    relations: RelationSql, select: exp.Select, by: Sequence[tuple[exp.Expr, str]], state: RelationState
) -> str:
    """The rows with columns c1, c2, ... for `by`: expressions that divide the rows, each with the name of its keys."""
    graph = build_graph(relations.query, select)
    bounds: RelationBounds = {}
    clause = select.args.get("where")
    parts: list[exp.Expr] = [exp.Paren(this=clause.this.copy())] if clause is not None else []
    for expression, keys in by:
        if isinstance(expression, exp.Column) and expression.table in graph.kept:
            for alias, name in graph.closure([(expression.table, expression.name)]).items():
                bounds.setdefault(alias, []).append((name, keys))
        else:  # not also on the item of FROM: PostgreSQL would estimate that hardly any row is left
            parts.append(exp.Var(this=among_keys(relations.at(expression), keys)))
    bare = select.copy()
    if parts:
        where = reduce(lambda one, more: exp.And(this=one, expression=more), parts)
        bare.set("where", exp.Where(this=where))
    if not (select.args.get("distinct") and select.args["distinct"].args.get("on")):
        bare.set("order", None)
    group_all(bare)
    bare.set("expressions", [aliased(i, f"c{n}") for n, i in enumerate(select.expressions, 1)])
    return relations.at(bare, state, bounds)


def restricted_sql(
    relations: RelationSql,
    select: exp.Select,
    items: Sequence[exp.Expr],
    key: GraphKey,
    keys: str,
    *,
    state: RelationState,
) -> str:
    """`items` of the rows of a SELECT's FROM and WHERE at a state, as c1, c2, ...; their key is one of `keys`."""
    bare = select.copy()
    for clause in ("group", "having", "distinct", "order", "windows", "limit", "offset"):
        bare.set(clause, None)
    bare.set("expressions", [aliased(item, f"c{n}") for n, item in enumerate(items, 1)])
    return relations.at(bare, state, {alias: [(name, keys)] for alias, name in key.bound.items()})


def operated_sql(
    relations: RelationSql, query: exp.Query, state: RelationState, columns: Sequence[str], where: str
) -> str:
    """A set operation with the condition in every SELECT: PostgreSQL does not push it down into EXCEPT."""
    if isinstance(query, exp.SetOperation):
        word = query.key.upper() + ("" if query.args.get("distinct") else " ALL")
        left, right = (operated_sql(relations, side, state, columns, where) for side in (query.this, query.expression))
        return f"({left}) {word} ({right})"
    return f"select * from ({relations.at(query, state)}) as q({', '.join(columns)}) where {where}"


def values_sql(relations: RelationSql, select: exp.Select, expression: exp.Expr, *, falling: bool) -> str:
    """The values of an expression in the rows of a SELECT's FROM and WHERE, at the new state.

    `falling`: they will be read in falling order. PostgreSQL does not tell a query in FROM so, which would sort them.
    """
    bare = select.copy()
    for clause in ("group", "having", "distinct", "order", "windows", "limit", "offset"):
        bare.set(clause, None)
    bare.set("expressions", [aliased(expression, "k")])
    leaf = relations.query.tree(select)
    if isinstance(leaf, Leaf) and leaf.query is not None and isinstance(expression, exp.Column):
        inner = bare.args["from_"].this.this
        if isinstance(inner, exp.Select) and not any(inner.args.get(name) for name in ("distinct", "limit", "offset")):
            value = value_of(inner.expressions[leaf.columns.index(expression.name)])
            ordered = exp.Ordered(this=value.copy(), desc=falling, nulls_first=falling)
            inner.set("order", exp.Order(expressions=[ordered]))
    return relations.at(bare)


@dataclass(frozen=True, slots=True)
class OrderedRows:
    """The rows of a SELECT with values of the expression `by` among `keys`, whose windows read further rows in order.

    `read`: the keys of these further rows too; None: all rows are read.
    """

    relations: RelationSql
    select: exp.Select
    by: exp.Expr
    keys: str
    read: str | None

    def sql(self, state: RelationState) -> str:
        """The rows at a state, with columns c1, c2, ..."""
        wide, width = self.select.copy(), len(self.select.expressions)
        wide.append("expressions", aliased(self.by, "k"))
        rows = recomputed_sql(self.relations, wide, [] if self.read is None else [(self.by, self.read)], state)
        listed = ", ".join(f"q.c{n}" for n in range(1, width + 1))
        return f"select {listed} from ({rows}) as q where {among_keys(f'q.c{width + 1}', self.keys)}"
