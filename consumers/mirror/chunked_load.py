"""The load of one large table in chunks of its key: each at a snapshot of its own, which is a tick of the queue.

A chunk is as many ranges of the key as can be read in some seconds, side by side. The rows of the chunks are files in a
folder beside the lake table, with what has changed of them up to the snapshot of each later chunk. So when the last
chunk is there, rows and changes add up to the table as its snapshot has it, and the lake table takes over the files in
one commit. No snapshot is held longer than a chunk takes. `progress.json` names the files: a mirror that was killed
goes on from there, and deletes what it does not name.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, suppress
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Self

import psycopg
import pyarrow as pa
import pyarrow.parquet as pq
from psycopg import Connection
from pyarrow import fs

from gdq.call import call
from gdq.consumers.copy.chunk_bounds import ChunkBounds
from gdq.consumers.copy.chunk_step import record_tick, summarise_log
from gdq.consumers.copy.chunk_table import ChunkTable, describe_table
from gdq.consumers.copy.leader import COPY_SETTINGS
from gdq.consumers.lake.data_files import (
    DataFile,
    DataFileWriter,
    RowPart,
    RowParts,
    StagedFiles,
    remove_data_files,
    write_parts,
)
from gdq.consumers.lake.files import ArrowDifference, rewrite_data_files
from gdq.consumers.lake.readers import LakeReaders, SnapshotReaders
from gdq.consumers.mirror.batch_changes import CopyAgain, TableEvents, log_rows, table_events
from gdq.consumers.mirror.load_folder import LoadFolder
from gdq.consumers.mirror.table import CopiedRows, MirrorTable, TooManyChanges, net_images, with_weight
from gdq.consumers.replica.copy_sizes import table_sizes
from gdq.consumers.replica.source_tables import SourceTable, require_capture, source_tables
from gdq.consumers.views.signals import Diverged, TableWanted
from gdq.consumers.views.snapshot_holder import SnapshotHolder, hold_snapshot
from gdq.errors import DivergedPosition, EraEnded, GdqError, TruncatedPosition
from gdq.sql_text import raw

# A table of fewer bytes is copied at one snapshot: that takes less than half a minute on a slow machine.
LARGE_BYTES = 512 * 2**20
# A chunk gets no further ranges after so long.
_CHUNK_SECONDS = 10.0
# A range has so many rows at first, then about so many bytes in memory, which make a file.
FIRST_ROWS = 10_000
_ROWS_MIN = 1_000
_RANGE_BYTES = 36 * 2**20
# So many changed rows wait until they are brought into the files, and no chunk may bring more than this.
_FOLD_ROWS = 500_000
_MAX_CHANGES = 5_000_000

_PROGRESS = "progress.json"


class Stopped(Exception):  # noqa: N818 (a signal)
    """The mirror is to end before a load is done."""


class _StartAgain(Exception):  # noqa: N818 (a signal)
    """Something happened to the table that the rows of its log do not show."""


@dataclass(frozen=True, slots=True)
class _Progress:
    """How far a load is: the rows with a key up to `upto` are in `files` as of some snapshot each.

    With the `changed` signed rows of `changes` they are as of `snapshot`, a tick at `position`. `described`: what is
    loaded, columns and key. `whole`: all rows are there. Files are (name, bytes, rows).
    """

    described: str
    upto: tuple[str, ...] | None = None
    whole: bool = False
    snapshot: str | None = None
    position: str | None = None
    files: tuple[tuple[str, int, int], ...] = ()
    changes: tuple[tuple[str, int, int], ...] = ()

    @classmethod
    def parse(cls, text: bytes) -> Self:
        known: dict[str, Any] = json.loads(text)
        lists = {name: tuple(tuple(file) for file in known[name]) for name in ("files", "changes")}
        upto = None if known["upto"] is None else tuple(known["upto"])
        return cls(**known | lists | {"upto": upto})

    @property
    def changed(self) -> int:
        return sum(rows for _, _, rows in self.changes)


def loads_in_chunks(source: Connection[Any], queue: str, captured: SourceTable) -> bool:
    """True if a table is large and has a key that divides it."""
    if table_sizes(source, [captured.relid])[captured.relid].bytes <= LARGE_BYTES:
        return False
    try:
        return bool(describe_table(source, queue, captured.table_name).key)
    except GdqError:
        return False


@dataclass(slots=True)
class _Chunk:
    """A chunk at a held snapshot, which goes up to a key that is known when its last range begins."""

    holder: SnapshotHolder
    table: ChunkTable
    upto: tuple[str, ...] | None


@dataclass(slots=True)
class ChunkedLoad:
    """The load of a captured table of `queue` for the mirror `name`; its files are in `place`.

    `holder`: a session that holds the snapshots, and serves no other purpose; `readers` read at them. `schema`: what
    the lake table's files are written with.
    """

    source: Connection[Any]
    holder: Connection[Any]
    readers: LakeReaders
    queue: str
    name: str
    table: MirrorTable
    schema: pa.Schema
    place: LoadFolder
    tell: Callable[[str], None]
    _progress: _Progress = field(init=False)
    _system: fs.FileSystem = field(init=False)
    _folder: str = field(init=False)
    _bounds: ChunkBounds = field(default_factory=ChunkBounds, init=False)
    # by what was read ranges are measured: about, as two threads count
    _rows_read: int = field(default=0, init=False)
    _bytes_read: int = field(default=0, init=False)

    def __post_init__(self) -> None:
        self._system, self._folder = self.place.system, self.place.path
        self._progress = _Progress("")

    @property
    def snapshot(self) -> str:
        """The snapshot that rows() are as of, once run() has ended."""
        assert self._progress.snapshot is not None
        return self._progress.snapshot

    @property
    def position(self) -> str:
        """The position of that snapshot, which is a tick."""
        assert self._progress.position is not None
        return self._progress.position

    def run(self, stop: Callable[[], bool]) -> None:
        """Load what is missing; Stopped if `stop` comes before that, CopyAgain if the table has other columns."""
        self._begin()
        try:
            while not self._progress.whole:
                if stop():
                    raise Stopped
                with suppress(TableWanted):  # the chunk gives way, and is read again
                    self._step(stop)
                if self._progress.changed > _FOLD_ROWS:
                    self._fold()
            self._fold()
        except (_StartAgain, Diverged, TooManyChanges) as error:
            self.clear()
            self.tell(f"{self.table.name}: {str(error) or 'too many changes'}: its load starts again")
            raise CopyAgain(self.table.name) from error
        except CopyAgain:
            self.clear()
            raise
        except psycopg.errors.LockNotAvailable:  # raised once `stop` has come
            raise Stopped from None

    def copied(self) -> CopiedRows:
        """The rows of the table, and the files that have them."""
        files = self._progress.files
        parts = RowParts(lambda: (self._read([file]) for file in files))
        return CopiedRows(parts, StagedFiles(self._system, tuple(self._files(files))))

    def clear(self) -> None:
        """Delete the load's files."""
        self.place.remove()
        self._progress = _Progress("")

    def _begin(self) -> None:
        """Go on from where an earlier run has come, if the table is as it was then and the log has the changes."""
        key = describe_table(self.source, self.queue, self.table.name).described
        described = json.dumps([self.table.plan, key])
        found = self._stored()
        if found is None or found.described != described or not self._is_good(found):
            self.clear()
            self._system.create_dir(self._folder, recursive=True)
            found = _Progress(described)
            self._store(found)
        elif found.snapshot is not None:
            self.tell(f"{self.table.name}: its load goes on after {sum(rows for *_, rows in found.files)} rows")
        self._progress = found
        named = {name for name, *_ in (*found.files, *found.changes)}
        for info in self._system.get_file_info(fs.FileSelector(self._folder)):
            if info.is_file and info.base_name not in {*named, _PROGRESS}:
                self._system.delete_file(info.path)

    def _stored(self) -> _Progress | None:
        try:
            with self._system.open_input_stream(f"{self._folder}/{_PROGRESS}") as stream:
                return _Progress.parse(stream.read())
        except (FileNotFoundError, ValueError, KeyError, TypeError):
            return None

    def _is_good(self, found: _Progress) -> bool:
        """True if the files are there, and the changes since."""
        for name, size, _ in (*found.files, *found.changes):
            if self._system.get_file_info(f"{self._folder}/{name}").size != size:
                return False
        if found.position is None:
            return True
        try:
            call(self.source, "check_position", self.queue, found.position)
        except (DivergedPosition, EraEnded, TruncatedPosition):
            return False
        return True

    def _store(self, progress: _Progress) -> None:
        """Have another state from now on; files that only the old one names may be deleted then."""
        text = json.dumps(asdict(progress)).encode()
        path = f"{self._folder}/{_PROGRESS}"
        local = isinstance(self._system, fs.LocalFileSystem)
        with self._system.open_output_stream(f"{path}.new" if local else path) as stream:
            stream.write(text)
        if local:
            Path(f"{path}.new").replace(path)
        self._progress = progress

    def _step(self, stop: Callable[[], bool]) -> None:
        """Read the next chunk, and what has changed of the ones before, at one snapshot."""
        name, before = self.table.name, self._progress
        summarise_log(self.holder, self.queue, [name])
        with (
            hold_snapshot(self.holder, self.queue, [name], stopped=stop) as holder,
            self.readers.at(holder.exported, holder.locked) as readers,
        ):
            holder.connection.execute(raw(COPY_SETTINGS))
            require_capture(self.source, self.queue, [name])
            self._require_same()
            chunk = _Chunk(holder, describe_table(holder.connection, self.queue, name), before.upto)
            parts = RowParts(lambda: self._ranges(chunk, readers), readers.cancel)
            added = write_parts(self._system, self._folder, self.schema, parts)
            changes = self._changes(holder, chunk.table)
            position = record_tick(self.source, self.queue, holder.snapshot)
        after = replace(before, upto=chunk.upto, whole=chunk.upto is None, snapshot=holder.snapshot, position=position)
        self._store(replace(after, files=(*before.files, *_named(added)), changes=(*before.changes, *changes)))

    def _ranges(self, chunk: _Chunk, readers: SnapshotReaders) -> Iterator[RowPart]:
        """The rows of one range after the other, as long as there is time; `chunk` goes up to the last one's end."""
        until = time.monotonic() + _CHUNK_SECONDS
        while True:
            after, reader = chunk.upto, chunk.holder.connection
            chunk.upto = self._bounds.next(reader, chunk.table, after, None, self._range_rows())
            select = self.table.select(reader, chunk.table.within(after, chunk.upto))
            yield self._measured(readers.rows(select, self.table.columns))
            if chunk.upto is None or time.monotonic() > until:
                return

    def _measured(self, rows: RowPart) -> RowPart:
        with closing(rows):
            for batch in rows:
                self._rows_read += batch.num_rows
                self._bytes_read += batch.nbytes
                yield batch

    def _range_rows(self) -> int:
        """The rows of the next range."""
        if not self._bytes_read:
            return FIRST_ROWS
        return max(self._rows_read * _RANGE_BYTES // self._bytes_read, _ROWS_MIN)

    def _require_same(self) -> None:
        """CopyAgain unless the table is captured as before; DDL is kept out by the snapshot's lock."""
        captured = self.table.captured
        if source_tables(self.source, self.queue, self.name).get(captured.relid) != captured:
            raise CopyAgain(self.table.name)

    def _changes(self, holder: SnapshotHolder, chunk: ChunkTable) -> list[tuple[str, int, int]]:
        """Files with what has changed of the rows that are there since their snapshot."""
        since, captured = self._progress.snapshot, self.table.captured
        if since is None:
            return []
        try:
            found = table_events(holder.connection, self.queue, [captured], since, holder.snapshot)
            event = found.get(captured.relid, TableEvents())
            if event.stale is not None or event.truncates:
                raise _StartAgain(event.stale or "it was truncated")
            select = log_rows(holder.connection, self.queue, captured, since, holder.snapshot)
        except (TruncatedPosition, psycopg.errors.UndefinedTable) as error:
            raise _StartAgain("changes since its last chunk are gone") from error
        within = chunk.within(None, self._progress.upto)
        net = net_images(self.table.images(holder.connection, select, most=_MAX_CHANGES, within=within))
        with DataFileWriter(self._system, self._folder, net.schema) as writer:
            writer.write(net)
        return _named(writer.files)

    def _fold(self) -> None:
        """Bring the changes into the files of the rows."""
        before = self._progress
        if not before.changes:
            return
        images = pa.Table.from_batches(self._read(before.changes), with_weight(self.table.schema))
        net = net_images(images)
        known = self._files(before.files)
        signed = ArrowDifference("signed", self.table.schema, lambda: iter(net.to_batches()), match=self.table.key)
        done = rewrite_data_files(self._system, self._folder, known, signed, self.schema)
        kept = [file for file in known if file not in done.removed]
        self._store(replace(before, files=tuple(_named([*kept, *done.added])), changes=()))
        remove_data_files(self._system, [*done.removed, *self._files(before.changes)])

    def _files(self, named: Sequence[tuple[str, int, int]]) -> list[DataFile]:
        return [DataFile(f"{self._folder}/{name}", size, rows) for name, size, rows in named]

    def _read(self, files: Sequence[tuple[str, int, int]]) -> RowPart:
        for name, *_ in files:
            with pq.ParquetFile(f"{self._folder}/{name}", filesystem=self._system) as parquet:
                yield from parquet.iter_batches()


def _named(files: Sequence[DataFile]) -> list[tuple[str, int, int]]:
    return [(file.path.rpartition("/")[2], file.bytes, file.rows) for file in files]
