"""Engine that fills a Delta or Iceberg table with Spark: its tasks read, compute and write.

Values travel as text that is equal for equal values, and get the table's types last. A change is one MERGE by the
connector of the table's format; the session needs its jars.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from psycopg import Connection

from gdq.consumers.lake.files import ArrowDifference
from gdq.consumers.lake.open import open_lake
from gdq.consumers.lake.table import LakeTable
from gdq.consumers.lake.types import LakeColumn, lake_column, lake_columns, lake_schema
from gdq.consumers.spark.jobs import own_jobs, spark_errors, tell_computing, text_columns, worker_errors
from gdq.consumers.spark.join_engine import SparkJoinEngine
from gdq.consumers.spark.key_statements import KeyStatements
from gdq.consumers.spark.lake_merge import SparkDifference, SparkTableWriter, row_image
from gdq.consumers.spark.lake_rows import JoinedLakeRows, KeyLakeRows
from gdq.consumers.spark.lake_types import NO_VALUE, lake_type_as_text, lake_type_from_text
from gdq.consumers.spark.session import SparkRun
from gdq.consumers.views.computation import Computation
from gdq.consumers.views.engine import EngineEffort, EngineTask
from gdq.consumers.views.target import StoredPosition, Target
from gdq.consumers.views.target_rows import TargetRows
from gdq.errors import GdqError, UnsupportedValue
from gdq.plan.spark.keys import SparkKeyPlan
from gdq.plan.spark.plan import SparkPlan
from gdq.typed.arrow import ArrowColumn
from gdq.view.lake_name import LakeKind, LakeName

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

_JARS = {"delta": "io.delta.tables.DeltaTable", "iceberg": "org.apache.iceberg.spark.SparkCatalog"}
_TOLD = re.compile(re.escape(NO_VALUE) + r"(.*?)!")
# Spark has no message text for error classes that another project's jar adds.
_UNKNOWN = re.compile(r"Cannot find main error class '(\w+)'")


@dataclass(slots=True)
class SparkLakeEngine:
    """Engine of one refresh of one view whose lake table Spark fills."""

    task: EngineTask
    source: JoinedLakeRows | KeyLakeRows
    writer: SparkTableWriter
    lake: LakeTable
    columns: Sequence[LakeColumn]
    computation: Computation | None
    _stack: ExitStack
    _change: SparkDifference | None = field(default=None, init=False)

    def compute(self, s0: str | None, changed: Mapping[str, str]) -> None:
        """Read and compute without touching the lake. Spark caches changed rows; a full load is streamed at commit."""
        tell_computing(self.task, full=s0 is None)
        if s0 is not None and not changed:
            return
        with lake_errors(delta=s0 is not None):
            found = self.source.rows(None if s0 is None else changed)
            if found is None:
                return
            if found.kind == "full":
                self._change = SparkDifference("full", self.columns, self._typed(row_copies(found.frame)))
                return
            more: list[str] = []
            if found.kind == "signed":
                more = [row_image(len(self.columns)), "w"]
            rows = self._typed(found.frame, *more).persist()
            self._stack.callback(rows.unpersist)
            rows.count()
            keys = {n: self._typed(frame, only=[n]) for n, frame in found.keys.items()}
            self._change = SparkDifference(found.kind, self.columns, rows, keys)

    def effort(self) -> EngineEffort:
        """The work of the refresh."""
        return self.source.effort()

    def commit(self, stored: StoredPosition | None, new: StoredPosition) -> int:
        """As CommittingEngine.commit()."""
        with lake_errors(delta=False):
            if self._change is None:
                return self.lake.commit(ArrowDifference("none", lake_schema(self.columns)), stored, new)
            return self.writer.commit(self._change, stored, new)

    def _typed(self, rows: DataFrame, *more: str, only: Sequence[int] = ()) -> DataFrame:
        """Text columns c1, c2, ... cast to the table's types, plus the expressions `more`."""
        numbers = only or range(1, len(self.columns) + 1)
        return rows.selectExpr(
            *(f"{lake_type_from_text(self.columns[n - 1], f'c{n}')} as c{n}" for n in numbers), *more
        )


