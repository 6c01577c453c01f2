"""Copies of a replica's tables: small ones whole, large ones in chunks, several at once."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from contextlib import ExitStack
from typing import Any

from psycopg import Connection

from gdq.conninfo import conninfo_of
from gdq.consumers.copy.chunk_table import describe_table
from gdq.consumers.copy.pieces import copy_columns
from gdq.consumers.copy.wal_writer import wal_writer_awake
from gdq.consumers.replica.column_changes import source_columns
from gdq.consumers.replica.copy_sizes import TableSize, expected_rows, grouped, shown_names, table_sizes
from gdq.consumers.replica.copy_workers import CopyRun, CopyWorker, open_reader, open_writer
from gdq.consumers.replica.large_copy import LargeCopy
from gdq.consumers.replica.source_tables import SourceTable
from gdq.consumers.replica.state import ReplicaState
from gdq.consumers.replica.table_copy import CopyOptions, Describe, name_before
from gdq.consumers.replica.table_ddl import create_schemas, is_missing
from gdq.consumers.replica.whole_copy import copy_whole
from gdq.errors import GdqError


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
    sizes = table_sizes(source, [table.relid for table in tables])
    large = [table for table in tables if _is_large(source, state, table, options, sizes[table.relid])]
    whole = [table for table in tables if table not in large]
    groups = grouped(whole, lambda table: sizes[table.relid])
    with ExitStack() as stack:
        stack.enter_context(wal_writer_awake(conninfo_of(there), f"gdq:{state.queue}/{state.name}"))
        workers = [
            CopyWorker(open_reader(stack, source, state), open_writer(stack, state))
            for _ in range(options.workers if large else min(options.workers, len(groups)))
        ]
        done = True
        if groups:
            name = shown_names([table.table_name for table in whole])
            run = CopyRun(name, _expected(whole, sizes), tell=tell, show=options.show, stop=stop)
            done = copy_whole(source, workers, groups, describe, options=options, run=run)
        if large and done:
            copy = LargeCopy(source, state, large, describe, options, tell)
            of_each = {table.table_name: sizes[table.relid].bytes for table in large}
            done = copy.run(workers, of_each, _expected(large, sizes), anew=anew, stop=stop)
    state.load()
    return done


def _is_large(
    source: Connection[Any], state: ReplicaState, table: SourceTable, options: CopyOptions, size: TableSize
) -> bool:
    """True if a table is copied in chunks, which needs a key that has ranges or none, and all rows of the target's."""
    large = size.is_large(options.chunk_rows) or table.relid in state.begun_names
    if not options.copy or not large:
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


def _expected(tables: Sequence[SourceTable], sizes: dict[int, TableSize]) -> int | None:
    return expected_rows(sizes[table.relid] for table in tables)
