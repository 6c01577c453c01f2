"""The files of a spool, in a folder or an object store: a manifest for each batch, and Parquet files beside.

    FOLDER/_gdq_spool/spool.json                     whose spool it is
    FOLDER/_gdq_spool/batches/FROM-TO.json           the manifest of a batch: it exists, or the batch is not there
    FOLDER/_gdq_spool/staged/...                     files of a batch whose manifest is about to come
    FOLDER/public.orders/v7/FROM-TO.parquet          the rows of one table, of one version of its columns

FROM and TO are ticks: a batch has the changes after the first up to the second. A file lies in its place only after its
manifest, so that programs that read the Parquet files by themselves find no batch that would come again.
"""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from datetime import datetime
from pathlib import Path
from typing import IO, Any, Self
from urllib.parse import quote

from gdq.errors import GdqError
from gdq.extra import extra_named
from gdq.json_text import json_text
from gdq.object_store import error_line, find_system, require_bucket, store_hint

_OWN = "_gdq_spool"
_MARK, _BATCHES, _STAGED = f"{_OWN}/spool.json", f"{_OWN}/batches", f"{_OWN}/staged"


@dataclass(frozen=True, slots=True)
class SpoolFile:
    """The rows of one table in a batch, of one version of its columns; `path` is relative to the folder."""

    table: str
    version: int
    path: str
    rows: int

    @property
    def staged(self) -> str:
        """Where the file lies until its manifest is there."""
        return f"{_STAGED}/{quote(self.path, safe='')}"


@dataclass(frozen=True, slots=True)
class Manifest:
    """What a batch has. `after` and `position`: the positions at its ends; `written`: by the server's clock.

    `first`: no batch was before it in the spool. `events`: changes that no row shows, each with id, op, table and data.
    """

    tick_from: int
    tick_to: int
    after: str
    position: str
    written: str
    first: bool = False
    files: list[SpoolFile] = field(default_factory=list)
    events: list[dict[str, Any]] = field(default_factory=list)

    @property
    def name(self) -> str:
        return range_name(self.tick_from, self.tick_to)

    @property
    def time(self) -> datetime:
        return datetime.fromisoformat(self.written)

    @classmethod
    def parse(cls, text: bytes) -> Self:
        fields = json.loads(text)
        return cls(**fields | {"files": [SpoolFile(**one) for one in fields["files"]]})


def range_name(tick_from: int, tick_to: int) -> str:
    """The name of a batch, by which names sort as batches do."""
    return f"{tick_from:015}-{tick_to:015}"


def ticks_of(name: str) -> tuple[int, int]:
    """The ticks in a name made by range_name()."""
    start, _, end = name.partition("-")
    return int(start), int(end)


def table_path(table: str, version: int, name: str) -> str:
    """Where rows of a table lie; the table as `%I.%I` writes it."""
    return f"{quote(table, safe='.')}/v{version}/{name}.parquet"


