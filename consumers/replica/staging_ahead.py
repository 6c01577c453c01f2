"""Net changes of tables, staged in the target before they are wanted: by threads, in sessions of their own.

    the program    apply table 1       apply table 2                    commit  apply table 1 ...
    a thread       stage table 2       stage table 1 of the next batch

So the source adds up changes and the target takes them in on one processor, while another one changes the tables. The
transaction that changes them reads a staging table that another session has filled, so that is no temporary one: it is
unlogged, in schema gdq_target, and its name has the process number of the session that reads it. A SELECT is known by
its text, which names the two snapshots that it reads between: so its rows are those that it would give at any later
moment, too. What goes wrong in a thread is no error: the usual way meets it again, and tells.
"""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from typing import Any

import psycopg
from psycopg import Connection

from gdq.call import scalar
from gdq.conninfo import connect, conninfo_of
from gdq.consumers.replica.changes import Staged, fill_stage, kept_name, stage_columns
from gdq.consumers.replica.table import ReplicaTable
from gdq.sql_text import raw
from gdq.typed.pgtypes import READ_SETTINGS

# How a batch's rows are read. The planner overestimates what lies in a BRIN range. Images are sorted in memory: 200,000
# changes of rows of 150 bytes take 81 MB, and a sixth more processor time on the disk.
READING = {"enable_seqscan": "off", "max_parallel_workers_per_gather": "0", "work_mem": "128MB"}

# Who waits for a lock that the batch's session holds would wait for ever: that session waits for this program. What is
# staged does not outlive the program, so nobody waits for its way to the disk.
_OWN = {
    "client_min_messages": "warning",
    "default_statistics_target": "10",
    "lock_timeout": "1s",
    "synchronous_commit": "off",
}

# The staging tables of a session, and of those that have ended.
_LEFT = r"""
select c.oid::regclass::text from pg_class c, substring(c.relname from '^replica_stage_([0-9]{1,9})_[0-9]+$') p
 where c.relnamespace = to_regnamespace('gdq_target') and c.relkind = 'r' and pg_has_role(c.relowner, 'usage')
   and (p::int = %s or not exists (select from pg_stat_activity a where a.pid = p::int)) and p is not null"""

_STARTED = "select pg_postmaster_start_time()"


@dataclass(frozen=True, slots=True)
class Wanted:
    """A table's net change that is wanted soon, and its SELECT: is_new, the columns, and what tells pairs."""

    table: ReplicaTable
    query: str


@dataclass(slots=True)
class StagingAhead:
    """The threads of one replica, and their staging tables. `source`, `target`: the sessions that apply its batches.

    `threads`: how many there are at most.
    """

    source: Connection[Any]
    target: Connection[Any]
    threads: int = 2
    _workers: list[_Worker] = field(default_factory=list, init=False)
    _free: dict[str, list[str]] = field(default_factory=dict, init=False)
    _lent: list[tuple[str, str]] = field(default_factory=list, init=False)
    _promised: list[tuple[str, str, Future[Staged | None]]] = field(default_factory=list, init=False)
    _there: set[str] = field(default_factory=set, init=False)
    _named: int = field(default=0, init=False)
    _impossible: bool = field(default=False, init=False)

    def begin(self, wanted: Sequence[Wanted]) -> None:
        """Stage the first of these, as many as there are threads, and give up all that is none of them."""
        queries = [one.query for one in wanted]
        for unwanted in [worker for worker in self._workers if worker.query not in (None, *queries)]:
            self._give_up(unwanted)
        begun = {worker.query for worker in self._workers}
        for one in wanted:
            if one.query not in begun and (worker := self._idle()) is not None:
                shape = kept_name(one.table)
                free = self._free.setdefault(shape, [])
                if not free:
                    self._named += 1
                    free.append(f"gdq_target.replica_stage_{self.target.info.backend_pid}_{self._named}")
                stage = free.pop()
                worker.begin(one, shape, stage, is_new=stage not in self._there)

    def taken(self, query: str) -> Staged | None:
        """Where the rows of a SELECT are staged, which is waited for; None if they are not.

        The staging table is the caller's until give_back().
        """
        worker = next((worker for worker in self._workers if worker.query == query), None)
        if worker is None:
            return None
        staged = worker.staged()
        if staged is None:
            self._give_up(worker)
            return None
        worker.query = None
        self._there.add(staged.name)
        self._lent.append((worker.shape, staged.name))
        return staged

    def promised(self, query: str) -> Future[Staged | None] | None:
        """As taken(), for another thread, which waits itself."""
        worker = next((worker for worker in self._workers if worker.query == query), None)
        if worker is None or worker.work is None:
            return None
        worker.query = None
        self._promised.append((worker.shape, worker.stage, worker.work))
        return worker.work

    def give_back(self) -> None:
        """Have the staging tables that were taken used again; the transactions that have read them have ended."""
        for shape, name, work in self._promised:
            if work.result() is not None:
                self._there.add(name)
            self._free[shape].append(name)
        self._promised.clear()
        for shape, name in self._lent:
            self._free[shape].append(name)
        self._lent.clear()

    def close(self) -> None:
        """End the threads and their sessions, whatever they are at, and drop the staging tables."""
        for worker in self._workers:
            worker.close()
        self._workers.clear()
        if self._named and not self.target.closed:
            with suppress(psycopg.Error):
                drop_stages(self.target)

    def _idle(self) -> _Worker | None:
        """A worker without a SELECT, a new one if need be; None if all are at work, or the target takes none."""
        for failed in [worker for worker in self._workers if worker.has_failed]:
            failed.close()  # it may be anywhere in the rows
            self._workers.remove(failed)
        idle = next((worker for worker in self._workers if worker.query is None), None)
        if idle is None and len(self._workers) < self.threads and not self._impossible:
            try:
                if not self._named:
                    drop_stages(self.target)
                idle = _Worker.of(self.source, self.target)
            except psycopg.Error:
                idle = None
            if idle is None:
                self._impossible = True
            else:
                self._workers.append(idle)
        return idle

    def _give_up(self, worker: _Worker) -> None:
        """End a worker: it may be anywhere in the rows."""
        worker.close()
        self._workers.remove(worker)
        self._free[worker.shape].append(worker.stage)
        if worker.staged() is not None:
            self._there.add(worker.stage)
        elif worker.is_refused:
            self._impossible = True


