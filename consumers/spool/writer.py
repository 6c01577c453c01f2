"""`gdq spool`: the batches of a consumer written as Parquet files, each once.

A batch is in the spool when its manifest is there; only then the consumer moves. A program that is killed in between
finds the manifest, and moves the consumer past it before it opens the next batch.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Generator, Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import TYPE_CHECKING, Any

from psycopg import Connection

from gdq.batch import Batch
from gdq.batch_state import refuse_gap
from gdq.call import scalar
from gdq.consumer import Consumer, register_consumer, seek, set_pace
from gdq.consumers.spool.store import Manifest, SpoolFile, SpoolStore, range_name, table_path
from gdq.era import check_position, position
from gdq.errors import GdqError, ResyncRequired
from gdq.qualified_sql import qualified
from gdq.source import Position, iso_utc
from gdq.stream import read_other_events

if TYPE_CHECKING:
    import pyarrow as pa

# A batch costs a file for each table: it joins the changes of many ticks.
MAX_EVENTS = 500_000
EVERY_SECONDS = 1.0

_LOCK_SECONDS = 30.0
_PAUSE_SECONDS = 0.2

_TABLES = qualified("select tbl::oid::text, table_name from gdq.batch_tables(%s, %s)")
_ROW_OPS = ("insert", "update", "delete")


@dataclass(frozen=True, slots=True)
class SpooledBatch:
    """One batch that was written: its ticks, and how many tables, rows and changes without rows it has."""

    tick_from: int
    tick_to: int
    tables: int
    rows: int
    events: int
    seconds: float


def spool_batches(
    connection: Connection[Any],
    queue: str,
    consumer: str,
    folder: str,
    *,
    once: bool = False,
    stop: Callable[[], bool] = lambda: False,
    keep: timedelta | None = None,
    max_events: int = MAX_EVENTS,
    every: float = EVERY_SECONDS,
    as_text: Collection[str] = (),
) -> Generator[SpooledBatch, None, None]:
    """Write the batches of a consumer into `folder`, a path or URI, and yield what was written of each.

    A new folder's consumer is registered unless it is; it begins at its position. `keep`: batches that are older are
    removed, but for the last; None: none is. `every`: unless `once`, seconds from the begin of a batch to that of the
    next, at least, which is the consumer's pace from then on. `as_text`: columns to write as text.
    """
    store = SpoolStore(folder)
    connection.autocommit = True
    _lock(connection, queue, consumer, stop)
    _begin(connection, queue, consumer, store)
    last = _go_on(connection, queue, consumer, store)
    after = position(connection, queue, consumer) if last is None else last.position
    if not once:
        set_pace(connection, queue, consumer, every)  # ticks need not come more often for a spool
    with (
        Consumer(connection, queue, consumer, max_events=max_events) as reader,
        closing(reader.batches(once=once, stop=stop)) as batches,
    ):
        for batch in batches:
            if batch.tick_from == batch.tick_to:
                continue  # retries, which somebody has put aside
            started = time.monotonic()
            with _gaps_told(batch):
                last = _write(batch, store, after, as_text, is_first=last is None)
            batch.commit()
            after = last.position
            rows, tables = sum(file.rows for file in last.files), {file.table for file in last.files}
            seconds = time.monotonic() - started
            yield SpooledBatch(last.tick_from, last.tick_to, len(tables), rows, len(last.events), seconds)
            if keep is not None:
                remove_before(store, last.time - keep)
            while not once and not stop() and (left := started + every - time.monotonic()) > 0:
                time.sleep(min(left, _PAUSE_SECONDS))


def remove_before(store: SpoolStore, until: datetime) -> int:
    """Remove batches that were written before a time, but for the last; returns their number."""
    removed = 0
    for name in store.names()[:-1]:
        if store.manifest(name).time >= until:
            break
        store.remove(name)
        removed += 1
    return removed


def _lock(connection: Connection[Any], queue: str, consumer: str, stop: Callable[[], bool]) -> None:
    """Keep other writers out as long as the session lives; one that was killed is gone after a moment."""
    until = time.monotonic() + _LOCK_SECONDS
    query = "select pg_catalog.pg_try_advisory_lock(pg_catalog.hashtextextended(%s, 0))"
    while not scalar(connection, query, f"gdq spool {queue}/{consumer}"):
        if stop() or time.monotonic() > until:
            raise GdqError(f'another gdq spool writes the batches of consumer "{consumer}" of queue "{queue}"')
        time.sleep(_PAUSE_SECONDS)


def _begin(connection: Connection[Any], queue: str, consumer: str, store: SpoolStore) -> None:
    """Make a new folder the consumer's spool, and register the consumer unless it is; an old one needs its consumer."""
    mark = {"queue": queue, "consumer": consumer}
    is_new = store.is_new(mark)
    with connection.transaction():
        if is_new or not store.names():
            register_consumer(connection, queue, consumer)
        if is_new:  # where nothing can be written no consumer holds the log
            store.take(mark)


