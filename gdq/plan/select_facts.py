"""What the planner takes each SELECT of a query for, and what the server takes it for: the two must agree.

Both sides describe the query that the planner works with, where every item of FROM has an alias of its own.
"""

from __future__ import annotations

from dataclasses import dataclass

from sqlglot import exp

from gdq.plan.query import FromTree, Query, joins_of, leaves_of
from gdq.plan.query_tree import RTE_GROUP, RTE_JOIN, RTE_VALUES, TreeNode, TreeValue
from gdq.plan.shape import is_grouped, windows_of
from gdq.plan.tree_meaning import QueryFrame, derived_column, from_joins, from_leaves, window_parts

_Columns = frozenset[tuple[str, str]]
_JOIN_KINDS = {"0": "inner", "1": "left", "2": "full", "3": "right"}


@dataclass(frozen=True, slots=True)
class SelectFacts:
    """One SELECT: items of FROM, joins with ON or that pad, and the columns that each part reads at any depth."""

    leaves: tuple[str, ...]
    joins: frozenset[tuple[str, frozenset[str], frozenset[str], _Columns]]
    items: tuple[_Columns, ...]
    where: _Columns
    having: _Columns
    grouped: bool
    groups: _Columns
    windows: bool
    distinct: str
    cut: bool


def planner_facts(query: Query) -> set[SelectFacts]:
    """The SELECTs of a query that have a FROM, as the planner has them."""
    return {facts for select in query.root.find_all(exp.Select) if (facts := _planned(query, select)).leaves}


def server_facts(tree: TreeNode) -> set[SelectFacts]:
    """The SELECTs of a query that have a FROM, as the server's tree has them."""
    reader = _TreeReader()
    reader.read(tree, None)
    return {facts for facts in reader.found if facts.leaves}


def _planned(query: Query, select: exp.Select) -> SelectFacts:
    tree = query.tree(select)
    distinct = select.args.get("distinct")
    having, where, order = (select.args.get(name) for name in ("having", "where", "order"))
    group = select.args.get("group")
    windows = [window for part in [*select.expressions, *([order] if order else [])] for window in windows_of(part)]
    return SelectFacts(
        tuple(leaf.alias for leaf in leaves_of(tree)),
        frozenset(
            (join.kind, _aliases(join.left), _aliases(join.right), _columns(join.on))
            for join in joins_of(tree)
            if join.on is not None or join.kind != "inner"
        ),
        tuple(_columns(item) for item in select.expressions),
        _columns(where),
        _columns(having),
        is_grouped(select),
        _columns(group),
        bool(windows),
        "" if distinct is None else "on" if distinct.args.get("on") else "all",
        bool(select.args.get("limit") or select.args.get("offset")),
    )


def _aliases(tree: FromTree) -> frozenset[str]:
    return frozenset(leaf.alias for leaf in leaves_of(tree))


def _columns(node: exp.Expr | None) -> _Columns:
    found = node.find_all(exp.Column) if node is not None else ()
    return frozenset((column.table, column.name) for column in found)


class _TreeReader:
    def __init__(self) -> None:
        self.found: set[SelectFacts] = set()

    def read(self, query: TreeNode, outer: QueryFrame | None) -> _Columns:
        """The columns that a query reads of itself and of those around it; adds the facts of its SELECTs."""
        frame = QueryFrame(query, outer)
        entries = query.nodes("rtable")
        for index, entry in enumerate(entries, 1):
            kept = entry.text("rtekind") in (RTE_JOIN, RTE_GROUP)
            frame.places[index] = entry if kept else _name(entry)
        leaves = from_leaves(query)
        inner: set[tuple[str, str]] = set()
        for index in leaves:
            entry = entries[index - 1]
            inner |= self._columns([entry.get(name) for name in ("subquery", "functions", "values_lists")], frame)
        if query.get("setOperations") is not None or any(_is_values(entries[index - 1]) for index in leaves):
            return frozenset(inner)
        facts = self._facts(query, frame, leaves)
        self.found.add(facts)
        rest = self._columns([query.get("targetList"), query.get("jointree"), query.get("limitCount")], frame)
        return frozenset(inner | rest | facts.having)

    def _facts(self, query: TreeNode, frame: QueryFrame, leaves: list[int]) -> SelectFacts:
        entries = query.nodes("targetList")
        targets = {entry.text("ressortgroupref"): entry.get("expr") for entry in entries}
        groups = [targets[one.text("tleSortGroupRef")] for one in query.nodes("groupClause")]
        joins = set()
        for join in from_joins(query):
            kind, on = _JOIN_KINDS.get(join.text("jointype"), ""), join.get("quals")
            if on is not None or kind != "inner":
                left, right = (self._side(join.get(name), frame) for name in ("larg", "rarg"))
                joins.add((kind, left, right, self._columns(on, frame)))
        return SelectFacts(
            tuple(str(frame.places[index]) for index in leaves),
            frozenset(joins),
            tuple(self._columns(one.get("expr"), frame) for one in entries if not one.flag("resjunk")),
            self._columns([one.get("quals") for one in query.nodes("jointree")], frame),
            self._columns(query.get("havingQual"), frame),
            query.flag("hasAggs") or any(query.get(name) for name in ("groupClause", "groupingSets", "havingQual")),
            self._columns(groups, frame),
            query.flag("hasWindowFuncs"),
            "on" if query.flag("hasDistinctOn") else "all" if query.get("distinctClause") else "",
            query.get("limitCount") is not None or query.get("limitOffset") is not None,
        )

    def _side(self, value: TreeValue, frame: QueryFrame) -> frozenset[str]:
        if isinstance(value, TreeNode) and value.kind == "JOINEXPR":
            return self._side(value.get("larg"), frame) | self._side(value.get("rarg"), frame)
        return frozenset(str(frame.places[int(one.text("rtindex"))]) for one in [value] if isinstance(one, TreeNode))

    def _columns(self, value: TreeValue, frame: QueryFrame) -> _Columns:
        """The columns that a value reads, at any depth."""
        if isinstance(value, list | tuple):
            return frozenset().union(*(self._columns(one, frame) for one in value))
        if not isinstance(value, TreeNode):
            return frozenset()
        if value.kind == "QUERY":
            return self.read(value, frame)
        if value.kind != "VAR":
            parts = [one for name, one in value.fields.items() if name != "eref"]
            return self._columns([*parts, *window_parts(value, frame)], frame)
        at, place, derived = derived_column(frame, value)
        if derived is not None:
            return self._columns(derived, at)
        names = at.entry(int(value.text("varno"))).nodes("eref")[0].get("colnames")
        number = int(value.text("varattno"))
        return frozenset({(str(place), str(names[number - 1]) if isinstance(names, list) and number > 0 else "*")})


def _name(entry: TreeNode) -> str:
    return next((alias.text("aliasname") for alias in entry.nodes("eref")), "")


def _is_values(entry: TreeNode) -> bool:
    return entry.text("rtekind") == RTE_VALUES
