"""SQL that Spark's tasks read a captured table with: a part of its log rows, or table rows by blocks or by keys."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from psycopg import Connection, sql
from psycopg.rows import scalar_row

from gdq.call import scalar
from gdq.consumers.views.change_source import NEW_OPS, OLD_OPS, LogColumn
from gdq.plan.table import WEIGHT_COLUMN
from gdq.qualified_sql import qualified
from gdq.source import Images
from gdq.sql_text import quote, raw

BLOCK_BYTES = 8192


def log_rows_sql(
    connection: Connection[Any], queue: str, table: str, s0: str, s1: str, *, may_lack: Sequence[str] | None = None
) -> str:
    """SELECT of a table's log rows in (s0, s1]; TruncatedPosition if rows after s0 are gone.

    `may_lack`: the columns whose values a row may lack, as an update left them as they were; None: any.
    """
    query = qualified("select gdq.delta_sql(%s, %s::pg_catalog.regclass, %s::pg_snapshot, %s::pg_snapshot, %s)")
    return str(scalar(connection, query, queue, table, s0, s1, None if may_lack is None else list(may_lack)))


def images_held(connection: Connection[Any], rows: Iterable[str]) -> int:
    """Number of row images in SELECTs made by log_rows_sql(); an update has two images."""
    query = " union all ".join(
        f"select count(*) filter (where d.ev_op in {OLD_OPS}) + count(*) filter (where d.ev_op in {NEW_OPS}) as n "
        f"from ({some}) as d"
        for some in rows
    )
    with connection.transaction(force_rollback=True), connection.cursor(row_factory=scalar_row) as cursor:
        cursor.execute("set local enable_seqscan = off")
        return int(cursor.execute(sql.SQL("select sum(n)::bigint from ({}) as n").format(raw(query))).fetchone() or 0)


def signed_form_sql(rows: str, columns: Sequence[LogColumn], images: Images = "both") -> str:
    """Log rows in signed long form: _change_type, _commit_version, _commit_timestamp, ev_id, then logged columns.

    Before the columns comes _unchanged, if updates may leave out large values: the names of those that a row lacks.
    `images` "new": without update_preimage, and a delete has its key alone.
    """
    old_kind = "case d.ev_op when 'D' then 'delete' else 'update_preimage' end"
    kinds = (
        (False, *((old_kind, OLD_OPS) if images == "both" else ("'delete'", "('D')"))),
        (True, "case d.ev_op when 'I' then 'insert' else 'update_postimage' end", NEW_OPS),
    )
    parts = []
    for new, kind, ops in kinds:
        header = f"{kind} as _change_type, d.ev_txid as _commit_version, d.ev_time as _commit_timestamp, d.ev_id"
        values = [
            f", d.{quote(name)} as {quote(c.name)}"
            if new or images == "both" or c.is_key
            else f", null::{c.log_type} as {quote(c.name)}"
            for c in columns
            if (name := c.image(new))
        ]
        unchanged = ", d.ev_unchanged as _unchanged" if any(c.omitted for c in columns) else ""
        parts.append(f"select {header}{unchanged}{''.join(values)} where d.ev_op in {ops}")
    return f"(select i.* from ({rows}) as d cross join lateral ({' union all '.join(parts)}) as i)"


def table_rows_sql(table: str, condition: str = "") -> str:
    """The rows of a table with WEIGHT_COLUMN 1, for FROM; `condition` is over the alias t."""
    where = f" where {condition}" if condition else ""
    return f"(select 1 as {quote(WEIGHT_COLUMN)}, t.* from {table} as t{where})"


def table_bytes(connection: Connection[Any], table: str) -> tuple[int, int]:
    """Bytes of a table's largest partition, and of all its partitions together."""
    query = qualified("""select max(pg_catalog.pg_relation_size(r))::bigint, sum(pg_catalog.pg_relation_size(r))::bigint
                 from (select %(table)s::pg_catalog.regclass
                       union select relid from pg_catalog.pg_partition_tree(%(table)s::pg_catalog.regclass)) as t(r)""")
    largest, total = connection.execute(query, {"table": table}).fetchone() or (0, 0)
    return int(largest), int(total)


def block_ranges(connection: Connection[Any], table: str, bytes_each: int) -> list[str]:
    """Conditions over t.ctid that divide a table into parts of about `bytes_each`; the last part is open-ended.

    All partitions of a table share the ranges, so the reader needs no privilege on each partition.
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


def split_log_rows_sql(connection: Connection[Any], queue: str, table: str, rows: str, bytes_each: int) -> list[str]:
    """The SELECT of log_rows_sql() in parts: each reads one log segment, or about `bytes_each` of its blocks.

    Logs are append-only, so a block holds the same rows for every reader.
    """
    sizes = segment_bytes(connection, queue, table, rows)
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


def segment_bytes(connection: Connection[Any], queue: str, table: str, rows: str) -> dict[str, int]:
    """Bytes of each log segment that the SELECT of log_rows_sql() reads, by the clause that names it there."""
    query = qualified("""select pg_catalog.format('%%I.%%I', n.nspname, c.relname), pg_catalog.pg_relation_size(c.oid)
                 from gdq.log_segments(%s, array[%s::pg_catalog.regclass]) s
                 join pg_catalog.pg_class c on c.oid = s join pg_catalog.pg_namespace n on n.oid = c.relnamespace
                order by 1""")
    found = connection.execute(query, [queue, table]).fetchall()
    return {f" from {name} where ": size for name, size in found if f" from {name} where " in rows}


def key_condition_sql(alias: str, columns: Sequence[tuple[str, str]], keys: Sequence[Sequence[str | None]]) -> str:
    """Condition that columns (name and type) of `alias` equal one of `keys`, given in PostgreSQL's text.

    Keys without NULL become arrays, so an index on the first column can be used; keys with NULL are compared by
    `is not distinct from`.
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
