"""Net changes of tables, staged in the target before they are wanted: by threads, in sessions of their own.

    the program    apply table 1       apply table 2                    commit  apply table 1 ...
    a thread       stage table 2       stage table 1 of the next batch

So the source adds up changes and the target takes them in on one processor, while another one changes the tables. The
transaction that changes them reads staging tables that another session has filled, so these are no temporary ones: they
are unlogged, in schema gdq_target, and their names have the process number of the session that reads them. A SELECT is
known by its text, which names the two snapshots that it reads between: so its rows are those that it would give at any
later moment, too. What goes wrong in a thread is no error: the usual way meets it again, and tells.
"""

from __future__ import annotations

import sys
import threading
from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from typing import Any

import psycopg
from psycopg import Connection

from gdq.call import scalar
from gdq.conninfo import connect, conninfo_of
from gdq.consumers.replica.changes import fill_stages, kept_name, stage_columns
from gdq.consumers.replica.staged_parts import StagedParts
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

# Bytes of the first part of a table's rows: less is not worth its three statements.
_PART_BYTES = 4 * 2**20

_LOOK_SECONDS = 0.1

# The staging tables of a session, and of those that have ended.
_LEFT = r"""
select c.oid::regclass::text from pg_class c, substring(c.relname from '^replica_stage_([0-9]{1,9})_[0-9]+$') p
 where c.relnamespace = to_regnamespace('gdq_target') and c.relkind = 'r' and pg_has_role(c.relowner, 'usage')
   and (p::int = %s or not exists (select from pg_stat_activity a where a.pid = p::int)) and p is not null"""

_STARTED = "select pg_postmaster_start_time()"


@dataclass(frozen=True, slots=True)
class Wanted:
    """A table's net change that is wanted soon, and its SELECT: is_new, the columns, and what tells pairs.

    `in_parts`: each key has one row, and rows may be applied before others have come.
    """

    table: ReplicaTable
    query: str
    in_parts: bool = False


@dataclass(slots=True)
class StagingAhead:
    """The threads of one replica, and their staging tables. `source`, `target`: the sessions that apply its batches.

    `appliers`: tables that are applied at once. There are as many threads, and one more.
    """

    source: Connection[Any]
    target: Connection[Any]
    appliers: int = 1
    _workers: list[_Worker] = field(default_factory=list, init=False)
    _tables: _StageTables = field(init=False)
    _lent: list[_Work] = field(default_factory=list, init=False)
    _begun: deque[StagedParts] = field(init=False)
    _impossible: bool = field(default=False, init=False)

    def __post_init__(self) -> None:
        self._tables = _StageTables(self.target.info.backend_pid)
        self._begun = deque(maxlen=self.appliers)

    def begin(self, wanted: Sequence[Wanted]) -> None:
        """Stage the first of these, as many as there are threads, and give up all that is none of them."""
        queries = [one.query for one in wanted]
        for unwanted in [worker for worker in self._workers if worker.query not in (None, *queries)]:
            self._give_up(unwanted)
        begun = {worker.query for worker in self._workers}
        for one in wanted:
            if one.query not in begun and (worker := self._idle()) is not None:
                # no more tables come at once than are applied at once: the later ones would hold up the first
                before = self._begun[0] if len(self._begun) == self.appliers else None
                self._begun.append(worker.begin(one, self._tables, after=before))

    def taken(self, query: str) -> StagedParts | None:
        """The rows of a SELECT that are staged, when some are; None if there are none.

        The staging tables are the caller's until give_back().
        """
        worker = next((worker for worker in self._workers if worker.query == query), None)
        if worker is None or worker.work is None:
            return None
        if not worker.work.parts.begins():
            self._give_up(worker)
            return None
        return self._lend(worker.work)

    def promised(self, query: str) -> StagedParts | None:
        """As taken(), for another thread, which waits itself."""
        worker = next((worker for worker in self._workers if worker.query == query), None)
        return None if worker is None or worker.work is None else self._lend(worker.work)

    def _lend(self, work: _Work) -> StagedParts:
        work.is_lent = True
        self._lent.append(work)
        return work.parts

    def give_back(self) -> int:
        """Have the staging tables that were taken used again; the number of rows that they have.

        The transactions that have read them have ended.
        """
        rows = 0
        for work in self._lent:
            work.parts.wait()
            self._tables.give_back(work.shape, work.stages)
            rows += work.parts.rows
        self._lent.clear()
        return rows

    def close(self) -> None:
        """End the threads and their sessions, whatever they are at, and drop the staging tables."""
        for worker in self._workers:
            worker.close()
        self._workers.clear()
        self._lent.clear()
        if self._tables.number and not self.target.closed:
            with suppress(psycopg.Error):
                drop_stages(self.target)

    def _idle(self) -> _Worker | None:
        """A worker without a SELECT, a new one if need be; None if all are at work, or the target takes none."""
        for failed in [worker for worker in self._workers if worker.is_idle and worker.has_failed]:
            failed.close()  # it may be anywhere in the rows
            self._workers.remove(failed)
        idle = next((worker for worker in self._workers if worker.is_idle), None)
        if idle is None and len(self._workers) <= self.appliers and not self._impossible:
            try:
                if not (self._workers or self._tables.number):
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
        assert worker.work is not None
        self._tables.give_back(worker.work.shape, worker.work.stages)
        self._impossible = self._impossible or worker.is_refused


