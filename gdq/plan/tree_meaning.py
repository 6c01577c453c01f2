"""What a query means, as far as two trees of the server can show it: two queries with the same meaning() are the same.

Not part of the meaning: names of items and columns, WITH (a query in WITH is the same as that query in FROM), USING
(its columns are those that it stands for), WINDOW, the places of words in the text, and ORDER BY of a set operation.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from gdq.plan.query_tree import (
    EXISTS_SUBLINK,
    RTE_CTE,
    RTE_FUNCTION,
    RTE_GROUP,
    RTE_JOIN,
    RTE_RELATION,
    RTE_SUBQUERY,
    RTE_VALUES,
    TreeNode,
    TreeValue,
)

# Fields that say where a node stood in the text, how it is printed, or what follows from other fields.
PRINTED_FIELDS = frozenset(
    {
        "location", "list_start", "list_end", "rexpr_list_start", "rexpr_list_end", "funcformat", "relabelformat",
        "coerceformat", "convertformat", "row_format", "arrayformat", "varnosyn", "varattnosyn", "varnullingrels",
        "aggno", "aggtransno", "hashable", "funccolnames", "funcparams",
    }
)  # fmt: skip


@dataclass(slots=True)
class QueryFrame:
    """A query whose parts are looked at. `places`: each index of the range table, as a leaf's name or as its entry."""

    query: TreeNode
    outer: QueryFrame | None
    places: dict[int, str | TreeNode] = field(default_factory=dict)

    def above(self, levels: int) -> QueryFrame:
        """The frame of the query that many levels above."""
        frame = self
        for _ in range(levels):
            if frame.outer is None:
                raise ValueError("a column of a query that is not there")
            frame = frame.outer
        return frame

    def entry(self, index: int) -> TreeNode:
        """The entry of the range table with that index."""
        return self.query.nodes("rtable")[index - 1]


def from_leaves(query: TreeNode) -> list[int]:
    """The indexes of the items of FROM, or of the sides of a set operation, from left to right."""
    parts = [*query.nodes("jointree"), *query.nodes("setOperations")]
    return [int(node.text("rtindex")) for part in parts for node in _places(part) if node.kind == "RANGETBLREF"]


def from_joins(query: TreeNode) -> list[TreeNode]:
    """The joins of a query's FROM."""
    return [node for part in query.nodes("jointree") for node in _places(part) if node.kind == "JOINEXPR"]


def derived_column(frame: QueryFrame, var: TreeNode) -> tuple[QueryFrame, str | TreeNode, TreeValue]:
    """Frame, place and value of a column: the value is the expression behind a merged or grouped column, else None."""
    at = frame.above(int(var.text("varlevelsup")))
    place = at.places[int(var.text("varno"))]
    if isinstance(place, str):
        return at, place, None
    listed = place.get("joinaliasvars" if place.text("rtekind") == RTE_JOIN else "groupexprs")
    number = int(var.text("varattno"))
    if number < 1 or not isinstance(listed, list):
        raise ValueError("a whole row of a join")
    return at, place, listed[number - 1]


def window_parts(call: TreeNode, frame: QueryFrame) -> list[TreeValue]:
    """The expressions of PARTITION BY and ORDER BY for the call of a window function; empty for other nodes."""
    if call.kind != "WINDOWFUNC":
        return []
    targets = {one.text("ressortgroupref"): one.get("expr") for one in frame.query.nodes("targetList")}
    window = next(one for one in frame.query.nodes("windowClause") if one.text("winref") == call.text("winref"))
    clauses = [*window.nodes("partitionClause"), *window.nodes("orderClause")]
    return [targets[one.text("tleSortGroupRef")] for one in clauses]


def meaning(query: TreeNode, views: Mapping[str, TreeNode] | None = None) -> object:
    """What a query means, as nested tuples to be compared. `views`: trees to take for relations with these numbers."""
    return _Reader(views or {}).query(query, None)


def _places(node: TreeNode) -> Iterator[TreeNode]:
    """The references and joins of a FROM or a set operation."""
    yield node
    for name in ("fromlist", "larg", "rarg"):
        for inner in node.nodes(name):
            yield from _places(inner)


