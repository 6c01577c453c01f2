"""Graph of a SELECT: links and bounds between its leaves, and from them the key by which it is recomputed in part.

    select ... from a join b on a.x = b.y       link: a change of b leads to the rows of a with a.x = b.y
                                                bound: if only a.x in S is wanted, only b.y in S is read

A link is a condition between two items of FROM, at any depth. A change is followed along it to an item that must have
a matching row. A bound (a.x -> b.y) holds both ways in an inner join, from the kept to the padded side of an outer
join, and from an outer query to a correlated subquery.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

from sqlglot import exp

from gdq.errors import PlanError
from gdq.plan.dialect import render_sql
from gdq.plan.leaf import Leaf
from gdq.plan.query import (
    FromJoin,
    FromTree,
    Query,
    conjuncts,
    joins_of,
    leaves_of,
    selects_of,
    subqueries_of,
    where_of,
)
from gdq.plan.shape import aggregates_of, windows_of

_ColumnOf = tuple[str, str]


@dataclass(frozen=True, slots=True)
class GraphLink:
    """A condition between two leaves, `left` and `right` by their aliases.

    `starts`: leaves from which the link may be followed: a row of such a leaf that contributes to the view guarantees
    a matching row on the other side. So from a subquery outwards and from the padded side of an outer join, not back.
    """

    left: str
    right: str
    condition: exp.Expr
    starts: frozenset[str]


@dataclass(frozen=True, slots=True)
class GraphKey:
    """The key to recompute a SELECT by. `starts`: its columns, two for the sides of a FULL JOIN.

    `bound`: all columns to restrict to the key's values, one per leaf, nearest first.
    """

    starts: tuple[_ColumnOf, ...]
    bound: dict[str, str]
    padded: bool


@dataclass(slots=True)
class Graph:
    """Leaves, links and bounds of a SELECT and of the subqueries in its expressions.

    `read`: the columns of each leaf that the view reads. `padding`: number of outer joins that may pad a leaf with
    NULL. `kept`: leaves of the SELECT with padding 0. `full`: pairs of equal columns of FULL JOINs. `negated`: the
    queries of NOT IN and similar tests, each with the test.
    """

    select: exp.Select
    leaves: dict[str, Leaf] = field(default_factory=dict)
    links: list[GraphLink] = field(default_factory=list)
    bounds: dict[_ColumnOf, list[_ColumnOf]] = field(default_factory=dict)
    kept: list[str] = field(default_factory=list)
    padding: dict[str, int] = field(default_factory=dict)
    read: dict[str, tuple[str, ...]] = field(default_factory=dict)
    full: list[tuple[_ColumnOf, _ColumnOf]] = field(default_factory=list)
    negated: list[tuple[exp.Query, exp.Expr]] = field(default_factory=list)

    def closure(self, starts: Iterable[_ColumnOf]) -> dict[str, str]:
        """Every leaf that is bound to the columns `starts`, with its column."""
        found: dict[str, str] = {}
        waiting = deque(starts)
        while waiting:
            alias, name = waiting.popleft()
            if alias not in found:
                found[alias] = name
                waiting += self.bounds.get((alias, name), [])
        return found

    def path(self, start: str, ends: Iterable[str]) -> list[GraphLink] | None:
        """The shortest chain of links from a leaf to one of `ends`; None if there is none."""
        goal = set(ends)
        came: dict[str, tuple[str, GraphLink] | None] = {start: None}
        waiting = deque([start])
        while waiting:
            alias = waiting.popleft()
            if alias in goal:
                return list(_back(came, alias))
            for link in self.links:
                for here, there in ((link.left, link.right), (link.right, link.left)):
                    if here == alias and here in link.starts and there not in came:
                        came[there] = (alias, link)
                        waiting.append(there)
        return None


def build_graph(query: Query, select: exp.Select) -> Graph:
    """The graph of `select`, with the leaves of its subqueries; a query in FROM is one leaf."""
    graph = Graph(select)
    tree = query.tree(select)
    graph.leaves |= _own(tree)
    _refuse_padded_full(tree)
    _count_padding(graph, tree)
    for column in query.root.find_all(exp.Column):
        graph.read[column.table] = (*graph.read.get(column.table, ()), column.name)
    graph.kept = [alias for alias in graph.leaves if not graph.padding[alias]]
    _add_joins(query, graph, tree, inner=set())
    _add_laterals(query, graph, tree)
    _add_conditions(query, graph, where_of(select), inner=None)
    _add_items(query, graph, select)
    return graph


def choose_graph_key(graph: Graph, changed: Iterable[str], tested: Iterable[exp.Expr] = ()) -> GraphKey:
    """The key that all changed leaves lead to in the fewest steps; PlanError if there is none.

    `tested`: left sides of the NOT INs whose queries changed; the key must be exactly these. For a NULL there the
    result depends on whether the query has rows at all, and only that key finds the rows with NULL.
    """
    changed = list(changed)
    wanted = {(one.table, one.name) if isinstance(one, exp.Column) else ("", "") for one in tested}
    best: tuple[tuple[int, int, int], GraphKey] | None = None
    for starts, padded, rank in _candidates(graph):
        if wanted and {*starts} != wanted:
            continue
        bound = graph.closure(starts)
        paths = [graph.path(alias, bound) for alias in changed]
        if any(path is None for path in paths):
            continue
        steps = sum(len(path) for path in paths if path is not None)
        score = (steps, -len(bound), rank)
        if best is None or score < best[0]:
            best = (score, GraphKey(starts, bound, padded))
    if best is None:
        raise PlanError("no-key", "no column ties the tables that changed to the rows of the view")
    return best[1]


def _candidates(graph: Graph) -> Iterator[tuple[tuple[_ColumnOf, ...], bool, int]]:
    """Possible keys: starts, True if they are the sides of a FULL JOIN, and a rank (less is better)."""
    for left, right in graph.full:
        # a column that its own side may pad is NULL in rows that a change of another value removes
        if graph.padding[left[0]] == graph.padding[right[0]] == 1:
            yield (left, right), True, 0
    if graph.full:
        return
    for alias in graph.kept:
        leaf = graph.leaves[alias]
        for name in leaf.table.key if leaf.table is not None else ():
            yield ((alias, name),), False, 0
        tested = [(one.table, one.name) for _, test in graph.negated if isinstance(one := test.this, exp.Column)]
        for column in [*graph.bounds, *tested]:
            if column[0] == alias:
                yield (column,), False, 1
        if leaf.table is None or not leaf.table.key:
            for name in graph.read.get(alias, ()):
                yield ((alias, name),), False, 2


def _back(came: dict[str, tuple[str, GraphLink] | None], alias: str) -> Iterator[GraphLink]:
    step = came[alias]
    while step is not None:
        alias, link = step
        yield link
        step = came[alias]


def _count_padding(graph: Graph, tree: FromTree | None) -> None:
    """Count for each leaf the outer joins that may pad it with NULL."""
    for leaf in leaves_of(tree):
        graph.padding[leaf.alias] = 0
    for join in joins_of(tree):
        for alias in _nullable(join):
            graph.padding[alias] += 1


def _refuse_padded_full(tree: FromTree | None) -> None:
    """PlanError for a FULL JOIN that another outer join pads: its key does not find all rows."""
    for join in joins_of(tree):
        sides = _sides(join)
        if any(inner.kind == "full" for side in sides for inner in joins_of(side)):
            raise PlanError("full-join-nested", "a FULL JOIN inside another outer join is loaded in full")


def _sides(join: FromJoin) -> list[FromTree]:
    """The sides that a join may pad with NULL."""
    return {"left": [join.right], "right": [join.left], "full": [join.left, join.right], "inner": []}[join.kind]


def _nullable(join: FromJoin) -> set[str]:
    return {leaf.alias for side in _sides(join) for leaf in leaves_of(side)}


def _add_joins(query: Query, graph: Graph, tree: FromTree | None, inner: set[str]) -> None:
    """Add the ON conditions of a FROM. `inner`: the leaves of the subquery with this FROM, empty for the SELECT."""
    for join in joins_of(tree):
        nullable = _nullable(join)
        for part in conjuncts(join.on):
            ends = _ends(graph, part)
            if ends is None:
                _add_conditions(query, graph, [part], inner=inner or None)
                continue
            if join.kind == "full" and not inner and all(end is not None for end in ends.columns):
                left, right = ends.columns
                if left is not None and right is not None:
                    graph.full.append((left, right))
            starts = inner or {*ends.aliases}
            if join.kind != "inner":
                # a row of the kept side counts also without a match
                starts = set() if join.kind == "full" else starts & nullable
            _link(graph, ends, part, starts, nullable)
            if join.kind != "full":
                _bind(graph, ends, nullable if join.kind != "inner" else inner or None)


def _add_conditions(query: Query, graph: Graph, parts: Iterable[exp.Expr], inner: set[str] | None) -> None:
    """Add conjuncts of a WHERE. `inner`: the leaves of the subquery with this WHERE, None for the SELECT itself."""
    for part in parts:
        queries = subqueries_of(part)
        if queries:
            for nested in queries:
                _add_subquery(query, graph, nested)
                _add_membership(query, graph, part, nested)
            continue
        ends = _ends(graph, part)
        if ends is not None:
            _link(graph, ends, part, {*ends.aliases} if inner is None else inner)
            _bind(graph, ends, inner)


def _add_subquery(query: Query, graph: Graph, nested: exp.Query) -> None:
    """Add leaves, links and bounds of a subquery and its nested ones."""
    for select in selects_of(nested):
        tree = query.tree(select)
        own = _own(tree)
        graph.leaves |= own
        _count_padding(graph, tree)
        _add_joins(query, graph, tree, inner=set(own))
        _add_laterals(query, graph, tree)
        _add_conditions(query, graph, where_of(select), inner=set(own))
        _add_items(query, graph, select)


def _own(tree: FromTree | None) -> dict[str, Leaf]:
    """The leaves of a FROM that are not LATERAL."""
    return {leaf.alias: leaf for leaf in leaves_of(tree) if not leaf.lateral}


def _add_laterals(query: Query, graph: Graph, tree: FromTree | None) -> None:
    """Add the LATERAL queries of a FROM, which depend on the row around them like subqueries in expressions."""
    for leaf in leaves_of(tree):
        if leaf.lateral and leaf.query is not None:
            _add_subquery(query, graph, leaf.query)


def _add_items(query: Query, graph: Graph, select: exp.Select) -> None:
    """Add the subqueries of a select list."""
    for item in select.expressions:
        for nested in subqueries_of(item):
            _add_subquery(query, graph, nested)
            _add_membership(query, graph, item, nested)


def _add_membership(query: Query, graph: Graph, part: exp.Expr, nested: exp.Query) -> None:
    """Add IN (SELECT ...) as an equality; NOT IN gives no bound, since a NULL in its query concerns all rows."""
    test = next((found for found in part.find_all(exp.In) if _is_of(found, nested)), None)
    if test is None:
        return
    outer = test.this.expressions if isinstance(test.this, exp.Tuple) else [test.this]
    if not isinstance(nested, exp.Select):
        raise PlanError("subquery-set-operation", "IN over a set operation is loaded in full")
    grouped = _group_columns(nested)
    plain = isinstance(part, exp.In)
    if not plain:
        graph.negated.append((nested, test))
    if _is_cut(nested):
        return
    own = set(_own(query.tree(nested)))
    for left, item in zip(outer, nested.expressions, strict=True):
        right = item.unalias()
        if aggregates_of(right) or (grouped is not None and render_sql(right) not in grouped):
            continue
        equal = exp.EQ(this=left.copy(), expression=right.copy())
        ends = _ends(graph, equal)
        if ends is not None:
            _link(graph, ends, equal, own)
            if plain:
                _bind(graph, ends, own)


def _is_cut(select: exp.Select) -> bool:
    """True if a SELECT's rows depend on each other, by LIMIT, DISTINCT ON or window functions."""
    distinct = select.args.get("distinct")
    cut = select.args.get("limit") or select.args.get("offset") or (distinct is not None and distinct.args.get("on"))
    return bool(cut) or any(windows_of(item) for item in select.expressions)


