"""The SQL by which a repair finds missing and extra rows of a table without a key: rows that only their hashes name."""

from __future__ import annotations

from collections.abc import Sequence

from gdq.consumers.replica.changes import STAGE
from gdq.consumers.replica.table import ReplicaTable
from gdq.consumers.table_compare.rows import Differing, keys_sql
from gdq.consumers.table_compare.sides import TwoSides
from gdq.sql_text import literal, quote

# The types on the way that have a collation.
_COLLATED = ("text", "character varying")


def travelling_values(table: ReplicaTable) -> str:
    """The values of a row of the source, as the staging table takes them."""
    # by the column's own collation other texts may be equal
    return ", ".join(
        column.logged(quote(column.name)) + (' collate "C"' if column.stage in _COLLATED else "") + f" as c{place}"
        for place, column in enumerate(table.columns, 1)
    )


def missing_sql(sides: TwoSides, table: ReplicaTable, differing: Sequence[Differing]) -> str:
    """SELECT for the staging table: rows that the source has, each as often as the target lacks it."""
    missing = [row for row in differing if row.missing]
    wanted = keys_sql(sides.source.connection, sides.shape, [row.named for row in missing])
    listed = ", ".join(f"c{place}" for place in range(1, len(table.columns) + 1))
    # rows of one hash may be different ones of which the target's types know one value
    return f"""with wanted as ({wanted}), held as (
          select gdq_key, {listed}, sum(w)::bigint as times
            from ({sides.source.found_sql(sides.shape, travelling_values(table))}) as r
           group by gdq_key, {listed} having sum(w) > 0)
        select true, {listed}
          from (select held.*, row_number() over (partition by gdq_key) as time from held, generate_series(1, times)) r
          join unnest({_hashes(missing)}, {literal([row.missing for row in missing])}::bigint[]) as m(hash, missing)
            on m.hash = r.gdq_key[1]::bigint and r.time <= m.missing"""


def stage_extra_sql(sides: TwoSides, table: ReplicaTable, differing: Sequence[Differing]) -> str:
    """Statement that stages rows of the target as rows that went, each as often as it has more than the source."""
    extra = [row for row in differing if row.extra]
    listed = ", ".join(f"c{place}" for place in range(1, len(table.columns) + 1))
    values = ", ".join(
        f"{column.travelling(quote(column.name))} as c{place}" for place, column in enumerate(table.columns, 1)
    )
    return f"""
        insert into {STAGE} (is_new, {listed})
        select false, {listed}
          from (select t.*, m.extra, row_number() over (partition by m.hash) as time
                  from (select {sides.shape.hashes}, {values} from {table.target}) t
                  join unnest({_hashes(extra)}, {literal([row.extra for row in extra])}::bigint[]) as m(hash, extra)
                    on m.hash = t.kh) r
         where time <= extra"""


def _hashes(rows: Sequence[Differing]) -> str:
    return f"{literal([row.kh for row in rows])}::bigint[]"