class _Reader:
    def __init__(self, views: Mapping[str, TreeNode]) -> None:
        self._views = views
        self._numbers = itertools.count(1)

    def query(self, query: TreeNode, outer: QueryFrame | None, *, bare: bool = False) -> object:
        """The meaning of a query; `bare`: only whether it has rows counts."""
        frame = QueryFrame(query, outer)
        leaves = from_leaves(query)
        for index, entry in enumerate(query.nodes("rtable"), 1):
            if entry.text("rtekind") in (RTE_JOIN, RTE_GROUP):
                frame.places[index] = entry
        for index in leaves:
            frame.places[index] = str(next(self._numbers))
        items = [self._item(frame.entry(index), frame) for index in leaves]
        operation = query.node("setOperations")
        targets = {one.text("ressortgroupref"): one.get("expr") for one in query.nodes("targetList")}
        shown = [one.get("expr") for one in query.nodes("targetList") if not one.flag("resjunk")]
        cut = bool(query.get("limitCount") or query.get("limitOffset"))
        clauses = ["groupClause", "distinctClause"] + (["sortClause"] if operation is None or cut else [])
        return (
            items,
            self._value(query.get("jointree"), frame),
            self._value(operation, frame),
            [] if bare else [self._value(one, frame) for one in shown],
            [self._clause(query.nodes(clause), targets, frame) for clause in clauses],
            [self._value(query.get(name), frame) for name in ("havingQual", "limitCount", "limitOffset")],
            [query.get(name) for name in ("hasDistinctOn", "limitOption", "groupDistinct", "hasForUpdate")],
            self._value(query.get("groupingSets"), frame),
        )

    def _item(self, entry: TreeNode, frame: QueryFrame) -> object:
        """An item of FROM."""
        kind = entry.text("rtekind")
        if kind == RTE_RELATION and entry.text("relid") in self._views:
            return "query", self.query(self._views[entry.text("relid")], None)
        if kind == RTE_RELATION:
            sample = self._value(entry.get("tablesample"), frame)
            return kind, entry.text("relid"), entry.text("inh"), sample
        if kind == RTE_SUBQUERY:
            return "query", self.query(entry.nodes("subquery")[0], frame)
        if kind == RTE_CTE:
            owner = frame.above(int(entry.text("ctelevelsup")))
            ctes = owner.query.nodes("cteList")
            query = next(one for one in ctes if one.text("ctename") == entry.text("ctename"))
            if query.flag("cterecursive"):
                return "recursive", entry.text("ctename")
            return "query", self.query(query.nodes("ctequery")[0], owner)
        if kind == RTE_VALUES:
            return kind, self._value(entry.get("values_lists"), frame)
        if kind == RTE_FUNCTION:
            return kind, self._value(entry.get("functions"), frame), entry.text("funcordinality")
        return kind, [(name, self._value(value, frame)) for name, value in entry.fields.items() if name != "eref"]

    def _value(self, value: TreeValue, frame: QueryFrame) -> object:
        if isinstance(value, list | tuple):
            return [self._value(one, frame) for one in value]
        if not isinstance(value, TreeNode):
            return value
        match value.kind:
            case "VAR":
                return self._column(value, frame)
            case "RANGETBLREF":
                place = frame.places[int(value.text("rtindex"))]
                return place if isinstance(place, str) else "join"
            case "JOINEXPR":
                sides = [self._value(value.get(name), frame) for name in ("larg", "rarg", "quals")]
                return "join", value.text("jointype"), sides
            case "SUBLINK":
                return self._sublink(value, frame)
            case "WINDOWFUNC":
                windows = {one.text("winref"): one for one in frame.query.nodes("windowClause")}
                return "window", self._fields(value, frame, {"winref"}), self._window(windows, value, frame)
            case "AGGREF":
                targets = {one.text("ressortgroupref"): one.get("expr") for one in value.nodes("args")}
                ordered = [self._clause(value.nodes(name), targets, frame) for name in ("aggorder", "aggdistinct")]
                return "aggregate", self._fields(value, frame, {"args", "aggorder", "aggdistinct"}), ordered, [
                    self._value(one.get("expr"), frame) for one in value.nodes("args") if not one.flag("resjunk")
                ]  # fmt: skip
        return value.kind, self._fields(value, frame, set())

    def _fields(self, node: TreeNode, frame: QueryFrame, without: set[str]) -> object:
        names = [name for name in node.fields if name not in PRINTED_FIELDS and name not in without]
        return [(name, self._value(node.get(name), frame)) for name in names]

    def _column(self, var: TreeNode, frame: QueryFrame) -> object:
        at, place, value = derived_column(frame, var)
        if isinstance(place, str):
            return "column", place, var.text("varattno")
        return self._value(value, at)

    def _sublink(self, link: TreeNode, frame: QueryFrame) -> object:
        query = link.nodes("subselect")[0]
        deciding = ("groupClause", "groupingSets", "havingQual", "distinctClause", "limitCount", "limitOffset")
        plain = not (query.flag("hasAggs") or query.flag("hasTargetSRFs") or any(query.get(name) for name in deciding))
        exists = link.text("subLinkType") == EXISTS_SUBLINK
        return (
            "sublink",
            link.text("subLinkType"),
            self._value(link.get("testexpr"), frame),
            self.query(query, frame, bare=exists and plain and query.get("setOperations") is None),
        )

    def _window(self, windows: dict[str, TreeNode], call: TreeNode, frame: QueryFrame) -> object:
        window = windows[call.text("winref")]
        targets = {one.text("ressortgroupref"): one.get("expr") for one in frame.query.nodes("targetList")}
        parts = [self._clause(window.nodes(name), targets, frame) for name in ("partitionClause", "orderClause")]
        names = ("frameOptions", "startOffset", "endOffset", "startInRangeFunc", "endInRangeFunc")
        return parts, [self._value(window.get(name), frame) for name in names]

    def _clause(self, clause: list[TreeNode], targets: dict[str, TreeValue], frame: QueryFrame) -> object:
        """The expressions of GROUP BY, DISTINCT or ORDER BY, each with its operators."""
        return [
            (
                self._value(targets[one.text("tleSortGroupRef")], frame),
                [one.get(name) for name in ("eqop", "sortop", "reverse_sort", "nulls_first")],
            )
            for one in clause
        ]
