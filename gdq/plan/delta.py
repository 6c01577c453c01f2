"""Plans how the rows of any query follow from the changes of its tables, by two rules.

    L, signed deltas, for projections, filters, UNION ALL and inner joins. With a and b at their new state:
       delta(a join b) = delta(a) join b + a join delta(b) - delta(a) join delta(b)
    K, recompute by key, for everything else: replace the rows of all touched keys (group, partition, join key, ...)

The rules combine: the delta of a query in FROM is used like the delta of a table. The plan is SQL of PostgreSQL over
the tables as they are now and these relations:

    gdq_delta_<n>   the net change of a table: its rows with __gdq_weight, the number inserted or (below zero) deleted
    gdq_old_<n>     a table as it was before
    gdq_any_<n>     every row that a table has or had
    gdq_rows_<n>    the signed rows that a step made: c1, c2, ... and w
    gdq_keys_<n>    an array of keys that a step collected; gdq_null_<n> is true if NULL was among them
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence

from sqlglot import exp

from gdq.errors import PlanError
from gdq.plan.dialect import render_sql
from gdq.plan.gate import touched_keys_sql
from gdq.plan.graph import Graph, GraphKey, build_graph, choose_graph_key
from gdq.plan.group_sums import GroupSums, group_sums
from gdq.plan.leaf import Leaf, is_correlated, output_names
from gdq.plan.own_key import replaced_by_own_key
from gdq.plan.query import Query, conjuncts, joins_of, leaves_of, subqueries_of, value_of, where_of
from gdq.plan.recompute import OrderedRows, operated_sql, recomputed_sql, restricted_sql, values_sql
from gdq.plan.relation_sql import RelationSql, among_keys
from gdq.plan.separate import separated
from gdq.plan.shape import dividing_expressions
from gdq.plan.steps import NO_NUMBER, PlannedValue, PlanStep, RecomputeOutcome, ReplaceOutcome, SignedOutcome
from gdq.plan.table import WEIGHT_COLUMN
from gdq.plan.whole import parts_after_where, require_limit_order, whole_inputs, whole_reason
from gdq.plan.window_order import WindowOrder, window_order
from gdq.sql_text import is_null, quote

# Each changed table doubles the terms of a join.
_CHANGED_MAX = 6


class DeltaPlanner:
    """Plans the steps for one set of changed tables. `numbers`: the number of each table (qualified name)."""

    def __init__(self, query: Query, numbers: dict[str, int], changed: Iterable[str]) -> None:
        self.query = query
        self.steps: list[PlanStep] = []
        self.relations = RelationSql(query, numbers, changed)
        self._numbers = itertools.count(1)
        self._aliases = itertools.count(1)
        self._deltas: dict[str, str | None] = {}

    def outcome(self, *, replace: bool = True) -> SignedOutcome | ReplaceOutcome | RecomputeOutcome | None:
        """How the rows of the whole query change, None if they do not. `replace`: a ReplaceOutcome is allowed."""
        root = self.query.root
        if not self.relations.is_changed(root):
            return None
        by_own_key = replaced_by_own_key(self.relations, self._keys)
        if by_own_key is not None:
            if not replace:
                raise PlanError("no-key", "the log lacks columns of the rows that went, and the key cannot find them")
            return by_own_key
        if isinstance(root, exp.Select):
            reason = whole_reason(root)
            if reason is not None:
                rows = self._reaching(root)
                return None if rows is None else RecomputeOutcome(rows, reason)
        if replace and isinstance(root, exp.Select):
            replaced = self._replaced(root)
            if replaced is not None:
                return replaced
        rows = self.delta(root)
        return None if rows is None else SignedOutcome(rows)

    def delta(self, query: exp.Query) -> str | None:
        """The relation of signed rows by which a query changes; None if it does not change."""
        if not self.relations.is_changed(query):
            return None
        if isinstance(query, exp.SetOperation):
            return self._set_operation(query)
        if not isinstance(query, exp.Select):
            return self.delta(query.this)
        query = self._separated(query)
        if whole_reason(query) is not None:
            return self._whole(query)
        order = window_order(self.query, query)
        if order is not None:
            rows = self._in_order(query, order)
            return None if rows is None else self._difference(len(query.expressions), rows.sql("new"), rows.sql("old"))
        by = self._dividing(query)
        if by is None:
            return self.core(query, [value_of(item) for item in query.expressions])
        sums = group_sums(self.query, query)
        if sums is not None and not self._is_by_key(query, sums.state.items, query.expressions):
            return self._summed(query, by, sums)
        keys = self._part_keys(query, by)
        if keys is None:
            return None
        new, old = (recomputed_sql(self.relations, query, keys, state) for state in ("new", "old"))
        return self._difference(len(query.expressions), new, old)

    def _summed(self, select: exp.Select, by: Sequence[exp.Expr], sums: GroupSums) -> str | None:
        """The change of a grouped SELECT, of whose groups only the new sums are read."""
        changes = self.core(select, sums.state.items)
        if changes is None:
            return None
        columns = [(key, f"c{sums.state.groups.index(key.unnest()) + 1}") for key in by]
        keys = [(key, self._keys(f"select {column} from {changes}")) for key, column in columns]
        no_number = sums.no_number(changes)
        if no_number:
            self.steps.append(PlanStep("check", f"check {changes}", no_number, NO_NUMBER))
        now = self.step(sums.now(self.relations, keys))
        new, old = sums.shown(now), sums.shown(f"({sums.before(now, changes)})")
        return self._difference(len(select.expressions), new, old)

    def _part_keys(self, select: exp.Select, by: Sequence[exp.Expr]) -> list[tuple[exp.Expr, str]] | None:
        """Some or all of the expressions `by`, each with the keys of the changed parts; None without changes."""
        found = self._choose(select)
        if found is not None and not found[1].padded:
            graph, key, changed = found
            start = "{}.{}".format(*map(quote, key.starts[0]))
            same = next((expression for expression in by if render_sql(expression) == start), None)
            if same is not None:
                return [(same, self._key_step(graph, key, changed))]
        touched = self.core(select, by, select.expressions)
        if touched is None:
            return None
        return [(expression, self._keys(f"select c{n} from {touched}")) for n, expression in enumerate(by, 1)]

    def _in_order(self, select: exp.Select, order: WindowOrder) -> OrderedRows | None:
        """The rows of a SELECT whose windows have no common PARTITION BY that changes reach; None without changes."""
        self._refuse_having(select)
        self._refuse_changed(order.by)
        touched = self._part_keys(select, [order.by])
        if touched is None:
            return None
        ((_, keys),) = touched
        values = [values_sql(self.relations, select, order.by, falling=falling) for falling in (False, True)]
        if order.near is None:
            return OrderedRows(self.relations, select, order.by, self._keys(order.later_keys(keys, *values)), None)
        if order.near == 0:
            return OrderedRows(self.relations, select, order.by, keys, keys)
        changed = self._keys(*order.near_keys(keys, *values))
        return OrderedRows(self.relations, select, order.by, changed, self._keys(*order.near_keys(changed, *values)))

    def _reaching(self, select: exp.Select) -> str | None:
        """The relation of changes in a SELECT's input rows; None without changes."""
        self._refuse_having(select)
        return self.core(select, whole_inputs(self.query, select), parts_after_where(select))

    def _whole(self, select: exp.Select) -> str | None:
        """The change of a SELECT in FROM that depends on all of its rows: computed at the new and at the old state."""
        require_limit_order(self.query, select)
        rows = self._reaching(select)
        if rows is None:
            return None
        new, old = (
            f"select * from ({self.relations.at(select, state)}) as q where exists (select from {rows})"
            for state in ("new", "old")
        )
        return self._difference(len(select.expressions), new, old)

    def core(self, select: exp.Select, items: Sequence[exp.Expr], beside: Sequence[exp.Expr] = ()) -> str | None:
        """The signed change of `items` over a SELECT's FROM and WHERE, or None; subqueries in `beside` count too."""
        if self._is_by_key(select, items, beside):
            return self._core_by_key(select, items)
        joins = joins_of(self.query.tree(select))
        return self._core_by_sign(select, items, [*where_of(select), *conjuncts(*(join.on for join in joins))])

    def _is_by_key(self, select: exp.Select, items: Sequence[exp.Expr], beside: Sequence[exp.Expr]) -> bool:
        """True if the signed changes of a SELECT's tables do not tell its change, but the keys that they touch."""
        joins = list(joins_of(self.query.tree(select)))
        parts = [*where_of(select), *conjuncts(*(join.on for join in joins)), *items, *beside]
        nested = [query for part in parts for query in subqueries_of(part)] + self._laterals(select)
        return any(join.kind != "inner" for join in joins) or any(self.relations.is_changed(query) for query in nested)

    def _replaced(self, select: exp.Select) -> ReplaceOutcome | None:
        """The plan that deletes from the target by key, if the view shows the key: then no query finds the old rows."""
        select = self._separated(select)
        names = {render_sql(value_of(item)): item.alias for item in reversed(select.expressions)}
        order = window_order(self.query, select)
        if order is not None:
            same = (item.alias for item in select.expressions if value_of(item).unnest() == order.by)
            shown = next(same, None)
            rows = self._in_order(select, order) if shown is not None else None
            if shown is None or rows is None:
                return None
            return ReplaceOutcome(((shown, rows.keys),), rows.sql("new"))
        by = self._dividing(select)
        if by is not None:
            by = [expression for expression in by if render_sql(expression) in names]
            keys = self._part_keys(select, by) if by else None
            if keys is None:
                return None
            sql = recomputed_sql(self.relations, select, keys, "new")
            return ReplaceOutcome(tuple((names[render_sql(expression)], key) for expression, key in keys), sql)
        found = self._choose(select)
        if found is None or found[1].padded:
            return None
        graph, key, changed = found
        ((alias, name),) = key.starts
        column = names.get(f"{quote(alias)}.{quote(name)}")
        if column is None:
            return None
        touched_keys = self._key_step(graph, key, changed)
        items = [value_of(item) for item in select.expressions]
        sql = restricted_sql(self.relations, select, items, key, touched_keys, state="new")
        return ReplaceOutcome(((column, touched_keys),), sql)

    def _choose(self, select: exp.Select) -> tuple[Graph, GraphKey, list[str]] | None:
        """Graph, key and changed leaves of a SELECT whose FROM and WHERE follow rule K; None for rule L."""
        joins = list(joins_of(self.query.tree(select)))
        parts = [*where_of(select), *conjuncts(*(join.on for join in joins)), *select.expressions]
        nested = [query for part in parts for query in subqueries_of(part)] + self._laterals(select)
        followed = any(self.relations.is_changed(query) for query in nested)
        if not followed and all(join.kind == "inner" for join in joins):
            return None
        graph = build_graph(self.query, select)
        changed = [alias for alias, leaf in graph.leaves.items() if self.relations.leaf_changed(leaf)]
        self._refuse_hidden(select, graph)
        tested = [test.this for query, test in graph.negated if self.relations.is_changed(query)]
        return graph, choose_graph_key(graph, changed, tested), changed

    def _laterals(self, select: exp.Select) -> list[exp.Query]:
        leaves = leaves_of(self.query.tree(select))
        return [leaf.query for leaf in leaves if leaf.lateral and leaf.query is not None]

    def _core_by_key(self, select: exp.Select, items: Sequence[exp.Expr]) -> str | None:
        found = self._choose(select)
        if found is None:
            raise PlanError("subquery", "a subquery whose tables changed stands where it is not followed")
        graph, key, changed = found
        keys = self._key_step(graph, key, changed)
        new, old = (restricted_sql(self.relations, select, items, key, keys, state=state) for state in ("new", "old"))
        return self._difference(len(items), new, old)

    def _core_by_sign(
        self, select: exp.Select, items: Sequence[exp.Expr], conditions: Sequence[exp.Expr]
    ) -> str | None:
        leaves = leaves_of(self.query.tree(select))
        deltas = {leaf.alias: self._leaf_delta(leaf) for leaf in leaves if self.relations.leaf_changed(leaf)}
        changed = [alias for alias, relation in deltas.items() if relation is not None]
        if not changed:
            return None
        if len(changed) > _CHANGED_MAX:
            raise PlanError("join-wide", f"more than {_CHANGED_MAX} tables of a join have changed")
        shown = ", ".join(f"{self.relations.at(item)} as c{n}" for n, item in enumerate(items, 1))
        where = " and ".join(f"({self.relations.at(part)})" for part in conditions) or "true"
        terms = []
        for size in range(1, len(changed) + 1):
            for some in itertools.combinations(changed, size):
                weights = " * ".join(f"{quote(alias)}.{quote(WEIGHT_COLUMN)}" for alias in some)
                sign = "" if size % 2 else "-"
                parts = [
                    f"{deltas[leaf.alias]} as {quote(leaf.alias)}"
                    if leaf.alias in some
                    else self._beside(leaf, {alias: str(deltas[alias]) for alias in some}, conditions)
                    for leaf in leaves
                ]
                listed = f"{shown}, " if shown else ""
                terms.append(f"select {listed}{sign}({weights}) as w from {', '.join(parts)} where {where}")
        return self.step(" union all ".join(terms))

    def _beside(self, leaf: Leaf, deltas: dict[str, str], conditions: Iterable[exp.Expr]) -> str:
        """A leaf at its new state for FROM; a query is restricted to the join keys of the deltas beside it."""
        if leaf.query is None or leaf.lateral:
            return self.relations.relation(leaf, "new")
        bounds = []
        for part in conditions:
            sides = (part.this.unnest(), part.expression.unnest()) if isinstance(part, exp.EQ) else ()
            for own, other in (sides, sides[::-1]) if sides else ():
                if not isinstance(own, exp.Column) or not isinstance(other, exp.Column):
                    continue
                if own.table == leaf.alias and other.table in deltas:
                    keys = self._keys(f"select d.{quote(other.name)} from {deltas[other.table]} as d")
                    bounds.append((own.name, keys))
        return self.relations.relation(leaf, "new", bounds)

    def _key_step(self, graph: Graph, key: GraphKey, changed: Iterable[str]) -> str:
        """Name of the step that follows the changes of all leaves to the key."""
        parts = []
        for alias in changed:
            delta = self._leaf_delta(graph.leaves[alias])
            if delta is None:
                continue
            parts.append(touched_keys_sql(self.relations, graph, key, alias, delta))
        for nested, _ in graph.negated:
            if self.relations.is_changed(nested):
                self._refuse_nulls(nested)
                parts.append("select null")
        return self._keys(" union all ".join(parts) or "select null::text where false")

    def _refuse_nulls(self, nested: exp.Query) -> None:
        """Add a check that no NULL entered or left the query of a NOT IN, which would change every row."""
        inner = {table.alias for table in nested.find_all(exp.Table)} | {
            subquery.alias for subquery in nested.find_all(exp.Subquery)
        }
        if any(column.table not in inner for column in nested.find_all(exp.Column)):
            raise PlanError("not-in-correlated", "a correlated NOT IN is loaded in full")
        rows = self.delta(nested)
        if rows is not None:
            columns = range(1, len(output_names(nested)) + 1)
            some = " or ".join(is_null(f"c{n}") for n in columns)
            sql = f"select exists (select from {rows} where {some})"
            self.steps.append(PlanStep("check", f"check {rows}", sql, "a NULL came into or went from a NOT IN"))

    def _set_operation(self, query: exp.SetOperation) -> str | None:
        width = len(output_names(query))
        columns = [f"c{n}" for n in range(1, width + 1)]
        deltas = [rows for side in (query.this, query.expression) if (rows := self.delta(side)) is not None]
        if not deltas:
            return None
        if isinstance(query, exp.Union) and not query.args.get("distinct"):
            if len(deltas) == 1:
                return deltas[0]
            listed = ", ".join([*columns, "w"])
            return self.step(" union all ".join(f"select {listed} from {rows}" for rows in deltas))
        keys = [self._keys(" union all ".join(f"select {column} from {rows}" for rows in deltas)) for column in columns]
        where = " and ".join(among_keys(column, key) for column, key in zip(columns, keys, strict=True))
        new, old = (operated_sql(self.relations, query, state, columns, where) for state in ("new", "old"))
        return self._difference(width, new, old)

    def _separated(self, select: exp.Select) -> exp.Select:
        return separated(self.query, select, f"d{next(self._aliases)}")

    def _dividing(self, select: exp.Select) -> list[exp.Expr] | None:
        """dividing_expressions(); PlanError if a changed subquery is in it, whose old values the rows' delta lacks."""
        self._refuse_having(select)
        by = dividing_expressions(select)
        self._refuse_changed(*(by or ()))
        return by

    def _refuse_changed(self, *by: exp.Expr) -> None:
        if any(self.relations.is_changed(query) for key in by for query in subqueries_of(key)):
            raise PlanError("no-key", "the rows of the view are divided by a subquery whose tables changed")

    def _refuse_having(self, select: exp.Select) -> None:
        """PlanError for a changed subquery in HAVING, or in ORDER BY that decides about rows."""
        names = ("having", "order") if select.args.get("limit") or select.args.get("distinct") else ("having",)
        clauses = (select.args.get(name) for name in names)
        if any(clause is not None and self.relations.is_changed(clause) for clause in clauses):
            raise PlanError("having-subquery", "a subquery in HAVING whose tables changed is loaded in full")

    def _refuse_hidden(self, select: exp.Select, graph: Graph) -> None:
        """PlanError if a changed table is read in a place that the graph does not follow."""
        self._refuse_having(select)
        seen = {table.alias for leaf in graph.leaves.values() if leaf.query for table in leaf.query.find_all(exp.Table)}
        for table in select.find_all(exp.Table):
            leaf = self.query.leaves[table.alias]
            if self.relations.leaf_changed(leaf) and table.alias not in graph.leaves and table.alias not in seen:
                raise PlanError("subquery", "a subquery whose tables changed is loaded in full")

    def _leaf_delta(self, leaf: Leaf) -> str | None:
        """The signed rows by which a leaf changes, for FROM, with the leaf's column names."""
        if leaf.table is not None:
            return f"pg_temp.gdq_delta_{self.relations.numbers[leaf.table.qualified]}"
        if leaf.query is None:
            raise AssertionError("a leaf is a table or a query")
        if leaf.alias not in self._deltas:
            if is_correlated(leaf.query):
                raise PlanError(
                    "lateral", "a query in FROM that reads columns from around its SELECT is loaded in full"
                )
            rows = self.delta(leaf.query)
            names = ", ".join(f"c{n} as {quote(name)}" for n, name in enumerate(leaf.columns, 1))
            listed = f"(select {names}, w as {quote(WEIGHT_COLUMN)} from {rows})"
            self._deltas[leaf.alias] = None if rows is None else listed
        return self._deltas[leaf.alias]

    def _difference(self, width: int, new: str, old: str) -> str:
        columns = "".join(f"q.c{n}, " for n in range(1, width + 1))
        names = f"q({', '.join(f'c{n}' for n in range(1, width + 1))})" if width else "q"
        return self.step(
            f"select {columns}1 as w from ({new}) as {names} union all select {columns}-1 from ({old}) as {names}"
        )

    def step(self, sql: str, value: PlannedValue | None = None) -> str:
        """Add a step that makes a relation, perhaps of one value; returns the relation's name."""
        name = f"pg_temp.gdq_rows_{next(self._numbers)}"
        self.steps.append(PlanStep("delta", name, sql, value=value))
        return name

    def _keys(self, sql: str, instead: str = "") -> str:
        known = next((step.name for step in self.steps if step.kind == "keys" and step.sql == sql), None)
        if known is not None:
            return known
        name = f"gdq_keys_{next(self._numbers)}"
        self.steps.append(PlanStep("keys", name, sql, instead=instead))
        return name
