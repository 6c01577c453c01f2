"""Versions of plain Parquet files as the target of a view: a folder that any reader of Parquet can read.

    FOLDER/current        link to the current version, replaced by an atomic rename
    FOLDER/v00000007/     the immutable files of one version, and its manifest with the view's position
    FOLDER/.written-.../  files by Spark's tasks that a version will have
    FOLDER/_gdq.lock      holds the mark of the view that owns the folder; locked while a version is made

An unchanged file is a hard link in the next version, so a version costs only the changed files.
"""

from __future__ import annotations

import fcntl
import json
import os
import shutil
import time
import uuid
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

import pyarrow as pa
import pyarrow.parquet as pq
from pyarrow import fs

from gdq.consumers.lake.columns import EvolvedColumn
from gdq.consumers.lake.data_files import DataFile
from gdq.consumers.lake.files import ArrowDifference, RewrittenDataFiles, evolved, rewrite_data_files
from gdq.consumers.lake.table import OwnedLakeTable
from gdq.consumers.views.signals import Diverged
from gdq.consumers.views.target import StoredPosition, TargetState
from gdq.errors import GdqError

# An old version is kept this long for its readers.
PARQUET_KEEP_SECONDS = 3600.0
# Folders of files that are to be committed have this name, and more.
_WRITTEN = ".written-"
_MANIFEST, _LOCK, _CURRENT = "_gdq.json", "_gdq.lock", "current"


@dataclass(frozen=True, slots=True)
class _Version:
    """One version: its number, its time (seconds since 1970), its position, and size and rows of each file."""

    number: int
    since: float
    position: str
    files: dict[str, list[int]]


