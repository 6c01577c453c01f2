"""The rows of a table that is copied to the lake: read at one snapshot, or a large table in chunks."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from psycopg import Connection

from gdq.conninfo import connect, conninfo_from
from gdq.consumers.copy.chunk_step import record_tick
from gdq.consumers.mirror.chunked_load import ChunkedLoad, loads_in_chunks
from gdq.consumers.mirror.load_folder import LoadFolder
from gdq.consumers.mirror.table import CopiedRows, MirrorTable
from gdq.consumers.replica.sessions import apply_settings
from gdq.consumers.replica.source_tables import SourceTable, source_tables
from gdq.table_copy import copy_table


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
    """

    source: Connection[Any]
    queue: str
    name: str
    describe: Callable[[SourceTable], MirrorTable]
    folder: LoadFolder | None
    tell: Callable[[str], None]

    @contextmanager
    def rows(self, captured: SourceTable, stop: Callable[[], bool]) -> Iterator[TableCopy]:
        """A copy, readable until the end of the block, which commits it to the lake.

        Stopped if `stop` comes before the rows are there, CopyAgain if the table is another one meanwhile.
        """
        if self.folder is not None and loads_in_chunks(self.source, self.queue, captured):
            with self._in_chunks(self.folder, captured, stop) as copy:
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
            yield TableCopy(table, copy.snapshot, position, lambda: table.rows(copy.connection), exported)

    @contextmanager
    def _in_chunks(self, folder: LoadFolder, captured: SourceTable, stop: Callable[[], bool]) -> Iterator[TableCopy]:
        table = self.describe(captured)
        name = f"gdq:{self.queue}/{self.name}"
        with connect(conninfo_from(self.source), application_name=name, autocommit=True) as reader:
            apply_settings(reader)
            reader.execute("set row_security = off")
            load = ChunkedLoad(self.source, reader, self.queue, self.name, table, folder, self.tell)
            load.run(stop)
        yield TableCopy(table, load.snapshot, load.position, load.rows)
        load.clear()
