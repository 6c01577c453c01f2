"""Netting of a view's signed rows, in a temporary table that ends with the transaction."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from gdq.consumers.views.difference import NETTED_ROWS, Difference, row_image_sql
from gdq.consumers.views.target import TargetColumn
from gdq.owner_sql import OwnerSql
from gdq.sql_text import quote

# Roughly the number of rows that PostgreSQL assumes for a table without statistics.
UNKNOWN_ROWS = 500

# Makes a temporary table from a name and a query; returns the number of its rows.
MakeTable = Callable[[str, str], int]


def net_signed_rows(make: MakeTable, types: Sequence[TargetColumn], rows: str, match: Sequence[str]) -> Difference:
    """Net signed rows (c1, c2, ..., w) of a view into the table NETTED_ROWS by `make`."""
    typed = "".join(f"c{n}::{column.type} as c{n}, " for n, column in enumerate(types, 1))
    names = [f"c{n}" for n in range(1, len(types) + 1)]
    make(
        "gdq_out",
        f"select * from (select distinct on (image) *, sum(w) over (partition by image) as net "
        f"from (select *, {row_image_sql(names)} as image from (select {typed}w from ({rows}) as r) as r) as r) as r "
        f"where net <> 0",
    )
    weight = "w"
    while any(column.name == weight for column in types):
        weight += "_"
    shown = "".join(f"c{n} as {quote(column.name)}, " for n, column in enumerate(types, 1))
    listed = f"select {shown}net::bigint as {quote(weight)} from {NETTED_ROWS}"
    return Difference("signed", listed, match=tuple(match), weight=weight)


def make_temporary_table(owned: OwnerSql, name: str, query: str, weight: str | None = None) -> int:
    """Create a table that ends with the transaction; returns its rows. `weight`: a column to analyze before joins."""
    rows = owned.run(f"create temp table {name} on commit drop as {query}")
    if rows > UNKNOWN_ROWS:
        # a small sample gives sizes and numbers of distinct values in a tenth of the time
        target = "set local default_statistics_target"
        owned.run(f"{target} = 3; analyze pg_temp.{name}; {target} to default")
    elif weight is not None:
        # without a known size, joining a table of ten rows made PostgreSQL read whole tables
        owned.run(f"analyze pg_temp.{name} ({weight})")
    return rows
