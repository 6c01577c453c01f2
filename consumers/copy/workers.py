"""The workers of a copy: threads that take piece after piece, and the loop that watches and stops them."""

from __future__ import annotations

import contextlib
import queue
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Protocol

import psycopg
from psycopg import Connection

from gdq.consumers.copy.pieces import Piece
from gdq.consumers.views.row_copy import RowsCopied

# Seconds between two looks at the workers, and between two reports of progress.
_LOOK_SECONDS = 0.2

# Seconds that a stopped worker is waited for: its statements were cancelled.
_STOP_SECONDS = 10.0

# Called with the rows so far and about how many there will be, None if unknown.
TellCopied = Callable[[int, int | None], None]


class CopyStopped(Exception):  # noqa: N818 (it says what happened)
    """Another part of the copy has failed, or the user has stopped it."""


class PieceWriter(Protocol):
    """One worker's end at the target; its writes become visible with commit() alone."""

    def write(self, reader: Connection[Any], piece: Piece, moved: Callable[[int], None]) -> RowsCopied:
        """Copy a piece. `moved` gets the rows since it was called last; what it raises ends the copy."""

    def cancel(self) -> None:
        """End the statement at hand; called by another thread."""

    def commit(self) -> None:
        """Make the writes durable."""

    def close(self) -> None:
        """End the worker; what was not committed is undone."""


_Pair = tuple[Connection[Any], PieceWriter]


class CopyTally:
    """Rows and bytes by table, added up by all workers, and what is told of them."""

    def __init__(self, pieces: Sequence[Piece]) -> None:
        self.rows: Counter[str] = Counter()
        self.bytes: Counter[str] = Counter()
        self._lock = threading.Lock()
        self._moved = 0
        self._blocks_done = 0
        self._blocks = sum(piece.blocks for piece in pieces)
        tables = {piece.table.name: piece.table.rows for piece in pieces}
        known = [rows for rows in tables.values() if rows is not None]
        self._estimate = round(sum(known)) if len(known) == len(tables) else None

    def moved(self, rows: int) -> None:
        """Note rows that are on their way."""
        with self._lock:
            self._moved += rows

    def done(self, piece: Piece, copied: RowsCopied) -> None:
        """Note a copied piece."""
        with self._lock:
            self.rows[piece.table.name] += copied.rows
            self.bytes[piece.table.name] += copied.bytes
            self._blocks_done += piece.blocks

    def told(self) -> tuple[int, int | None]:
        """The rows so far, and about how many there will be: by the statistics, else by the blocks that were read."""
        with self._lock:
            if self._estimate is not None or not self._blocks_done:
                return self._moved, self._estimate
            return self._moved, round(sum(self.rows.values()) * self._blocks / self._blocks_done)


def run_workers(
    readers: Sequence[Connection[Any]], writers: Sequence[PieceWriter], pieces: Sequence[Piece], tell: TellCopied
) -> CopyTally:
    """Copy all pieces with one thread for each reader and writer; the first error stops all, and is raised."""
    workers = _Workers(pieces)
    workers.run(list(zip(readers, writers, strict=True)), tell)
    tell(*workers.tally.told())
    return workers.tally


class _Workers:
    """The threads of a copy, and the pieces that wait for them."""

    def __init__(self, pieces: Sequence[Piece]) -> None:
        self.tally = CopyTally(pieces)
        self._waiting: queue.SimpleQueue[Piece] = queue.SimpleQueue()
        for piece in pieces:
            self._waiting.put(piece)
        self._stopped = threading.Event()

    def run(self, pairs: Sequence[_Pair], tell: TellCopied) -> None:
        """Have each pair copy pieces until none is left; after an error, or Ctrl-C, no thread goes on."""
        run_threads(
            [partial(self._work, *pair) for pair in pairs],
            [partial(_cancel, *pair) for pair in pairs],
            self._stopped,
            lambda: tell(*self.tally.told()),
        )

    def _work(self, reader: Connection[Any], writer: PieceWriter) -> None:
        with contextlib.suppress(queue.Empty):
            while not self._stopped.is_set():
                piece = self._waiting.get_nowait()
                self.tally.done(piece, writer.write(reader, piece, self._moved))

    def _moved(self, rows: int) -> None:
        if self._stopped.is_set():
            raise CopyStopped
        self.tally.moved(rows)


def _cancel(reader: Connection[Any], writer: PieceWriter) -> None:
    cancel_statement(reader)
    writer.cancel()


def cancel_statement(connection: Connection[Any]) -> None:
    """End the statement that another thread waits for in a session."""
    with contextlib.suppress(psycopg.Error):
        connection.cancel_safe(timeout=_STOP_SECONDS)


def run_threads(
    works: Sequence[Callable[[], None]],
    cancels: Sequence[Callable[[], None]],
    stopped: threading.Event,
    look: Callable[[], None] = lambda: None,
) -> None:
    """Run each function in a thread until all have ended; the first error stops all, and is raised.

    `stopped` is set when they are to end; then what one of them waits for is ended by its function of `cancels`. `look`
    is called now and then meanwhile, by the caller's thread. Ctrl-C stops all, too.
    """
    errors: list[BaseException] = []

    def guarded(work: Callable[[], None]) -> None:
        try:
            work()
        except BaseException as error:
            errors.append(error)  # the caller's thread raises it
            stopped.set()

    threads = [threading.Thread(target=guarded, args=[work], name="gdq copy", daemon=True) for work in works]
    for thread in threads:
        thread.start()
    try:
        while not stopped.is_set() and (alive := [thread for thread in threads if thread.is_alive()]):
            alive[0].join(_LOOK_SECONDS)
            look()
    finally:
        stopped.set()
        _end(threads, cancels)
    if errors:
        raise next((error for error in errors if not isinstance(error, CopyStopped)), errors[0])


def _end(threads: Sequence[threading.Thread], cancels: Sequence[Callable[[], None]]) -> None:
    """Cancel what threads that have not ended wait for, until they have."""
    deadline = time.monotonic() + _STOP_SECONDS
    while any(thread.is_alive() for thread in threads) and time.monotonic() < deadline:
        for thread, cancel in zip(threads, cancels, strict=True):
            if thread.is_alive():
                cancel()
        for thread in threads:
            thread.join(_LOOK_SECONDS)
