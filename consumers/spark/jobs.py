"""Computes a view's rows with Apache Spark and merges them into the target: a projection or a GROUP BY of one table."""

from __future__ import annotations

import re
import secrets
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

import psycopg
from psycopg import Connection
from psycopg.rows import scalar_row

from gdq.consumers.spark.session import SparkRun
from gdq.consumers.spark.source import read_statements
from gdq.consumers.spark.stage import text_rows, write_stage
from gdq.consumers.spark.table_sql import base, block_ranges, images_held, key_condition, split_log_rows, table_bytes
from gdq.consumers.views.change_source import log_columns, weighted
from gdq.consumers.views.engine import Effort, Kind, Task
from gdq.consumers.views.signals import NeedsFull, TableWanted
from gdq.consumers.views.snapshot_holder import SnapshotHolder
from gdq.consumers.views.target import Target, TargetRows
from gdq.errors import GdqError
from gdq.plan.table import Read, RefreshPlan
from gdq.typed.arrow import LOG_SETTINGS, Column, select_sql
from gdq.typed.pgtypes import READ_SETTINGS, ColumnType
from gdq.view.table_schema import apply_settings, describe, load_schema
from gdq.view.target_merge import Merge
from gdq.view.view import ViewInfo

if TYPE_CHECKING:
    from pyspark import StatusTracker
    from pyspark.sql import DataFrame, SparkSession


_KEYS_MAX = 200_000
_KEYS_EACH = 10_000
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
    """What Spark has computed: columns and rows, or the table where it wrote them; the touched keys of a recompute."""

    columns: list[str]
    rows: list[tuple[str | None, ...]]
    table: str | None
    keys: list[tuple[str | None, ...]]