@contextmanager
def spark_lake_engine(run: SparkRun, task: EngineTask, computation: Computation | None) -> Iterator[SparkLakeEngine]:
    """The engine for a refresh; its cached frames are freed after the block. GdqError if Spark lacks the jars.

    `computation` nets the changes and finds the keys of a view that Spark does not join.
    """
    spark, view, plan = run.spark, task.view, task.plan
    assert view.lake is not None
    kind = view.lake.kind
    check_jars(spark, kind)

    def texts(connection: Connection[Any], columns: Sequence[tuple[str, int, str]]) -> list[ArrowColumn]:
        plain = text_columns(connection, columns)
        return [lake_type_as_text(lake_column(*column, kind), own) for column, own in zip(columns, plain, strict=True)]

    with own_jobs(spark, task.tell), ExitStack() as stack:
        source: JoinedLakeRows | KeyLakeRows
        if isinstance(plan, SparkPlan):
            # this target only names the view: the rows go to the lake
            place = TargetRows(task.holder.connection, Target(view.view_name, view.source, view.target), (), task.tell)
            source = JoinedLakeRows(SparkJoinEngine(lambda: run, task, plan, place, texts), stack, len(task.columns))
        else:
            assert isinstance(plan, SparkKeyPlan)
            assert computation is not None
            source = KeyLakeRows(KeyStatements(computation, run), plan, texts)
        lake = open_lake(view.lake, f"view {view.view_name}", view.source)
        columns = lake_columns(task.columns, kind)
        writer = lake_writer(spark, view.lake, f"view {view.view_name}", view.source)
        yield SparkLakeEngine(task, source, writer, lake, columns, computation, stack)


def lake_writer(spark: SparkSession, name: LakeName, owner: str, source: str) -> SparkTableWriter:
    """The writer of a lake table; `owner` and `source` as in open_lake()."""
    if name.kind == "parquet":
        from gdq.consumers.spark.lake_parquet import SparkParquetWriter  # noqa: PLC0415 (needs pyarrow alone)

        return SparkParquetWriter(spark, name, owner, source)
    if name.kind == "delta":
        from gdq.consumers.spark.lake_delta import SparkDeltaWriter  # noqa: PLC0415 (needs deltalake)

        return SparkDeltaWriter(spark, name, owner, source)
    from gdq.consumers.spark.lake_iceberg import SparkIcebergWriter  # noqa: PLC0415 (needs pyiceberg)

    return SparkIcebergWriter(spark, name, owner, source)


def check_jars(spark: SparkSession, kind: LakeKind) -> None:
    """GdqError if Spark lacks the jars of a format."""
    if kind not in _JARS:
        return
    machine: Any = spark._jvm
    loader = machine.java.lang.Thread.currentThread().getContextClassLoader()
    try:
        loader.loadClass(_JARS[kind])
    except spark_errors() as error:
        name = {"delta": "Delta Lake", "iceberg": "Iceberg"}[kind]
        raise GdqError(
            f"Spark has no jar of {name}: it cannot fill {kind} targets",
            hint="Start it with --packages, as `gdq docs spark` says.",
        ) from error


@contextmanager
def lake_errors(*, delta: bool, cure: str = "Cast it to text in the view.") -> Iterator[None]:
    """Turn Spark's errors into one line; UnsupportedValue names the column of a value that the table cannot hold.

    `cure`: what helps then.
    """
    with worker_errors(delta=delta):
        try:
            yield
        except Exception as error:
            found, unknown = _TOLD.search(str(error)), _UNKNOWN.search(str(error))
            if unknown is not None:
                raise GdqError(f"Spark failed: {unknown[1]}") from error
            if found is None:
                raise
            raise UnsupportedValue(found[1], hint=cure) from error


def row_copies(rows: DataFrame) -> DataFrame:
    """Each row repeated by its weight."""
    if "w" not in rows.columns:
        return rows
    return rows.selectExpr("*", "explode(sequence(1, int(w)))")
