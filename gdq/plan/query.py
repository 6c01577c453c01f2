"""Reads the canonical SQL of a view, as pg_get_viewdef() prints it, into a tree that the planner can take apart.

That text has every name resolved: tables have their schema, columns their table, stars are spelled out. This module
then puts CTEs in the places where they are used, gives every item of FROM a unique alias, and turns USING into ON.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

from sqlglot import exp
from sqlglot.errors import SqlglotError

from gdq.errors import PlanError
from gdq.plan.dialect import parse_statement, render_sql
from gdq.plan.leaf import Leaf, is_correlated, leaf_of
from gdq.plan.table import TableSchema

_JoinKind = Literal["inner", "left", "right", "full"]
_KINDS: dict[str, _JoinKind] = {"LEFT": "left", "RIGHT": "right", "FULL": "full"}


@dataclass(frozen=True, slots=True)
class FromJoin:
    """Two parts of a FROM and the condition between them."""

    kind: _JoinKind
    left: FromTree
    right: FromTree
    on: exp.Expr | None


FromTree = Leaf | FromJoin


@dataclass(slots=True)
class Query:
    """A view's query, normalized. `leaves`: all items of FROM at any depth by their alias.

    `sets`: the aliases of items that stand for grouping sets (gdq.plan.grouping), with the query's SQL if one is empty.
    """

    root: exp.Query
    leaves: dict[str, Leaf] = field(default_factory=dict)
    sets: dict[str, str] = field(default_factory=dict)

    def leaf(self, node: exp.Expr) -> Leaf:
        """The leaf for a node of FROM."""
        return self.leaves[node.alias]

    def tree(self, select: exp.Select) -> FromTree | None:
        """FROM as a tree of joins; None without FROM."""
        clause = select.args.get("from_")
        if clause is None:
            return None
        tree = self._tree(clause.this)
        for join in select.args.get("joins") or ():
            tree = self._join(tree, join)
        return tree

    def tables(self, node: exp.Expr) -> set[str]:
        """The tables that a part of the query reads, quoted and qualified."""
        # the functions within ROWS FROM are nodes of tables too, but no items of FROM
        found = (self.leaves.get(table.alias) for table in node.find_all(exp.Table))
        return {leaf.table.qualified for leaf in found if leaf is not None and leaf.table is not None}

    def _tree(self, node: exp.Expr) -> FromTree:
        tree = self._tree(node.this) if _is_parenthesis(node) else self.leaf(node)
        for join in node.args.get("joins") or ():
            tree = self._join(tree, join)
        return tree

    def _join(self, left: FromTree, join: exp.Join) -> FromJoin:
        kind = _KINDS.get(join.side.upper(), "inner")
        return FromJoin(kind, left, self._tree(join.this), join.args.get("on"))


def parse_query(sql: str, tables: Sequence[TableSchema]) -> Query:
    """A view's canonical SQL over `tables`, parsed and normalized; PlanError if that is not possible."""
    try:
        root = parse_statement(sql)
    except SqlglotError as error:
        raise PlanError("expression", "the planner cannot read the view's SQL") from error
    if not isinstance(root, exp.Query):
        raise PlanError("not-a-select", "a view is a SELECT")
    root = _without_parentheses(_inlined(root, {}))
    for test in root.find_all(exp.Exists):
        _ask_for_nothing(test.this)
    query = Query(root)
    _Namer(query, {(table.schema, table.name): table for table in tables}).run()
    return query


def _is_parenthesis(node: exp.Expr) -> bool:
    """True if a node of FROM is not an item but joins in parentheses."""
    items = exp.Table | exp.Subquery | exp.Values | exp.Unnest
    return isinstance(node, exp.Subquery) and not node.alias and isinstance(node.this, items)


def value_of(item: exp.Expr) -> exp.Expr:
    """The expression of an item of a select list, without its name."""
    inner = item.unalias()
    if isinstance(inner, exp.Subquery) and inner.alias:
        inner = inner.copy()
        inner.set("alias", None)
    return inner


def aliased(item: exp.Expr, name: str) -> exp.Alias:
    """An item of a select list under another name."""
    return exp.Alias(this=value_of(item).copy(), alias=exp.to_identifier(name, quoted=True))


def column_node(alias: str, name: str) -> exp.Column:
    """A column of an item of FROM."""
    return exp.Column(this=exp.to_identifier(name, quoted=True), table=exp.to_identifier(alias, quoted=True))


def conjuncts(*conditions: exp.Expr | None) -> list[exp.Expr]:
    """The AND-connected parts of conditions."""
    parts: list[exp.Expr] = []
    for condition in conditions:
        inner = condition.unnest() if condition is not None else None
        if isinstance(inner, exp.And):
            parts += conjuncts(inner.this, inner.expression)
        elif inner is not None:
            parts.append(inner)
    return parts


def where_of(select: exp.Select) -> list[exp.Expr]:
    """The conjuncts of WHERE."""
    clause = select.args.get("where")
    return conjuncts(clause.this) if clause is not None else []


