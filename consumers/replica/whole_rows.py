"""Rows of tables without a key, deleted and inserted as often as they went and came: such a table is a multiset.

The staging table has a row for each time, and never the same row as both old and new. An update is a row that went and
another one that came. Of equal rows in the target any may be deleted.
"""

from __future__ import annotations

from typing import Any

from psycopg import Connection

from gdq.consumers.replica.changes import STAGE, Applied, insert_staged
from gdq.consumers.replica.same_rows import found_images_sql, staged_images
from gdq.consumers.replica.table import ReplicaTable
from gdq.sql_text import raw


def replace_whole_rows(target: Connection[Any], table: ReplicaTable) -> Applied:
    """Delete the rows that went, and insert those that came."""
    deleted = 0
    # tables without a key often only grow
    if target.execute(raw(f"select from {STAGE} where not is_new limit 1")).rowcount:
        deleted = target.execute(raw(delete_sql(table))).rowcount
    return Applied(insert_staged(target, table, "s.is_new"), 0, deleted)


def delete_sql(table: ReplicaTable, stage: str = STAGE) -> str:
    """Statement that deletes the staged rows that went, each as often as it went."""
    return f"""
        with gone as materialized ({_gone_sql(table, stage)})
        delete from {table.target} d using (
          select t.tableoid as relid, t.ctid as place, cardinality(g.staged) as times,
                 row_number() over (partition by g.image) as time
            from gone g join {table.target} t on {_found_sql(table)}) f
         where f.time <= f.times and d.tableoid = f.relid and d.ctid = f.place"""


def lacking_sql(table: ReplicaTable) -> str:
    """SELECT of the places in the staging table of rows that went, and that the target lacks so often."""
    return f"""
        select unnest(g.staged[count(t.ctid)::int + 1:]) as staged
          from ({_gone_sql(table)}) g left join {table.target} t on {_found_sql(table)}
         group by g.image, g.staged having count(t.ctid) < cardinality(g.staged)"""


def _gone_sql(table: ReplicaTable, stage: str = STAGE) -> str:
    """SELECT of the different rows that went: a number, their values in the target, their places in the stage."""
    images = staged_images(table, "s")
    listed = ", ".join(f"{image} as v{place}" for place, image in enumerate(images, 1))
    return f"""
        select row_number() over () as image, {", ".join(f"v{place}" for place in range(1, len(images) + 1))},
               array_agg(place) as staged
          from (select s.ctid as place, {listed} from {stage} s where not s.is_new) r
         group by {", ".join(f"v{place}" for place in range(1, len(images) + 1))}"""


def _found_sql(table: ReplicaTable) -> str:
    return found_images_sql(table, [f"g.v{place}" for place in range(1, len(table.columns) + 1)])
