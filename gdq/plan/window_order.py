"""Window functions without a common PARTITION BY: on which rows, in the order of ORDER BY, a row's values depend.

    lag(v) over (order by at, id)                                             on one row below
    sum(v) over (order by at, id rows between 1 preceding and 2 following)    on one row below, two rows above
    row_number() over (order by at, id)                                       on all rows below

The first expression of ORDER BY, here at, is the key: a change touches its value, and the values of rows near it. They
are sought in the new state alone. A row that changes because another one came or went has only unchanged rows between
itself and the nearest change, and these are in both states.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from sqlglot import exp

from gdq.errors import PlanError
from gdq.plan.dialect import literal_number, render_sql
from gdq.plan.leaf import Leaf
from gdq.plan.query import Query, leaves_of, value_of
from gdq.plan.shape import group_of, has_open_windows, is_grouped, windows_of
from gdq.plan.whitelist import AGGREGATES
from gdq.plan.whole import whole_inputs
from gdq.sql_text import is_not_null, is_null

# How many rows before a row and after it, in the order of a window, its value depends on; None: on any number.
_Reach = tuple[int | None, int | None]

_ALL: _Reach = (None, None)
_BEFORE: _Reach = (None, 0)
_SHIFTS = {"lag", "lead"}
_RANKS = {"rank", "dense_rank"}
_OF_FRAMES = {"first_value", "last_value", "nth_value"}
# Aggregates whose value depends on the order of equal rows, and nodes of some of the others.
_ORDERED = {
    "any_value", "array_agg", "json_agg", "json_object_agg", "jsonb_agg", "jsonb_object_agg", "string_agg",
}  # fmt: skip
_UNORDERED = (exp.Avg, exp.Count, exp.LogicalAnd, exp.LogicalOr, exp.Max, exp.Min, exp.Sum)


@dataclass(frozen=True, slots=True)
class WindowOrder:
    """The order of all windows of a SELECT. `by`: the first expression of ORDER BY.

    `below` and `above`: how many rows with smaller and with greater values a row depends on; None: on all of them, and
    then the other is a number. `nulls_low`: NULL comes where smaller values do, else where greater ones do.
    """

    by: exp.Expr
    below: int | None
    above: int | None
    nulls_low: bool

    @property
    def near(self) -> int | None:
        """The number of rows on each side that a row may depend on; None: all rows of one side."""
        return None if self.below is None or self.above is None else max(self.below, self.above)

    def near_keys(self, keys: str, rising: str, falling: str) -> tuple[str, str]:
        """SELECT of the keys and the values near them; the same read at once by a sort.

        The first looks up each key, so it needs an index. `keys`: the name of collected keys. `rising` and `falling`:
        SELECTs of all values of `by`, to be read in such an order.
        """
        null, near = keys.replace("keys", "null"), self.near
        low = _nearest("<", " desc", near, nulls=self.nulls_low)
        high = _nearest(">", "", near, nulls=not self.nulls_low)
        looked_up = (
            f"{_all(rising, falling)} {_themselves(keys)} union all "
            f"select n.k from unnest({keys}) as t(k) cross join lateral ({low} union all {high}) as n union all "
            f"({_last(null, '' if self.nulls_low else ' desc', near)})"
        )
        nulls = "first" if self.nulls_low else "last"
        read = (
            f"{_all(rising, falling)} select k from (select k, sum(m) over (order by k nulls {nulls} "
            f"rows between {near} preceding and {near} following) as near from (select k, max(m) as m from ("
            f"select i.k, 0 from i union all select t.k, 1 from ({_themselves(keys)}) as t) as u(k, m) group by k) as g"
            f") as n where near > 0"
        )
        return looked_up, read

    def later_keys(self, keys: str, rising: str, falling: str) -> str:
        """As near_keys(), of all values that depend on rows with these keys: those on one side of the first."""
        up = self.below is None
        beside = (self.above if up else self.below) or 0
        toward, away, word, back = (">", "<", "", " desc") if up else ("<", ">", " desc", "")
        null, first = (
            keys.replace("keys", "null"),
            f"(select t.k from unnest({keys}) as t(k) order by t.k{word} limit 1)",
        )
        nulls_last = self.nulls_low != up
        parts = [_themselves(keys), f"select i.k from i where i.k {toward} {first}"]
        if nulls_last:
            parts.append(f"select i.k from i where {is_null('i.k')} and pg_catalog.cardinality({keys}) > 0")
        else:
            parts.append(f"select i.k from i where {null}")
        if beside:
            parts.append(f"(select i.k from {_rows(back)} where i.k {away} {first} order by i.k{back} limit {beside})")
            behind = f"select i.k from i where {is_null('i.k')} limit 1"
            parts.append(f"({_last(null, back, beside) if nulls_last else behind})")
        return f"{_all(rising, falling)} {' union all '.join(parts)}"


def window_order(query: Query, select: exp.Select) -> WindowOrder | None:
    """The order of a SELECT's windows; None if they have a common PARTITION BY. PlanError if rows depend on all others.

    Not for a SELECT with groups or DISTINCT.
    """
    if not has_open_windows(select) or is_grouped(select) or select.args.get("distinct"):
        return None
    windows = [window for item in select.expressions for window in windows_of(item)]
    first = next((_ordered(window)[0] for window in windows if not _parts(window) and _ordered(window)), None)
    if first is None:
        raise PlanError("window-no-partition", "a window without PARTITION BY and ORDER BY depends on all rows")
    by, nulls_low = first.this.unnest(), _nulls_low(first)
    below: int | None = 0
    above: int | None = 0
    for window in windows:
        if any(_same(part, by) for part in _parts(window)):
            continue  # a row depends on rows with the same value alone
        order = _ordered(window)
        if _parts(window) or not order or not _same(order[0].this, by) or _nulls_low(order[0]) != nulls_low:
            raise PlanError("window-no-partition", "windows without a common PARTITION BY have different orders")
        before, after = _reach(query, select, window)
        if order[0].args.get("desc"):
            before, after = after, before
        below, above = _most(below, before), _most(above, after)
    if below is None and above is None:
        raise PlanError("window-no-partition", "a window function without a common PARTITION BY depends on all rows")
    return WindowOrder(by.copy(), below, above, nulls_low)


def _all(rising: str, falling: str) -> str:
    """WITH that names all values: i.k in rising and d.k in falling order."""
    return f"with i(k) as not materialized ({rising}), d(k) as not materialized ({falling})"


def _themselves(keys: str) -> str:
    null = keys.replace("keys", "null")
    return f"select t.k from unnest({keys}) as t(k) union all select null where {null}"


def _nearest(than: str, word: str, near: int | None, *, nulls: bool) -> str:
    """SELECT of the values nearest to t.k on one side; `nulls`: NULL comes on that side, behind all values."""
    found = (
        f"select i.k{', 0' if nulls else ''} from {_rows(word)} where i.k {than} t.k order by i.k{word} limit {near}"
    )
    if not nulls:
        return f"({found})"
    behind = f"select i.k, 1 from i where {is_null('i.k')} limit 1"
    return f"(select e.k from (({found}) union all ({behind})) as e(k, o) order by e.o limit {near})"


def _last(null: str, word: str, near: int | None) -> str:
    """SELECT of the values next to NULL, if that is among the keys."""
    return f"select i.k from {_rows(word)} where {null} and {is_not_null('i.k')} order by i.k{word} limit {near}"


def _rows(word: str) -> str:
    """The values i.k, to be read in an order."""
    return "d as i" if word else "i"


def _parts(window: exp.Window) -> list[exp.Expr]:
    return list(window.args.get("partition_by") or ())


def _ordered(window: exp.Window) -> list[exp.Ordered]:
    order = window.args.get("order")
    return list(order.expressions) if order is not None else []


def _nulls_low(item: exp.Ordered) -> bool:
    return bool(item.args.get("nulls_first")) != bool(item.args.get("desc"))


def _same(one: exp.Expr, other: exp.Expr) -> bool:
    return render_sql(one.unnest()) == render_sql(other)


def _most(one: int | None, other: int | None) -> int | None:
    return None if one is None or other is None else max(one, other)


def _reach(query: Query, select: exp.Select, window: exp.Window) -> _Reach:
    """How many rows before and after a row a function reads; PlanError if it may take equal rows in any order."""
    call = window.this.this if isinstance(window.this, exp.Filter) else window.this
    name = call.name.lower() if isinstance(call, exp.Anonymous) else ""
    aggregate = isinstance(call, exp.AggFunc) or name in AGGREGATES
    spec = window.args.get("spec")
    if name in _SHIFTS:
        given = call.expressions[1:2]
        offset = literal_number(given[0]) if given else 1
        reach: _Reach = _ALL if offset is None else (offset, 0) if name == "lag" else (0, offset)
    elif aggregate or name in _OF_FRAMES:
        reach = _frame(spec)
    else:
        reach = _BEFORE if name in _RANKS | {"row_number"} else _ALL
    by_rows = spec is not None and spec.text("kind").upper() == "ROWS"
    of_peers = name in _RANKS or (not by_rows and (isinstance(call, _UNORDERED) or name in AGGREGATES - _ORDERED))
    if reach != _ALL and not of_peers and not _is_total(query, select, _ordered(window)):
        raise PlanError(
            "window-order", "an ORDER BY with ties leaves open which row is before another; add a key to it"
        )
    return reach


def _frame(spec: exp.Expr | None) -> _Reach:
    """How far a frame extends before and after its row. Offsets of RANGE and GROUPS are any number of rows."""
    if spec is None:
        return _BEFORE
    counted = spec.text("kind").upper() == "ROWS"
    found: list[int | None] = []
    for bound, side, toward in (("start", "start_side", "PRECEDING"), ("end", "end_side", "FOLLOWING")):
        value = spec.args.get(bound)
        if value is None or value == "CURRENT ROW":
            found.append(0)
        elif str(spec.args.get(side)).upper() != toward:
            found.append(0)  # it ends on the other side of the row
        else:
            found.append(literal_number(value) if counted and isinstance(value, exp.Expr) else None)
    return found[0], found[1]


def _is_total(query: Query, select: exp.Select, order: Sequence[exp.Ordered]) -> bool:
    """True if rows that an ORDER BY leaves in any order are equal: it has all columns used, or a key of each item."""
    by = {render_sql(item.this.unnest()) for item in order}
    if {render_sql(column) for column in whole_inputs(query, select)} <= by:
        return True
    return all(
        any({render_sql(exp.column(name, leaf.alias)) for name in key} <= by for key in _keys_of(leaf))
        for leaf in leaves_of(query.tree(select))
    )


def _keys_of(leaf: Leaf) -> Iterator[tuple[str, ...]]:
    """Columns of an item of FROM of which no two rows have the same values."""
    if leaf.table is not None and leaf.table.key:
        yield leaf.table.key
    if isinstance(leaf.query, exp.Select) and is_grouped(leaf.query):
        shown = {
            render_sql(value_of(item)): name for item, name in zip(leaf.query.expressions, leaf.columns, strict=True)
        }
        groups = [render_sql(group) for group in group_of(leaf.query)]
        if all(group in shown for group in groups):
            yield tuple(shown[group] for group in groups)
