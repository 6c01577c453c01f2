"""Spark jobs of one refresh: they end with it, their errors become one line, their rows go to a staging table."""

from __future__ import annotations

import re
import secrets
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import psycopg
from psycopg import Connection

from gdq.call import scalar
from gdq.consumers.spark.stage import text_rows, write_stage
from gdq.consumers.spark.table_sql import images_held
from gdq.consumers.views.engine import EngineTask
from gdq.consumers.views.progress import Progress
from gdq.consumers.views.signals import NeedsFull, TableWanted
from gdq.consumers.views.snapshot_holder import SnapshotHolder
from gdq.consumers.views.target import Target
from gdq.errors import GdqError
from gdq.owner_sql import OwnerSql
from gdq.qualified_sql import qualified
from gdq.typed.arrow import ArrowColumn
from gdq.typed.pgtypes import ColumnType
from gdq.view.cost import rows_held
from gdq.view.table_schema import apply_view_settings
from gdq.view.view import ViewInfo

if TYPE_CHECKING:
    from pyspark import StatusTracker
    from pyspark.sql import DataFrame, SparkSession


# Size of the part of a table or a log that one task reads.
PARTITION_BYTES = 64 * 2**20
_JOB_PROPERTIES = ("spark.jobGroup.id", "spark.job.description", "spark.job.interruptOnCancel")
_TASKS_END_SECONDS = 30.0
_TOLD_SECONDS = 1.0
_ONE_AT_A_TIME = threading.RLock()
_WORKER_ERROR = re.compile(r"(?:psycopg|gdq)\.(?:errors\.)?(\w+): (.+)")
LONG_TYPE = ColumnType("int64", "bigint", "({c})::bigint")

# Turns described columns, (name, type oid, type) each, into columns that are read as text.
ColumnsAsText = Callable[[Connection[Any], Sequence[tuple[str, int, str]]], list[ArrowColumn]]


@dataclass(frozen=True, slots=True)
class StagedRows:
    """Rows that Spark computed: in this process (`rows`), or in the staging table `table`."""

    columns: list[str]
    rows: list[tuple[str | None, ...]]
    table: str | None


def weighed_log_images(holder: SnapshotHolder, changed: Mapping[str, str], choose: Callable[[int], None]) -> int | None:
    """Number of row images in the changed tables' log rows, None without changes; `choose` may raise NeedsFull."""
    if not changed:
        return None
    images = images_held(holder.connection, changed.values())
    choose(images)
    return images


def tell_computing(task: EngineTask, *, full: bool) -> None:
    """Tell that Spark computes, and for a full load about how many rows of tables its tasks will read."""
    if task.tell.watched:
        task.tell.expect(rows_held(task.holder.connection, task.view.tables) if full else None, "computing")
    task.tell("computing")


def stage_job_rows(data: DataFrame, place: tuple[Connection[Any], Target, str | None], dsn: str) -> StagedRows:
    """Compute `data`. Spark's tasks write it into the staging table of `place`; without one this process gets it."""
    output, target, stage = place
    if stage is None:
        return StagedRows(data.columns, text_rows(data), None)
    with output.transaction():
        target.create_stage(output, stage, data.columns)
    write_stage(data, dsn, stage.partition(".")[2].strip('"'), elsewhere=not target.in_source)
    return StagedRows(data.columns, [], stage)


@dataclass(slots=True)
class OwnJobs:
    """Work of the jobs of a block, known after its end: the rows that their tasks got from the server."""

    rows_read: int | None = None


@contextmanager
def own_jobs(spark: SparkSession, progress: Progress | None = None) -> Iterator[OwnJobs]:
    """Run the block's Spark jobs so that no task outlives it. One thread of the process at a time may be in the block.

    No task may start after the held snapshot is gone. But Spark leaves tasks behind: a join with an empty side returns
    while the other side is still read, and when one stage fails, the stages beside it go on. One thread at a time,
    because refreshes share the session's settings and the names of temporary views. `progress` is told, from a thread
    of its own, the rows that the tasks have read.
    """
    with _ONE_AT_A_TIME:
        context, group = spark.sparkContext, f"gdq {secrets.token_hex(8)}"
        outer = {name: context.getLocalProperty(name) for name in _JOB_PROPERTIES}
        context.setJobGroup(group, "gdq refresh", interruptOnCancel=True)
        jobs = OwnJobs()
        try:
            with _told_rows(spark, group, progress):
                yield jobs
        finally:
            for name, value in outer.items():
                context.setLocalProperty(name, value)  # type: ignore[arg-type]  # None takes it away
            context.cancelJobGroup(group)
            tracker = context.statusTracker()
            is_running = partial(_is_running, tracker)
            # the tracker learns of a job some time after its tasks have started
            _all_told(spark)
            # a task that still runs at the deadline does no harm: it has its snapshot, and its rows are not used
            deadline = time.monotonic() + _TASKS_END_SECONDS
            while any(map(is_running, tracker.getJobIdsForGroup(group))) and time.monotonic() < deadline:
                time.sleep(0.01)
        if _all_told(spark):
            jobs.rows_read = _rows_read(spark, group)