def leaves_of(tree: FromTree | None) -> list[Leaf]:
    """The leaves of a tree from left to right."""
    if tree is None:
        return []
    return [tree] if isinstance(tree, Leaf) else [*leaves_of(tree.left), *leaves_of(tree.right)]


def joins_of(tree: FromTree | None) -> Iterator[FromJoin]:
    """All joins of a tree."""
    if isinstance(tree, FromJoin):
        yield tree
        yield from joins_of(tree.left)
        yield from joins_of(tree.right)


def subqueries_of(node: exp.Expr) -> list[exp.Query]:
    """The queries directly inside an expression, without nested ones."""
    if isinstance(node, exp.Query) and not isinstance(node, exp.Subquery):
        return [node]
    found: list[exp.Query] = []
    for child in node.iter_expressions():
        found += subqueries_of(child)
    return found


def selects_of(query: exp.Query) -> list[exp.Select]:
    """The SELECTs of a set operation, or the SELECT itself."""
    if isinstance(query, exp.SetOperation):
        return [*selects_of(query.this), *selects_of(query.expression)]
    return [query] if isinstance(query, exp.Select) else selects_of(query.this)


def _inlined(node: exp.Expr, known: Mapping[str, tuple[exp.Expr, Sequence[exp.Identifier]]]) -> exp.Expr:
    """A copy of a query with each CTE put in the places where it is used."""
    node = node.copy()
    clause = node.args.get("with_")
    if clause is not None:
        if clause.args.get("recursive"):
            raise PlanError("recursive", "WITH RECURSIVE is loaded in full")
        known = dict(known)
        for cte in clause.expressions:
            alias = cte.args["alias"]
            known[cte.alias] = (_inlined(cte.this, known), alias.args.get("columns") or ())
        node.set("with_", None)
    for inner in list(node.find_all(exp.Query)):
        if inner is not node and inner.args.get("with_") is not None:
            inner.replace(_inlined(inner, known))
    for table in list(node.find_all(exp.Table)):
        if table.db or table.name not in known:
            continue
        query, columns = known[table.name]
        own = table.args.get("alias")
        alias = exp.TableAlias(
            this=exp.to_identifier(table.alias_or_name, quoted=True),
            columns=list((own.args.get("columns") if own else None) or [c.copy() for c in columns]),
        )
        table.replace(exp.Subquery(this=query.copy(), alias=alias, joins=table.args.get("joins")))
    return node


def _without_parentheses(node: exp.Expr) -> exp.Query:
    while isinstance(node, exp.Subquery) and not node.alias:
        node = node.this
    if not isinstance(node, exp.Query):
        raise PlanError("not-a-select", "a view is a SELECT")
    for inner in list(node.find_all(exp.Subquery)):
        # (SELECT ...) UNION ...: the tree shows the order without the parentheses
        if isinstance(inner.parent, exp.SetOperation) and not inner.alias and isinstance(inner.this, exp.Query):
            inner.replace(inner.this)
    return node


def _ask_for_nothing(query: exp.Expr) -> None:
    """Replace the plain columns in an EXISTS's select list by 1: they come from a star, and are not read."""
    deciding = ("group", "having", "distinct", "limit", "offset", "windows")
    if not isinstance(query, exp.Select) or any(query.args.get(clause) for clause in deciding):
        return
    if all(isinstance(item.unalias(), exp.Column) for item in query.expressions):
        query.set("expressions", [exp.Literal.number(1)])


