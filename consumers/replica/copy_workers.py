"""The workers of a replica's copies: threads that take one group of tables after the other, and what they tell.

Each has a session of its own in the source and in the target, so that both servers work on several tables at once.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext, suppress
from copy import copy
from dataclasses import dataclass
from functools import partial
from typing import Any

from psycopg import Connection

from gdq.conninfo import connect, conninfo_of
from gdq.consumers.copy.snapshot import CopyProgress
from gdq.consumers.copy.workers import CopyStopped, cancel_statement, run_threads
from gdq.consumers.replica.origin import bear_origin
from gdq.consumers.replica.sessions import apply_settings, commit_for_good
from gdq.consumers.replica.source_tables import SourceTable
from gdq.consumers.replica.state import ReplicaState
from gdq.consumers.replica.table import suppress_triggers

# Shows the progress of copies while its block runs; None if nobody looks.
ShowProgress = Callable[[], AbstractContextManager[CopyProgress | None]]

WORKERS = 2


@dataclass(frozen=True, slots=True)
class CopyWorker:
    """A worker's session in the source, and the replica's state in its session of the target."""

    reader: Connection[Any]
    state: ReplicaState


def no_progress() -> AbstractContextManager[CopyProgress | None]:
    """A ShowProgress that shows nothing."""
    return nullcontext()


def open_reader(stack: ExitStack, source: Connection[Any], state: ReplicaState) -> Connection[Any]:
    """A worker's session in the source, which ends with `stack`."""
    name = f"gdq:{state.queue}/{state.name}/copy"
    reader = stack.enter_context(connect(conninfo_of(source), application_name=name, autocommit=True))
    apply_settings(reader)
    return reader


def open_writer(stack: ExitStack, state: ReplicaState) -> ReplicaState:
    """The replica's state in a session of its own, which writes as the replica's does and ends with `stack`.

    What it stores is in the target alone until the replica's state is loaded again.
    """
    name = f"gdq:{state.queue}/{state.name}/copy"
    writer = stack.enter_context(connect(conninfo_of(state.connection), application_name=name, autocommit=True))
    apply_settings(writer)
    commit_for_good(writer)
    # a small sample tells enough to apply changes; autovacuum takes a larger one
    writer.execute("set default_statistics_target = 10")
    bear_origin(writer, state.source)
    suppress_triggers(writer)
    own = copy(state)
    own.connection, own.tables = writer, dict(state.tables)
    return own


class CopyRun:
    """One run of the workers over groups of tables. The methods that workers call may be called by any thread.

    `tell` gets lines, and what `show` opens gets the rows so far of all tables, about `expected`; both are called by
    the caller's thread. After `stop` no further table is begun.
    """

    def __init__(
        self,
        name: str,
        expected: int | None,
        *,
        tell: Callable[[str], None],
        show: ShowProgress = no_progress,
        stop: Callable[[], bool] = lambda: False,
    ) -> None:
        self._name, self._expected = name, expected
        self._tell, self._show, self._stop = tell, show, stop
        self._waiting: queue.SimpleQueue[Sequence[SourceTable]] = queue.SimpleQueue()
        self._lines: queue.SimpleQueue[str] = queue.SimpleQueue()
        self._failed = threading.Event()
        self._enough = threading.Event()
        self._lock = threading.Lock()
        self._rows = 0
        self._left_out = False

    def run(
        self,
        workers: Sequence[CopyWorker],
        groups: Sequence[Sequence[SourceTable]],
        copy: Callable[[CopyWorker, Sequence[SourceTable]], None],
    ) -> bool:
        """Have the workers copy all groups; False if `stop` came before. The first error ends all, and is raised.

        `copy` ends early unless goes_on().
        """
        for group in groups:
            self._waiting.put(group)
        with self._show() as progress:
            try:
                run_threads(
                    [partial(self._work, worker, copy) for worker in workers],
                    [partial(_cancel, worker) for worker in workers],
                    self._failed,
                    partial(self._look, progress),
                )
            finally:
                self._look(progress)
        return not self._left_out

    def goes_on(self) -> bool:
        """True if another table may be begun; else it is left out."""
        self._left_out = self._left_out or self._enough.is_set()
        return not self._enough.is_set() and not self._failed.is_set()

    def moved(self, rows: int) -> None:
        """Note rows that are on their way; CopyStopped if another worker has failed."""
        if self._failed.is_set():
            raise CopyStopped
        with self._lock:
            self._rows += rows

    def told(self, line: str) -> None:
        """Have a line told."""
        self._lines.put(line)

    def _work(self, worker: CopyWorker, copy: Callable[[CopyWorker, Sequence[SourceTable]], None]) -> None:
        with suppress(queue.Empty):
            while True:
                group = self._waiting.get_nowait()
                if not self.goes_on():
                    return
                copy(worker, group)

    def _look(self, progress: CopyProgress | None) -> None:
        if self._stop():
            self._enough.set()
        with suppress(queue.Empty):
            while True:
                self._tell(self._lines.get_nowait())
        if progress is not None and self._rows:
            progress(self._name, "copying", self._rows, self._expected)


def _cancel(worker: CopyWorker) -> None:
    for session in (worker.reader, worker.state.connection):
        cancel_statement(session)
