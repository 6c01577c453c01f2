"""Jobs of Apache Spark for a refresh: none outlives it, their errors are one line, their rows go to a staging table."""

from __future__ import annotations

import re
import secrets
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import psycopg
from psycopg import Connection

from gdq.call import scalar
from gdq.consumers.spark.stage import text_rows, write_stage
from gdq.consumers.spark.table_sql import images_held
from gdq.consumers.views.signals import NeedsFull, TableWanted
from gdq.consumers.views.snapshot_holder import SnapshotHolder
from gdq.consumers.views.target import Target
from gdq.errors import GdqError
from gdq.typed.arrow import Column
from gdq.typed.pgtypes import ColumnType
from gdq.view.view import ViewInfo

if TYPE_CHECKING:
    from pyspark import StatusTracker
    from pyspark.sql import DataFrame, SparkSession


# The part of a table or a log that one task reads.
PARTITION_BYTES = 64 * 2**20
_JOB_PROPERTIES = ("spark.jobGroup.id", "spark.job.description", "spark.job.interruptOnCancel")
_TASKS_END_SECONDS = 30.0
_ONE_AT_A_TIME = threading.RLock()
_WORKER_ERROR = re.compile(r"(?:psycopg|gdq)\.(?:errors\.)?(\w+): (.+)")
LONG = ColumnType("int64", "bigint", "({c})::bigint")

# How columns, (name, type oid, type) each, are read as text.
Texts = Callable[[Connection[Any], Sequence[tuple[str, int, str]]], list[Column]]


@dataclass(frozen=True, slots=True)
class Staged:
    """The rows that Spark has computed, with their columns, or the table into which Spark wrote them."""

    columns: list[str]
    rows: list[tuple[str | None, ...]]
    table: str | None


def weighed(holder: SnapshotHolder, changed: Mapping[str, str], choose: Callable[[int], None]) -> int | None:
    """How many images of rows the logs hold of what changed, for a choice that may raise NeedsFull; None of nothing."""
    if not changed:
        return None
    images = images_held(holder.connection, changed.values())
    choose(images)
    return images


def put(data: DataFrame, place: tuple[Connection[Any], Target, str | None], dsn: str) -> Staged:
    """Compute `data` into the staging table of `place`, written by Spark's tasks, or without one into this process."""
    output, target, stage = place
    if stage is None:
        return Staged(data.columns, text_rows(data), None)
    with output.transaction():
        target.create_stage(output, stage, data.columns)
    write_stage(data, dsn, stage.partition(".")[2].strip('"'))
    return Staged(data.columns, [], stage)


@dataclass(slots=True)
class Jobs:
    """What the jobs of a block did, once it has ended: the rows that their tasks got from the server."""

    rows_read: int | None = None


@contextmanager
def own_jobs(spark: SparkSession) -> Iterator[Jobs]:
    """Let no task of the jobs in this block outlive it, and no two threads of this process be in such a block at once.

    No task may start when the held snapshot is gone. An action returns once it has its result: a stage that turned
    out not to matter, since what it was to be joined with is empty, goes on without it; so do the stages beside one
    that failed. The names of the temporary views and the settings of the session are one refresh's at a time.
    """
    with _ONE_AT_A_TIME:
        yield from _own_jobs(spark)


def _own_jobs(spark: SparkSession) -> Iterator[Jobs]:
    """As own_jobs(), for the thread whose turn it is."""
    context, group = spark.sparkContext, f"gdq {secrets.token_hex(8)}"
    outer = {name: context.getLocalProperty(name) for name in _JOB_PROPERTIES}
    context.setJobGroup(group, "gdq refresh", interruptOnCancel=True)
    jobs = Jobs()
    try:
        yield jobs
    finally:
        for name, value in outer.items():
            context.setLocalProperty(name, value)  # type: ignore[arg-type]  # None takes it away
        context.cancelJobGroup(group)
        tracker = context.statusTracker()
        # the tracker hears of a job some time after its tasks have started
        _all_told(spark)
        # a task that does not end reads by a snapshot that it has already, and what it reads counts for nothing
        deadline = time.monotonic() + _TASKS_END_SECONDS
        while any(map(partial(_is_running, tracker), tracker.getJobIdsForGroup(group))) and time.monotonic() < deadline:
            time.sleep(0.01)
    jobs.rows_read = _rows_read(spark, tracker.getJobIdsForGroup(group))


