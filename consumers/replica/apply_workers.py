"""Tables whose changes are applied beside those of others: by threads, in transactions of the target of their own.

    the program    apply table 1                 commit: table 1, and the position
    a worker       apply table 2       (waits)   commit: table 2, and that it is at the batch's end

So several processors of the target change rows. A worker commits just before the program, and what it stores of its
table is what a copy at the end of the batch would store. A program that was killed in between finds that one table is
ahead of the others, and goes on as after a copy.

What goes wrong in a worker is no error: it rolls back, and the usual way meets it again, and tells. An application may
wait for rows of a worker, and the program for rows of hers. No server sees that circle, as the worker waits for the
program outside of it. So a worker that others wait for gives its work up while the program waits for a lock.
"""

from __future__ import annotations

import threading
from collections.abc import Collection, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field

import psycopg

from gdq.call import scalar
from gdq.consumers.replica.changes import Applied, Staged
from gdq.consumers.replica.copy_workers import open_writer
from gdq.consumers.replica.refusal import RowsLackingError
from gdq.consumers.replica.staged_parts import StagedParts
from gdq.consumers.replica.state import ReplicaState
from gdq.consumers.replica.table import ReplicaTable
from gdq.consumers.replica.table_apply import apply_staged
from gdq.errors import GdqError
from gdq.qualified_sql import qualified

# How a batch is written. What is staged is sorted in memory; a small sample of it tells enough.
WRITING = "set local default_statistics_target = 10; set local work_mem = '64MB'"
# A worker waits for no lock that the program's session may hold.
_OWN = f"{WRITING}; set local lock_timeout = '1s'"

_LOOK_SECONDS = 1.0

_IN_THE_WAY = qualified("""
select pg_catalog.cardinality(pg_catalog.pg_blocking_pids(%s)) > 0
   and exists (select from pg_catalog.pg_locks l
                where not l.granted and pg_catalog.pg_backend_pid() = any (pg_catalog.pg_blocking_pids(l.pid)))""")


@dataclass(slots=True)
class ApplyWorkers:
    """The workers of one replica, `number` of them at most, and what they have of the open batch."""

    state: ReplicaState
    number: int
    _workers: list[_Worker] = field(default_factory=list, init=False)
    _opened: ExitStack = field(default_factory=ExitStack, init=False)
    _impossible: bool = field(default=False, init=False)

    @property
    def tables(self) -> Collection[str]:
        """The tables of the open batch that workers have."""
        return {worker.task.table.name for worker in self._workers if worker.task is not None}

    @property
    def has_free(self) -> bool:
        """True if another table may be begun."""
        return len(self.tables) < self.number and not self._impossible

    def begin(self, table: ReplicaTable, parts: StagedParts, snapshot: str) -> bool:
        """Have a table's changes applied as they are staged; False if no worker is to be had.

        `snapshot`: the end of the batch.
        """
        worker = self._free()
        if worker is None:
            return False
        worker.begin(_Task(table, parts, snapshot))
        return True

    def left(self) -> Sequence[str]:
        """The tables that workers could not apply, by name, when all have tried; the program has to."""
        failed = [worker for worker in self._workers if worker.task is not None and not worker.task.is_applied()]
        names = [worker.task.table.name for worker in failed if worker.task is not None]
        for worker in failed:
            worker.end(commit=False)
        return names

    def commit(self) -> tuple[Applied, Sequence[str]]:
        """Commit what was applied: the rows, and the tables that were given up meanwhile, by name."""
        applied, given_up = Applied(), list[str]()
        for worker in self._workers:
            if worker.task is None:
                continue
            table, snapshot = worker.task.table.name, worker.task.snapshot
            done = worker.end(commit=True)
            if done is None:
                given_up.append(table)
            else:
                applied += done
                self.state.brought(table, snapshot)
        return applied, given_up

    def give_up(self) -> None:
        """Roll back what the workers have, and wait until they have."""
        for worker in self._workers:
            if worker.task is not None:
                worker.end(commit=False)

    def close(self) -> None:
        """End the workers, whatever they are at."""
        self.give_up()
        for worker in self._workers:
            worker.threads.shutdown()
        self._opened.close()

    def _free(self) -> _Worker | None:
        if not self.has_free:
            return None
        for worker in self._workers:
            if worker.task is None and not worker.state.connection.closed:
                return worker
        try:
            self._workers.append(_Worker.of(self._opened, self.state))
        except psycopg.Error:  # the target takes no more sessions
            self._impossible = True
            return None
        return self._workers[-1]


