"""The tables of a view as a slot sends them: their requirements, and marks by which a change of a table is noticed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from psycopg import Connection

from gdq.consumers.slot.pgoutput import Relation
from gdq.consumers.slot.slot import publication_name
from gdq.consumers.slot.snapshot import Snapshot
from gdq.errors import GdqError

_FIRST_XID = 3

# A rewrite gives a table another file, a dropped column's number is never given again, and what is taken out of a
# publication and put back has another oid: nothing of that need be among the rows that a slot sends. Of a partition not
# even a replica identity is, for its rows come as the root's: its pg_class row is written anew by each ALTER TABLE. The
# partitions are asked for by the snapshot, which pg_partition_tree() would not do.
_TABLES = """
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
       select min(l.oid::pg_catalog.regclass::text) filter (where l.relkind not in ('r', 'p')) as foreign_part,
              min(l.oid::pg_catalog.regclass::text) filter (where l.relpersistence <> 'p') as unlogged_part,
              min(l.oid::pg_catalog.regclass::text) filter (where l.relkind = 'r' and l.relreplident <> 'f')
                as keyed_part,
              bool_or(leaving) as leaving,
              string_agg(concat_ws(' ', l.oid, l.relfilenode, l.xmin, place, leaving), ',' order by l.oid) as mark
         from tree join pg_catalog.pg_class l on l.oid = tree.oid) parts
     order by t.i"""


@dataclass(frozen=True, slots=True)
class PublishedTable:
    """A table of a view. `columns`: type oid, modifier and name of each that is sent, as one text."""

    name: str
    oid: int
    columns: tuple[str, ...]

    def is_sent_as(self, relation: Relation) -> bool:
        """Whether rows that the slot describes so are whole rows of the table as it is."""
        sent = tuple(f"{column.type_oid} {column.type_modifier} {column.name}" for column in relation.columns)
        return relation.identity == "f" and sent == self.columns


@dataclass(frozen=True, slots=True)
class PublishedTables:
    """All tables of a view by their oid. `mark` is another after each change of them that rows do not show.

    `published`: the newest transaction that changed what is published, 64 bits; 0 when that is long ago.
    """

    tables: dict[int, PublishedTable]
    mark: str
    published: int


def published_tables(connection: Connection[Any], queue: str, names: Sequence[str], s1: Snapshot) -> PublishedTables:
    """The tables as a transaction sees them whose snapshot is s1.

    GdqError for one whose changes a slot does not send, or not with old rows.
    """
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
            # what a transaction wrote before DETACH CONCURRENTLY began is sent as the root's when it ends
            newest = s1.xmax
    return PublishedTables(tables, ";".join(marks), newest)


def _check(name: str, publication: str, found: Sequence[Any]) -> None:
    kind, persistence, identity, inherits, there, listed, whole, via_root, foreign, unlogged, keyed = found
    if kind not in ("r", "p") or inherits or foreign:
        what = f"{name} has a foreign partition" if foreign else f"{name} is a partition, or has children"
        raise GdqError(
            f"table {what}, whose changes a slot does not send, or not as the table's",
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
