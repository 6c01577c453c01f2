"""The rows of a table that is copied to the lake: read at one snapshot, or a large table in chunks."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from psycopg import Connection

from gdq.conninfo import connect, conninfo_from
from gdq.consumers.copy.chunk_step import record_tick
from gdq.consumers.lake.data_files import RowParts
from gdq.consumers.lake.readers import LakeReaders
from gdq.consumers.lake.table import LakeTable
from gdq.consumers.mirror.batch_changes import CopyAgain
from gdq.consumers.mirror.chunked_load import ChunkedLoad, loads_in_chunks
from gdq.consumers.mirror.load_folder import LoadFolder
from gdq.consumers.mirror.table import CopiedRows, MirrorTable
from gdq.consumers.replica.sessions import apply_settings
from gdq.consumers.replica.source_tables import SourceTable, source_tables
from gdq.consumers.spark.table_sql import block_ranges
from gdq.consumers.views.signals import TableWanted
from gdq.table_copy import copy_table

# Blocks of a table that one session reads in one go, about those of a file of the lake.
_PART_BYTES = 48 * 2**20


@dataclass(frozen=True, slots=True)
class TableCopy:
    """A table, and its rows as of a snapshot, which is a tick of the queue at `position`.

    `exported`: a session that holds the snapshot, and the name of it for other sessions; None if nobody holds it.
    """

    table: MirrorTable
    snapshot: str
    position: str
    rows: CopiedRows
    exported: tuple[Connection[Any], str] | None = None


@dataclass(frozen=True, slots=True)
class Copies:
    """Copies tables of `queue` for the mirror `name`.

    `describe`: how a table is now. `folder`: for the files of a load in chunks; None if there is no place for them.
    `readers`: sessions that read the rows.
    """

    source: Connection[Any]
    queue: str
    name: str
    describe: Callable[[SourceTable], MirrorTable]
    folder: LoadFolder | None
    readers: LakeReaders
    tell: Callable[[str], None]

    @contextmanager
    def rows(self, captured: SourceTable, lake: LakeTable, stop: Callable[[], bool]) -> Iterator[TableCopy]:
        """A copy, readable until the end of the block, which commits it to the lake.

        Stopped if `stop` comes before the rows are there, CopyAgain if the table is another one meanwhile.
        """
        if self.folder is not None and loads_in_chunks(self.source, self.queue, captured):
            with self._in_chunks(self.folder, captured, lake, stop) as copy:
                yield copy
        else:
            with self._at_once(captured) as copy:
                yield copy

    @contextmanager
    def _at_once(self, captured: SourceTable) -> Iterator[TableCopy]:
        with copy_table(self.source, captured.table_name) as copy:
            apply_settings(copy.connection)
            # the lock of the copy keeps DDL out from here on
            captured = source_tables(self.source, self.queue, self.name).get(captured.relid, captured)
            table = self.describe(captured)
            position = record_tick(self.source, self.queue, copy.snapshot)
            exported = (copy.connection, copy.exported)
            ranges = block_ranges(copy.connection, copy.table, _PART_BYTES)
            selects = [table.select(copy.connection, f"where {one}" if one else "") for one in ranges]
            try:
                with self.readers.at(copy.exported, copy.table) as readers:
                    parts = RowParts(lambda: (readers.rows(one, table.columns) for one in selects), readers.cancel)
                    yield TableCopy(table, copy.snapshot, position, CopiedRows(parts), exported)
            except TableWanted:
                raise CopyAgain(captured.table_name) from None

    @contextmanager
    def _in_chunks(
        self, folder: LoadFolder, captured: SourceTable, lake: LakeTable, stop: Callable[[], bool]
    ) -> Iterator[TableCopy]:
        table = self.describe(captured)
        name = f"gdq:{self.queue}/{self.name}"
        with connect(conninfo_from(self.source), application_name=name, autocommit=True) as reader:
            apply_settings(reader)
            reader.execute("set row_security = off")
            schema = lake.file_schema(table.schema)
            load = ChunkedLoad(
                self.source, reader, self.readers, self.queue, self.name, table, schema, folder, self.tell
            )
            load.run(stop)
        yield TableCopy(table, load.snapshot, load.position, load.copied())
        load.clear()
