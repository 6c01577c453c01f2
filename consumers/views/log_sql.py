"""SQL for what a reader of a captured table reads: its signed changes, or its rows by blocks or by keys."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from psycopg import Connection, sql
from psycopg.rows import scalar_row

from gdq.errors import mapped
from gdq.plan.table import WEIGHT, quote
from gdq.view.table_schema import raw
from gdq.view.target import NeedsFull

BLOCK_BYTES = 8192

_OLD_OPS, _NEW_OPS = "('D', 'U', 'o')", "('I', 'U', 'n')"

# What pg_stat_xact_all_tables shows, of some tables with their partitions.
ROWS_READ = """
select coalesce(sum(pg_catalog.pg_stat_get_xact_tuples_returned(t.oid)
                    + pg_catalog.pg_stat_get_xact_tuples_fetched(t.oid)
                    + (select coalesce(sum(pg_catalog.pg_stat_get_xact_tuples_fetched(i.indexrelid)), 0)
                         from pg_catalog.pg_index i where i.indrelid = t.oid)), 0)::bigint
  from (select n::pg_catalog.regclass::oid as oid from pg_catalog.unnest(%s::text[]) n
        union select p.relid from pg_catalog.unnest(%s::text[]) n,
                                  pg_catalog.pg_partition_tree(n::pg_catalog.regclass) p) t"""


@dataclass(frozen=True, slots=True)
class LogColumn:
    """A column of a captured table and where its log holds it. `collation` when it is not the type's own."""

    name: str
    type: str
    log_type: str
    as_text: bool
    is_key: bool
    log_key: str | None
    log_old: str | None
    log_new: str | None
    collation: str | None

    def image(self, new: bool) -> str | None:
        """The log column with the old or new value: for a key column of mode pk the key; None when there is none."""
        return (self.log_new if new else self.log_old) or self.log_key


def log_columns(connection: Connection[Any], queue: str, table: str) -> list[LogColumn]:
    """The logged columns of a captured table."""
    return log_columns_of(connection, queue, [table])[table]


def log_columns_of(connection: Connection[Any], queue: str, tables: Sequence[str]) -> dict[str, list[LogColumn]]:
    """The logged columns of captured tables, in one statement."""
    query = """
        select w.name as of_table, l.name, l.type, l.log_type, l.as_text, l.is_key, l.log_key, l.log_old, l.log_new,
               case when a.attcollation <> t.typcollation
                    then pg_catalog.format('%%I.%%I', n.nspname, c.collname) end as collation
          from (select n as name, n::pg_catalog.regclass as relid from pg_catalog.unnest(%(tables)s::text[]) n) w
          cross join lateral gdq.table_columns(%(queue)s, w.relid) l
          join pg_catalog.pg_attribute a on a.attrelid = w.relid and a.attnum = l.attnum
          join pg_catalog.pg_type t on t.oid = a.atttypid
          left join pg_catalog.pg_collation c on c.oid = a.attcollation
          left join pg_catalog.pg_namespace n on n.oid = c.collnamespace
         order by l.attnum"""
    found: dict[str, list[LogColumn]] = {table: [] for table in tables}
    with mapped():
        for of_table, *column in connection.execute(query, {"queue": queue, "tables": list(tables)}, prepare=True):
            found[of_table].append(LogColumn(*column))
    return found


def changes(connection: Connection[Any], queue: str, table: str, s0: str, s1: str) -> str:
    """The SELECT of a table's log rows in (s0, s1]. TruncatedPosition when rows after s0 are gone."""
    query = "select gdq.delta_sql(%s, %s::pg_catalog.regclass, %s::pg_snapshot, %s::pg_snapshot)"
    with mapped(), connection.cursor(row_factory=scalar_row) as cursor:
        return str(cursor.execute(query, [queue, table, s0, s1]).fetchone())


def images_held(connection: Connection[Any], rows: Iterable[str]) -> int:
    """How many images of table rows there are in log rows, SELECTs of changes(): an update has two."""
    query = " union all ".join(
        f"select count(*) filter (where d.ev_op in {_OLD_OPS}) + count(*) filter (where d.ev_op in {_NEW_OPS}) as n "
        f"from ({some}) as d"
        for some in rows
    )
    with connection.transaction(force_rollback=True), connection.cursor(row_factory=scalar_row) as cursor:
        cursor.execute("set local enable_seqscan = off")
        return int(cursor.execute(sql.SQL("select sum(n)::bigint from ({}) as n").format(raw(query))).fetchone() or 0)