class ParquetLake(OwnedLakeTable):
    """The folder `name` as the target of one view."""

    @property
    def library_errors(self) -> tuple[type[Exception], ...]:
        return (pa.ArrowException,)

    @property
    def folder(self) -> Path:
        return Path(self.name.place)

    @property
    def current(self) -> Path:
        """The folder of the current version."""
        return (self.folder / _CURRENT).resolve()

    def state(self) -> TargetState:
        version = self._current()
        if version is None:
            return TargetState(None)
        return TargetState(StoredPosition.parse(version.position), self._foreign(version))

    def commit(self, change: ArrowDifference, stored: StoredPosition | None, new: StoredPosition) -> int:
        with self._locked():
            state, before = self.state(), self._current()
            self.check(state, stored, change.kind)
            if change.kind == "none" and before is not None:
                moved = _Version(before.number, before.since, new.text, before.files)
                self._write_manifest(self._path(before.number), moved)
                return 0
            return self._make(before, change, new)

    def folder_for_files(self) -> Path:
        """The path of a new folder for the files of commit_files(); the table's folder is the owner's from now on."""
        with self._locked():
            return self.folder / f"{_WRITTEN}{uuid.uuid4()}"

    def commit_files(
        self, written: Path, kind: Literal["full", "append"], stored: StoredPosition | None, new: StoredPosition
    ) -> int:
        """As commit(), of Parquet files that others have written into a folder of folder_for_files().

        `kind`: whether they are all rows, or further ones.
        """
        with self._locked():
            before = self._current()
            self.check(self.state(), stored, kind)
            known = self._files(before) if before else []
            found = sorted(written.glob("[!._]*.parquet"))
            added = [DataFile(str(path), path.stat().st_size, pq.read_metadata(path).num_rows) for path in found]
            removed = known if kind == "full" else []
            rows = [sum(file.rows for file in some) for some in (removed, added)]
            schema, (path, _) = pq.read_schema(found[0]), self._begun(before)
            for file in added:
                Path(file.path).rename(path / Path(file.path).name)
            return self._published(before, RewrittenDataFiles(removed, added, *rows), schema, new)

    def schema(self) -> pa.Schema:
        version = self._current()
        if version is None:
            raise Diverged(f"{self.name} is gone")
        return _nullable(pq.read_schema(self._files(version)[0].path))

    def evolve(
        self, columns: Sequence[EvolvedColumn], stored: StoredPosition, new: StoredPosition, *, adopt: bool = False
    ) -> None:
        with self._locked():
            before = self._current()
            self.check(self.state(), stored, "full" if adopt else "signed")
            self._make(before, evolved(self.scan, columns), new)

    def scan(self) -> Iterator[pa.RecordBatch]:
        version = self._current()
        if version is None:
            raise Diverged(f"{self.name} is gone")
        for file in self._files(version):
            with pq.ParquetFile(file.path) as parquet:
                schema = _nullable(parquet.schema_arrow)
                for batch in parquet.iter_batches():
                    yield pa.RecordBatch.from_arrays(batch.columns, schema=schema)

    def sweep(self) -> None:
        self.expire(PARQUET_KEEP_SECONDS)

    def expire(self, keep: float) -> None:
        if not self.folder.is_dir():
            return
        with self._locked():
            current = self._current()
            until = current.since if current else time.time()
            for path in self.folder.glob(f"{_WRITTEN}*"):
                shutil.rmtree(path)  # of a killed writer
            for path in sorted(self.folder.glob("v*"), reverse=True):
                number = int(path.name[1:]) if path.name[1:].isdigit() else None
                if number is None or (current is not None and number == current.number):
                    continue
                if current is None or number > current.number or until < time.time() - keep:
                    shutil.rmtree(path)
                else:
                    until = _read_manifest(path).since

    def drop(self) -> None:
        if self._ours():
            shutil.rmtree(self.folder)

    def _make(self, before: _Version | None, change: ArrowDifference, new: StoredPosition) -> int:
        """Make the next version beside the current one, then point `current` to it."""
        path, known = self._begun(before)
        if known and change.kind == "signed":
            change = change.arranged(pq.read_schema(known[0].path).names)
        done = rewrite_data_files(fs.LocalFileSystem(), str(path), known, change)
        return self._published(before, done, change.schema, new)

    def _begun(self, before: _Version | None) -> tuple[Path, list[DataFile]]:
        """The empty folder of the next version, and the files of the one before."""
        path = self._next(before)
        shutil.rmtree(path, ignore_errors=True)  # left by a killed refresh
        path.mkdir()
        return path, self._files(before) if before else []

    def _next(self, before: _Version | None) -> Path:
        return self._path(before.number + 1 if before else 1)

    def _published(
        self, before: _Version | None, done: RewrittenDataFiles, schema: pa.Schema, new: StoredPosition
    ) -> int:
        """Make a version of the files that stay and those that were added, which are in its folder."""
        path, known = self._next(before), self._files(before) if before else []
        kept = [file for file in known if file not in done.removed]
        files = {Path(file.path).name: [file.bytes, file.rows] for file in [*kept, *done.added]}
        for file in kept:
            os.link(file.path, path / Path(file.path).name)
        if not files:  # readers learn the columns from a file
            pq.write_table(schema.empty_table(), path / "part-empty.parquet")
            files["part-empty.parquet"] = [(path / "part-empty.parquet").stat().st_size, 0]
        elif len(files) > 1 and "part-empty.parquet" in files:
            del files["part-empty.parquet"]
            (path / "part-empty.parquet").unlink()
        for name in files:
            _sync(path / name)
        self._write_manifest(path, _Version(int(path.name[1:]), time.time(), new.text, files))
        self._point(path)
        return done.deleted + done.inserted

    def _point(self, path: Path) -> None:
        link = self.folder / f".{_CURRENT}"
        link.unlink(missing_ok=True)
        link.symlink_to(path.name)
        link.replace(self.folder / _CURRENT)
        _sync(self.folder)

    def _current(self) -> _Version | None:
        """The version that `current` points to; GdqError if the folder is not this view's."""
        if not self._ours() or not (self.folder / _CURRENT).is_symlink():
            return None
        return _read_manifest(self.folder / _CURRENT)

    def _ours(self) -> bool:
        """True if the folder is this view's; False when it is empty or missing."""
        lock = self.folder / _LOCK
        if lock.exists():
            # empty: a refresh was killed while it created the file
            if lock.read_text() not in ("", self.source):
                raise self.foreign_error()
            return True
        if self.folder.exists() and (not self.folder.is_dir() or any(self.folder.iterdir())):
            raise self.foreign_error()
        return False

    def _foreign(self, version: _Version) -> str | None:
        path = self._path(version.number)
        found = {entry.name: entry.stat().st_size for entry in path.iterdir() if not entry.name.startswith((".", "_"))}
        if found != {name: size for name, (size, _) in version.files.items()}:
            return f"the files of {path} are others"
        return None

    def _files(self, version: _Version) -> list[DataFile]:
        path = self._path(version.number)
        return [DataFile(str(path / name), size, rows) for name, (size, rows) in version.files.items()]

    def _path(self, number: int) -> Path:
        return self.folder / f"v{number:08}"

    @contextmanager
    def _locked(self) -> Iterator[None]:
        """Keep other refreshes out; the lock ends with the process."""
        self._ours()
        self.folder.mkdir(parents=True, exist_ok=True)
        with (self.folder / _LOCK).open("a+") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            # another view may have taken the folder while this one waited
            if not lock.seek(0, os.SEEK_END):
                lock.write(self.source)
                lock.flush()
            self._ours()
            yield

    def _write_manifest(self, path: Path, version: _Version) -> None:
        made = path / f".{_MANIFEST}"
        made.write_text(json.dumps(asdict(version)))
        _sync(made)
        made.replace(path / _MANIFEST)
        _sync(path)


def _nullable(schema: pa.Schema) -> pa.Schema:
    """The columns without what Spark says of those that it has given one value: that none is NULL."""
    return pa.schema([pa.field(field.name, field.type) for field in schema])


def _read_manifest(path: Path) -> _Version:
    try:
        fields: dict[str, Any] = json.loads((path / _MANIFEST).read_text())
        return _Version(**fields)
    except (OSError, ValueError, TypeError) as error:
        raise GdqError(
            f"{path / _MANIFEST} cannot be read: {error}", hint="Remove the folder; the next refresh loads it in full."
        ) from error


def _sync(path: Path) -> None:
    """Flush a file or folder to disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
