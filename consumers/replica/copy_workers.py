"""The workers of a replica's copies: threads that take one group of tables after the other, and what they tell.

Each has a session of its own in the source and in the target, so that both servers work on several tables at once.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext, suppress
from copy import copy
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

from psycopg import Connection

from gdq.conninfo import connect, conninfo_of
from gdq.consumers.copy.chunk_progress import CopyTaken, join_copy
from gdq.consumers.copy.snapshot import CopyProgress
from gdq.consumers.copy.workers import CopyStopped, cancel_statement, run_threads
from gdq.consumers.replica.origin import BearingConnection, bear_origin
from gdq.consumers.replica.sessions import apply_settings, commit_for_good
from gdq.consumers.replica.state import ReplicaState
from gdq.consumers.replica.table import suppress_triggers
from gdq.sql_text import raw

# Shows the progress of copies while its block runs; None if nobody looks.
ShowProgress = Callable[[], AbstractContextManager[CopyProgress | None]]

WORKERS = 2

# What a killed program has left in the target's server ends as soon as that notices.
_TAKEN_SECONDS = 60.0
_LOOK_SECONDS = 0.2

_Item = TypeVar("_Item")
_Result = TypeVar("_Result")


@dataclass(frozen=True, slots=True)
class CopyWorker:
    """A worker's session in the source, and the replica's state in its session of the target."""

    reader: Connection[Any]
    state: ReplicaState


@dataclass(frozen=True, slots=True)
class HeldTable:
    """A table at a held snapshot of the source.

    `copy()` brings all its rows, and stores that, in the open transaction of the target; it returns what is told.
    """

    name: str
    copy: Callable[[], str]


# Locks tables in a worker's session of the source, and takes a snapshot, until the block ends.
HoldTables = Callable[[CopyWorker, Sequence[_Item]], AbstractContextManager[Sequence[HeldTable]]]


def no_progress() -> AbstractContextManager[CopyProgress | None]:
    """A ShowProgress that shows nothing."""
    return nullcontext()


def open_reader(stack: ExitStack, source: Connection[Any], state: ReplicaState) -> Connection[Any]:
    """A worker's session in the source, which ends with `stack`."""
    name = f"gdq:{state.queue}/{state.name}/copy"
    reader = stack.enter_context(connect(conninfo_of(source), application_name=name, autocommit=True))
    apply_settings(reader)
    return reader


def open_writer(stack: ExitStack, state: ReplicaState, what: str = "copy") -> ReplicaState:
    """The replica's state in a session of its own, which writes as the replica's does and ends with `stack`.

    `what`: what the session is for, as the server lists it. What it stores is in the target alone until the replica's
    state is loaded again.
    """
    name = f"gdq:{state.queue}/{state.name}/{what}"
    conninfo = conninfo_of(state.connection)
    writer = stack.enter_context(connect(conninfo, application_name=name, autocommit=True, kind=BearingConnection))
    apply_settings(writer)
    commit_for_good(writer)
    # a small sample tells enough to apply changes; autovacuum takes a larger one
    writer.execute("set default_statistics_target = 10")
    bear_origin(writer, state.source)
    suppress_triggers(writer)
    own = copy(state)
    own.connection, own.tables = writer, dict(state.tables)
    return own


def take_alone(take: Callable[[], _Result], workers: Sequence[CopyWorker], stop: Callable[[], bool]) -> _Result | None:
    """The result of `take()`, which has the first worker's session hold the replica's copy; None if `stop` came before.

    The other sessions join it. CopyTaken if another program is at work on it for a minute.
    """
    deadline = time.monotonic() + _TAKEN_SECONDS
    while True:
        try:
            taken = take()
            break
        except CopyTaken:
            if time.monotonic() > deadline:
                raise
        if stop():
            return None
        time.sleep(_LOOK_SECONDS)
    for worker in workers[1:]:
        join_copy(worker.state.connection, worker.state.copy_name)
    return taken


def copy_groups(
    workers: Sequence[CopyWorker], groups: Sequence[Sequence[_Item]], hold: HoldTables[_Item], run: CopyRun
) -> bool:
    """Copy groups of tables, each at one snapshot; False if the run was stopped before.

    Each table is copied in a transaction of the target.
    """

    def copy_group(worker: CopyWorker, group: Sequence[_Item]) -> None:
        target = worker.state.connection
        with hold(worker, group) as tables:
            for table in tables:
                if not run.goes_on():
                    return
                with target.transaction():
                    told = table.copy()
                target.execute(raw(f"analyze {table.name}"))
                run.told(told)

    return run.run(workers, groups, copy_group)


class CopyRun:
    """One run of the workers over groups of tables, or parts of one. Any thread may call the methods that workers call.

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
        self._lines: queue.SimpleQueue[str] = queue.SimpleQueue()
        self._failed = threading.Event()
        self._enough = threading.Event()
        self._lock = threading.Lock()
        self._rows = 0
        self._left_out = False

    def run(
        self,
        workers: Sequence[CopyWorker],
        items: Sequence[_Item],
        copy: Callable[[CopyWorker, _Item], None],
    ) -> bool:
        """Have the workers copy all items; False if `stop` came before. The first error ends all, and is raised.

        `copy` ends early unless goes_on().
        """
        waiting: queue.SimpleQueue[_Item] = queue.SimpleQueue()
        for item in items:
            waiting.put(item)
        with self._show() as progress:
            try:
                run_threads(
                    [partial(self._work, worker, waiting, copy) for worker in workers],
                    [partial(_cancel, worker) for worker in workers],
                    self._failed,
                    partial(self._look, progress),
                )
            finally:
                self._look(progress)
        return not self._left_out

    def goes_on(self) -> bool:
        """True if another item may be begun; else it is left out."""
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

    def _work(
        self, worker: CopyWorker, waiting: queue.SimpleQueue[_Item], copy: Callable[[CopyWorker, _Item], None]
    ) -> None:
        with suppress(queue.Empty):
            while True:
                item = waiting.get_nowait()
                if not self.goes_on():
                    return
                copy(worker, item)

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
