"""A captured table as a chunked copy reads it: its columns and key, the bounds of chunks, and the rows that changed.

Chunks are ranges of the key, compared in the source's server alone. A row belongs to a range by its image: an update
that moves it from one range to another takes it from the one and adds it to the other. A table without a key has no
ranges (chunk_blocks).
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from psycopg import Connection, sql

from gdq.call import scalar
from gdq.consumers.views.change_source import LogColumn, log_columns, weighted_log_rows
from gdq.consumers.views.snapshot_holder import SnapshotHolder
from gdq.errors import GdqError, mapped_errors
from gdq.plan.table import WEIGHT_COLUMN
from gdq.qualified_sql import qualified
from gdq.queue import TableInfo, table_info
from gdq.sql_text import quote, raw

# Columns that a copy writes, in order. `divides`: whether key ranges of the column mean the same wherever gdq compares
# values. The operators of other schemas' types are found by the search_path, and values that a collation takes for
# equal are two rows elsewhere.
_COLUMNS = qualified("""
select a.attname::text, format_type(a.atttypid, a.atttypmod),
       coalesce(b.typtype = 'e' or b.typnamespace = 'pg_catalog'::pg_catalog.regnamespace, false)
         and coalesce(o.collisdeterministic, true)
  from pg_catalog.pg_attribute a
  join pg_catalog.pg_type t on t.oid = a.atttypid
  left join pg_catalog.pg_type b on b.oid = (case when t.typtype = 'd' then t.typbasetype else t.oid end)
  left join pg_catalog.pg_collation o on o.oid = a.attcollation
 where a.attrelid = %s::pg_catalog.regclass and a.attnum > 0 and not a.attisdropped and a.attgenerated = ''
 order by a.attnum""")

# The key's columns in the order of the index that finds them, so that chunks are read by it.
_KEY = qualified("""
with k as (select array_agg(c.attnum::smallint) as columns
             from gdq.table_columns(%(queue)s, %(table)s::pg_catalog.regclass) c where c.is_key)
