"""Plans a view that ends with ORDER BY ... LIMIT: the first rows of its query are kept, with a reserve.

    select id, note from t order by note, id limit 10      state: the first rows of the query without LIMIT

The state is a table beside the target, with all rows of the query up to its last one. Changes beyond that row do not
matter. If too few rows are left, the state is filled anew from the query.
"""

from __future__ import annotations

from dataclasses import dataclass

from sqlglot import exp

from gdq.plan.dialect import literal_number, render_sql
from gdq.plan.leaf import output_names
from gdq.plan.query import Query, subqueries_of, value_of
from gdq.plan.whole import is_ordered

# A view of more rows is loaded in full: its state would be another copy of it.
_ROWS_MAX = 10_000
_RESERVE = 50


@dataclass(frozen=True, slots=True)
class TopPlan:
    """The state of a view with LIMIT. `query`: SQL without ORDER BY and LIMIT.

    `width`: its number of columns c1, c2, ..., which are the view's and behind them those of ORDER BY alone. `shown`:
    how many are the view's. `order`: ORDER BY over c1, c2, ... `first` and `last`: the numbers of the view's first and
    last row. `hidden`: the expressions of ORDER BY that the view does not show.
    """

    query: str
    width: int
    shown: int
    order: str
    first: int
    last: int
    hidden: tuple[exp.Expr, ...]

    @property
    def columns(self) -> list[str]:
        """The columns of the query's rows."""
        return [f"c{n}" for n in range(1, self.width + 1)]

    @property
    def kept(self) -> int:
        """The number of rows that a full state has, the reserve among them."""
        return 2 * self.last + _RESERVE


def plan_top(query: Query) -> TopPlan | None:
    """The state of a query with LIMIT at its top; None if it is not kept.

    ORDER BY must define the order fully: else PostgreSQL may take others of several rows at any time.
    """
    root = query.root
    if not isinstance(root, exp.Select) or root.args.get("limit") is None or root.args.get("order") is None:
        return None
    limit, offset = _number(root.args["limit"]), _number(root.args.get("offset"))
    if not limit or offset is None or limit + offset > _ROWS_MAX or not is_ordered(query, root):
        return None
    distinct = root.args.get("distinct")
    order = root.args["order"].expressions
    if (distinct is not None and distinct.args.get("on")) or any(subqueries_of(item) for item in order):
        return None
    known = [value_of(item).unnest() for item in root.expressions]
    hidden = list(dict.fromkeys(item.this.unnest() for item in order if item.this.unnest() not in known))
    places = {expression: f"c{n}" for n, expression in reversed(list(enumerate([*known, *hidden], 1)))}
    inner = root.copy()
    without_limit(inner, tuple(hidden))
    by = ", ".join(places[item.this.unnest()] + _direction(item) for item in order)
    width = len(known) + len(hidden)
    return TopPlan(render_sql(inner), width, len(known), by, offset + 1, limit + offset, tuple(hidden))


def without_limit(select: exp.Select, hidden: tuple[exp.Expr, ...]) -> None:
    """Take ORDER BY, LIMIT and OFFSET off a SELECT, and let it show the expressions `hidden` too."""
    for clause in ("order", "limit", "offset"):
        select.set(clause, None)
    names = {*output_names(select)}
    for n, expression in enumerate(hidden, len(names) + 1):
        name = f"order{n}"
        while name in names:
            name += "_"
        names.add(name)
        select.append("expressions", exp.Alias(this=expression.copy(), alias=exp.to_identifier(name, quoted=True)))


def _number(clause: exp.Expr | None) -> int | None:
    """The constant of LIMIT, OFFSET or FETCH, 0 without one; None if it is no plain number."""
    if clause is None:
        return 0
    return literal_number(clause.args.get("count") if isinstance(clause, exp.Fetch) else clause.expression)


def _direction(item: exp.Expr) -> str:
    nulls = item.args.get("nulls_first")
    words = " desc" if item.args.get("desc") else ""
    return words + ("" if nulls is None else " nulls first" if nulls else " nulls last")
