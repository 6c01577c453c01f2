"""A view's tables as a slot sends them: checks that it sends everything, and marks that show a change of a table."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from psycopg import Connection

from gdq.consumers.slot.pgoutput import RelationMessage
from gdq.consumers.slot.slot import publication_name
from gdq.consumers.slot.snapshot import PgSnapshot
from gdq.errors import GdqError
from gdq.qualified_sql import qualified

_FIRST_XID = 3

# The mark (concat_ws) shows changes of a table that a slot's rows need not show: a rewrite gives another relfilenode, a
# column dropped and added again another attnum, a table removed from and added to the publication another oid.
# For partitions, whose rows come as the root's, the xmin of pg_class changes with each ALTER TABLE. The recursive query
# sees the partitions of the snapshot; pg_partition_tree() would not.
_TABLES = qualified("""
    select t.name, c.oid::bigint, c.relkind::text, c.relpersistence::text, c.relreplident::text,
           c.relispartition or (c.relhassubclass and c.relkind <> 'p'), p.oid is not null, r.oid is not null,
           coalesce(p.pubinsert and p.pubupdate and p.pubdelete and p.pubtruncate
                    and r.prqual is null and r.prattrs is null, false),
           coalesce(p.pubviaroot, false), parts.foreign_part, parts.unlogged_part, parts.keyed_part,
           coalesce(parts.leaving, false),
           array(select pg_catalog.format('%%s %%s %%s', a.atttypid::bigint, a.atttypmod, a.attname)
                   from pg_catalog.pg_attribute a
                  where a.attrelid = c.oid and a.attnum > 0 and not a.attisdropped and a.attgenerated = ''
                  order by a.attnum),
           pg_catalog.concat_ws(' ', c.oid, c.relfilenode, p.oid, p.xmin, r.oid, r.xmin,
             (select pg_catalog.string_agg(pg_catalog.concat_ws(' ', a.attnum, a.atttypid, a.atttypmod, a.attcollation,
                                                                a.attname), ',' order by a.attnum)
                from pg_catalog.pg_attribute a where a.attrelid = c.oid and a.attnum > 0 and not a.attisdropped),
             parts.mark),
           array[p.xmin::text::bigint, r.xmin::text::bigint]
      from pg_catalog.unnest(%s::text[]) with ordinality as t(name, i)
      join pg_catalog.pg_class c on c.oid = t.name::pg_catalog.regclass
      left join pg_catalog.pg_publication p on p.pubname = %s
      left join pg_catalog.pg_publication_rel r on r.prpubid = p.oid and r.prrelid = c.oid
     cross join lateral (
       with recursive tree(oid, place, leaving) as (
         select i.inhrelid, i.xmin, i.inhdetachpending
           from pg_catalog.pg_inherits i where i.inhparent = c.oid and c.relkind = 'p'
         union all
         select i.inhrelid, i.xmin, i.inhdetachpending
           from tree join pg_catalog.pg_inherits i on i.inhparent = tree.oid)
       select min(l.oid::pg_catalog.regclass::text) filter (where l.relkind <> all ('{r,p}')) as foreign_part,
              min(l.oid::pg_catalog.regclass::text) filter (where l.relpersistence <> 'p') as unlogged_part,
              min(l.oid::pg_catalog.regclass::text) filter (where l.relkind = 'r' and l.relreplident <> 'f')
                as keyed_part,
              bool_or(leaving) as leaving,
              string_agg(concat_ws(' ', l.oid, l.relfilenode, l.xmin, place, leaving), ',' order by l.oid) as mark
         from tree join pg_catalog.pg_class l on l.oid = tree.oid) parts
     order by t.i""")


@dataclass(frozen=True, slots=True)
class PublishedTable:
    """A table of a view. `columns`: one text for each column sent, with type oid, modifier and name."""

    name: str
    oid: int
    columns: tuple[str, ...]

    def is_sent_as(self, relation: RelationMessage) -> bool:
        """True if the slot's description has full identity and the same columns as the table."""
        sent = tuple(f"{column.type_oid} {column.type_modifier} {column.name}" for column in relation.columns)
        return relation.identity == "f" and sent == self.columns


@dataclass(frozen=True, slots=True)
class PublishedTables:
    """All tables of a view by oid. `mark` differs after each change of a table that rows do not show.

    `published`: 64-bit number of the newest transaction that changed the publication; 0 if that is long ago.
    """

    tables: dict[int, PublishedTable]
    mark: str
    published: int


def published_tables(connection: Connection[Any], queue: str, names: Sequence[str], s1: PgSnapshot) -> PublishedTables:
    """The tables as a transaction with snapshot s1 sees them; GdqError if the slot lacks changes or old rows of one."""
    publication = publication_name(queue)
    tables, marks, newest = {}, [], 0
    for name, oid, *facts, leaving, columns, mark, xids in connection.execute(
        _TABLES, [list(names), publication]
    ).fetchall():
        _check(name, publication, facts)
        tables[oid] = PublishedTable(name, oid, tuple(columns))
        marks.append(mark)
        known = [s1.full(xid) for xid in xids if xid >= _FIRST_XID]
        newest = max([newest, *(xid for xid in known if xid < s1.xmax)])
        if leaving:
            # during DETACH CONCURRENTLY, a transaction's earlier changes of the partition still come as the root's
            newest = s1.xmax
    return PublishedTables(tables, ";".join(marks), newest)


def _check(name: str, publication: str, found: Sequence[Any]) -> None:
    kind, persistence, identity, inherits, there, listed, whole, via_root, foreign, unlogged, keyed = found
    if kind not in ("r", "p") or inherits or foreign:
        what = f"{name} has a foreign partition" if foreign else f"{name} is a partition, or has children"
        raise GdqError(
            f"table {what}: a slot does not send its changes, or not under the table's name",
            hint="Refresh the view from the queue: leave --source out.",
        )
    if persistence != "p" or unlogged:
        raise GdqError(
            f"table {unlogged or name} is unlogged: a slot has none of its changes", hint="Leave --source out."
        )
    if not there or not listed:
        raise GdqError(
            f"publication {publication} does not have table {name}",
            hint=f"ALTER PUBLICATION {publication} ADD TABLE {name}" if there else "Make it with gdq create-slot.",
        )
    if not whole:
        raise GdqError(
            f"publication {publication} does not send all rows, columns and operations of table {name}",
            hint="Drop the queue's slots and make them anew with gdq create-slot.",
        )
    if kind == "p" and not via_root:
        raise GdqError(
            f"publication {publication} sends the changes of {name} as those of its partitions",
            hint=f"ALTER PUBLICATION {publication} SET (publish_via_partition_root = true)",
        )
    if identity != "f" or keyed:
        without = name if identity != "f" else keyed
        raise GdqError(
            f"changes of table {without} come through a slot without old rows",
            hint=f"ALTER TABLE {without} REPLICA IDENTITY FULL",
        )
