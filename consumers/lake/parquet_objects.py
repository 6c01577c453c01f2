"""Versions of plain Parquet files in an object store, which has no links: a manifest names the files of each version.

    FOLDER/_gdq/owner            holds the mark of the view that owns the folder
    FOLDER/_gdq/v00000007.json   the manifest of a version: its files, and the view's position; the last one is current
    FOLDER/part-...parquet       the immutable files

A version is made by a put that fails if the manifest is there. Files that no manifest names go with old versions: at
once they might be those of a commit whose answer was lost.
"""

from __future__ import annotations

import json
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime, timedelta
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
from pyarrow import fs

from gdq.consumers.lake.columns import EvolvedColumn
from gdq.consumers.lake.data_files import DataFile
from gdq.consumers.lake.files import ArrowDifference, evolved, rewrite_data_files
from gdq.consumers.lake.object_store import ObjectExists, put_new, require_conditional_put
from gdq.consumers.lake.parquet import PARQUET_KEEP_SECONDS
from gdq.consumers.lake.table import OwnedLakeTable
from gdq.consumers.views.signals import Diverged
from gdq.consumers.views.target import StoredPosition, TargetState
from gdq.object_store import find_system, require_bucket

_OWN = "_gdq"
_OWNER = f"{_OWN}/owner"


@dataclass(frozen=True, slots=True)
class _Version:
    """One version: its number, its time (seconds since 1970), its position, and size and rows of each file."""

    number: int
    since: float
    position: str
    files: dict[str, tuple[int, int]]