@contextmanager
def _told_rows(spark: SparkSession, group: str, progress: Progress | None) -> Iterator[None]:
    """Tell the rows that the tasks of a job group have read, every second until the block ends."""
    if progress is None or not progress.watched:
        yield
        return
    ended = threading.Event()

    def tell() -> None:
        # what cannot be told is left out: it makes no load fail
        with suppress(Exception):
            over = False
            while not over:
                over = ended.wait(_TOLD_SECONDS)
                if over:
                    _all_told(spark)
                rows = _rows_read(spark, group)
                if rows:
                    progress.at(rows)

    thread = threading.Thread(target=tell, name="gdq spark progress", daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()


def _rows_read(spark: SparkSession, group: str) -> int | None:
    """Input records of all stages of a group's jobs, as far as Spark has counted; None if it does not."""
    from py4j.protocol import Py4JError  # noqa: PLC0415 (comes with pyspark)

    tracker, context = spark.sparkContext.statusTracker(), spark.sparkContext._jsc.sc()
    infos = [tracker.getJobInfo(job) for job in tracker.getJobIdsForGroup(group)]
    stages = {stage for info in infos if info is not None for stage in info.stageIds}
    try:
        return sum(int(context.statusStore().lastStageAttempt(stage).inputRecords()) for stage in stages)
    except Py4JError:
        return None


def _all_told(spark: SparkSession) -> bool:
    """Wait until Spark's listeners have received all events; False if they did not in time."""
    from py4j.protocol import Py4JError  # noqa: PLC0415 (comes with pyspark)

    try:
        spark.sparkContext._jsc.sc().listenerBus().waitUntilEmpty()
    except Py4JError:
        return False
    return True


def _is_running(tracker: StatusTracker, job: int) -> bool:
    """True if the job or one of its tasks still runs."""
    info = tracker.getJobInfo(job)
    if info is None:
        return False
    stages = [tracker.getStageInfo(stage) for stage in info.stageIds]
    return info.status == "RUNNING" or any(stage is not None and stage.numActiveTasks > 0 for stage in stages)


def spark_errors() -> tuple[type[Exception], ...]:
    """The classes of the errors that Spark and its way to the Java machine raise."""
    from py4j.protocol import Py4JError  # noqa: PLC0415 (comes with pyspark)
    from pyspark.errors import PySparkException  # noqa: PLC0415 (half a gigabyte of package)

    return PySparkException, Py4JError


@contextmanager
def worker_errors(*, delta: bool) -> Iterator[None]:
    """Turn errors of Spark and its workers into one line; TableWanted when a worker must not wait for its table.

    Row images in a log may be gone from the table and still raise, say, a division by zero. So an error in the data of
    a `delta` raises NeedsFull: the table's own rows decide.
    """
    try:
        yield
    except spark_errors() as error:
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
    """True if Spark failed because Ctrl-C cancelled its jobs: its error hides the KeyboardInterrupt."""
    while error is not None and not isinstance(error, KeyboardInterrupt):
        error = error.__context__
    return error is not None


def text_columns(connection: Connection[Any], described: Sequence[tuple[str, int, str]]) -> list[ArrowColumn]:
    """Columns for (name, type oid, type) each that are read as PostgreSQL's text."""
    query = qualified("""select t.oid, pg_catalog.format('pg_catalog.textin(%%I.%%I({c}))', n.nspname, p.proname)
                 from pg_catalog.pg_type t join pg_catalog.pg_proc p on p.oid = t.typoutput
                 join pg_catalog.pg_namespace n on n.oid = p.pronamespace where t.oid = any (%s::oid[])""")
    outputs = dict(connection.execute(query, [[oid for _, oid, _ in described]]).fetchall())
    return [ArrowColumn(name, ColumnType("string", "string", outputs[oid])) for name, oid, _ in described]


def as_owner(connection: Connection[Any], view: ViewInfo, statements: Sequence[str]) -> list[str]:
    """SELECTs for Spark's tasks, whose code runs as the view's owner there; `connection` leads to the tables."""
    if view.acts_as is None:
        return list(statements)
    with connection.transaction(force_rollback=True):
        apply_view_settings(connection, view.settings)
        owned = OwnerSql(connection, view.acts_as)
        return [owned.select(statement) for statement in statements]


def log_bytes(holder: SnapshotHolder, view: ViewInfo) -> int:
    """Bytes in the log segments of a view's tables: the most that an incremental refresh reads of logs."""
    query = qualified("""select coalesce(sum(pg_catalog.pg_relation_size(s)), 0)::bigint
                 from gdq.log_segments(%s, %s::text[]::pg_catalog.regclass[]) s""")
    return int(scalar(holder.connection, query, view.queue_name, view.tables) or 0)