class _Namer:
    """Gives leaves unique aliases, resolves columns to leaves, and turns USING into ON."""

    def __init__(self, query: Query, tables: Mapping[tuple[str, str], TableSchema]) -> None:
        self._query = query
        self._tables = tables
        self._numbers = itertools.count(1)
        self._scopes: dict[int, dict[str, str]] = {}
        self._merged: dict[int, set[str]] = {}

    def run(self) -> None:
        root = self._query.root
        for select in root.find_all(exp.Select):
            _expand_windows(select)
        for operation in root.find_all(exp.SetOperation):
            _refuse_limit(operation)
        for select in list(root.find_all(exp.Select)):
            self._name_outputs(select)
        for select in list(root.find_all(exp.Select)):
            self._scopes[id(select)] = self._name_leaves(select)
        for column in list(root.find_all(exp.Column)):
            self._resolve(column)
        joins = list(root.find_all(exp.Join))
        self._merged = {id(join): {name.name for name in join.args.get("using") or ()} for join in joins}
        for join in joins:
            self._expand_using(join)
        for lateral in list(root.find_all(exp.Lateral)):
            self._settle_lateral(lateral)

    def _settle_lateral(self, node: exp.Lateral) -> None:
        """Turn a LATERAL query that reads no columns of items before it into an ordinary one."""
        leaf = self._query.leaf(node)
        if leaf.query is not None and not is_correlated(leaf.query):
            self._query.leaves[leaf.alias] = replace(leaf, lateral=False)
            node.replace(exp.Subquery(this=leaf.query, alias=node.args["alias"], joins=node.args.get("joins")))

    def _name_outputs(self, select: exp.Select) -> None:
        items = []
        for number, item in enumerate(select.expressions, 1):
            if item.find(exp.Star) and not item.find(exp.Count):
                raise PlanError("whole-row", f"{render_sql(item)} stands for a whole row")
            items.append(aliased(item, item.alias_or_name or f"column{number}"))
        select.set("expressions", items)

    def _name_leaves(self, select: exp.Select) -> dict[str, str]:
        names: dict[str, str] = {}
        clause = select.args.get("from_")
        if select.args.get("laterals"):
            raise PlanError("lateral", "this kind of LATERAL is loaded in full")
        parts = ([clause.this] if clause is not None else []) + [j.this for j in select.args.get("joins") or ()]
        for node in (leaf for part in parts for leaf in _leaf_nodes(part)):
            old = node.alias or node.name
            alias = f"t{next(self._numbers)}"
            given = node.args.get("alias")
            columns = tuple(c.name for c in (given.args.get("columns") if given else None) or ())
            leaf = leaf_of(node, alias, columns, self._tables)
            listed = (
                [exp.to_identifier(c, quoted=True) for c in (columns if leaf.fixed else leaf.columns)]
                if columns
                else None
            )
            named = exp.TableAlias(this=exp.to_identifier(alias, quoted=True), columns=listed)
            node.set("alias", named)
            self._query.leaves[alias] = leaf
            names[old] = alias
        return names

    def _resolve(self, column: exp.Column) -> None:
        select = column.find_ancestor(exp.Select)
        while select is not None:
            scope = self._scopes[id(select)]
            if not column.table and len(scope) == 1:
                (alias,) = scope.values()
            else:
                alias = scope.get(column.table, "")
            if alias:
                break
            select = select.find_ancestor(exp.Select)
        else:
            raise PlanError("column-unresolved", f"{render_sql(column)} belongs to no single table")
        if column.name not in self._query.leaves[alias].columns:
            raise PlanError("system-column", f"{render_sql(column)} is no column that is logged")
        name = exp.to_identifier(column.name, quoted=True)
        column.replace(exp.Column(this=name, table=exp.to_identifier(alias, quoted=True)))

    def _expand_using(self, join: exp.Join) -> None:
        using = join.args.get("using")
        if join.args.get("method") or (using and (join.side or "").lower() == "full"):
            raise PlanError("full-join-using", "FULL JOIN ... USING is loaded in full; write ON")
        if not using:
            return
        owner = join.parent
        if owner is None or isinstance(owner, exp.Select):
            raise PlanError("column-unresolved", "USING is loaded in full; write ON")
        joins = owner.args.get("joins") or []
        before = joins[: next(n for n, one in enumerate(joins) if one is join)]
        pairs = []
        for name in using:
            sides = self._source(owner, before, name.name), self._source(join.this, None, name.name)
            if not all(sides):
                raise PlanError("column-unresolved", f"USING ({name.name}) is loaded in full; write ON")
            pairs.append(exp.EQ(this=column_node(sides[0], name.name), expression=column_node(sides[1], name.name)))
        join.set("using", None)
        join.set("on", exp.and_(*pairs))

    def _source(self, node: exp.Expr, joins: list[exp.Join] | None, name: str) -> str:
        """The leaf from which a column of an item with these joins (None: with all) comes; empty if it has none."""
        joins = (node.args.get("joins") or []) if joins is None else joins
        if joins:
            *before, last = joins
            right = self._source(last.this, None, name)
            left = self._source(node, before, name)
            # of two equal columns USING shows that of the side that is never padded
            merged = name in self._merged.get(id(last), ())
            return right if (merged and last.side.upper() == "RIGHT") or not left else left
        if _is_parenthesis(node):
            return self._source(node.this, None, name)
        return node.alias if name in self._query.leaves[node.alias].columns else ""


def _leaf_nodes(node: exp.Expr) -> list[exp.Expr]:
    """The items of FROM under a node, across joins and parentheses."""
    found = _leaf_nodes(node.this) if _is_parenthesis(node) else [node]
    for join in node.args.get("joins") or ():
        found += _leaf_nodes(join.this)
    return found


def _expand_windows(select: exp.Select) -> None:
    """Put the definitions of a WINDOW clause in the places where they are used."""
    named = {window.name: window for window in select.args.get("windows") or ()}
    for window in list(select.find_all(exp.Window)) if named else ():
        known = named.get(window.text("alias"))
        if known is None or known is window:
            continue
        if known.text("alias"):
            raise PlanError("window-named", "a window that is made from another one is loaded in full")
        for part, value in known.args.items():
            if value and part != "this" and not window.args.get(part):
                copied = [one.copy() for one in value] if isinstance(value, list) else value
                window.set(part, copied.copy() if isinstance(copied, exp.Expr) else copied)
        window.set("alias", None)
    select.set("windows", None)


def _refuse_limit(operation: exp.SetOperation) -> None:
    if operation.args.get("limit") or operation.args.get("offset"):
        raise PlanError("order-limit", "LIMIT after a set operation is loaded in full")
    operation.set("order", None)
