"""The least or greatest value of an expression, followed from the values that came and went."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from sqlglot import exp

from gdq.plan.dialect import render_sql
from gdq.sql_text import is_not_null


@dataclass(frozen=True, slots=True)
class StateExtreme:
    """A min or max over all rows; `column` is its column in the state."""

    kind: Literal["min", "max"]
    expression: exp.Expr
    column: str

    def follow(self, state: str, rows: str, value: str, source: str) -> str:
        """The statement that updates the state's value from signed rows with the column `value`.

        If the extreme value itself was deleted, the new one is looked up in `source`, the query's FROM and WHERE: by
        an index if there is one, else by reading all rows.
        """
        return (
            f"with net as materialized ({net_values_sql(rows, value)}) "
            f"update {state} as s set {self.column} = {self.after(f's.{self.column}', 'net', source)} "
            f"where exists (select from net)"
        )

    def after(self, held: str, net: str, source: str) -> str:
        """Expression of the value after the changes of the relation `net`, from the value before."""
        return extreme_after(self.kind, held, net, f"select {self.kind}({render_sql(self.expression)}) {source}")


def net_values_sql(rows: str, value: str) -> str:
    """SELECT of the values x that came or went in signed rows with the column `value`, with their weights w."""
    return (
        f"select r.{value} as x, sum(r.w) as w from {rows} as r "
        f"where {is_not_null(f'r.{value}')} group by r.{value}, r.{value}::text having sum(r.w) <> 0"
    )


def extreme_after(kind: str, held: str, net: str, anew: str) -> str:
    """Expression of a min or max after the changes of the relation `net`: of the value before, or by the SELECT `anew`.

    The SELECT is run only where the value itself, or a better one, went.
    """
    compare, better = ("<=", "least") if kind == "min" else (">=", "greatest")
    return (
        f"case when exists (select from {net} where w < 0 and x {compare} {held}) then ({anew}) "
        f"else {better}({held}, (select {kind}(x) from {net} where w > 0)) end"
    )