def _rows_read(spark: SparkSession, jobs: Iterable[int]) -> int | None:
    """What Spark counted in the stages of these jobs; None where it does not tell."""
    from py4j.protocol import Py4JError  # noqa: PLC0415 (comes with pyspark)

    tracker, context = spark.sparkContext.statusTracker(), spark.sparkContext._jsc.sc()
    infos = [tracker.getJobInfo(job) for job in jobs]
    stages = {stage for info in infos if info is not None for stage in info.stageIds}
    if not _all_told(spark):
        return None
    try:
        return sum(int(context.statusStore().lastStageAttempt(stage).inputRecords()) for stage in stages)
    except Py4JError:
        return None


def _all_told(spark: SparkSession) -> bool:
    """Wait until Spark's own listeners have heard of all that was; False where they do not tell in time."""
    from py4j.protocol import Py4JError  # noqa: PLC0415 (comes with pyspark)

    try:
        spark.sparkContext._jsc.sc().listenerBus().waitUntilEmpty()
    except Py4JError:
        return False
    return True


def _is_running(tracker: StatusTracker, job: int) -> bool:
    """Whether a job or a task of it has not ended."""
    info = tracker.getJobInfo(job)
    if info is None:
        return False
    stages = [tracker.getStageInfo(stage) for stage in info.stageIds]
    return info.status == "RUNNING" or any(stage is not None and stage.numActiveTasks > 0 for stage in stages)


@contextmanager
def worker_errors(*, delta: bool) -> Iterator[None]:
    """The errors of Spark and its workers in one line; TableWanted when a worker must not wait for its table.

    An image that is gone again may raise what no row of the table does, a division by zero; then the table decides:
    NeedsFull when a `delta` is read.
    """
    try:
        yield
    except Exception as error:
        if not type(error).__module__.startswith(("pyspark.", "py4j.")):
            raise
        if _was_interrupted(error):
            raise KeyboardInterrupt from error
        cause = _WORKER_ERROR.search(str(error))
        if cause is None:
            raise GdqError(f"Spark failed: {str(error).strip().splitlines()[0]}") from error
        kind = getattr(psycopg.errors, cause[1], None)
        if kind is psycopg.errors.LockNotAvailable:
            raise TableWanted(cause[2]) from error
        if delta and kind is not None and issubclass(kind, psycopg.DataError):
            raise NeedsFull(f"a changed row cannot be computed: {cause[2]}") from error
        raise GdqError(cause[2]) from error


def _was_interrupted(error: BaseException | None) -> bool:
    """Whether Spark failed since Ctrl-C has cancelled its jobs: that error takes the place of KeyboardInterrupt."""
    while error is not None and not isinstance(error, KeyboardInterrupt):
        error = error.__context__
    return error is not None


def text_columns(connection: Connection[Any], described: Sequence[tuple[str, int, str]]) -> list[Column]:
    """Columns, (name, type oid, type) each, that are read as PostgreSQL's text."""
    query = """select t.oid, pg_catalog.format('pg_catalog.textin(%%I.%%I({c}))', n.nspname, p.proname)
                 from pg_catalog.pg_type t join pg_catalog.pg_proc p on p.oid = t.typoutput
                 join pg_catalog.pg_namespace n on n.oid = p.pronamespace where t.oid = any (%s::oid[])"""
    outputs = dict(connection.execute(query, [[oid for _, oid, _ in described]]).fetchall())
    return [Column(name, ColumnType("string", "string", outputs[oid])) for name, oid, _ in described]


def log_bytes(holder: SnapshotHolder, view: ViewInfo) -> int:
    """The size of the log segments of a view's tables: a refresh from changes reads no more of them."""
    query = """select coalesce(sum(pg_catalog.pg_relation_size(s)), 0)::bigint
                 from gdq.log_segments(%s, %s::text[]::pg_catalog.regclass[]) s"""
    return int(scalar(holder.connection, query, view.queue_name, view.tables) or 0)
