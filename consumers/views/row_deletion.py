"""Deletes the rows of a target that went, each as often as it went.

A row is found by its image, the text of the whole row. Equal values may have several texts, such as 1 day and 24:00, or
1.0 and 1.00 in jsonb: DISTINCT and UNION show any of them. So a row whose image is not there is found by its values.
"""

from __future__ import annotations

from collections.abc import Sequence

import psycopg

from gdq.consumers.views.difference import NETTED_ROWS, row_image_sql
from gdq.consumers.views.signals import Diverged
from gdq.owner_sql import OwnerSql
from gdq.sql_text import is_null, quote


def delete_netted_rows(owned: OwnerSql, table: str, columns: Sequence[str], match: Sequence[str]) -> int:
    """Delete the rows in NETTED_ROWS with a negative `net`, exactly that many copies of each; returns their number.

    `columns`: those of the target's `table`; `match`: those with an index, by which rows are found. Diverged if a row
    is missing: then nothing, or too little, was deleted.
    """
    expected = int(owned.value(f"select coalesce(-sum(net), 0)::bigint from {NETTED_ROWS} where net < 0"))
    if not expected:
        return 0
    found = found_rows_sql(table, columns, match)
    gone = f"array(select ctid from gone where (select count(*) from gone) = {expected})"
    exact = f"with gone as materialized (select ctid from ({found}) as f where copy <= n)"
    if owned.run(f"{exact} delete from {table} where ctid = any ({gone})") == expected:
        return expected
    try:
        deleted = owned.run(_delete_by_value(table, columns, found))
    except psycopg.errors.UndefinedFunction as error:
        raise Diverged(f"{table} lacks rows that went") from error  # a type without an equality
    if deleted != expected:
        raise Diverged(f"{table} held {deleted} of the {expected} rows that went")
    return deleted


def found_rows_sql(table: str, columns: Sequence[str], match: Sequence[str], netted: str = NETTED_ROWS) -> str:
    """SELECT of target rows with the image of a row in `netted` that went: ctid, image, `copy` and `n`.

    `copy` numbers the rows of one image, of which `n` went.
    """
    pairs = [(quote(name), f"d.c{columns.index(name) + 1}") for name in match]
    some = " or ".join(is_null(value) for _, value in pairs)
    same = "".join(f" and t.{name} = {value}" for name, value in pairs)
    alike = "".join(f" and t.{name} is not distinct from {value}" for name, value in pairs)
    image = row_image_sql(columns, "t.")
    joined = (
        f"select t.ctid, d.image, row_number() over (partition by d.image) as copy, -d.net as n "
        f"from {table} as t join {netted} as d on d.net < 0 and d.image = {image}"
    )
    parts = [f"{joined}{same}"] + ([f"{joined}{alike} and ({some})"] if pairs else [])
    return " union all ".join(f"({part})" for part in parts)


def _delete_by_value(table: str, columns: Sequence[str], found: str) -> str:
    """DELETE of the rows that went: those with the image first, then rows with equal values. Reads the whole target."""
    shown = ", ".join(f"t.{quote(name)} as c{n}" for n, name in enumerate(columns, 1))
    names = ", ".join(f"c{n}" for n in range(1, len(columns) + 1))
    return f"""
        with exact as materialized (select ctid, image from ({found}) as f where copy <= n),
             missing as (select d.*, -d.net - (select count(*) from exact e where e.image = d.image) as n
                           from {NETTED_ROWS} as d where d.net < 0),
             equal as (select place, sum(n) over (partition by {names}) as n,
                              row_number() over (partition by {names}, place is null) as copy
                         from (select t.ctid as place, {shown}, 0 as n from {table} as t
                                where t.ctid not in (select ctid from exact)
                               union all
                               select null, {names}, n from missing where n > 0) as q)
        delete from {table}
         where ctid in (select ctid from exact
                         union all
                        select place from equal where place is not null and copy <= n)"""
