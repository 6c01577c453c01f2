"""Plans one SELECT of a view for Spark: the reads of tables, the join, and PostgreSQL's expressions after it.

Equalities between two tables are joins. Spark compares PostgreSQL's text of both sides, so equal values must have equal
texts: numeric is read without trailing zeros, other types without this property are refused.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from sqlglot import exp

from gdq.errors import PlanError
from gdq.plan.dialect import render_sql
from gdq.plan.leaf import Leaf
from gdq.plan.query import FromJoin, FromTree, Query, conjuncts, subqueries_of, where_of
from gdq.plan.shape import aggregates_of
from gdq.plan.spark.parts import Branch, LeafEdge, LeafRead, LeafRole
from gdq.plan.spark.sql import JoinedLeaf, joined_rows_sql
from gdq.plan.text_types import check_after_join, query_column_types, text_kind

# The largest number of tables in one join.
_LEAVES_MAX = 8

_STRICT = (exp.EQ, exp.NEQ, exp.GT, exp.GTE, exp.LT, exp.LTE)


def _common(condition: exp.Expr) -> list[exp.Expr]:
    """The conjuncts that all alternatives of an OR share: an equality among them can join tables."""
    first, *others = [conjuncts(one) for one in _alternatives(condition)]
    shared = [{render_sql(part) for part in one} for one in others]
    return [part for part in first if all(render_sql(part) in one for one in shared)] if shared else []


def _alternatives(condition: exp.Expr) -> list[exp.Expr]:
    inner = condition.unnest()
    if not isinstance(inner, exp.Or):
        return [inner]
    return [*_alternatives(inner.this), *_alternatives(inner.expression)]


@dataclass(frozen=True, slots=True)
class _Side:
    """One side of an equality: PostgreSQL's expression `sql`, and `text`, which is equal for equal values.

    `strict`: a column or a cast of one, so it is NULL if the column is.
    """

    alias: str
    sql: str
    text: str
    strict: bool


class BranchPlanner:
    """Plans one SELECT of a view for Spark."""

    def __init__(self, query: Query) -> None:
        self.query = query
        self._column_type = query_column_types(query)
        self.parts: dict[str, JoinedLeaf] = {}
        self.edges: list[LeafEdge] = []
        self.equalities: list[tuple[str, str, str, str]] = []
        self.residual: list[exp.Expr] = []
        self.values: dict[tuple[str, str], str] = {}

    def plan(self, select: exp.Select, items: Sequence[exp.Expr]) -> Branch:
        """The plan of `items` over a SELECT's FROM and WHERE; PlanError for a construct that Spark does not cover."""
        conditions = [*self._flatten(self.query.tree(select)), *where_of(select)]
        plain = []
        for part in conditions:
            if subqueries_of(part):
                self._exists(part)
            else:
                plain.append(part)
        self._reduce(plain)
        if len(self.parts) > _LEAVES_MAX:
            raise PlanError("spark-wide", f"Spark joins up to {_LEAVES_MAX} tables")
        for part in plain:
            self._condition(part)
        for one in self.parts.values():
            if one.role != "inner":
                self._join(one)
        computed = tuple(self._after(item) for item in items)
        where = " and ".join(f"({self._after(part)})" for part in self.residual)
        values = tuple((name, alias, sql) for (alias, sql), name in self.values.items())
        for name, alias, sql in values:
            self.parts[alias].columns[name] = sql
        leaves = tuple(self._leaf(part) for part in self.parts.values())
        return Branch(
            leaves, tuple(self.edges), joined_rows_sql(self.parts, self.equalities, values), values, computed, where
        )

    # FROM

    def _flatten(self, tree: FromTree | None) -> list[exp.Expr]:
        """Register the leaves of a FROM; returns the conditions of its inner joins."""
        found: list[exp.Expr] = []
        if isinstance(tree, Leaf):
            self._add(tree, "inner")
        elif isinstance(tree, FromJoin):
            left, right = tree.left, tree.right
            if tree.kind == "right":
                left, right = right, left
            if tree.kind == "full":
                raise PlanError("spark-full-join", "Spark takes no FULL JOIN")
            found += self._flatten(left)
            if tree.kind == "inner":
                found += [*self._flatten(right), *conjuncts(tree.on)]
            else:
                if not isinstance(right, Leaf):
                    raise PlanError("spark-outer-join", "Spark pads one table by an outer join, not a join of tables")
                self._add(right, "padded").on += conjuncts(tree.on)
        return found

    def _add(self, leaf: Leaf, role: LeafRole) -> JoinedLeaf:
        if leaf.table is None:
            raise PlanError("spark-subquery", "Spark takes tables in FROM, no queries")
        part = self.parts[leaf.alias] = JoinedLeaf(leaf, role)
        return part

    def _exists(self, part: exp.Expr) -> None:
        """Register the table of an EXISTS, NOT EXISTS or IN (SELECT) of WHERE."""
        node, negated = part.unnest(), False
        if isinstance(node, exp.Not):
            node, negated = node.this.unnest(), True
        nested = subqueries_of(node)
        on: list[exp.Expr] = []
        inner = nested[0]
        if isinstance(node, exp.Exists) and node.this is inner:
            pass
        elif (
            isinstance(node, exp.In)
            and not negated
            and not node.args.get("expressions")
            and isinstance(inner, exp.Select)
        ):
            outer = node.this.expressions if isinstance(node.this, exp.Tuple) else [node.this]
            if subqueries_of(exp.Tuple(expressions=[one.copy() for one in outer])):
                raise PlanError("spark-subquery", "Spark takes EXISTS and IN of one table only")
            own = [item.unalias() for item in inner.expressions]
            on = [exp.EQ(this=a.copy(), expression=b.copy()) for a, b in zip(outer, own, strict=True)]
        else:
            raise PlanError(
                "spark-subquery", f"Spark takes EXISTS and IN as conditions of their own: {render_sql(part)}"
            )
        if len(nested) != 1 or not isinstance(inner, exp.Select) or _is_shaped(inner):
            raise PlanError("spark-subquery", "Spark takes EXISTS and IN of one table without GROUP BY or LIMIT")
        tree = self.query.tree(inner)
        if not isinstance(tree, Leaf) or any(subqueries_of(one) for one in where_of(inner)):
            raise PlanError("spark-subquery", "Spark takes EXISTS and IN of one table only")
        self._add(tree, "absent" if negated else "exists").on += [*on, *where_of(inner)]

    def _reduce(self, conditions: Sequence[exp.Expr]) -> None:
        """Turn an outer join into an inner join if a condition rejects its padded rows."""
        waiting = list(conditions)
        while waiting:
            part = waiting.pop()
            if not _is_strict(part):
                continue
            for alias in _aliases(part):
                one = self.parts[alias]
                if one.role == "padded":
                    one.role = "inner"
                    waiting += one.on
        for one in self.parts.values():
            if one.role == "inner":
                for part in one.on:
                    self._condition(part)
                one.on = []

    # conditions

    def _condition(self, part: exp.Expr) -> None:
        """Add a condition of WHERE or of an inner join."""
        aliases = _aliases(part)
        sides = self._sides(part)
        if sides is not None and all(self.parts[alias].role == "inner" for alias in aliases):
            left, right = sides
            keys = [self._key(side.alias, side.text) for side in sides]
            self.equalities.append((left.alias, keys[0], right.alias, keys[1]))
            self._edge(left, right)
        elif len(aliases) == 1 and self.parts[aliases[0]].role == "inner":
            self.parts[aliases[0]].where.append(part)
        else:
            self.residual.append(part)
            for implied in _common(part):
                self._condition(implied)

    def _join(self, one: JoinedLeaf) -> None:
        """Add the conditions of an outer join, or of an EXISTS or IN."""
        own = one.leaf.alias
        found, guards = [], []
        for part in one.on:
            aliases = _aliases(part)
            if aliases == [own]:
                one.where.append(part)
            elif own not in aliases:
                guards.append((aliases, part))
            else:
                sides = self._sides(part)
                if sides is None:
                    raise PlanError("spark-condition", f"Spark joins by equalities: {render_sql(part)}")
                mine, other = sides if sides[0].alias == own else (sides[1], sides[0])
                if self.parts[other.alias].role == "padded" and not other.strict:
                    # an expression is computed when the table is read, so it lacks the padded rows
                    raise PlanError("spark-condition", f"Spark joins padded rows by columns: {render_sql(part)}")
                found.append((mine, other))
        for aliases, part in guards:
            # a row that fails a condition over the kept side gets the key NULL, which matches nothing
            number = next((n for n, (_, other) in enumerate(found) if aliases == [other.alias]), None)
            if number is None:
                raise PlanError(
                    "spark-condition", f"Spark takes no such condition of an outer join: {render_sql(part)}"
                )
            mine, other = found[number]
            text = f"case when {render_sql(part)} then {other.text} end"
            found[number] = (mine, _Side(other.alias, other.sql, text, other.strict))
        if not found:
            raise PlanError("spark-condition", "Spark wants an equality in the condition of an outer or semi join")
        for mine, other in found:
            one.links.append((self._key(own, mine.text, "j"), other.alias, self._key(other.alias, other.text)))
            one.own.append(mine.sql)
            self._edge(mine, other)

    def _edge(self, left: _Side, right: _Side) -> None:
        self.edges.append(LeafEdge((left.alias, left.sql), (right.alias, right.sql)))

    def _sides(self, part: exp.Expr) -> tuple[_Side, _Side] | None:
        """The sides of an equality between two leaves; None for other conditions, PlanError for other types."""
        if not isinstance(part, exp.EQ):
            return None
        sides = [part.this.unnest(), part.expression.unnest()]
        aliases = [_aliases(side) for side in sides]
        if any(len(found) != 1 for found in aliases) or aliases[0] == aliases[1]:
            return None
        kinds = [self._kind(side) for side in sides]
        if "" in kinds or (kinds[0] != kinds[1] and set(kinds) != {"integer", "numeric"}):
            raise PlanError("spark-key-type", f"Spark does not compare the types of {render_sql(part)}")
        wrap = "pg_catalog.trim_scale(({})::pg_catalog.numeric)" if "numeric" in kinds else "{}"
        (first,), (second,) = aliases
        left, right = (render_sql(side) for side in sides)
        strict = [_is_column(side) for side in sides]
        return (
            _Side(first, left, wrap.format(left), strict[0]),
            _Side(second, right, wrap.format(right), strict[1]),
        )

    def _kind(self, side: exp.Expr) -> str:
        return text_kind(side, self._column_type)

    def _key(self, alias: str, sql: str, letter: str = "k") -> str:
        """Name of a leaf's column that holds a key; `letter` j: its own key in an outer or semi join."""
        columns = self.parts[alias].columns
        known = next((name for name, text in columns.items() if text == sql and name[0] == letter), None)
        if known is not None:
            return known
        name = f"{letter}{len(columns) + 1}"
        columns[name] = sql
        return name

    # what is computed after the join

    def _after(self, expression: exp.Expr) -> str:
        """An expression over values of leaves; PlanError if its result depends on the database that computes it."""
        whole = self._value(expression)
        if whole is not None:
            return whole
        holder = exp.Paren(this=expression.copy())
        found: list[exp.Expr] = []
        self._replace(holder.this, found)
        check_after_join(holder.this, [self._kind_of_value(node) for node in found])
        return render_sql(holder.this)

    def _value(self, node: exp.Expr) -> str | None:
        """Name of the value for an expression over one leaf; None if no single leaf can compute it."""
        aliases = _aliases(node)
        if subqueries_of(node) or aggregates_of(node) or len(aliases) > 1:
            return None
        alias = aliases[0] if aliases else next(iter(self.parts))
        if alias not in self.parts or self.parts[alias].role not in ("inner", "padded"):
            raise PlanError("spark-subquery", f"{render_sql(node)} is no column of FROM")
        if not isinstance(node, exp.Column) and self.parts[alias].role == "padded":
            return None
        return self.values.setdefault((alias, render_sql(node)), f"v{len(self.values) + 1}")

    def _replace(self, node: exp.Expr, found: list[exp.Expr]) -> None:
        if subqueries_of(node) and isinstance(node, exp.Query | exp.Subquery | exp.Exists):
            raise PlanError("spark-subquery", "Spark takes no subquery among the columns or inside a condition")
        # WHEN ... THEN ... and (..., ...) are parts of an expression, not values
        name = self._value(node) if _aliases(node) and not isinstance(node, exp.If | exp.Tuple) else None
        if name is not None:
            found.append(node.copy())
            node.replace(exp.Var(this=name))
            return
        for child in list(node.iter_expressions()):
            self._replace(child, found)

    def _kind_of_value(self, node: exp.Expr) -> str:
        if isinstance(node, exp.Column) and self._column_type(node) in ("double precision", "real"):
            return self._column_type(node)
        return self._kind(node)

    def _leaf(self, part: JoinedLeaf) -> LeafRead:
        table = part.leaf.table
        if table is None:
            raise AssertionError("a leaf of Spark is a table")
        where = " and ".join(f"({render_sql(one)})" for one in part.where)
        own = tuple(dict.fromkeys(part.own))
        columns = tuple(part.columns.items())
        return LeafRead(part.leaf.alias, table.qualified, part.role, where, columns, own)


def _is_shaped(select: exp.Select) -> bool:
    """True if a subquery has more than FROM and WHERE: groups, aggregates, DISTINCT, LIMIT or windows."""
    clauses = ("group", "having", "distinct", "limit", "offset", "windows")
    grouped = any(aggregates_of(item) for item in select.expressions)
    return grouped or any(select.args.get(clause) for clause in clauses)


def _aliases(node: exp.Expr) -> list[str]:
    """The leaves whose columns an expression reads."""
    return list(dict.fromkeys(column.table for column in node.find_all(exp.Column)))


def _is_column(side: exp.Expr) -> bool:
    while isinstance(side, exp.Cast | exp.Paren):
        side = side.this
    return isinstance(side, exp.Column)


def _is_strict(part: exp.Expr) -> bool:
    """True for a comparison of plain columns and literals, which is never true for a NULL."""
    if not isinstance(part, _STRICT):
        return False
    plain = (exp.EQ, exp.NEQ, exp.GT, exp.GTE, exp.LT, exp.LTE, exp.Column, exp.Identifier, exp.Literal, exp.Cast)
    return all(isinstance(node, (*plain, exp.DataType, exp.DataTypeParam, exp.Paren)) for node in part.walk())