@dataclass(slots=True)
class SparkEngine:
    """One refresh of one view by Spark, whose tasks read what the snapshot holder sees."""

    run: SparkRun
    task: Task
    plan: RefreshPlan
    place: TargetRows
    texts: Texts = field(default_factory=lambda: text_columns)
    _staged: Staged | None = field(default=None, init=False)
    _effort: Effort = field(default=Effort("none"), init=False)

    def compute(self, s0: str | None, changed: Mapping[str, str]) -> None:
        """Let Spark compute, from the changes since s0 or (None) from the whole table, and stage the result."""
        self.task.tell("computing", 0)
        if s0 is not None and not changed:
            return
        kind: Kind = "full" if s0 is None else "incremental" if self.plan.rows is None else "by-key"
        delta_rows = weighed(self.task.holder, changed, self.task.choose)
        with worker_errors(delta=s0 is not None), own_jobs(self.run.spark) as jobs:
            self._staged = self._stage(None if s0 is None else changed[self.task.view.tables[0]])
        self._effort = Effort(kind, delta_rows, jobs.rows_read)

    def effort(self) -> Effort:
        """What the refresh took."""
        return self._effort

    def apply(self, s0: str | None, changed: Mapping[str, str]) -> int:  # noqa: ARG002 (what changed is staged)
        self.task.tell("writing", 0)
        staged = self._staged
        if staged is None:
            return 0
        apply_settings(self.place.output, READ_SETTINGS | self.task.view.settings)
        table = staged.table or self.place.target.temporary_stage(self.place.output, staged.columns, staged.rows)
        merge = Merge(self.place.output, self.place.target, self.plan, self.place.types, table)
        return merge.full() if s0 is None else merge.difference(staged.keys)

    def _stage(self, rows: str | None) -> Staged:
        """Let Spark compute, from these log rows or (None) from the whole table, and write the staging table."""
        data, keys = self.frame(rows)
        return self._write(data, keys, full=rows is None)

    def frame(self, rows: str | None) -> tuple[DataFrame, list[tuple[str | None, ...]]]:
        """What Spark is to compute, from these log rows or (None) from the whole table; the touched keys."""
        plan = self.plan
        if rows is None and plan.rows is not None:
            return self._read_rows(None), []
        data = self._compute(rows)
        if plan.rows is None:
            return data, []
        keys = [tuple(row) for row in data.limit(_KEYS_MAX + 1).collect()]
        if len(keys) > _KEYS_MAX:
            raise NeedsFull(f"more than {_KEYS_MAX} keys changed")
        return self._read_rows(keys), keys

    def _compute(self, rows: str | None) -> DataFrame:
        """The plan's Spark statement over these log rows, or over the whole table as one."""
        queue = self.task.view.queue_name
        if rows is None:
            ranges = block_ranges(self.task.holder.connection, self.task.view.tables[0], PARTITION_BYTES)
            relations = [base(self.task.view.tables[0], part) for part in ranges]
        else:
            columns = log_columns(self.task.holder.connection, queue, self.task.view.tables[0])
            parts = split_log_rows(self.task.holder.connection, queue, self.task.view.tables[0], rows, PARTITION_BYTES)
            relations = [weighted(part, columns) for part in parts]
        self._read(self.plan.delta, relations, log=rows is not None).createOrReplaceTempView("delta")
        return self.run.spark.sql(self.plan.compute.sql)

    def _read_rows(self, keys: Sequence[tuple[str | None, ...]] | None) -> DataFrame:
        """The rows of the view for these keys, or (None) all of them."""
        read = self.plan.rows
        if read is None:
            raise AssertionError("the plan recomputes nothing")
        relation = base(self.task.view.tables[0])
        if keys is None:
            if not read.group:
                parts = block_ranges(self.task.holder.connection, self.task.view.tables[0], PARTITION_BYTES)
                return self._read(read, [base(self.task.view.tables[0], part) for part in parts])
            return self._read(read, [relation])
        schema = load_schema(self.task.holder.connection, self.task.view.queue_name, self.task.view.tables[0])
        columns = [(column.name, column.type) for name in read.keys if (column := schema.column(name))]
        chunks = [keys[n : n + _KEYS_EACH] for n in range(0, len(keys), _KEYS_EACH)] or [[]]
        conditions = [key_condition(read.alias, columns, chunk) for chunk in chunks]
        return self._read(read, [relation], conditions=conditions)

    def _read(
        self,
        read: Read,
        relations: Sequence[str],
        *,
        conditions: Sequence[str] = ("",),
        log: bool = False,
    ) -> DataFrame:
        """A reading statement of the plan as a DataFrame, one partition for each relation and condition."""
        columns = self._columns(self.task.holder.connection, read)
        queries = [read.render(relation, condition) for relation in relations for condition in conditions]
        settings = (LOG_SETTINGS if log else READ_SETTINGS) | self.task.view.settings
        return read_statements(
            self.run.spark,
            self.run.worker_dsn,
            [select_sql(f"({query}) as q", columns) for query in queries],
            columns,
            settings=settings,
            snapshot=self.task.holder.exported,
        )

    def _columns(self, connection: Connection[Any], read: Read) -> list[Column]:
        """How the columns of a statement travel: numbers that Spark adds as such, all else as PostgreSQL's text."""
        numbers = {column.name: column.spark for column in self.plan.merge.state} | {"w": "bigint"}
        described = describe(connection, read.render(base(self.task.view.tables[0])), self.task.view.settings)
        columns = []
        for column in self.texts(connection, described):
            spark = numbers.get(column.source)
            if spark is None:
                columns.append(column)
            elif spark == "bigint":
                columns.append(Column(column.source, LONG))
            else:
                arrow = spark.replace("decimal", "decimal128").replace(",", ", ")
                columns.append(Column(column.source, ColumnType(arrow, spark, "({c})::text")))
        return columns

    def _write(self, data: DataFrame, keys: list[tuple[str | None, ...]], *, full: bool) -> Staged:
        if full:
            size = table_bytes(self.task.holder.connection, self.task.view.tables[0])[1]
        else:
            size = log_bytes(self.task.holder, self.task.view)
        dsn = self.run.worker_dsn if self.task.view.target_dsn is None else self.task.view.target_dsn
        stage = self.place.target.stage(secrets.token_hex(4)) if size > self.run.driver_bytes else None
        return put(data, (self.place.output, self.place.target, stage), dsn, keys)


def weighed(holder: SnapshotHolder, changed: Mapping[str, str], choose: Callable[[int], None]) -> int | None:
    """How many images of rows the logs hold of what changed, for a choice that may raise NeedsFull; None of nothing."""
    if not changed:
        return None
    images = images_held(holder.connection, changed.values())
    choose(images)
    return images


def put(
    data: DataFrame,
    place: tuple[Connection[Any], Target, str | None],
    dsn: str,
    keys: list[tuple[str | None, ...]],
) -> Staged:
    """Compute `data` into the staging table of `place`, written by Spark's tasks, or without one into this process."""
    output, target, stage = place
    if stage is None:
        return Staged(data.columns, text_rows(data), None, keys)
    with output.transaction():
        target.create_stage(output, stage, data.columns)
    write_stage(data, dsn, stage.partition(".")[2].strip('"'))
    return Staged(data.columns, [], stage, keys)


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
    with holder.connection.cursor(row_factory=scalar_row) as cursor:
        return int(cursor.execute(query, [view.queue_name, view.tables]).fetchone() or 0)