select a.attname::text
  from k, (select o.columns
              from k, pg_catalog.pg_index i,
                   lateral (values ((i.indkey::smallint[])[0:i.indnkeyatts - 1])) as o(columns)
            where i.indrelid = %(table)s::pg_catalog.regclass and i.indisvalid and i.indisunique and i.indpred is null
              and o.columns @> k.columns and k.columns @> o.columns
            order by i.indisprimary desc, i.indexrelid limit 1) x,
       unnest(x.columns) with ordinality as o(attnum, place)
  join pg_catalog.pg_attribute a on a.attrelid = %(table)s::pg_catalog.regclass and a.attnum = o.attnum
 order by o.place""")

_HAS_KEY = qualified("""
select exists (select from gdq.table_columns(%s, %s::pg_catalog.regclass) c where c.is_key)""")

_ONLY = qualified("select c.relkind <> 'p' from pg_catalog.pg_class c where c.oid = %s::pg_catalog.regclass")

_BLOCKS = qualified("""
select sum(pg_relation_size(one.relid) / current_setting('block_size')::bigint)
  from (select %s::pg_catalog.regclass as relid
        union select t.relid from pg_catalog.pg_partition_tree(%s::pg_catalog.regclass) t where t.isleaf) as one""")

# Blocks whose rows are read for the bounds of one range.
_SAMPLE_BLOCKS = 50
# Blocks whose rows are read for the bounds of a range's chunks: a part of all, but so many at least and at most.
_CHUNKS_SHARE, _CHUNKS_BLOCKS = 0.005, (500, 10_000)

# A bound: the texts of the key's values, or of a place in a table without a key.
Bound = tuple[str, ...]


@dataclass(frozen=True, slots=True)
class ChunkTable:
    """A captured table of `queue`: its columns with their types, and its key, () if there is none.

    `only`: it has no partitions.
    """

    queue: str
    name: str
    columns: tuple[tuple[str, str], ...]
    key: tuple[str, ...]
    only: bool

    @property
    def described(self) -> str:
        """The columns and the key as text: a copy whose table has another text starts again."""
        return json.dumps([self.columns, self.key])

    @property
    def listed(self) -> str:
        """The columns as a list in SQL."""
        return ", ".join(quote(name) for name, _ in self.columns)

    def next_bound(
        self, connection: Connection[Any], after: Bound | None, until: Bound | None, size: int
    ) -> Bound | None:
        """The end of a chunk of `size` rows after a bound (None: from the start); `until` if the range ends before."""
        places = ", ".join(place for place, _ in self._places)
        texts = ", ".join(f"{place}::text" for place, _ in self._places)
        where = self.within(after, until)
        query = f"select {texts} from {self._from} {where} order by {places} limit 1 offset {size - 1}"
        row = connection.execute(raw(query)).fetchone()
        return until if row is None else tuple(row)

    def dividing_bounds(self, connection: Connection[Any], ranges: int, size: int) -> list[Bound]:
        """Keys that divide the table into so many ranges, or fewer of about `size` rows: by the rows of some blocks.

        The rows are looked at, not statistics: these may be missing, are of single columns, and not for all to read.
        A table without a key is one range.
        """
        if not self.key:
            return []
        blocks = scalar(connection, _BLOCKS, self.name, self.name) or 0
        share = min(_SAMPLE_BLOCKS * ranges / blocks, 1.0) if blocks else 1.0
        columns = ", ".join(f"{place} as k{number}" for number, (place, _) in enumerate(self._places, 1))
        names = [f"k{number}" for number in range(1, len(self.key) + 1)]
        key = ", ".join(names)
        number = f"floor(count(*) / {share * size})"
        query = f"""
            with s as materialized (select {columns} from {self._from} tablesample system ({share * 100})),
                 n as materialized (select greatest(1, least({ranges}, {number}))::int as n from s),
                 r as (select {key}, ntile((select n from n)) over (order by {key}) as place from s)
            select distinct on (place) {", ".join(f"{name}::text" for name in names)} from r
             where place < (select n from n) order by place, {", ".join(f"r.{name} desc" for name in names)}"""
        return [tuple(row) for row in connection.execute(raw(query)).fetchall()]

    def sampled_bounds(
        self, connection: Connection[Any], after: Bound | None, until: Bound | None, size: int
    ) -> list[Bound]:
        """Keys that lie about `size` rows after one another, from a bound to another: by the rows of some blocks."""
        blocks = int(scalar(connection, _BLOCKS, self.name, self.name) or 0)
        least, most = _CHUNKS_BLOCKS
        share = min(max(blocks * _CHUNKS_SHARE, least), most) / blocks if blocks > least else 1.0
        places = ", ".join(place for place, _ in self._places)
        texts = ", ".join(f"{place}::text" for place, _ in self._places)
        names = ", ".join(f"k{number}" for number in range(1, len(self.key) + 1))
        query = f"""
            select {names}
              from (select row_number() over (order by {places}), {texts}
                      from {self._from} tablesample system ({share * 100}) {self.within(after, until)}
                   ) as s(place, {names})
             where s.place % {max(1, round(size * share))} = 0 order by s.place"""
        return [tuple(row) for row in connection.execute(raw(query)).fetchall()]

    def rows(self, after: Bound | None, upto: Bound | None) -> str:
        """SELECT of the rows whose key is after a bound and not after another; None: without that limit."""
        return f"select {self.listed} from {self._from} {self.within(after, upto)}"

    def changed_rows(self, holder: SnapshotHolder, since: str, after: Bound | None, upto: Bound | None) -> str | None:
        """SELECT of what changed between `since` and the held snapshot; None if nothing did.

        Columns: the key, how often a row came (less than 0: went), and the row. Only keys after `after` and not after
        `upto`. With a key the row is the one that is held: it may have been there before, and all rows of the keys have
        gone.
        """
        if not self.key:
            return self.images(holder, since, holder.snapshot)
        # values of the rows come from the table
        log_rows = self._log_rows(holder, since, holder.snapshot, whole=False)
        if log_rows is None:
            return None
        logged = [c for c in self._logged(holder) if c.name in self.key]
        keys = ", ".join(f"t.{quote(name)}" for name in self.key)
        same = " and ".join(f"t.{quote(name)} = k.{quote(name)}" for name in self.key)
        shown = ", ".join(f"k.{quote(name)}" for name in self.key)
        images = weighted_log_rows(log_rows, logged)
        rows = ", ".join(f"t.{quote(name)}" for name, _ in self.columns)
        came = f"case when t.{quote(self.key[0])} is null then -1 else 1 end"
        return (
            f"with k as materialized (select distinct {keys} from {images} as t {self.within(after, upto)}) "
            f"select {shown}, {came}, {rows} from k left join {self._from} on {same}"
        )

    def images(
        self,
        holder: SnapshotHolder,
        since: str,
        to: str,
        *,
        back: bool = False,
        every: bool = False,
    ) -> str | None:
        """As changed_rows(), between any two snapshots, from the log alone: rows that came and rows that went.

        `back`: what leads from the later snapshot to the earlier one. `every`: also rows that came as often as they
        went. Rows are told apart by their texts, as types without equality can be. GdqError if the log lacks columns.
        """
        log_rows = self._log_rows(holder, since, to)
        if log_rows is None:
            return None
        logged = self._logged(holder)
        self.check_images(logged)
        by_name = {column.name: column for column in logged}
        signed = weighted_log_rows(log_rows, [by_name[name] for name, _ in self.columns])
        places = {name: f"c{number}" for number, (name, _) in enumerate(self.columns, 1)}
        columns = ", ".join(f"t.{quote(name)} as {place}" for name, place in places.items())
        listed = ", ".join(places.values())
        image = image_sql(f"t.{quote(name)}" for name, _ in self.columns)
        weight = f"{'-' if back else ''}t.{quote(WEIGHT_COLUMN)}"
        shown = ", ".join([*(places[name] for name in self.key), "net", listed])
        return (
            f"select {shown} from (select distinct on (image) {listed}, sum(w) over (partition by image) as net "
            f"from (select {columns}, {weight} as w, {image} as image "
            f"from {signed} as t) as i) as i{'' if every else ' where net <> 0'}"
        )

    def check_images(self, logged: Sequence[LogColumn]) -> None:
        """GdqError unless the log has all columns of the rows before and after each change."""
        whole = {column.name for column in logged if column.log_old and column.log_new and not column.omitted}
        lacking = [name for name, _ in self.columns if name not in whole]
        if lacking:
            raise GdqError(
                f"the log of table {self.name} lacks column{'s' if len(lacking) > 1 else ''} {', '.join(lacking)}",
                hint="Capture all its columns, in mode full, with unchanged both or once.",
            )

    def _log_rows(self, holder: SnapshotHolder, since: str, to: str, *, whole: bool = True) -> str | None:
        """SELECT of the log's rows between two snapshots; None if there are none.

        `whole`: an update without a value that it left as it was is an error.
        """
        query = qualified("select gdq.delta_sql(%s, %s::pg_catalog.regclass, %s::pg_snapshot, %s::pg_snapshot, %s)")
        may_lack = list[str]() if whole else None
        with mapped_errors():
            found = str(scalar(holder.connection, query, self.queue, self.name, since, to, may_lack))
        return None if found.endswith(" where false") else found  # as delta_sql() writes it for no rows

    def _logged(self, holder: SnapshotHolder) -> list[LogColumn]:
        return log_columns(holder.connection, self.queue, self.name)

    @property
    def _from(self) -> str:
        return f"{'only ' if self.only else ''}{self.name} as t"

    @property
    def _places(self) -> list[tuple[str, str]]:
        """The key's columns in SQL, with the types."""
        types = dict(self.columns)
        return [(f"t.{quote(name)}", types[name]) for name in self.key]

    def within(self, after: Bound | None, upto: Bound | None) -> str:
        """The WHERE of rows t whose key is after a bound and not after another; None: without that limit."""
        key = ", ".join(place for place, _ in self._places)

        def row(bound: Bound) -> str:
            values = zip(self._places, bound, strict=True)
            return ", ".join(f"{sql.Literal(value).as_string(None)}::{kind}" for (_, kind), value in values)

        limits = [f"row({key}) > row({row(after)})"] if after is not None else []
        limits += [f"row({key}) <= row({row(upto)})"] if upto is not None else []
        return f"where {' and '.join(limits)}" if limits else ""