def changes_of(connection: Connection[Any], queue: str, tables: Sequence[str], s0: str, s1: str) -> dict[str, str]:
    """changes() of those of the tables that have log rows in (s0, s1].

    NeedsFull when an event there says that log rows do not show every change; TruncatedPosition as changes().
    """
    query = """
        with event as materialized (
          select kind, tbl from gdq.delta_events(%(queue)s, %(s0)s::pg_snapshot, %(s1)s::pg_snapshot,
                                                %(tables)s::text[]::pg_catalog.regclass[])
           where kind <> 'message' limit 1)
        select t.name, e.kind, e.tbl, case when e.kind is null then
                 gdq.delta_sql(%(queue)s, t.name::pg_catalog.regclass, %(s0)s::pg_snapshot, %(s1)s::pg_snapshot) end
          from pg_catalog.unnest(%(tables)s::text[]) with ordinality as t(name, i)
          left join event e on true order by i"""
    values = {"queue": queue, "tables": list(tables), "s0": s0, "s1": s1}
    found = {}
    for table, kind, of_table, rows in connection.execute(query, values, prepare=True).fetchall():
        if kind is not None:
            raise NeedsFull(f"{kind} of {of_table}")
        if not rows.endswith(" where false"):  # as delta_sql() says that there is none
            found[table] = rows
    return found


def weighted(rows: str, columns: Sequence[LogColumn]) -> str:
    """Log rows as signed images: WEIGHT -1 or 1, then the table's columns in the table's own types, for FROM."""
    images = [
        f", case when s.w < 0 then {_typed(c, new=False)} else {_typed(c, new=True)} end as {quote(c.name)}"
        for c in columns
        if c.image(new=True)
    ]
    return (
        f"(select s.w as {quote(WEIGHT)}{''.join(images)} from ({rows}) as d, (values (-1), (1)) as s(w) "
        f"where case when s.w < 0 then d.ev_op in {_OLD_OPS} else d.ev_op in {_NEW_OPS} end)"
    )


def signed_form(rows: str, columns: Sequence[LogColumn]) -> str:
    """Log rows in signed long form: _change_type, _commit_version, _commit_timestamp, ev_id, the columns as logged."""
    kinds = (
        (False, "case d.ev_op when 'D' then 'delete' else 'update_preimage' end", _OLD_OPS),
        (True, "case d.ev_op when 'I' then 'insert' else 'update_postimage' end", _NEW_OPS),
    )
    parts = []
    for new, kind, ops in kinds:
        header = f"{kind} as _change_type, d.ev_txid as _commit_version, d.ev_time as _commit_timestamp, d.ev_id"
        images = [f", d.{quote(name)} as {quote(c.name)}" for c in columns if (name := c.image(new))]
        parts.append(f"select {header}{''.join(images)} where d.ev_op in {ops}")
    return f"(select i.* from ({rows}) as d cross join lateral ({' union all '.join(parts)}) as i)"


def base(table: str, condition: str = "") -> str:
    """The rows of a table with WEIGHT 1, for FROM; `condition` is over the alias t."""
    where = f" where {condition}" if condition else ""
    return f"(select 1 as {quote(WEIGHT)}, t.* from {table} as t{where})"


def table_bytes(connection: Connection[Any], table: str) -> tuple[int, int]:
    """Size of a table, of its largest partition and in all, in bytes."""
    query = """select max(pg_catalog.pg_relation_size(r))::bigint, sum(pg_catalog.pg_relation_size(r))::bigint
                 from (select %(table)s::pg_catalog.regclass
                       union select relid from pg_catalog.pg_partition_tree(%(table)s::pg_catalog.regclass)) as t(r)"""
    largest, total = connection.execute(query, {"table": table}).fetchone() or (0, 0)
    return int(largest), int(total)


def rows_held(connection: Connection[Any], tables: Sequence[str]) -> int:
    """About how many rows these tables and their partitions hold, by the server's statistics; 0 without any."""
    query = """
        select coalesce(sum(greatest(pg_catalog.pg_stat_get_live_tuples(c.oid), c.reltuples::bigint, 0)), 0)::bigint
          from pg_catalog.pg_class c
         where c.relkind <> 'p' and c.oid in (
                 select n::pg_catalog.regclass from pg_catalog.unnest(%(tables)s::text[]) n
                 union select p.relid from pg_catalog.unnest(%(tables)s::text[]) n,
                                           pg_catalog.pg_partition_tree(n::pg_catalog.regclass) p)"""
    with connection.cursor(row_factory=scalar_row) as cursor:
        return int(cursor.execute(query, {"tables": list(tables)}).fetchone() or 0)


