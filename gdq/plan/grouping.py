"""Turns GROUPING SETS, ROLLUP and CUBE into one GROUP BY, over the rows of FROM once for each set.

    select a, b, sum(x) from t group by rollup (a, b)      has the rows of

    select case when s.n in (1, 2) then a end, case when s.n in (1) then b end, sum(x)
      from t cross join (values (1), (2), (3)) s (n) group by 1, 2, s.n

but for a set without expressions over no rows at all: it has one row all the same.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Sequence

from sqlglot import exp

from gdq.errors import PlanError
from gdq.plan.leaf import Leaf, is_correlated
from gdq.plan.query import Query, leaves_of, parse_query, subqueries_of
from gdq.plan.relation_sql import RelationSql
from gdq.plan.shape import aggregates_of, has_grouping_sets, window_parts
from gdq.plan.steps import PlanStep
from gdq.plan.table import TableSchema

# More sets multiply the rows of FROM too often.
_SETS_MAX = 64
_COLUMN = "n"

_Set = tuple[exp.Expr, ...]


def parse_grouped(sql: str, tables: Sequence[TableSchema]) -> Query:
    """As parse_query(), with one GROUP BY for grouping sets; PlanError if that is not possible."""
    query = parse_query(sql, tables)
    for number, select in enumerate(list(query.root.find_all(exp.Select)), 1):
        if has_grouping_sets(select):
            _rewrite(query, select, f"g{number}", sql)
    return query


def empty_checks(query: Query, relations: RelationSql) -> list[PlanStep]:
    """Checks that the changed SELECTs of a query that have a set without expressions had rows before, and have now."""
    checks = []
    for alias, sql in query.sets.items():
        select = next(one for one in query.root.find_all(exp.Select) if _reads(query, one, alias))
        if not sql or not relations.is_changed(select):
            continue
        if is_correlated(select):
            raise PlanError("grouping-sets", "grouping sets that read columns from around their SELECT")
        rows = select.copy()
        for clause in ("group", "having", "distinct", "order", "windows", "limit", "offset"):
            rows.set(clause, None)
        rows.set("expressions", [exp.Literal.number(1)])
        new, old = relations.at(rows, "new"), relations.at(rows, "old")
        test = f"select not exists ({new}) or not exists ({old})"
        checks.append(
            PlanStep("check", f"check {alias}", test, "grouping sets are over no rows, or were [grouping-sets]")
        )
    return checks


def _reads(query: Query, select: exp.Select, alias: str) -> bool:
    return any(leaf.alias == alias for leaf in leaves_of(query.tree(select)))


def _rewrite(query: Query, select: exp.Select, alias: str, sql: str) -> None:
    group = select.args["group"]
    if any(value is not None for name, value in group.args.items() if name != "expressions"):
        raise PlanError("grouping-sets", "GROUP BY DISTINCT is loaded in full")
    sets = [tuple(itertools.chain(*parts)) for parts in itertools.product(*map(_sets, group.expressions))]
    if len(sets) > _SETS_MAX:
        raise PlanError("grouping-sets", f"more than {_SETS_MAX} grouping sets are loaded in full")
    if select.args.get("from_") is None:
        raise PlanError("grouping-sets", "grouping sets over no table are loaded in full")
    groups = list(dict.fromkeys(itertools.chain(*sets)))
    number = exp.column(exp.to_identifier(_COLUMN, quoted=True), exp.to_identifier(alias, quoted=True))
    shown = {
        one: _within(one, [n for n, some in enumerate(sets, 1) if one in some], len(sets), number) for one in groups
    }
    for part in _parts(select):
        _replace(part, shown, sets, number)
    group.set("expressions", [*(value.copy() for value in shown.values()), number.copy()])
    values = exp.Values(
        expressions=[exp.Tuple(expressions=[exp.Literal.number(n)]) for n in range(1, len(sets) + 1)],
        alias=exp.TableAlias(
            this=exp.to_identifier(alias, quoted=True), columns=[exp.to_identifier(_COLUMN, quoted=True)]
        ),
    )
    select.append("joins", exp.Join(this=values, kind="CROSS"))
    query.leaves[alias] = Leaf(alias, (_COLUMN,), fixed=values)
    query.sets[alias] = sql if any(not some for some in sets) else ""


def _sets(item: exp.Expr) -> list[_Set]:
    """The sets of one item of GROUP BY."""
    if isinstance(item, exp.GroupingSets):
        return [one for inner in item.expressions for one in _sets(inner)]
    if isinstance(item, exp.Rollup):
        parts = [_listed(one) for one in item.expressions]
        return [tuple(itertools.chain(*parts[:n])) for n in range(len(parts), -1, -1)]
    if isinstance(item, exp.Cube):
        parts = [_listed(one) for one in item.expressions]
        chosen = itertools.product((True, False), repeat=len(parts))
        return [tuple(itertools.chain(*itertools.compress(parts, which))) for which in chosen]
    return [_listed(item)]


def _listed(item: exp.Expr) -> _Set:
    item = item.unnest()
    return tuple(one.unnest() for one in item.expressions) if isinstance(item, exp.Tuple) else (item,)


def _within(expression: exp.Expr, numbers: Sequence[int], count: int, number: exp.Column) -> exp.Expr:
    """An expression's value in the rows of the sets that have it; NULL in others."""
    if len(numbers) == count:
        return expression
    some = exp.In(this=number.copy(), expressions=[exp.Literal.number(n) for n in numbers])
    return exp.Case(ifs=[exp.If(this=some, true=expression.copy())])


def _parts(select: exp.Select) -> Iterator[exp.Expr]:
    """The parts of a SELECT that are computed from groups."""
    yield from select.expressions
    clauses = (select.args.get(name) for name in ("having", "order", "distinct"))
    yield from (clause for clause in clauses if clause is not None)


def _replace(node: exp.Expr, shown: dict[exp.Expr, exp.Expr], sets: Sequence[_Set], number: exp.Column) -> None:
    """Replace groups and GROUPING() in an expression over groups by what they are in the rows of each set."""
    if subqueries_of(node):
        raise PlanError("grouping-sets", "a subquery beside grouping sets is loaded in full")
    if node in shown:
        node.replace(shown[node].copy())
    elif isinstance(node, exp.Anonymous) and node.name.upper() == "GROUPING":
        node.replace(_bits(node.expressions, sets, number))
    elif aggregates_of(node) != [node]:
        for child in list(window_parts(node) if isinstance(node, exp.Window) else node.iter_expressions()):
            _replace(child, shown, sets, number)


def _bits(asked: Iterable[exp.Expr], sets: Sequence[_Set], number: exp.Column) -> exp.Expr:
    """GROUPING(): a bit for each expression, which is 1 in the rows of sets that lack it."""
    parts = [one.unnest() for one in asked]
    ifs = []
    for n, some in enumerate(sets, 1):
        bits = int("".join("0" if part in some else "1" for part in parts), 2)
        ifs.append(exp.If(this=exp.Literal.number(n), true=exp.Literal.number(bits)))
    return exp.Case(this=number.copy(), ifs=ifs)
