"""The keys that a changed row touches, and the gate: conditions without which the row cannot matter to the view.

A changed row of a subquery's table must meet its query's conditions, and matters only to rows around it that meet
theirs. The gate uses only conditions over the row itself and over unchanged tables: such a look-up costs an index scan
per changed row, while changed tables, read in two states, cost more than the saved keys are worth.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable

from sqlglot import exp

from gdq.plan.dialect import render_sql
from gdq.plan.graph import Graph, GraphKey
from gdq.plan.leaf import LEAF_NODES
from gdq.plan.query import conjuncts, joins_of, leaves_of, subqueries_of, where_of
from gdq.plan.relation_sql import RelationSql
from gdq.sql_text import quote

# With more tables the look-ups cost more than the keys that they save.
_TABLES_MAX = 6


def touched_keys_sql(relations: RelationSql, graph: Graph, key: GraphKey, alias: str, delta: str) -> str:
    """SELECT of the key values that changes of the leaf `alias` may touch, along the links of the graph.

    `delta`: the relation of these changes, for FROM.
    """
    path = graph.path(alias, key.bound) or []
    end = alias
    items = [f"{delta} as {quote(alias)}"]
    for link in path:
        ends = (link.left, link.right)
        items += [relations.relation(graph.leaves[one], "any") for one in ends if one != alias]
        end = next((one for one in ends if one in key.bound), end)
    more, conditions = _gate(relations, graph, alias, {one for link in path for one in (link.left, link.right)})
    conditions += [relations.at(link.condition, "any") for link in path]
    where = " and ".join(f"({condition})" for condition in conditions)
    listed = ", ".join(dict.fromkeys([*items, *more]))
    return f"select {quote(end)}.{quote(key.bound[end])} as k from {listed}" + (f" where {where}" if where else "")


def _gate(relations: RelationSql, graph: Graph, alias: str, beside: Collection[str]) -> tuple[list[str], list[str]]:
    """Further items of FROM and conditions, as SQL, that a row of the leaf `alias` must meet to change anything.

    `beside`: the leaves that are already in FROM. A row may match more than once.
    """
    if any(
        alias in {table.alias for table in nested.find_all(*LEAF_NODES, exp.Lateral)} for nested, _ in graph.negated
    ):
        return [], []  # a NOT IN depends on rows without any condition that ties them to the changed one
    blocks = _blocks(relations, graph, alias)
    if not blocks:
        return [], []
    leaves = [leaf for block in blocks for leaf in leaves_of(relations.query.tree(block)) if leaf.table]
    here = {alias, *({leaf.alias for leaf in leaves} & {*beside})}
    known = here | {leaf.alias for leaf in leaves if not relations.leaf_changed(leaf)}
    parts = _conditions(relations, graph, blocks, known)
    reached = _reached(here, parts)
    parts = _without_bare(here, [part for part in parts if _aliases(part) <= reached])
    looked_up = sorted({one for part in parts for one in _aliases(part)} - here)
    if len(looked_up) > _TABLES_MAX or all(_is_link(part) for part in parts):
        looked_up, parts = [], [part for part in parts if _aliases(part) <= here]
    items = [relations.relation(graph.leaves[one], "new") for one in looked_up]
    return items, [relations.at(part, "any") for part in parts]


def _blocks(relations: RelationSql, graph: Graph, alias: str) -> list[exp.Select]:
    """The SELECT whose FROM has the leaf and the SELECTs around it, up to the first with another join than inner."""
    found: list[exp.Select] = []
    block = next(
        (
            select
            for select in graph.select.find_all(exp.Select)
            if any(leaf.alias == alias for leaf in leaves_of(relations.query.tree(select)))
        ),
        None,
    )
    while block is not None and all(join.kind == "inner" for join in joins_of(relations.query.tree(block))):
        found.append(block)
        block = block.find_ancestor(exp.Select) if block is not graph.select else None
    return found


def _conditions(
    relations: RelationSql, graph: Graph, blocks: Iterable[exp.Select], known: Collection[str]
) -> list[exp.Expr]:
    """Conditions of SELECTs over known leaves, without changed subqueries, each once."""
    parts = [link.condition for link in graph.links if link.starts <= set(known)]
    for block in blocks:
        parts += [*where_of(block), *conjuncts(*(join.on for join in joins_of(relations.query.tree(block))))]
    found: dict[str, exp.Expr] = {}
    for part in parts:
        nested = subqueries_of(part)
        if _aliases(part) <= set(known) and not any(relations.is_changed(query) for query in nested):
            found[render_sql(part)] = part
    return list(found.values())


def _reached(here: Iterable[str], parts: Iterable[exp.Expr]) -> set[str]:
    """The leaves that conditions connect with `here`, directly or over others."""
    reached = set(here)
    groups = [_aliases(part) for part in parts]
    while more := {one for group in groups if group & reached for one in group} - reached:
        reached |= more
    return reached


def _without_bare(here: Collection[str], parts: list[exp.Expr]) -> list[exp.Expr]:
    """The conditions without leaves that have only equalities to one other leaf: these do not filter."""
    while True:
        bare = {
            alias
            for alias in {one for part in parts for one in _aliases(part)} - set(here)
            if all(_is_link(part) for part in parts if alias in _aliases(part))
            and len({one for part in parts if alias in _aliases(part) for one in _aliases(part)}) <= 2
        }
        if not bare:
            return parts
        parts = [part for part in parts if not _aliases(part) & bare]


def _aliases(part: exp.Expr) -> set[str]:
    """The leaves of a condition, without those of its subqueries."""
    inner = {table.alias for query in subqueries_of(part) for table in query.find_all(*LEAF_NODES, exp.Lateral)}
    return {column.table for column in part.find_all(exp.Column)} - inner


def _is_link(part: exp.Expr) -> bool:
    """True if a condition is an equality of two columns of different leaves."""
    return (
        isinstance(part, exp.EQ)
        and isinstance(part.this.unnest(), exp.Column)
        and isinstance(part.expression.unnest(), exp.Column)
        and len(_aliases(part)) == 2
    )
