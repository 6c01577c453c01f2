"""Whether a view's query alone decides its rows, so that two computations of it at one snapshot are equal.

Example: array_agg(x) without ORDER BY depends on the order in which the server happens to read. Audits compare only
what the query decides. When in doubt a query counts as one that does not decide.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from gdq.plan.query_tree import RTE_GROUP, RTE_JOIN, RTE_RELATION, TreeNode, TreeValue, walk_tree
from gdq.plan.tree_meaning import PRINTED_FIELDS, QueryFrame, derived_column, from_leaves, window_parts
from gdq.plan.whitelist import BASE_TYPES, ServerFunction, Settled, called_function, type_of

# Aggregates whose result follows the order of their input.
_ORDERED = {
    "any_value", "array_agg", "json_agg", "json_object_agg", "jsonb_agg", "jsonb_object_agg", "string_agg",
}  # fmt: skip
# Aggregates that add or multiply; over floats the order of the rows decides the last digits.
_ADDING = {
    "avg", "corr", "covar_pop", "covar_samp", "regr_avgx", "regr_avgy", "regr_intercept", "regr_r2", "regr_slope",
    "regr_sxx", "regr_sxy", "regr_syy", "stddev", "stddev_pop", "stddev_samp", "sum", "var_pop", "var_samp", "variance",
}  # fmt: skip
_FLOATS = {*BASE_TYPES["real"], *BASE_TYPES["double precision"]}
# Window functions for which rows with equal ORDER BY are the same.
_OF_PEERS = {"rank", "dense_rank", "percent_rank", "cume_dist"}
# ROWS, EXCLUDE CURRENT ROW, EXCLUDE GROUP, EXCLUDE TIES in a window's frame.
_ROW_FRAMES = 0x4 | 0x8000 | 0x10000 | 0x20000

# Types whose equal values are the same; also numeric and character with a modifier.
_EXACT = {
    oid
    for name in (
        "boolean", "bytea", "name", "bigint", "smallint", "integer", "text", "character varying", "date", "time",
        "timestamp", "uuid",
    )
    for oid in BASE_TYPES[name]
} | {18, 26, 1184, 1185}  # fmt: skip
_NUMERIC, _CHARACTER = BASE_TYPES["numeric"][0], BASE_TYPES["character"][0]
_INTEGERS = {16, 20, 21, 23}
# Functions of numbers whose results are equal for equal arguments.
_OF_NUMBERS = {
    "numeric_add", "numeric_sub", "numeric_mul", "numeric_uminus", "numeric_abs", "abs", "float8pl", "float8mi",
    "float8mul", "float8um", "float4pl", "float4mi", "float4mul", "float4um", "int2", "int4", "int8", "min_scale",
    "width_bucket",
}  # fmt: skip
_CALLS = {
    "FUNCEXPR", "OPEXPR", "COERCEVIAIO", "ARRAYCOERCEEXPR", "SUBSCRIPTINGREF", "FIELDSELECT", "ARRAYEXPR", "ROWEXPR",
}  # fmt: skip


def settled_rows(tree: TreeNode, functions: Mapping[int, ServerFunction], keys: Mapping[str, Sequence[int]]) -> Settled:
    """What a query decides, by its tree. `keys`: the numbers of the key columns of tables, by the tables' numbers."""
    judge = _Judge(functions, keys)
    try:
        judge.query(tree, None, top=True)
    except _OpenError as error:
        return Settled(str(error))
    except (LookupError, ValueError):
        return Settled("its tree is not understood")
    loose = _is_loose(tree, functions)
    if loose and any(_shows_writing(node, functions) for node in walk_tree(tree)):
        return Settled("it shows how a value is written that can be written in several ways")
    return Settled(None, frozenset(judge.open_columns), loose)


class _OpenError(Exception):
    """A part of the query leaves its result open."""


