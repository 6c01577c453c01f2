"""The relations that a refresh reads, as SQL: tables and queries at a state, restricted to keys."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Literal

from sqlglot import exp

from gdq.plan.leaf import ITEMS, Leaf
from gdq.plan.query import Query, render
from gdq.sql_text import quote

State = Literal["new", "old", "any"]
Bounds = dict[str, list[tuple[str, str]]]


class Relations:
    """Renders parts of a query. `numbers`: its tables (qualified) and their numbers; `changed`: those that changed."""

    def __init__(self, query: Query, numbers: dict[str, int], changed: Iterable[str]) -> None:
        self.query = query
        self.numbers = numbers
        self._changed = frozenset(changed)

    def is_changed(self, node: exp.Expr) -> bool:
        """Whether a part of the query reads a table that changed."""
        return bool(self.query.tables(node) & self._changed)

    def leaf_changed(self, leaf: Leaf) -> bool:
        """Whether an item of FROM is or reads a table that changed."""
        if leaf.table is not None:
            return leaf.table.qualified in self._changed
        return leaf.query is not None and self.is_changed(leaf.query)

    def relation(self, leaf: Leaf, state: State, bounds: Sequence[tuple[str, str]] = ()) -> str:
        """A leaf at a state, for FROM with its alias; `bounds`: its columns and the keys that are wanted there."""
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
            states: tuple[State, ...] = ("new", "old") if state == "any" and self.is_changed(query) else (state,)
            sql = " union all ".join(f"({self.at(query, 'new' if s == 'any' else s)})" for s in states)
            item = f"({sql}) as {alias}({columns})"
        return f"({_within(item, leaf, bounds)}) as {alias}" if bounds else item

    def _table(self, qualified: str, state: State) -> str:
        if state == "new" or qualified not in self._changed:
            return qualified
        return f"pg_temp.gdq_{state}_{self.numbers[qualified]}"

    def at(self, node: exp.Expr, state: State = "new", bounds: Bounds | None = None) -> str:
        """A part of the query as SQL, every leaf in it at a state and within its bounds."""
        holder = exp.Paren(this=node.copy())
        leaves = [n for n in holder.find_all(*ITEMS, bfs=False) if n.alias in self.query.leaves]
        for found in reversed(leaves):
            leaf = self.query.leaves[found.alias]
            wanted = (bounds or {}).get(leaf.alias, [])
            if leaf.table is None and not wanted:
                continue
            item = _bare(found) if leaf.table is None else self.relation(leaf, state)
            body = exp.Var(this=_within(item, leaf, wanted))
            found.replace(exp.Subquery(this=body, alias=alias_node(leaf.alias), joins=found.args.get("joins")))
        return render(holder.this)


def _bare(node: exp.Expr) -> str:
    """An item of FROM without what is joined to it."""
    bare = node.copy()
    bare.set("joins", None)
    return render(bare)


def _within(item: str, leaf: Leaf, bounds: Sequence[tuple[str, str]]) -> str:
    """The SELECT of an item of FROM, with the alias of its leaf, within bounds."""
    where = " and ".join(among(f"{quote(leaf.alias)}.{quote(name)}", keys) for name, keys in bounds)
    return f"select * from {item}" + (f" where {where}" if where else "")


def among(expression: str, keys: str) -> str:
    """The condition that an expression is one of collected keys."""
    null = keys.replace("keys", "null")
    return f"({expression} = any ({keys}) or ({null} and {expression} is null))"


def alias_node(alias: str) -> exp.TableAlias:
    """An alias in FROM."""
    return exp.TableAlias(this=exp.to_identifier(alias, quoted=True))