@dataclass(slots=True)
class _Task:
    """A table's changes, and the program's word about them. `applied`: the rows; None if the worker has given up.

    `waits`: the rows are changed, and wait for the word.
    """

    table: ReplicaTable
    parts: StagedParts
    snapshot: str
    waits: threading.Event = field(default_factory=threading.Event)
    said: threading.Event = field(default_factory=threading.Event)
    commit: bool = False
    applied: Future[Applied | None] | None = None

    def is_applied(self) -> bool:
        """True if the rows are changed, when the worker has tried."""
        assert self.applied is not None
        self.applied.add_done_callback(lambda _: self.waits.set())
        self.waits.wait()
        return not self.applied.done()


class _GivenUpError(Exception):
    """A worker's transaction is to be rolled back."""


@dataclass(slots=True)
class _Worker:
    """A thread with a session of its own in the target, where `state` is the replica's; `program`: the other session.

    `task`: what it is at, or waits with.
    """

    state: ReplicaState
    program: int
    threads: ThreadPoolExecutor
    task: _Task | None = None

    @classmethod
    def of(cls, stack: ExitStack, state: ReplicaState) -> _Worker:
        """A worker whose session ends with `stack`."""
        own = open_writer(stack, state, "apply")
        return cls(own, state.connection.info.backend_pid, ThreadPoolExecutor(1, thread_name_prefix="gdq-apply"))

    def begin(self, task: _Task) -> None:
        self.task = task
        task.applied = self.threads.submit(self._apply, task)

    def end(self, *, commit: bool) -> Applied | None:
        """Commit or roll back: the rows that were changed, None if there are none. Errors of the commit are raised."""
        task, self.task = self.task, None
        assert task is not None
        assert task.applied is not None
        task.commit = commit
        task.said.set()
        if commit:
            return task.applied.result()
        with suppress(psycopg.Error):
            self.state.connection.cancel_safe(timeout=1.0)
        task.applied.exception()  # waits for the end
        return None

    def _apply(self, task: _Task) -> Applied | None:
        committing = False
        try:
            with self.state.connection.transaction():
                self.state.connection.execute(_OWN)
                applied = apply_staged(self.state.connection, task.table, self._trusted(task))
                self.state.store_moved(task.table.name, task.snapshot)
                self._wait(task)
                committing = True
        except (psycopg.Error, GdqError, RowsLackingError, _GivenUpError):
            if committing:
                raise  # whether it has committed is for the next start to find
            return None
        return applied

    @staticmethod
    def _trusted(task: _Task) -> Iterator[Staged]:
        """The parts of a table's last images; _GivenUpError if a key is in doubt, or the program wants none."""

        def look() -> None:
            if task.said.is_set() and not task.commit:
                raise _GivenUpError

        for part in task.parts.all(look):
            if part.doubtful:
                raise _GivenUpError
            yield part

    def _wait(self, task: _Task) -> None:
        """Wait for the program's word; _GivenUpError if it is no, or if this transaction is in its way."""
        task.waits.set()
        while not task.said.wait(_LOOK_SECONDS):
            if scalar(self.state.connection, _IN_THE_WAY, self.program):
                raise _GivenUpError
        if not task.commit:
            raise _GivenUpError