@dataclass(slots=True)
class _StageTables:
    """The names of the staging tables of the session that reads them, `reader`: of those that are free by shape.

    The shape is what the columns are like. `number`: of the last one that was named.
    """

    reader: int
    number: int = 0
    _free: dict[str, list[str]] = field(default_factory=dict)
    _there: set[str] = field(default_factory=set)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def take(self, shape: str) -> tuple[str, bool]:
        """The name of a free table, and whether it exists."""
        with self._lock:
            free = self._free.setdefault(shape, [])
            if not free:
                self.number += 1
                free.append(f"gdq_target.replica_stage_{self.reader}_{self.number}")
            name = free.pop()
            return name, name in self._there

    def is_made(self, name: str) -> None:
        """Note that a table exists now."""
        with self._lock:
            self._there.add(name)

    def give_back(self, shape: str, names: Sequence[str]) -> None:
        """Note that tables are free; the first one will be taken first."""
        with self._lock:
            self._free.setdefault(shape, []).extend(reversed(names))


def drop_stages(target: Connection[Any]) -> None:
    """Drop the staging tables that this session reads, and those of sessions that have ended."""
    with target.transaction():
        for (name,) in target.execute(_LEFT, [target.info.backend_pid]).fetchall():
            target.execute(raw(f"drop table if exists {name}"))


@dataclass(slots=True)
class _Work:
    """A SELECT whose rows are staged in `stages`, tables of one `shape`. `is_lent`: somebody reads them."""

    wanted: Wanted
    shape: str
    parts: StagedParts = field(default_factory=StagedParts)
    stages: list[str] = field(default_factory=list)
    is_lent: bool = False


@dataclass(slots=True)
class _Worker:
    """A thread, with a session in the source and one in the target. `work`: what it stages, or has staged last.

    `is_refused`: the role may not make staging tables.
    """

    source: Connection[Any]
    target: Connection[Any]
    threads: ThreadPoolExecutor
    work: _Work | None = None
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
    def query(self) -> str | None:
        """The SELECT that it stages, or has staged, and that nobody has taken."""
        return None if self.work is None or self.work.is_lent else self.work.wanted.query

    @property
    def is_idle(self) -> bool:
        """True if it has nothing staged that is wanted, and stages nothing."""
        return self.work is None or (self.work.is_lent and self.work.parts.ended)

    @property
    def has_failed(self) -> bool:
        """True if somebody has taken what could not be staged to its end."""
        return self.work is not None and self.work.parts.failed

    def begin(self, wanted: Wanted, tables: _StageTables, *, after: StagedParts | None) -> StagedParts:
        """Have the thread stage rows; those of `after` come to the target before them."""
        self.work = _Work(wanted, kept_name(wanted.table))
        self.threads.submit(self._stage, self.work, tables, after)
        return self.work.parts

    def close(self) -> None:
        """End the work and the sessions."""
        self._unwanted = True
        while self.work is not None and not self.work.parts.wait(_LOOK_SECONDS):
            # the statement may begin after the first attempt
            for one in (self.source, self.target):
                with suppress(psycopg.Error):
                    one.cancel_safe(timeout=1.0)
        self.threads.shutdown()
        self.source.close()
        self.target.close()

    def _stage(self, work: _Work, tables: _StageTables, after: StagedParts | None) -> None:
        waits_for = [] if after is None else [after]

        def moved(rows: int) -> None:  # noqa: ARG001
            # by now the source has added up
            while waits_for and not self._unwanted:
                if waits_for[0].wait(_LOOK_SECONDS):
                    waits_for.clear()
            if self._unwanted:
                raise _UnwantedError

        wanted, error = work.wanted, None
        try:
            stages = self._stages(work, tables)
            for part in fill_stages(self.source, self.target, wanted.table, wanted.query, stages, moved=moved):
                work.parts.add(part)
        except (psycopg.Error, _UnwantedError) as failure:
            self.is_refused = isinstance(failure, psycopg.errors.InsufficientPrivilege)
            error = failure
        finally:
            work.parts.end(error or sys.exception())

    def _stages(self, work: _Work, tables: _StageTables) -> Iterator[tuple[str, int]]:
        """Empty staging tables, and how many bytes are to go into each."""
        table, size = work.wanted.table, _PART_BYTES if work.wanted.in_parts else sys.maxsize
        while True:
            name, is_there = tables.take(work.shape)
            work.stages.append(name)
            make = f"create unlogged table {name} ({stage_columns(table)}) with (autovacuum_enabled = off)"
            self.target.execute(raw(f"truncate {name}" if is_there else make))
            tables.is_made(name)
            yield name, size
            size *= 2


class _UnwantedError(Exception):
    """Nobody wants the rows any more."""


def _session(like: Connection[Any]) -> Connection[Any]:
    """Another session where one is, under settings that read and write values alike."""
    name = like.info.parameter_status("application_name")
    opened = connect(conninfo_of(like), application_name=f"{name}/ahead", autocommit=True)
    for setting, value in (READ_SETTINGS | READING | _OWN).items():
        opened.execute("select pg_catalog.set_config(%s, %s, false)", [setting, value])
    return opened
