"""A folder of Parquet or Arrow files as the target of a copy: a folder for each table, a file for each piece.

    FOLDER/_gdq_snapshot.json          the tables, the snapshot and the position
    FOLDER/public.orders/part-00000.parquet

The files are written into .FOLDER.gdq_part beside it, which gets the name FOLDER when all are there: so a reader sees
the whole copy or none. The files of a copy that was killed are removed by the next one to the same FOLDER.
"""

from __future__ import annotations

import fcntl
import itertools
import os
import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

import pyarrow as pa
import pyarrow.parquet as pq
from psycopg import Connection

from gdq.consumers.copy.leader import CopyLead
from gdq.consumers.copy.pieces import CopyColumn, Piece, SourceTable
from gdq.consumers.copy.workers import CopyTally
from gdq.consumers.lake.types import LakeColumn, lake_column, lake_schema, read_lake_rows
from gdq.consumers.views.row_copy import RowsCopied
from gdq.errors import GdqError
from gdq.json_text import json_text
from gdq.owner_sql import OwnerSql
from gdq.typed.pgtypes import READ_AS_TEXT, base_type_name

FileFormat = Literal["parquet", "arrow"]

_MANIFEST = "_gdq_snapshot.json"


def file_target(target: str) -> FileTarget:
    """The target that `parquet:FOLDER` or `arrow:FOLDER` names; GdqError if it names no folder."""
    word, _, place = target.partition(":")
    form: FileFormat = "arrow" if word == "arrow" else "parquet"
    if not place or "://" in place:
        raise GdqError(f"target {target!r} names no folder of this machine", hint=f"Write {form}:/folder.")
    return FileTarget(form, Path(os.path.abspath(place)))  # noqa: PTH100 (no link is resolved)


@dataclass(slots=True)
class _TableFiles:
    """What the files of one table share: their folder, the columns, and the numbers that are left."""

    table: SourceTable
    folder: Path
    columns: tuple[LakeColumn, ...]
    numbers: Iterator[int] = field(default_factory=itertools.count)


class FileTarget:
    """A new folder with the tables' files. It is not there before the copy has ended, nor after an error."""

    takes_generated = True

    def __init__(self, form: FileFormat, folder: Path) -> None:
        self._form, self._folder = form, folder
        self._part = folder.with_name(f".{folder.name}.gdq_part")
        self._files: dict[str, _TableFiles] = {}
        self._lock: int | None = None

    def prepare(self, lead: CopyLead) -> None:
        """Make the folder that is written; GdqError if there is something at the place already."""
        try:
            if self._folder.exists() and any(self._folder.iterdir()):
                raise GdqError(f"folder {self._folder} is not empty", hint="Name a new folder for each copy.")
            self._folder.parent.mkdir(parents=True, exist_ok=True)
            self._take_part()
        except OSError as error:
            raise _cannot_write(self._folder, error) from error
        for table, name in zip(lead.tables, folder_names([table.name for table in lead.tables]), strict=True):
            folder = self._part / name
            folder.mkdir()
            self._files[table.name] = _TableFiles(table, folder, tuple(_column(c, table) for c in table.columns))

    def writers(self, number: int) -> Sequence[FilePieceWriter]:
        """The ends of this many workers."""
        return [FilePieceWriter(self._form, self._files) for _ in range(number)]

    def writing(self) -> AbstractContextManager[None]:
        """Nothing: files wait for nobody."""
        return nullcontext()

    def commit(self, lead: CopyLead, tally: CopyTally, position: str | None) -> None:
        """Write the manifest, and give the folder its name."""
        try:
            for files in self._files.values():
                if not any(files.folder.iterdir()):  # its readers find the columns of an empty table too
                    _write(self._form, files, iter(()))
            described = [_described(files, tally) for files in self._files.values()]
            manifest = {
                "format": self._form, "snapshot": lead.holder.snapshot, "position": position, "tables": described
            }  # fmt: skip
            (self._part / _MANIFEST).write_text(json_text(manifest) + "\n", encoding="utf-8")
            for path in (*self._part.rglob("*"), self._part):
                _sync(path)
            self._part.rename(self._folder)
            _sync(self._folder.parent)
        except OSError as error:
            raise _cannot_write(self._folder, error) from error
        self._release()

    def undo(self) -> None:
        """Remove what was written."""
        if self._lock is not None:
            shutil.rmtree(self._part, ignore_errors=True)
            self._release()

    def _take_part(self) -> None:
        """Make the folder beside it anew, unless another copy is writing it."""
        self._part.mkdir(exist_ok=True)
        lock = os.open(self._part, os.O_RDONLY)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(lock)
            raise GdqError(f"another copy is writing {self._folder}", hint="Wait for it, or name another.") from None
        self._lock = lock
        for path in self._part.iterdir():
            if path.is_dir():
                shutil.rmtree(path)
            else:
                path.unlink()

    def _release(self) -> None:
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None


