"""New Parquet files of a lake table: written batch by batch, several at once, or taken over from where they wait.

A file is made by one thread, of whole parts where it can be: so the files of a table that is read in the order of its
key have few keys in common, and a change touches few of them.
"""

from __future__ import annotations

import os
import uuid
from collections.abc import Callable, Generator, Iterable, Iterator
from contextlib import closing, suppress
from dataclasses import dataclass
from queue import SimpleQueue
from threading import Event, Lock, Thread
from typing import Any, Self

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from pyarrow import fs

from gdq.consumers.lake.columns import FIELD_ID

# Deleting one row rewrites a file, which has at most this size.
FILE_BYTES = 32 * 2**20
# A row group has so many rows, or bytes in memory.
_GROUP_ROWS = 131_072
_GROUP_BYTES = 16 * 2**20
# Where a part ends, a file of so many bytes ends, too.
_PART_BYTES = FILE_BYTES // 2
# Files that are written at once: more of them want more processors than the server that is read leaves.
_WRITERS = 2
# A thread that has not ended by then is told again to give up what it waits for.
_CANCEL_SECONDS = 0.5


@dataclass(frozen=True, slots=True)
class DataFile:
    """One Parquet file of a table: its path in the file system, its size in bytes and its number of rows."""

    path: str
    bytes: int
    rows: int


RowPart = Generator[pa.RecordBatch, None, None]


@dataclass(frozen=True, slots=True)
class RowParts:
    """Rows in parts, which threads read side by side, each part by one of them.

    `parts` gives them anew each time that it is called. `cancel`: has what a part waits for end with an error.
    """

    parts: Callable[[], Iterator[RowPart]]
    cancel: Callable[[], None] = lambda: None

    def rows(self) -> Iterator[pa.RecordBatch]:
        """All rows, read by the caller's thread."""
        for part in self.parts():
            with closing(part):
                yield from part

    def mapped(self, change: Callable[[pa.RecordBatch], pa.RecordBatch]) -> RowParts:
        """The same with each batch changed."""

        def parts() -> Iterator[RowPart]:
            return (_changed(part, change) for part in self.parts())

        return RowParts(parts, self.cancel)


def _changed(part: RowPart, change: Callable[[pa.RecordBatch], pa.RecordBatch]) -> RowPart:
    with closing(part):
        for batch in part:
            yield change(batch)


@dataclass(frozen=True, slots=True)
class StagedFiles:
    """Files of a file system that have the rows of a whole load; they are not the table's yet."""

    system: fs.FileSystem
    files: tuple[DataFile, ...]

    def taken(self, system: fs.FileSystem, folder: str, schema: pa.Schema) -> list[DataFile] | None:
        """The files in a table's folder, too, without reading them; None if they have another schema."""
        if any(_form(pq.read_schema(file.path, filesystem=self.system)) != _form(schema) for file in self.files):
            return None
        added = [DataFile(_new_path(folder), file.bytes, file.rows) for file in self.files]
        local = isinstance(system, fs.LocalFileSystem) and isinstance(self.system, fs.LocalFileSystem)
        for old, new in zip(self.files, added, strict=True):
            if not local or not _linked(old.path, new.path):
                fs.copy_files(old.path, new.path, source_filesystem=self.system, destination_filesystem=system)
        return added


def _form(schema: pa.Schema) -> list[tuple[str, pa.DataType, bytes | None]]:
    return [(field.name, field.type, (field.metadata or {}).get(FIELD_ID)) for field in schema]


def _linked(old: str, new: str) -> bool:
    try:
        os.link(old, new)
    except OSError:  # another disk, or one without links
        return False
    return True


def _new_path(folder: str) -> str:
    return f"{folder}/part-{uuid.uuid4()}.parquet"