@dataclass(slots=True)
class _Judge:
    functions: Mapping[int, ServerFunction]
    keys: Mapping[str, Sequence[int]]
    open_columns: set[int] = field(default_factory=set)

    def query(self, query: TreeNode, outer: QueryFrame | None, *, top: bool = False) -> None:
        """Raise _OpenError if a query leaves its rows open; `top`: its columns may be open."""
        frame = QueryFrame(query, outer)
        for index, entry in enumerate(query.nodes("rtable"), 1):
            frame.places[index] = entry if entry.text("rtekind") in (RTE_JOIN, RTE_GROUP) else str(index)
        self._from(query, frame)
        if query.flag("hasDistinctOn") and not self._orders(query.nodes("sortClause"), frame):
            raise _OpenError("DISTINCT ON takes any of several rows")
        cut = query.get("limitCount") is not None or query.get("limitOffset") is not None
        if cut and not self._orders(query.nodes("sortClause"), frame):
            raise _OpenError("LIMIT takes any of several rows")
        self._value([query.get(name) for name in ("jointree", "havingQual", "limitCount", "limitOffset")], frame)
        plain = top and not (query.get("distinctClause") or query.get("setOperations"))
        for entry in query.nodes("targetList"):
            try:
                self._item(entry.get("expr"), frame)
            except _OpenError:
                if not plain or entry.flag("resjunk") or entry.text("ressortgroupref") not in ("", "0"):
                    raise
                self.open_columns.add(int(entry.text("resno")) - 1)

    def _from(self, query: TreeNode, frame: QueryFrame) -> None:
        """As query(), for the items of FROM and WITH."""
        for entry in query.nodes("rtable"):
            for inner in entry.nodes("subquery"):
                self.query(inner, frame)
            self._value([entry.get(name) for name in ("functions", "values_lists")], frame)
        for cte in query.nodes("cteList"):
            for inner in cte.nodes("ctequery"):
                self.query(inner, frame)

    def _item(self, value: TreeValue, frame: QueryFrame) -> None:
        """An item of the select list. A sum of floats at the top is compared with a tolerance."""
        if frame.outer is None and isinstance(value, TreeNode) and value.kind == "AGGREF" and self._adds_floats(value):
            self._value([inner for name, inner in value.fields.items() if name != "eref"], frame)
        else:
            self._value(value, frame)

    def _value(self, value: TreeValue, frame: QueryFrame) -> None:
        """Raise _OpenError if a part of an expression leaves its value open."""
        if isinstance(value, list | tuple):
            for one in value:
                self._value(one, frame)
        if not isinstance(value, TreeNode):
            return
        if value.kind == "QUERY":
            self.query(value, frame)
            return
        if value.kind == "AGGREF":
            self._aggregate(value, frame)
        if value.kind == "WINDOWFUNC":
            self._window(value, frame)
        for inner in value.fields.values():
            self._value(inner, frame)

    def _name(self, node: TreeNode) -> str:
        function = self.functions.get(called_function(node))
        return function.name if function is not None else ""

    def _adds_floats(self, node: TreeNode) -> bool:
        # of integers too, corr() and the like are computed as floats
        of_floats = {*node.numbers("aggargtypes"), int(node.text("aggtype") or node.text("wintype") or 0)} & _FLOATS
        arguments = {type_of(one) for one in node.nodes("args")} if node.kind == "WINDOWFUNC" else set()
        return self._name(node) in _ADDING and bool(of_floats or arguments & _FLOATS)

    def _aggregate(self, node: TreeNode, frame: QueryFrame) -> None:
        name = self._name(node)
        if self._adds_floats(node):
            raise _OpenError(f"{name} adds floats in any order")
        if name not in _ORDERED:
            return
        targets = {one.text("ressortgroupref"): one.get("expr") for one in node.nodes("args")}
        order = {_image(targets[one.text("tleSortGroupRef")], frame) for one in node.nodes("aggorder")}
        given = {_image(one.get("expr"), frame) for one in node.nodes("args") if one.get("expr") is not None}
        # a constant is the same in every row
        given = {image for image in given if not (isinstance(image, tuple) and image[0] == "CONST")}
        if not (order and (given <= order or self._has_keys(order, frame))):
            raise _OpenError(f"{name} without an order that decides takes its values in any order")

    def _window(self, node: TreeNode, frame: QueryFrame) -> None:
        name = self._name(node)
        if self._adds_floats(node):
            raise _OpenError(f"{name} adds floats in any order")
        windows = {one.text("winref"): one for one in frame.query.nodes("windowClause")}
        options = int(windows[node.text("winref")].text("frameOptions") or 0)
        aggregate = node.flag("winagg") and name not in _ORDERED and not options & _ROW_FRAMES
        if name in _OF_PEERS or aggregate:
            return
        order = {_image(one, frame) for one in window_parts(node, frame)}
        if not self._covers(order, frame):
            raise _OpenError(f"{name} depends on the order of equal rows")

    def _orders(self, clause: Sequence[TreeNode], frame: QueryFrame) -> bool:
        """True if rows that a clause leaves in any order are equal."""
        targets = {one.text("ressortgroupref"): one.get("expr") for one in frame.query.nodes("targetList")}
        return self._covers({_image(targets[one.text("tleSortGroupRef")], frame) for one in clause}, frame)

    def _covers(self, order: set[object], frame: QueryFrame) -> bool:
        query = frame.query
        targets = {one.text("ressortgroupref"): one.get("expr") for one in query.nodes("targetList")}
        if query.get("groupingSets"):
            return False
        if query.get("groupClause"):
            groups = {_image(targets[one.text("tleSortGroupRef")], frame) for one in query.nodes("groupClause")}
            return groups <= order
        if query.flag("hasAggs"):
            return True
        shown = [one.get("expr") for one in query.nodes("targetList")]
        if any(node.kind == "SUBLINK" for node in walk_tree(shown)):
            return self._has_keys(order, frame)
        used = {_image(node, frame) for node in walk_tree(shown) if node.kind == "VAR" and _is_own(node)}
        return used <= order or self._has_keys(order, frame)

    def _has_keys(self, order: set[object], frame: QueryFrame) -> bool:
        """True if an order has the keys of all items of FROM."""
        leaves = from_leaves(frame.query)
        for index in leaves:
            entry = frame.entry(index)
            key = self.keys.get(entry.text("relid")) if entry.text("rtekind") == RTE_RELATION else None
            if not key or not {("VAR", str(index), str(number)) for number in key} <= order:
                return False
        return bool(leaves)