class SpoolStore:
    """The folder `folder`, or the object store that a URI such as s3://bucket/folder names. Errors are GdqError."""

    def __init__(self, folder: str) -> None:
        with extra_named():
            import pyarrow as pa  # noqa: PLC0415
            from pyarrow import fs  # noqa: PLC0415

        self.folder = folder
        self._fs, self._errors = fs, (OSError, pa.ArrowException)
        with self.told():
            self._system, self._root = find_system(folder if "://" in folder else str(Path(folder).resolve()))
        self._local = isinstance(self._system, fs.LocalFileSystem)

    @contextlib.contextmanager
    def told(self) -> Iterator[None]:
        """Errors of the file system as one line that names the spool; a missing file stays FileNotFoundError."""
        try:
            yield
        except FileNotFoundError:
            raise
        except self._errors as error:
            raise GdqError(f"spool {self.folder}: {error_line(error)}", hint=store_hint(self.folder)) from error

    def mark(self) -> dict[str, str] | None:
        """Whose spool the folder is; None if there is no spool."""
        try:
            mark: dict[str, str] = json.loads(self._read(_MARK))
        except FileNotFoundError:
            return None
        return mark

    def is_new(self, mark: dict[str, str]) -> bool:
        """True if the folder is still to be made the spool of `mark`; GdqError if it is another one or has other files.

        What one that was killed while it made the folder has left is no obstacle.
        """
        found = self.mark()
        if found is not None and found != mark:
            raise GdqError(f"{self.folder} is the spool of {found}, not of {mark}")
        with self.told():
            if not self._local:
                require_bucket(self.folder)
            if found is None and any(Path(info.path).name != _OWN for info in self._list("")):
                raise GdqError(f"{self.folder} has files and is no spool", hint="Name an empty folder.")
        return found is None

    def take(self, mark: dict[str, str]) -> None:
        """Make the folder the spool of `mark`."""
        self._write(_MARK, json_text(mark).encode())

    def names(self) -> list[str]:
        """The names of all batches, in order."""
        with self.told():
            found = [Path(info.path).name for info in self._list(_BATCHES)]
        return sorted(name.removesuffix(".json") for name in found if name[0] != "." and name.endswith(".json"))

    def manifest(self, name: str) -> Manifest:
        """The manifest of a batch; FileNotFoundError if it was removed."""
        return Manifest.parse(self._read(f"{_BATCHES}/{name}.json"))

    def last(self) -> Manifest | None:
        """The manifest of the last batch."""
        names = self.names()
        return self.manifest(names[-1]) if names else None

    def add(self, manifest: Manifest) -> None:
        """Add a batch whose files are staged. It is there once its manifest is, whatever happens after that."""
        if self._local:
            for file in manifest.files:
                _sync(self._path(file.staged))
        self._write(f"{_BATCHES}/{manifest.name}.json", json_text(asdict(manifest)).encode())
        self.place(manifest)

    def place(self, manifest: Manifest) -> None:
        """Move a batch's files from where they are staged to their places, unless they are there."""
        with self.told():
            for file in manifest.files:
                if self._exists(file.staged):
                    place = self._path(file.path)
                    self._system.create_dir(str(Path(place).parent), recursive=True)
                    self._system.move(self._path(file.staged), place)
                    if self._local:
                        _sync(str(Path(place).parent))

    def recover(self) -> Manifest | None:
        """Finish or undo what a killed program has left behind; returns the last batch."""
        last = self.last()
        if last is not None:
            self.place(last)
        known = set(self.names())
        with self.told():
            for info in self._list("", recursive=True):
                path = Path(info.path)
                is_own = f"/{_OWN}/" in info.path
                if path.name.startswith(".") or (path.suffix == ".parquet" and (is_own or path.stem not in known)):
                    self._system.delete_file(info.path)
        return last

    def remove(self, name: str) -> None:
        """Remove a batch: first its manifest, so that no reader begins with it, then its files."""
        manifest = self.manifest(name)
        with self.told():
            self._system.delete_file(self._path(f"{_BATCHES}/{name}.json"))
            for file in manifest.files:
                self._system.delete_file(self._path(file.path))

    @contextlib.contextmanager
    def staging(self, file: SpoolFile) -> Iterator[IO[bytes]]:
        """A new staged file to write to."""
        with self.told():
            self._system.create_dir(self._path(_STAGED), recursive=True)
            with self._system.open_output_stream(self._path(file.staged)) as stream:
                yield stream

    def open(self, file: SpoolFile) -> Any:
        """A file of a batch, open to be read; FileNotFoundError if the batch was removed."""
        with self.told():
            for path in (file.path, file.staged):
                with contextlib.suppress(FileNotFoundError):
                    return self._system.open_input_file(self._path(path))
            return self._system.open_input_file(self._path(file.path))  # it was moved between the two

    def _path(self, path: str) -> str:
        return f"{self._root}/{path}"

    def _exists(self, path: str) -> bool:
        return bool(self._system.get_file_info(self._path(path)).type == self._fs.FileType.File)

    def _list(self, path: str, *, recursive: bool = False) -> list[Any]:
        """The files below a folder; with the folders in it unless `recursive`."""
        selector = self._fs.FileSelector(self._path(path).rstrip("/"), allow_not_found=True, recursive=recursive)
        found: list[Any] = self._system.get_file_info(selector)
        return [info for info in found if not recursive or info.type == self._fs.FileType.File]

    def _read(self, path: str) -> bytes:
        with self.told(), self._system.open_input_stream(self._path(path)) as stream:
            text: bytes = stream.read()
            return text

    def _write(self, path: str, text: bytes) -> None:
        """Write a file at once: in a folder by a rename; in an object store a file is there when it is whole."""
        place = Path(self._path(path))
        with self.told():
            self._system.create_dir(str(place.parent), recursive=True)
            made = str(place.with_name(f".{place.name}")) if self._local else str(place)
            with self._system.open_output_stream(made) as stream:
                stream.write(text)
            if self._local:
                _sync(made)
                Path(made).replace(place)
                _sync(str(place.parent))


def _sync(path: str) -> None:
    """Flush a file or folder to disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
