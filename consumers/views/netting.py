"""Netting: signed rows added up, of the changes of a table and of a view.

What many changes net to is kept in a temporary table that ends with the transaction.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence

from gdq.consumers.views.difference import NETTED_ROWS, Difference, row_image_sql
from gdq.consumers.views.target import TargetColumn
from gdq.owner_sql import OwnerSql
from gdq.plan.table import WEIGHT_COLUMN, UsedTable
from gdq.sql_text import quote

# Roughly the number of rows that PostgreSQL assumes for a table without statistics.
UNKNOWN_ROWS = 500

# Of a log that a slower consumer keeps long only the new part should be read, by its index. Costs of plans without
# sequential scans would have them compiled for longer than they run.
BEGIN_NETTING = "set local enable_seqscan = off; set local jit = off"
END_NETTING = "set local enable_seqscan to default; set local jit to default"

# A relation of a plan that may be a part of a statement instead of a temporary one.
_PART = re.compile(r"\bpg_temp\.(gdq_(?:delta|old|any|rows)_\d+)\b")

# Makes a temporary table from a name and a query; returns the number of its rows.
MakeTable = Callable[[str, str], int]


def as_part(text: str, parts: Mapping[str, str] | None = None) -> str:
    """SQL of a plan that reads these parts of a statement (None: any) in place of temporary relations."""
    return _PART.sub(lambda found: found[1] if parts is None or found[1] in parts else found[0], text)


def with_parts(select: str, parts: Mapping[str, str]) -> str:
    """A SELECT, with those of the parts that it reads in WITH. A part may read those before it."""
    needed: list[str] = []
    for name in reversed([*parts]):
        if re.search(rf"\b{name}\b", " ".join([select, *(parts[other] for other in needed)])):
            needed.append(name)
    if not needed:
        return select
    if select.startswith("with "):
        select = f"select * from ({select}) as q"
    return f"with {', '.join(f'{name} as {part_hint(name)}({parts[name]})' for name in reversed(needed))} {select}"


def part_hint(name: str) -> str:
    """What stands before a part in WITH: conditions on a table as it was go down to the table."""
    return "not materialized " if name.startswith(("gdq_old_", "gdq_any_")) else ""


def netted_images_sql(table: UsedTable, images: str, *, exact: bool) -> str:
    """SELECT of the net change of a table, from its signed images.

    `exact`: equal values of all columns are identical to the bit. Else rows are netted by their text, `__image`.
    """
    columns = ", ".join(quote(name) for name in table.logged)
    weight, images = quote(WEIGHT_COLUMN), table.matter(images)
    if table.keys_only:  # netting would drop an update of a column that is not logged
        return f"select distinct {columns}, 1 as {weight} from {images} as i"
    if table.key and exact:
        return (
            f"select {columns}, sum({weight}) as {weight} from {images} as i "
            f"group by {columns} having sum({weight}) <> 0"
        )
    net = f"sum({weight}) over (partition by __image) as {weight}"
    listed = f"{columns}, " if columns else ""
    return (
        f"select * from (select distinct on (__image) {listed}__image, {net} "
        f"from (select {listed}{weight}, {row_image_sql(table.logged)} as __image from {images} as i) as i) "
        f"as net "
        f"where {weight} <> 0"
    )


def old_rows_sql(table: UsedTable, delta: str) -> tuple[str, str]:
    """SELECTs over a table and its net change, the relation `delta`: the table as it was, and all it has or had."""
    columns = ", ".join(quote(name) for name in table.logged)
    weight = quote(WEIGHT_COLUMN)
    gone = f"select {columns} from {delta} where {weight} < 0"
    rows = f"select {columns} from {table.name} union all {gone}"
    if table.key:
        same = " and ".join(f"d.{quote(key)} = t.{quote(key)}" for key in table.key)
        kept = f"select {columns} from {table.name} as t where not exists (select from {delta} as d where {same})"
        return f"{kept} union all {gone}", rows
    image = row_image_sql(table.logged)
    gone = f"select {columns} from {delta}, generate_series(1, -{weight}) where {weight} < 0"
    kept = (
        f"select {columns} from (select {columns}{', ' if columns else ''}{image} as __image, "
        f"row_number() over (partition by {image}) as __copy from {table.name} as i) as t "
        f"where not exists (select from {delta} as d where d.__image = t.__image and t.__copy <= d.{weight})"
    )
    return f"{kept} union all {gone}", rows


def netted_rows_sql(types: Sequence[TargetColumn], rows: str) -> str:
    """SELECT of the signed rows (c1, c2, ..., w) of a view, netted: c1, c2, ..., `image`, and `net`, never 0."""
    typed = "".join(f"c{n}::{column.type} as c{n}, " for n, column in enumerate(types, 1))
    names = [f"c{n}" for n in range(1, len(types) + 1)]
    return (
        f"select * from (select distinct on (image) *, sum(w) over (partition by image) as net "
        f"from (select *, {row_image_sql(names)} as image from (select {typed}w from ({rows}) as r) as r) as r) as r "
        f"where net <> 0"
    )


def net_signed_rows(make: MakeTable, types: Sequence[TargetColumn], rows: str, match: Sequence[str]) -> Difference:
    """Net signed rows (c1, c2, ..., w) of a view into the table NETTED_ROWS by `make`."""
    make("gdq_out", netted_rows_sql(types, rows))
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
