"""SQL of the relations that a refresh reads: tables and queries at a state, restricted to keys."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Literal

from sqlglot import exp

from gdq.plan.dialect import render_sql
from gdq.plan.leaf import LEAF_NODES, Leaf
from gdq.plan.query import Query
from gdq.sql_text import is_null, quote

RelationState = Literal["new", "old", "any"]
RelationBounds = dict[str, list[tuple[str, str]]]


class RelationSql:
    """Renders parts of a query. `numbers`: the number of each table (qualified name); `changed`: the changed tables."""

    def __init__(self, query: Query, numbers: dict[str, int], changed: Iterable[str]) -> None:
        self.query = query
        self.numbers = numbers
        self._changed = frozenset(changed)

    def is_changed(self, node: exp.Expr) -> bool:
        """True if a part of the query reads a changed table."""
        return bool(self.query.tables(node) & self._changed)

    def leaf_changed(self, leaf: Leaf) -> bool:
        """True if an item of FROM is or reads a changed table."""
        if leaf.table is not None:
            return leaf.table.qualified in self._changed
        return leaf.query is not None and self.is_changed(leaf.query)

    def relation(self, leaf: Leaf, state: RelationState, bounds: Sequence[tuple[str, str]] = ()) -> str:
        """A leaf at a state, for FROM with its alias; `bounds`: columns and the keys that they are restricted to."""
        alias = quote(leaf.alias)
        columns = ", ".join(quote(name) for name in leaf.columns)
        if leaf.table is not None:
            rows = self._table(leaf.table.qualified, state)
            item = f"{rows} as {alias}"
        elif leaf.fixed is not None:
            item = _bare(leaf.fixed)
        elif leaf.lateral and leaf.query is not None:
            item = f"lateral ({self.at(leaf.query, 'new')}) as {alias}({columns})"
        else:
            query = leaf.query or exp.Select()
            states: tuple[RelationState, ...] = (
                ("new", "old") if state == "any" and self.is_changed(query) else (state,)
            )
            sql = " union all ".join(f"({self.at(query, 'new' if s == 'any' else s)})" for s in states)
            item = f"({sql}) as {alias}({columns})"
        return f"({_within(item, leaf, bounds)}) as {alias}" if bounds else item

    def _table(self, qualified: str, state: RelationState) -> str:
        if state == "new" or qualified not in self._changed:
            return qualified
        return f"pg_temp.gdq_{state}_{self.numbers[qualified]}"

    def at(self, node: exp.Expr, state: RelationState = "new", bounds: RelationBounds | None = None) -> str:
        """A part of the query as SQL, every leaf at a state and within its bounds."""
        holder = exp.Paren(this=node.copy())
        leaves = [n for n in holder.find_all(*LEAF_NODES, bfs=False) if n.alias in self.query.leaves]
        for found in reversed(leaves):
            leaf = self.query.leaves[found.alias]
            wanted = (bounds or {}).get(leaf.alias, [])
            if leaf.table is None and not wanted:
                continue
            item = _bare(found) if leaf.table is None else self.relation(leaf, state)
            body = exp.Var(this=_within(item, leaf, wanted))
            found.replace(exp.Subquery(this=body, alias=alias_node(leaf.alias), joins=found.args.get("joins")))
        return render_sql(holder.this)


def _bare(node: exp.Expr) -> str:
    """An item of FROM without its joins."""
    bare = node.copy()
    bare.set("joins", None)
    return render_sql(bare)


def _within(item: str, leaf: Leaf, bounds: Sequence[tuple[str, str]]) -> str:
    """SELECT of an item of FROM, with its leaf's alias, within bounds."""
    where = " and ".join(among_keys(f"{quote(leaf.alias)}.{quote(name)}", keys) for name, keys in bounds)
    return f"select * from {item}" + (f" where {where}" if where else "")


def among_keys(expression: str, keys: str) -> str:
    """Condition that an expression is one of the collected keys."""
    null = keys.replace("keys", "null")
    return f"({expression} = any ({keys}) or ({null} and {is_null(expression)}))"


def alias_node(alias: str) -> exp.TableAlias:
    """An alias in FROM."""
    return exp.TableAlias(this=exp.to_identifier(alias, quoted=True))