def rows_read(connection: Connection[Any], tables: Sequence[str]) -> int:
    """Rows of these tables that this session has read; it may hold those of transactions before this one."""
    with connection.cursor(row_factory=scalar_row) as cursor:
        return int(cursor.execute(ROWS_READ, [tables, tables], prepare=True).fetchone() or 0)


def block_ranges(connection: Connection[Any], table: str, bytes_each: int) -> list[str]:
    """Conditions over t.ctid that divide a table into parts of about `bytes_each`; the last has no end.

    The partitions of a partitioned table share the ranges, so that reading them takes no right on each.
    """
    size, _ = table_bytes(connection, table)
    return _ranges("t.ctid", size, bytes_each)


def _ranges(ctid: str, size: int, bytes_each: int) -> list[str]:
    step = max(bytes_each // BLOCK_BYTES, 1)
    starts = list(range(0, max(size // BLOCK_BYTES, 1), step))
    conditions = []
    for start, end in zip(starts, [*starts[1:], None], strict=True):
        parts = [f"{ctid} >= '({start},0)'"] if start else []
        parts += [f"{ctid} < '({end},0)'"] if end is not None else []
        conditions.append(" and ".join(parts))
    return conditions


def split_changes(connection: Connection[Any], queue: str, table: str, rows: str, bytes_each: int) -> list[str]:
    """The SELECT of changes() in parts: each reads one log segment, or a range of its blocks of about `bytes_each`.

    Logs are only ever appended to, so their blocks hold the same rows for every reader.
    """
    query = """select pg_catalog.format('%%I.%%I', n.nspname, c.relname), pg_catalog.pg_relation_size(c.oid)
                 from gdq.log_segments(%s, array[%s::pg_catalog.regclass]) s
                 join pg_catalog.pg_class c on c.oid = s join pg_catalog.pg_namespace n on n.oid = c.relnamespace
                order by 1"""
    found = connection.execute(query, [queue, table]).fetchall()
    sizes = {f" from {name} where ": size for name, size in found if f" from {name} where " in rows}
    if sum(sizes.values()) <= bytes_each:
        return [rows]
    parts = []
    for clause, size in sizes.items():
        own = rows
        for other in sizes.keys() - {clause}:
            own = own.replace(other, f"{other}false and ")
        conditions = _ranges("ctid", size, bytes_each)
        parts += [own.replace(clause, f"{clause}{part} and ") if part else own for part in conditions]
    return parts


def key_condition(alias: str, columns: Sequence[tuple[str, str]], keys: Sequence[Sequence[str | None]]) -> str:
    """The condition that columns (name and type) of `alias` are one of `keys`, values in PostgreSQL's text.

    Keys without NULL go as arrays, which an index on the first column serves; the others need a comparison that takes
    NULL for a value.
    """
    whole = [key for key in keys if None not in key]
    partial = [key for key in keys if None in key]
    names = [f"{quote(alias)}.{quote(name)}" for name, _ in columns]
    parts = []
    if whole:
        arrays = _arrays(columns, whole)
        parts.append(f"{names[0]} = any ({arrays[0]})")
        if len(columns) > 1:
            parts[0] += f" and ({', '.join(names)}) in (select * from unnest({', '.join(arrays)}))"
    if partial:
        labels = [f"k{n}" for n in range(1, len(columns) + 1)]
        same = " and ".join(f"{name} is not distinct from k.{label}" for name, label in zip(names, labels, strict=True))
        listed = f"unnest({', '.join(_arrays(columns, partial))}) as k({', '.join(labels)})"
        parts.append(f"exists (select from {listed} where {same})")
    return " or ".join(f"({part})" for part in parts) or "false"


def _arrays(columns: Sequence[tuple[str, str]], keys: Sequence[Sequence[str | None]]) -> list[str]:
    values = zip(*keys, strict=True)
    return [
        f"{sql.Literal(list(some)).as_string(None)}::{kind}[]" for (_, kind), some in zip(columns, values, strict=True)
    ]


def _typed(column: LogColumn, new: bool) -> str:
    collate = f" collate {column.collation}" if column.collation else ""
    return f"(d.{quote(column.image(new) or '')})::{column.type}{collate}"
