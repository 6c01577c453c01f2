"""Copies of a replica's tables: small ones whole, large ones in chunks, several at once."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

from psycopg import Connection

from gdq.consumers.copy.chunk_table import describe_table
from gdq.consumers.copy.pieces import copy_columns
from gdq.consumers.replica.column_changes import source_columns
from gdq.consumers.replica.copy_workers import CopyRun, CopyWorker, open_reader, open_writer
from gdq.consumers.replica.large_copy import LargeCopy
from gdq.consumers.replica.source_tables import SourceTable
from gdq.consumers.replica.state import ReplicaState
from gdq.consumers.replica.table_copy import CopyOptions, Describe, name_before
from gdq.consumers.replica.table_ddl import create_schemas, is_missing
from gdq.consumers.replica.whole_copy import copy_whole, grouped
from gdq.errors import GdqError

# A table of more bytes is copied in chunks however many rows it has: it takes half a minute on a slow machine.
_LARGE_BYTES = 128 * 2**20

# Of each table and its partitions: bytes, and about how many rows; the estimate follows the blocks since ANALYZE. Sizes
# wait for locks: of p.oid, so that no plan looks at all tables.
_SIZES = """
select o.relid::bigint, s.bytes, s.rows
  from unnest(%s::oid[]) as o(relid), lateral (
    select coalesce(sum(b.bytes), 0)::bigint as bytes,
           sum(case when c.reltuples >= 0 then c.reltuples / greatest(c.relpages, 1) end
               * b.heap / current_setting('block_size')::int)::bigint as rows
      from (select o.relid::oid union select t.relid from pg_partition_tree(o.relid) t where t.isleaf) as p(oid)
      join pg_class c on c.oid = p.oid and c.relkind <> 'p',
           lateral (select pg_table_size(p.oid) as bytes, pg_relation_size(p.oid) as heap) as b) as s"""


@dataclass(frozen=True, slots=True)
class _Size:
    """Bytes of a table, and about how many rows it has, None if nobody knows."""

    bytes: int = 0
    rows: int | None = None


def copy_tables(
    source: Connection[Any],
    state: ReplicaState,
    tables: Sequence[SourceTable],
    describe: Describe,
    options: CopyOptions,
    *,
    anew: Collection[str] = (),
    tell: Callable[[str], None],
    stop: Callable[[], bool],
) -> bool:
    """Copy tables, and store the snapshot of each in the target; False if `stop` came before all were copied.

    A table that was copied before gets the source's present name and columns first; one that the target lacks is made
    there if `options` say so. `anew`: tables whose copy is not to go on where it was. GdqError if the target has rows
    of a table that this replica has not copied before, unless they are to be overwritten.
    """
    if not tables:
        return True
    there = state.connection
    missing = [table.table_name for table in tables if options.create and is_missing(there, table.table_name)]
    for table in tables:
        known = state.known(table.table_name) is not None or name_before(state, table) is not None
        if not known and table.table_name not in missing:
            describe(table, there)  # all that could not be copied is told before the first copy
    create_schemas(there, missing)
    sizes = {relid: _Size(*size) for relid, *size in source.execute(_SIZES, [[table.relid for table in tables]])}
    large = [table for table in tables if _is_large(source, state, table, options, sizes.get(table.relid, _Size()))]
    whole = [table for table in tables if table not in large]
    groups = grouped(state, whole, {relid: size.bytes for relid, size in sizes.items()})
    with ExitStack() as stack:
        workers = [
            CopyWorker(open_reader(stack, source, state), open_writer(stack, state))
            for _ in range(options.workers if large else min(options.workers, len(groups)))
        ]
        done = True
        if groups:
            run = CopyRun(_named(whole), _expected(whole, sizes), tell=tell, show=options.show, stop=stop)
            done = copy_whole(source, workers, groups, describe, options=options, run=run)
        if large and done:
            copy = LargeCopy(source, state, large, describe, options, tell)
            of_each = {table.table_name: sizes.get(table.relid, _Size()).bytes for table in large}
            done = copy.run(workers, of_each, _expected(large, sizes), anew=anew, stop=stop)
    state.load()
    return done


def _is_large(
    source: Connection[Any], state: ReplicaState, table: SourceTable, options: CopyOptions, size: _Size
) -> bool:
    """True if a table is copied in chunks, which needs a key that has ranges or none, and all rows of the target's."""
    large = size.bytes > _LARGE_BYTES or (size.rows or 0) > options.chunk_rows
    if not options.copy or not (large or table.relid in state.begun_names):
        return False
    if state.shared_with(table.table_name) is not None:
        return False
    try:
        chunked = describe_table(source, state.queue, table.table_name)
    except GdqError:
        return False
    # what the source computes is in no chunk, so that the target has to compute it as well
    columns = source_columns(source, state.queue, table.relid, table.version)
    left_out = {name for name, _ in columns.columns.values()} - {name for name, _ in chunked.columns}
    name = name_before(state, table) or table.table_name
    return not left_out or is_missing(state.connection, name) or left_out <= _computed(state.connection, name)


def _computed(target: Connection[Any], table: str) -> set[str]:
    return {column.name for column in copy_columns(target, table) if column.generated}


def _expected(tables: Sequence[SourceTable], sizes: dict[int, _Size]) -> int | None:
    known = [rows for table in tables if (rows := sizes.get(table.relid, _Size()).rows) is not None]
    return sum(known) if len(known) == len(tables) else None


def _named(tables: Sequence[SourceTable]) -> str:
    return tables[0].table_name if len(tables) == 1 else f"{len(tables)} tables"