def drop_stages(target: Connection[Any]) -> None:
    """Drop the staging tables that this session reads, and those of sessions that have ended."""
    with target.transaction():
        for (name,) in target.execute(_LEFT, [target.info.backend_pid]).fetchall():
            target.execute(raw(f"drop table if exists {name}"))


@dataclass(slots=True)
class _Worker:
    """A thread, with a session in the source and one in the target. `query`: what it stages, or has staged in `stage`.

    `shape`: what the columns of the staging table are like. `work`: the staging itself. `is_refused`: the role may not
    make staging tables.
    """

    source: Connection[Any]
    target: Connection[Any]
    threads: ThreadPoolExecutor
    query: str | None = None
    shape: str = ""
    stage: str = ""
    work: Future[Staged | None] | None = None
    _unwanted: bool = False
    is_refused: bool = False

    @classmethod
    def of(cls, source: Connection[Any], target: Connection[Any]) -> _Worker | None:
        """A worker for two sessions; None if the target's name leads to another server now."""
        with ExitStack() as stack:
            reads, writes = (stack.enter_context(_session(one)) for one in (source, target))
            if scalar(writes, _STARTED) != scalar(target, _STARTED):
                return None
            stack.pop_all()
            return cls(reads, writes, ThreadPoolExecutor(1, thread_name_prefix="gdq-ahead"))

    @property
    def is_idle(self) -> bool:
        """True if it has nothing staged that is wanted, and stages nothing."""
        return self.query is None and (self.work is None or self.work.done())

    @property
    def has_failed(self) -> bool:
        """True if another thread was promised what could not be staged."""
        return self.is_idle and self.work is not None and self.work.result() is None

    def begin(self, wanted: Wanted, shape: str, stage: str, *, is_new: bool) -> None:
        """Have the thread fill a staging table, which is made if it `is_new`; `shape`: what its columns are like."""
        self.query, self.shape, self.stage = wanted.query, shape, stage
        self.work = self.threads.submit(self._stage, wanted, stage, is_new=is_new)

    def staged(self) -> Staged | None:
        """What is staged, when it is; None if the thread has failed, or was ended."""
        return None if self.work is None else self.work.result()

    def close(self) -> None:
        """End the work and the sessions."""
        self._unwanted = True
        while self.work is not None and not self.work.done():
            # the statement may begin after the first attempt
            for one in (self.source, self.target):
                with suppress(psycopg.Error):
                    one.cancel_safe(timeout=1.0)
            with suppress(TimeoutError):
                self.work.result(timeout=0.1)
        self.threads.shutdown()
        self.source.close()
        self.target.close()

    def _stage(self, wanted: Wanted, stage: str, *, is_new: bool) -> Staged | None:
        make = f"create unlogged table {stage} ({stage_columns(wanted.table)}) with (autovacuum_enabled = off)"
        try:
            with self.target.transaction():
                self.target.execute(raw(make if is_new else f"truncate {stage}"))
                return fill_stage(self.source, self.target, wanted.table, wanted.query, stage, moved=self._moved)
        except (psycopg.Error, _UnwantedError) as error:
            self.is_refused = isinstance(error, psycopg.errors.InsufficientPrivilege)
            return None

    def _moved(self, rows: int) -> None:  # noqa: ARG002
        if self._unwanted:
            raise _UnwantedError


class _UnwantedError(Exception):
    """Nobody wants the rows any more."""


def _session(like: Connection[Any]) -> Connection[Any]:
    """Another session where one is, under settings that read and write values alike."""
    name = like.info.parameter_status("application_name")
    opened = connect(conninfo_of(like), application_name=f"{name}/ahead", autocommit=True)
    for setting, value in (READ_SETTINGS | READING | _OWN).items():
        opened.execute("select pg_catalog.set_config(%s, %s, false)", [setting, value])
    return opened