class ParquetObjects(OwnedLakeTable):
    """The folder `name` of an object store as the target of one view."""

    @property
    def library_errors(self) -> tuple[type[Exception], ...]:
        return (pa.ArrowException,)

    def state(self) -> TargetState:
        return self._state_of(self._current())

    def commit(self, change: ArrowDifference, stored: StoredPosition | None, new: StoredPosition) -> int:
        return self._onto_current(stored, change.kind, lambda version: self._make(version, change, new))

    def schema(self) -> pa.Schema:
        system, _ = find_system(self.name.place)
        schema: pa.Schema = pq.read_schema(self._files(self._present())[0].path, filesystem=system)
        return schema

    def evolve(
        self, columns: Sequence[EvolvedColumn], stored: StoredPosition, new: StoredPosition, *, adopt: bool = False
    ) -> None:
        change = evolved(self.scan, columns)
        self._onto_current(stored, "full" if adopt else "signed", lambda version: self._make(version, change, new))

    def scan(self) -> Iterator[pa.RecordBatch]:
        system, _ = find_system(self.name.place)
        for file in self._files(self._present()):
            with pq.ParquetFile(file.path, filesystem=system) as parquet:
                yield from parquet.iter_batches()

    def sweep(self) -> None:
        self.expire(PARQUET_KEEP_SECONDS)

    def expire(self, keep: float) -> None:
        if not self._ours():
            return
        system, folder = find_system(self.name.place)
        now, used, until = datetime.now(UTC), set[str](), float("inf")
        for number in reversed(self._numbers()):
            if until < now.timestamp() - keep:
                system.delete_file(f"{folder}/{_path(number)}")
                continue
            version = self._read(number)
            used.update(version.files)
            until = version.since
        for info in self._list(""):
            old = info.is_file and info.base_name not in used and info.mtime < now - timedelta(seconds=keep)
            if old and info.base_name.endswith(".parquet"):
                system.delete_file(info.path)

    def drop(self) -> None:
        if self._ours():
            system, folder = find_system(self.name.place)
            system.delete_dir(folder)

    def _onto_current(self, stored: StoredPosition | None, kind: str, make: Callable[[_Version | None], int]) -> int:
        """Call `make` with the current version until it comes first with the next."""

        def attempt() -> int:
            version = self._current()
            self.check(self._state_of(version), stored, kind)
            return make(version)

        return self.commit_onto(ObjectExists, attempt)

    def _make(self, before: _Version | None, change: ArrowDifference, new: StoredPosition) -> int:
        """Write the files that a change adds, then the manifest of the next version; ObjectExists if it is there."""
        if not self._ours():
            require_conditional_put(self.name.place)
            put_new(self.name.place, _OWNER, self.source.encode())
        system, folder = find_system(self.name.place)
        known = self._files(before) if before else []
        if known and change.kind == "signed":
            change = change.arranged(pq.read_schema(known[0].path, filesystem=system).names)
        done = rewrite_data_files(system, folder, known, change)
        files = [file for file in [*known, *done.added] if file not in done.removed]
        # readers learn the columns from a file, which has no rows only where there are none
        files = [file for file in files if file.rows] or files[:1] or [_empty_file(system, folder, change.schema)]
        named = {file.path.rpartition("/")[2]: (file.bytes, file.rows) for file in files}
        version = _Version(before.number + 1 if before else 1, time.time(), new.text, named)
        put_new(self.name.place, _path(version.number), json.dumps(asdict(version)).encode())
        return done.deleted + done.inserted

    def _present(self) -> _Version:
        version = self._current()
        if version is None:
            raise Diverged(f"{self.name} is gone")
        return version

    def _current(self) -> _Version | None:
        """The last version; GdqError if the folder is not this view's."""
        numbers = self._numbers() if self._ours() else []
        return self._read(numbers[-1]) if numbers else None

    def _state_of(self, version: _Version | None) -> TargetState:
        if version is None:
            return TargetState(None)
        sizes = {info.base_name: info.size for info in self._list("")}
        as_written = all(sizes.get(name) == size for name, (size, _) in version.files.items())
        foreign = None if as_written else f"the files of {self.name} are others"
        return TargetState(StoredPosition.parse(version.position), foreign)

    def _ours(self) -> bool:
        """True if the folder is this view's; False when it is empty or missing."""
        system, folder = find_system(self.name.place)
        try:
            with system.open_input_stream(f"{folder}/{_OWNER}") as stream:
                owner: bytes = stream.read()
        except FileNotFoundError:
            if any(info.base_name != _OWN for info in self._list("")):
                raise self.foreign_error() from None
            require_bucket(self.name.place)
            return False
        except OSError:
            self._list("")  # which the store refuses in its own words, as it does not the question for one object
            raise
        if owner.decode() != self.source:
            raise self.foreign_error()
        return True

    def _numbers(self) -> list[int]:
        names = [info.base_name for info in self._list(_OWN)]
        return sorted(int(name[1:].removesuffix(".json")) for name in names if name.endswith(".json"))

    def _read(self, number: int) -> _Version:
        system, folder = find_system(self.name.place)
        with system.open_input_stream(f"{folder}/{_path(number)}") as stream:
            fields: dict[str, Any] = json.loads(stream.read())
        files = {name: (size, rows) for name, (size, rows) in fields["files"].items()}
        return _Version(**fields | {"files": files})

    def _files(self, version: _Version) -> list[DataFile]:
        _, folder = find_system(self.name.place)
        return [DataFile(f"{folder}/{name}", size, rows) for name, (size, rows) in version.files.items()]

    def _list(self, path: str) -> list[fs.FileInfo]:
        system, folder = find_system(self.name.place)
        found: list[fs.FileInfo] = system.get_file_info(
            fs.FileSelector(f"{folder}/{path}".rstrip("/"), allow_not_found=True)
        )
        return found


def _path(number: int) -> str:
    return f"{_OWN}/v{number:08}.json"


def _empty_file(system: fs.FileSystem, folder: str, schema: pa.Schema) -> DataFile:
    """A file without rows."""
    path = f"{folder}/part-{uuid.uuid4()}.parquet"
    pq.write_table(schema.empty_table(), path, filesystem=system)
    return DataFile(path, system.get_file_info(path).size, 0)