def image_sql(columns: Iterable[str]) -> str:
    """A row's text by its columns in SQL; rows with one text have the same values."""
    return f'row({", ".join(columns)})::text collate "C"'


def captured_tables(connection: Connection[Any], queue: str, names: Sequence[str]) -> list[str]:
    """The tables' qualified names; GdqError for one that a chunked copy cannot follow."""
    captured = {info.table_name: info for info in table_info(connection, queue)}
    query = qualified("""select format('%%I.%%I', n.nspname, c.relname)
                 from pg_catalog.pg_class c join pg_catalog.pg_namespace n on n.oid = c.relnamespace
                where c.oid = %s::pg_catalog.regclass""")
    found: list[str] = []
    for name in names:
        row = connection.execute(query, [name]).fetchone()
        info = captured.get(row[0]) if row else None
        if info is None:
            raise GdqError(f'queue "{queue}" does not capture table {name}', hint="gdq add-table captures it.")
        _check_followed(info)
        if info.table_name not in found:
            found.append(info.table_name)
    return found


def _check_followed(info: TableInfo) -> None:
    if info.where or not {"insert", "update", "delete", "truncate"} <= set(info.operations):
        raise GdqError(
            f"table {info.table_name} is captured in part, by where or operations: its copy could not be kept right",
            hint="Capture all changes of all its rows, in another queue.",
        )


def describe_table(connection: Connection[Any], queue: str, table: str) -> ChunkTable:
    """The table as the open transaction sees it; `table` is its qualified name. GdqError for a key without ranges."""
    columns = connection.execute(_COLUMNS, [table]).fetchall()
    divides = {name: good for name, _, good in columns}
    key = tuple(name for (name,) in connection.execute(_KEY, {"queue": queue, "table": table}))
    if not key and scalar(connection, _HAS_KEY, queue, table):
        raise GdqError(
            f"table {table} has no unique index on just the columns of its key",
            hint="Create one, and run the copy again: it goes on.",
        )
    for name in key:
        if not divides.get(name):
            raise GdqError(
                f"column {name} of the key of table {table} has a type or a collation that has no ranges here",
                hint="Types of extensions and collations that are not deterministic cannot be divided.",
            )
    row = connection.execute(_ONLY, [table]).fetchone()
    described = ChunkTable(queue, table, tuple((name, kind) for name, kind, _ in columns), key, bool(row and row[0]))
    if not key:
        described.check_images(log_columns(connection, queue, table))
    return described