class FilePieceWriter:
    """One worker's end: each piece becomes a file, each block of rows a row group or record batch."""

    def __init__(self, form: FileFormat, files: dict[str, _TableFiles]) -> None:
        self._form, self._files = form, files

    def write(self, reader: Connection[Any], piece: Piece, moved: Callable[[int], None]) -> RowsCopied:
        """Write a piece into a file; a piece without rows makes none."""
        files = self._files[piece.table.name]
        batches = read_lake_rows(OwnerSql(reader, None), piece.select(), files.columns)
        first = next(batches, None)
        if first is None:
            return RowsCopied(0, 0)
        try:
            return _write(self._form, files, itertools.chain([first], batches), moved)
        except OSError as error:
            raise _cannot_write(files.folder, error) from error

    def cancel(self) -> None:
        """Nothing: a file does not wait."""

    def commit(self) -> None:
        """Nothing: the folder is named when all workers are done."""

    def close(self) -> None:
        """Nothing: undo() removes the files."""


def _write(
    form: FileFormat,
    files: _TableFiles,
    batches: Iterator[pa.RecordBatch],
    moved: Callable[[int], None] = lambda _: None,
) -> RowsCopied:
    """Write record batches into a new file of a table."""
    path = files.folder / f"part-{next(files.numbers):05}.{form}"
    schema, rows = lake_schema(files.columns), 0
    with path.open("xb") as sink:
        opened = pq.ParquetWriter(sink, schema) if form == "parquet" else pa.ipc.new_file(sink, schema)
        with opened as writer:
            for batch in batches:
                writer.write_batch(batch)
                rows += batch.num_rows
                moved(batch.num_rows)
    return RowsCopied(rows, path.stat().st_size)


def _column(column: CopyColumn, table: SourceTable) -> LakeColumn:
    """The column of a file, in which texts are as PostgreSQL has them."""
    found = lake_column(column.name, column.type_oid, column.type, "parquet")
    found = replace(found, of=f"table {table.name}", cure="Have the file hold its text: --as-text, as_text in Python.")
    # a view's target folds 1.0 and 1.00, a copy does not
    exact = found.arrow == pa.string() and base_type_name(column.type) == "numeric"
    if exact or column.name in table.as_text:
        return replace(found, arrow=pa.string(), read=READ_AS_TEXT.read_sql)
    return found


def _described(files: _TableFiles, tally: CopyTally) -> dict[str, Any]:
    """What the manifest says of a table."""
    table = files.table
    columns = [{"name": c.name, "type": c.type, "arrow": str(c.arrow)} for c in files.columns]
    place = {"table_name": table.name, "folder": files.folder.name, "rows": tally.rows[table.name]}
    return place | {"where": table.condition, "columns": columns}


def folder_names(tables: Sequence[str]) -> list[str]:
    """A folder's name for each table that every file system and reader takes: other characters become _."""
    found: list[str] = []
    for table in tables:
        plain = "".join(c if c.isalnum() or c in "._-" else "_" for c in table.replace('"', "")).lstrip("._") or "table"
        name, number = plain, 1
        while name.casefold() in {one.casefold() for one in found}:
            number += 1
            name = f"{plain}_{number}"
        found.append(name)
    return found


def _sync(path: Path) -> None:
    """Have a file or folder on disk, as the rename will be."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _cannot_write(folder: Path, error: OSError) -> GdqError:
    return GdqError(f"cannot write {error.filename or folder}: {error.strerror or error}")