def _group_columns(select: exp.Select) -> set[str] | None:
    group = select.args.get("group")
    if group is None:
        return set() if any(aggregates_of(item) for item in select.expressions) else None
    return {render_sql(item) for item in group.expressions}


def _is_of(node: exp.Expr, nested: exp.Query) -> bool:
    return any(found is nested for child in node.iter_expressions() for found in subqueries_of(child))


@dataclass(frozen=True, slots=True)
class _Ends:
    aliases: tuple[str, str]
    columns: tuple[_ColumnOf | None, _ColumnOf | None]


def _ends(graph: Graph, part: exp.Expr) -> _Ends | None:
    """The two leaves of a condition, with their columns if it is an equality of two columns."""
    aliases = list(dict.fromkeys(column.table for column in part.find_all(exp.Column)))
    if len(aliases) != 2 or subqueries_of(part) or any(alias not in graph.leaves for alias in aliases):
        return None
    first, second = aliases
    if isinstance(part, exp.EQ):
        left, right = part.this.unnest(), part.expression.unnest()
        if isinstance(left, exp.Column) and isinstance(right, exp.Column):
            return _Ends((left.table, right.table), ((left.table, left.name), (right.table, right.name)))
    return _Ends((first, second), (None, None))


def _link(graph: Graph, ends: _Ends, part: exp.Expr, starts: set[str], here: Iterable[str] = ()) -> None:
    """Add a link, unless its condition may be true for the NULLs of a padded leaf.

    In that case a new row of the leaf also removes a padded row, which the link would not find. `starts`: leaves it may
    be followed from (others are ignored); `here`: leaves padded by the condition's own join, after the test.
    """
    starts = starts & {*ends.aliases}
    if not starts:
        return
    plain = all(column is not None for column in ends.columns)
    if plain or not any(graph.padding[alias] - (alias in here) for alias in ends.aliases):
        graph.links.append(GraphLink(*ends.aliases, part, frozenset(starts)))


def _bind(graph: Graph, ends: _Ends, into: set[str] | None) -> None:
    """Bind two equal columns: both ways, or only towards the leaves in `into`."""
    left, right = ends.columns
    if left is None or right is None:
        return
    for start, end in ((left, right), (right, left)):
        if into is None or end[0] in into:
            graph.bounds.setdefault(start, []).append(end)
