"""Reading a spool: the batches that `gdq spool` has written, in order, without the server."""

from __future__ import annotations

import time as clock
from bisect import bisect_left
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from datetime import datetime
from typing import TYPE_CHECKING, Any

from gdq.consumers.spool.store import Manifest, SpoolFile, SpoolStore, ticks_of
from gdq.errors import DivergedPosition, GdqError, TruncatedPosition
from gdq.shown import Shown
from gdq.source import Position

if TYPE_CHECKING:
    import pyarrow as pa

_LOOK_SECONDS = 0.5


@dataclass(frozen=True, slots=True, repr=False)
class SpoolEvent(Shown):
    """A change that no row shows: `op` is truncate, ddl or message; `data` as in Event.new, in JSON's values."""

    id: int
    op: str
    table: str | None
    data: dict[str, Any] | None


class SpoolBatch:
    """One batch of a spool: the changes after one tick up to another, whole transactions.

    `tick_from` and `tick_to` are its ends. `written`: when gdq spool wrote it, by the server's clock. `events`: the
    changes that no row shows, in order; the rows are in arrow(), by ev_id in the same order.
    """

    def __init__(self, store: SpoolStore, manifest: Manifest) -> None:
        self._store = store
        self._manifest = manifest
        self.tick_from = manifest.tick_from
        self.tick_to = manifest.tick_to
        self.written = manifest.time
        self.events = [SpoolEvent(**event) for event in manifest.events]

    def __repr__(self) -> str:
        return f"<SpoolBatch of {self._store.folder}: ticks {self.tick_from} to {self.tick_to}>"

    @property
    def position(self) -> Position:
        """The reader's position once it has applied the batch; open_spool() takes it as `after`."""
        return Position.parse(self._manifest.position)

    def tables(self) -> list[str]:
        """The tables that have rows in the batch, as `schema.table` quoted where needed."""
        return list(dict.fromkeys(file.table for file in self._manifest.files))

    def versions(self, table: str) -> list[int]:
        """The versions of a table's columns that have rows in the batch, oldest first; several only after DDL."""
        return [file.version for file in self._files(table)]

    def arrow(self, table: str, *, columns: Collection[str] | None = None, version: int | None = None) -> pa.Table:
        """The log rows of one table in no order, with the columns of Batch.arrow(); without rows an empty table.

        `columns`: only these columns of the Arrow table. After DDL inside the batch the columns are those of the newest
        version, NULL if a row lacks one; GdqError if a type has changed. `version`: only the rows of one of versions().
        TruncatedPosition if the batch has been removed.
        """
        import pyarrow as pa  # noqa: PLC0415

        parts = [pa.Table.from_batches(batches, schema) for schema, batches in self._read(table, columns, version)]
        if not parts:
            return pa.table({})
        newest = parts[-1].schema
        try:
            return pa.concat_tables([_aligned(part, newest) for part in parts])
        except pa.ArrowException as error:
            raise GdqError(f"a column of table {table} has another type since an ALTER: read each version") from error

    def arrow_batches(
        self, table: str, *, columns: Collection[str] | None = None, version: int | None = None
    ) -> Iterator[pa.RecordBatch]:
        """As arrow(), streamed; after DDL inside the batch the rows of each version have its own columns."""
        for _, batches in self._read(table, columns, version):
            yield from batches

    def _files(self, table: str) -> list[SpoolFile]:
        return [file for file in self._manifest.files if file.table == table]

    def _read(
        self, table: str, columns: Collection[str] | None, version: int | None
    ) -> Iterator[tuple[pa.Schema, Iterator[pa.RecordBatch]]]:
        import pyarrow as pa  # noqa: PLC0415
        import pyarrow.parquet as pq  # noqa: PLC0415

        for file in self._files(table):
            if version in (None, file.version):
                try:
                    opened = self._store.open(file)
                except FileNotFoundError as error:
                    raise _removed(self._store, self.tick_from) from error
                with self._store.told(), pq.ParquetFile(opened) as parquet:
                    known = parquet.schema_arrow
                    names = known.names if columns is None else [name for name in known.names if name in columns]
                    yield pa.schema([known.field(name) for name in names]), parquet.iter_batches(columns=names)


