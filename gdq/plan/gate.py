"""Which keys the changes of an item of FROM touch, and what must hold for a changed row to matter to the view at all.

A row that changed in a table of a subquery matters only to rows of the queries around it that pass their other
conditions, and it must pass those of its own query. Only what the row itself and tables without changes tell is asked:
to look that up costs an index scan for each changed row, where tables in two states cost more than the keys are worth.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable

from sqlglot import exp

from gdq.plan.graph import Graph, Key
from gdq.plan.leaf import ITEMS
from gdq.plan.query import conjuncts, joins_of, leaves_of, render, subqueries_of, where_of
from gdq.plan.relation_sql import Relations
from gdq.sql_text import quote

# More tables than these cost more to look up than the keys that they save.
_TABLES_MAX = 6


def following(relations: Relations, graph: Graph, key: Key, alias: str, delta: str) -> str:
    """The SELECT of the values of a key that changes of the leaf `alias` may touch, along the links of the graph.

    `delta`: the relation with those changes, for FROM.
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


def _gate(relations: Relations, graph: Graph, alias: str, beside: Collection[str]) -> tuple[list[str], list[str]]:
    """More items of FROM and conditions, as SQL, which a row of the leaf `alias` must meet to change anything.

    `beside`: the leaves that are in FROM already. A row may meet them more than once.
    """
    if any(alias in {table.alias for table in nested.find_all(*ITEMS, exp.Lateral)} for nested, _ in graph.negated):
        return [], []  # a NOT IN depends on rows that no condition ties to the one that changed
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


def _blocks(relations: Relations, graph: Graph, alias: str) -> list[exp.Select]:
    """The SELECT whose FROM has a leaf, and those around it, as far as all their joins are inner ones."""
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
    relations: Relations, graph: Graph, blocks: Iterable[exp.Select], known: Collection[str]
) -> list[exp.Expr]:
    """The conditions of SELECTs over known leaves whose truth did not change for a row, each once."""
    parts = [link.condition for link in graph.links if link.starts <= set(known)]
    for block in blocks:
        parts += [*where_of(block), *conjuncts(*(join.on for join in joins_of(relations.query.tree(block))))]
    found: dict[str, exp.Expr] = {}
    for part in parts:
        nested = subqueries_of(part)
        if _aliases(part) <= set(known) and not any(relations.is_changed(query) for query in nested):
            found[render(part)] = part
    return list(found.values())


def _reached(here: Iterable[str], parts: Iterable[exp.Expr]) -> set[str]:
    """The leaves that conditions tie to those that are here, directly or over others."""
    reached = set(here)
    groups = [_aliases(part) for part in parts]
    while more := {one for group in groups if group & reached for one in group} - reached:
        reached |= more
    return reached


def _without_bare(here: Collection[str], parts: list[exp.Expr]) -> list[exp.Expr]:
    """The conditions but for those of leaves that nothing but one equality is asked of."""
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
    """The leaves that a condition is about, those of queries in it left out."""
    inner = {table.alias for query in subqueries_of(part) for table in query.find_all(*ITEMS, exp.Lateral)}
    return {column.table for column in part.find_all(exp.Column)} - inner


def _is_link(part: exp.Expr) -> bool:
    """Whether a condition only says that two columns are equal."""
    return (
        isinstance(part, exp.EQ)
        and isinstance(part.this.unnest(), exp.Column)
        and isinstance(part.expression.unnest(), exp.Column)
        and len(_aliases(part)) == 2
    )
