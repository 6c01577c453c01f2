"""The tables of a publication as the source has them now: their columns, and what shows changes that no row shows.

A slot sends neither DDL nor what a rewrite does to rows. So what the catalog has of a table is stored with its copy,
and compared before each batch.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from psycopg import Connection
from psycopg.rows import namedtuple_row

from gdq.consumers.replica.column_changes import SourceColumns
from gdq.consumers.slot.pgoutput import RelationColumn, RelationMessage
from gdq.consumers.slot.slot import publication_name
from gdq.consumers.slot.snapshot import PgSnapshot
from gdq.errors import GdqError
from gdq.qualified_sql import qualified

_FIRST_XID = 3

# Rows may have changed unseen if `fixed` differs: another table of the name, another publication, other partitions or
# other files of theirs (TRUNCATE of a partition comes through no slot), another primary key where descriptions do not
# name it. Or if `files` and `altered` differ both: ALTER TABLE that rewrites a table changes its file and a row of
# pg_attribute, TRUNCATE and VACUUM FULL only the file, SET DEFAULT only the row. The recursive query sees the
# partitions of the snapshot; pg_partition_tree() would not.
_TABLES = qualified("""
    select pg_catalog.format('%%I.%%I', n.nspname, c.relname) as name, n.nspname::text as schema_name,
           c.relname::text as table_name, c.oid::bigint as oid, c.relreplident::text as identity,
           case when c.relkind <> all ('{r,p}') or c.relispartition or (c.relhassubclass and c.relkind <> 'p')
                then 'is a partition, or has children'
                when tree.foreign_part is not null then 'has a foreign partition'
                when c.relpersistence <> 'p' or tree.unlogged then 'is unlogged'
                when not (p.pubinsert and p.pubupdate and p.pubdelete and p.pubtruncate) or r.prqual is not null
                     or r.prattrs is not null then 'is published in part'
                when coalesce(pg_catalog.to_jsonb(p) ->> 'pubgencols', 'n') <> all ('{n,f}')
                then 'is published with generated columns'
                when c.relkind = 'p' and not p.pubviaroot then 'is published by its partitions' end as fault,
           cols.columns, cols.generated, cols.altered, cols.missing,
           c.relnatts::text as numbers, c.relfilenode::text as files,
           pg_catalog.concat_ws(' ', c.oid, p.oid, p.xmin, r.oid, r.xmin,
             (select k.indkey::text from pg_catalog.pg_index k
               where k.indrelid = c.oid and k.indisprimary and c.relreplident = 'f'), tree.mark) as fixed,
           array[p.xmin::text::bigint, r.xmin::text::bigint] as published,
           coalesce(tree.leaving, false) as leaving
      from pg_catalog.pg_publication p
      join pg_catalog.pg_publication_rel r on r.prpubid = p.oid
      join pg_catalog.pg_class c on c.oid = r.prrelid
      join pg_catalog.pg_namespace n on n.oid = c.relnamespace
      left join pg_catalog.pg_index i on i.indrelid = c.oid
            and case when c.relreplident = 'd' then i.indisprimary when c.relreplident = 'i' then i.indisreplident
                     else false end
     cross join lateral (
       select coalesce(pg_catalog.jsonb_agg(pg_catalog.jsonb_build_array(a.attnum, a.attname,
                pg_catalog.format_type(a.atttypid, a.atttypmod), a.atttypid::bigint, a.atttypmod,
                c.relreplident = 'f' or coalesce(
                  a.attnum = any ((i.indkey::pg_catalog.int2[])[0:i.indnkeyatts - 1]), false)) order by a.attnum)
                filter (where a.attgenerated = ''), '[]') as columns,
              array_agg(a.attname::text) filter (where a.attgenerated <> '') as generated,
              coalesce(array_agg(a.attnum) filter (where a.atthasmissing), '{}') as missing,
              pg_catalog.string_agg(pg_catalog.concat_ws(' ', a.attnum, a.xmin), ',' order by a.attnum) as altered
         from pg_catalog.pg_attribute a where a.attrelid = c.oid and a.attnum > 0 and not a.attisdropped) cols
     cross join lateral (
       with recursive tree(oid, place, leaving) as (
         select h.inhrelid, h.xmin, h.inhdetachpending
           from pg_catalog.pg_inherits h where h.inhparent = c.oid and c.relkind = 'p'
         union all
         select h.inhrelid, h.xmin, h.inhdetachpending
           from tree join pg_catalog.pg_inherits h on h.inhparent = tree.oid)
       select min(l.oid::bigint) filter (where l.relkind <> all ('{r,p}')) as foreign_part,
              bool_or(l.relpersistence <> 'p') as unlogged, bool_or(leaving) as leaving,
              pg_catalog.string_agg(pg_catalog.concat_ws(' ', l.oid, l.relfilenode, place, leaving), ','
                                    order by l.oid) as mark
         from tree join pg_catalog.pg_class l on l.oid = tree.oid) tree
     where p.pubname = %s""")

_SNAPSHOT = qualified("select pg_catalog.pg_current_snapshot()::text")


@dataclass(frozen=True, slots=True)
class PublishedTable:
    """A published table: `relation` is how the slot describes it now, `columns` what is stored with a copy.

    `oid`: in the source. `generated`: columns that a slot does not send. `missing`: the numbers of columns of which
    older rows have a value that they do not store. `published`: 64-bit number of the newest transaction that changed
    the publication; 0 if that is long ago.
    """

    name: str
    relation: RelationMessage
    columns: SourceColumns
    generated: tuple[str, ...]
    missing: frozenset[int]
    published: int

    @property
    def oid(self) -> int:
        return self.relation.oid

    @property
    def column_names(self) -> list[str]:
        """The columns that a slot sends."""
        return [column.name for column in self.relation.columns]

    def is_as(self, stored: SourceColumns) -> bool:
        """True if every change since these columns were stored comes through the slot."""
        then, now = stored.mark, self.columns.mark
        rewritten = then.get("files") != now["files"] and then.get("altered") != now["altered"]
        return stored.columns == self.columns.columns and then.get("fixed") == now["fixed"] and not rewritten

    def shows_where(self, stored: SourceColumns) -> bool:
        """True if only columns have changed since, and the slot's descriptions tell rows before and after it apart.

        So they do if columns were only added or only dropped, beside new names and types: then two descriptions that
        are alike are of the same columns. A column that was added and dropped since is a number that is not there; one
        that the source has computed is an older number, and its rows have values that were not sent.
        """
        then, now = stored.mark, self.columns.mark
        before, after = stored.columns.keys(), self.columns.columns.keys()
        return (
            then.get("fixed") == now["fixed"]
            and then.get("files") == now["files"]
            and then.get("sent") != now["sent"]
            and (before <= after or after <= before)
            and not (after - before) & self.missing
            and all(number > int(then["numbers"]) for number in after - before)
            and after >= set(range(int(then["numbers"]) + 1, int(now["numbers"]) + 1))
        )


def sent_columns(relation: RelationMessage) -> str:
    """The columns of a description as one text, whatever the replica identity is."""
    return json.dumps([(column.name, column.type_oid, column.type_modifier) for column in relation.columns])


def current_snapshot(connection: Connection[Any]) -> PgSnapshot:
    """The snapshot that a query has now; that of the transaction under REPEATABLE READ."""
    row = connection.execute(_SNAPSHOT).fetchone()
    assert row is not None
    return PgSnapshot.parse(row[0])


def published_tables(connection: Connection[Any], queue: str, names: Sequence[str] | None) -> dict[str, PublishedTable]:
    """The tables of a queue's publication by name, None for all; GdqError for one that a slot does not give whole."""
    now = current_snapshot(connection)
    publication = publication_name(queue)
    with connection.cursor(row_factory=namedtuple_row) as cursor:
        found: list[Any] = cursor.execute(_TABLES, [publication]).fetchall()
    tables = {}
    for row in found:
        if names is not None and row.name not in names:
            continue
        if row.fault is not None:
            raise GdqError(
                f"table {row.name} {row.fault}: not all of its changes come through publication {publication}",
                hint="Publish it whole, leave it out by --tables, or replicate from the queue.",
            )
        tables[row.name] = _table(row, now)
    return tables


def _table(row: Any, now: PgSnapshot) -> PublishedTable:
    sent = tuple(RelationColumn(name, kind, modifier, key) for _, name, _, kind, modifier, key in row.columns)
    known = [now.full(xid) for xid in row.published if xid >= _FIRST_XID]
    newest = max((xid for xid in known if xid < now.xmax), default=0)
    relation = RelationMessage(row.oid, row.schema_name, row.table_name, row.identity, sent)
    return PublishedTable(
        name=row.name,
        relation=relation,
        columns=SourceColumns(
            version=0,
            columns={number: (name, kind) for number, name, kind, *_ in row.columns},
            mark={
                "fixed": row.fixed,
                "files": row.files,
                "altered": row.altered,
                "numbers": row.numbers,
                "sent": sent_columns(relation),
            },
        ),
        generated=tuple(row.generated or ()),
        missing=frozenset(row.missing),
        # while a partition is detached concurrently, a transaction's earlier changes of it still come as the root's
        published=now.xmax if row.leaving else newest,
    )