class Spool:
    """The batches of a spool, one after the other; open_spool() makes it. It keeps no position by itself."""

    def __init__(self, store: SpoolStore) -> None:
        self._store = store
        mark = store.mark()
        if mark is None:
            raise GdqError(f"{store.folder} is no spool", hint="gdq spool makes it.")
        self.queue = mark["queue"]
        self._at: int | None = None

    def __repr__(self) -> str:
        return f"<Spool {self._store.folder} of queue {self.queue}>"

    def seek(self, *, tick: int | None = None, time: datetime | None = None) -> int:
        """Go on with the batch that has the changes after a tick, or after a time; returns the tick where it begins.

        The batch is given whole, so changes before may come, too. A change that was committed after `time`, which needs
        a time zone, was written after it. TruncatedPosition if changes after the
        tick or time may have been removed.
        """
        names = self._store.names()
        if not names:
            raise GdqError(f"{self._store.folder} has no batches yet")
        if tick is not None:
            place = bisect_left(names, True, key=lambda name: ticks_of(name)[1] > tick)
            if tick < ticks_of(names[0])[0]:
                raise _removed(self._store, tick)
        elif time is not None:
            place = bisect_left(names, True, key=lambda name: self._manifest(name).time > time)
            # the first batch that is kept may follow on one that was written after the time
            if place == 0 and not self._manifest(names[0]).first:
                raise _removed(self._store, ticks_of(names[0])[0])
        else:
            raise GdqError("seek() takes a tick or a time")
        self._at = ticks_of(names[place])[0] if place < len(names) else ticks_of(names[-1])[1]
        return self._at

    def batches(
        self, *, once: bool = False, timeout: float | None = None, stop: Callable[[], bool] = lambda: False
    ) -> Iterator[SpoolBatch]:
        """Yield the batches from where the reader is, the first one at the start.

        `once`: end with the last that is there. `timeout`: end after this many seconds without a batch; None: wait for
        ever. `stop` is called between batches and while waiting. TruncatedPosition if the next batch was removed.
        """
        waiting_since = clock.monotonic()
        while not stop():
            found = self._next()
            for name in found:
                if stop():
                    return
                batch = SpoolBatch(self._store, self._manifest(name))
                yield batch
                self._at = batch.tick_to
                waiting_since = clock.monotonic()
            if once and not found:
                return
            if not found:
                if timeout is not None and clock.monotonic() - waiting_since >= timeout:
                    return
                clock.sleep(_LOOK_SECONDS if timeout is None else min(_LOOK_SECONDS, timeout))

    def _next(self) -> list[str]:
        """The names of the batches that follow on each other from where the reader is."""
        names = self._store.names()
        start = 0 if self._at is None else bisect_left(names, self._at, key=lambda name: ticks_of(name)[0])
        at, found = self._at, names[start:]
        if start == 0 and found and at is not None and ticks_of(found[0])[0] != at:
            raise _removed(self._store, at)
        for name in found:
            if at not in (None, ticks_of(name)[0]):
                raise GdqError(f"spool {self._store.folder}: batch {name} does not follow on tick {at}")
            at = ticks_of(name)[1]
        return found

    def _manifest(self, name: str) -> Manifest:
        try:
            return self._store.manifest(name)
        except FileNotFoundError as error:
            raise _removed(self._store, ticks_of(name)[0]) from error

    def _start_after(self, position: Position) -> None:
        """Go on after a position that this spool gave."""
        names = self._store.names()
        for name in names:
            manifest = self._manifest(name)
            for known in (manifest.after, manifest.position):
                if known == str(position):
                    self._at = position.tick
                    return
        if names and position.tick < ticks_of(names[0])[0]:
            raise _removed(self._store, position.tick)
        raise DivergedPosition(f"spool {self._store.folder} has no batch that ends at position {position}")


def open_spool(folder: str, *, after: Position | str | None = None) -> Spool:
    """A spool that `gdq spool` writes: `folder` is a path or a URI such as s3://bucket/folder.

    `after`: the position of the last batch that was applied; None: from the first batch that is there.
    GdqError if there is no spool; TruncatedPosition if batches after the position were removed; DivergedPosition if it
    is of another spool. Reads need no database. Nothing is written.
    """
    spool = Spool(SpoolStore(folder))
    if after is not None:
        spool._start_after(Position.parse(after) if isinstance(after, str) else after)
    return spool


def _aligned(rows: pa.Table, schema: pa.Schema) -> pa.Table:
    """Rows with the columns of a schema, NULL where they lack one."""
    import pyarrow as pa  # noqa: PLC0415

    arrays = [
        rows.column(field.name) if field.name in rows.schema.names else pa.nulls(rows.num_rows, field.type)
        for field in schema
    ]
    return pa.Table.from_arrays(arrays, schema=schema)


def _removed(store: SpoolStore, tick: int) -> TruncatedPosition:
    return TruncatedPosition(
        f"spool {store.folder} has no more the changes after tick {tick}",
        hint="Load the tables anew, and keep more: gdq spool --keep.",
    )