class DataFileWriter:
    """Writes record batches into new Parquet files of a folder; an exception in the block removes them."""

    def __init__(self, system: fs.FileSystem, folder: str, schema: pa.Schema) -> None:
        self._system, self._folder, self._schema = system, folder, schema
        self._sink: Any = None
        self._writer: Any = None
        self._path = ""
        self._rows = 0
        self._waiting: list[pa.Table] = []
        self._repeating: list[str] | None = None
        self.rows = 0
        self.files: list[DataFile] = []

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is None:
            self._finish()
            return
        if self._writer is not None:
            self._writer.close()
            self._sink.close()
            self._system.delete_file(self._path)
        remove_data_files(self._system, self.files)

    def write(self, rows: pa.RecordBatch | pa.Table) -> None:
        """Add rows; finish the file once it is large enough."""
        if not rows.num_rows:
            return
        table = pa.Table.from_batches([rows]) if isinstance(rows, pa.RecordBatch) else rows
        self._waiting.append(table.cast(self._schema))
        self.rows += table.num_rows
        if sum(part.num_rows for part in self._waiting) >= _GROUP_ROWS or self._waiting_bytes >= _GROUP_BYTES:
            self._write_group()
            if self._sink.tell() >= FILE_BYTES:
                self._finish()

    @property
    def _waiting_bytes(self) -> int:
        return sum(part.nbytes for part in self._waiting)

    def _write_group(self) -> None:
        """Write what waits: a row group, or several if it came at once."""
        if not self._waiting:
            return
        table = pa.concat_tables(self._waiting)
        self._waiting = []
        if self._repeating is None:
            self._repeating = _repeating(table)
        if self._writer is None:
            self._path = _new_path(self._folder)
            self._sink = self._system.open_output_stream(self._path)
            self._writer = pq.ParquetWriter(
                self._sink, self._schema, compression="snappy", use_dictionary=self._repeating or False
            )
        few = table.num_rows < 2 * _GROUP_ROWS
        self._writer.write_table(table, row_group_size=table.num_rows if few else _GROUP_ROWS)
        self._rows += table.num_rows

    def end_part(self) -> None:
        """Finish the file if it is large enough for one."""
        written = 0 if self._writer is None else self._sink.tell()
        if written + self._waiting_bytes // 2 >= _PART_BYTES:
            self._finish()

    def _finish(self) -> None:
        self._write_group()
        if self._writer is None:
            return
        self._writer.close()
        self._sink.close()
        size = self._system.get_file_info(self._path).size
        self.files.append(DataFile(self._path, size, self._rows))
        self._writer, self._rows = None, 0


def _repeating(rows: pa.Table) -> list[str]:
    """The columns with values that come again: a dictionary of the others costs time, and makes a file larger."""
    return [
        name
        for name, column in zip(rows.schema.names, rows.columns, strict=True)
        if 2 * pc.count_distinct(column, mode="all").as_py() <= rows.num_rows
    ]


def write_parts(system: fs.FileSystem, folder: str, schema: pa.Schema, rows: RowParts) -> list[DataFile]:
    """Write rows into new files of a folder, by threads side by side; an error is raised, and leaves no file."""
    writers = _PartWriters(system, folder, schema, rows.parts())
    # an error may keep this frame until the program ends: that must not wait for a thread
    threads = [Thread(target=writers.work, name=f"gdq writer {number}", daemon=True) for number in range(_WRITERS)]
    for thread in threads:
        thread.start()
    added: list[DataFile] = []
    try:
        for _ in threads:
            added += writers.ended()
    except BaseException:
        writers.stopped.set()
        while any(thread.is_alive() for thread in threads):
            rows.cancel()
            for thread in threads:
                thread.join(_CANCEL_SECONDS)
        remove_data_files(system, [*added, *writers.left()])
        raise
    return added


class _Stopped(Exception):  # noqa: N818 (a signal)
    """Another thread has failed."""


class _PartWriters:
    """What the threads of write_parts() share: each takes part after part, and tells its files or its error."""

    def __init__(self, system: fs.FileSystem, folder: str, schema: pa.Schema, parts: Iterator[RowPart]) -> None:
        self._place = system, folder, schema
        self._parts = parts
        self._lock = Lock()
        self._ended: SimpleQueue[list[DataFile] | BaseException] = SimpleQueue()
        self.stopped = Event()

    def work(self) -> None:
        try:
            with DataFileWriter(*self._place) as writer:
                while (part := self._next()) is not None:
                    with closing(part):
                        self._write(part, writer)
                    writer.end_part()
            self._ended.put(writer.files)
        except BaseException as error:
            self._ended.put(error)

    def ended(self) -> list[DataFile]:
        """The files of the thread that ends next; raises its error."""
        found = self._ended.get()
        if isinstance(found, BaseException):
            raise found
        return found

    def left(self) -> list[DataFile]:
        """The files of threads that have ended, and were not asked for."""
        files: list[DataFile] = []
        while not self._ended.empty():
            with suppress(BaseException):
                files += self.ended()
        return files

    def _write(self, part: RowPart, writer: DataFileWriter) -> None:
        for batch in part:
            if self.stopped.is_set():
                raise _Stopped
            writer.write(batch)

    def _next(self) -> RowPart | None:
        with self._lock:
            return None if self.stopped.is_set() else next(self._parts, None)


def remove_data_files(system: fs.FileSystem, files: Iterable[DataFile]) -> None:
    """Delete files that no commit names."""
    for file in files:
        try:
            system.delete_file(file.path)
        except FileNotFoundError:
            continue