def _go_on(connection: Connection[Any], queue: str, consumer: str, store: SpoolStore) -> Manifest | None:
    """Bring spool and consumer to the end of the last batch, which is returned; GdqError if changes would be lost."""
    last = store.recover()
    if last is None:
        return None
    check_position(connection, queue, last.position)
    at = Position.parse(position(connection, queue, consumer))
    if at.tick > last.tick_to:
        raise GdqError(
            f'consumer "{consumer}" stands at tick {at.tick}, the spool {store.folder} ends at tick {last.tick_to}:'
            " changes between the two would be missing",
            hint=f"Move the consumer back by gdq seek to tick {last.tick_to}, or begin a new spool in another folder.",
        )
    if at.tick < last.tick_to:
        seek(connection, queue, consumer, tick=last.tick_to)
    return last


def _write(batch: Batch, store: SpoolStore, after: str, as_text: Collection[str], *, is_first: bool) -> Manifest:
    """Write a batch's files, then its manifest; ResyncRequired if changes are missing."""
    tick_from = Position.parse(after).tick
    if batch.tick_from not in (None, tick_from):
        raise GdqError(f"the consumer was moved to tick {batch.tick_from}, spool {store.folder} ends at {tick_from}")
    name = range_name(tick_from, batch.tick_to)
    events = _events(batch)
    files = []
    # by number, since a table may have been dropped since; a number is a regclass too
    for number, table in batch.connection.execute(_TABLES, [batch.id, batch.token]).fetchall():
        for version in batch.versions(number):
            read = batch.arrow_batches(number, unsupported="text", as_text=as_text, version=version.id)
            file = _write_rows(store, table, version.id, name, read)
            if file is not None:
                files.append(file)
    written = iso_utc(scalar(batch.connection, "select pg_catalog.clock_timestamp()"))
    # asked for last: whose session the server has ended writes no manifest
    manifest = Manifest(tick_from, batch.tick_to, after, str(batch.position), written, is_first, files, events)
    store.add(manifest)
    return manifest


def _write_rows(
    store: SpoolStore, table: str, version: int, name: str, read: Iterator[pa.RecordBatch]
) -> SpoolFile | None:
    """Stage the rows of a table; None if there are none."""
    import pyarrow.parquet as pq  # noqa: PLC0415

    rows = next((some for some in read if some.num_rows), None)
    if rows is None:
        return None
    written, file = 0, SpoolFile(table, version, table_path(table, version, name), 0)
    with store.staging(file) as stream, pq.ParquetWriter(stream, rows.schema, compression="zstd") as writer:
        while rows is not None:
            writer.write_batch(rows)
            written += rows.num_rows
            rows = next(read, None)
    return SpoolFile(table, version, file.path, written)


def _events(batch: Batch) -> list[dict[str, Any]]:
    """The changes of a batch that no row shows; ResyncRequired if changes are missing."""
    found = []
    for event in read_other_events(batch.connection, batch.id, batch.token):
        refuse_gap(event)
        if event.op not in _ROW_OPS and not event.retries:
            found.append({"id": event.id, "op": event.op, "table": event.table, "data": event.in_json().new})
    return found


@contextmanager
def _gaps_told(batch: Batch) -> Iterator[None]:
    """ResyncRequired with what to do about it, also for rows that are a gap themselves."""
    try:
        try:
            yield
        except (OSError, GdqError) as error:
            if isinstance(error, OSError) or isinstance(error.__cause__, OSError):
                # the driver of Arrow does not say which error of the server it was: the events do
                for event in batch.events(images="new", columns=()):
                    refuse_gap(event)
            raise
    except ResyncRequired as error:
        raise ResyncRequired(
            f"{error}, and a spool has no rows of a copy",
            hint="Copy the table where it is needed, unregister the consumer, and begin a new spool in another folder.",
        ) from error