def _is_own(var: TreeNode) -> bool:
    return var.text("varlevelsup") in ("", "0")


def _image(value: TreeValue, frame: QueryFrame) -> object:
    """An expression to be compared with another of the same query."""
    if isinstance(value, list | tuple):
        return tuple(_image(one, frame) for one in value)
    if not isinstance(value, TreeNode):
        return value
    if value.kind == "VAR" and _is_own(value):
        _, place, derived = derived_column(frame, value)
        if derived is not None:
            return _image(derived, frame)
        return "VAR", str(place), value.text("varattno")
    return value.kind, *((name, _image(one, frame)) for name, one in value.fields.items() if name not in PRINTED_FIELDS)


def _is_exact(node: TreeNode) -> bool:
    """True if equal values of an expression are the same."""
    kind = type_of(node)
    if kind in (_NUMERIC, _CHARACTER):
        return node.text("vartypmod") not in ("", "-1")
    return kind in _EXACT


def _is_loose(tree: TreeNode, functions: Mapping[int, ServerFunction]) -> bool:
    """True if a query takes one of several equal values that may be written differently."""
    for node in walk_tree(tree):
        kept: list[TreeNode | None] = []
        if node.kind == "QUERY":
            targets = {one.text("ressortgroupref"): one.node("expr") for one in node.nodes("targetList")}
            clauses = [*node.nodes("groupClause"), *node.nodes("distinctClause")]
            kept = [targets[one.text("tleSortGroupRef")] for one in clauses]
        elif node.kind in ("AGGREF", "WINDOWFUNC"):
            function = functions.get(called_function(node))
            if function is None or function.name not in _ADDING | {"count"}:
                kept = [one.node("expr") if one.kind == "TARGETENTRY" else one for one in node.nodes("args")]
        types = {*node.numbers("colTypes")} if node.nodes("groupClauses") else set()
        if types - _EXACT or any(one is not None and not _is_exact(one) for one in kept):
            return True
    return False


def _shows_writing(node: TreeNode, functions: Mapping[int, ServerFunction]) -> bool:
    """True if an expression may give different results for equal values that are written differently."""
    if node.kind not in _CALLS:
        return False
    given = [one for name in ("args", "arg", "refexpr", "elements") for one in node.nodes(name)]
    if all(_is_exact(one) or one.kind == "CONST" for one in given) or type_of(node) == BASE_TYPES["boolean"][0]:
        return False
    function = functions.get(called_function(node))
    numbers = {type_of(one) for one in given} <= {_NUMERIC, *_FLOATS, *_INTEGERS}
    return not (numbers and function is not None and function.own and function.name in _OF_NUMBERS)
