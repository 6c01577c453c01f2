"""Lets Spark fill a Delta or Iceberg table: its tasks read, compute and write, and no row passes through this process.

What PostgreSQL reads travels as text that is the same for equal values, and becomes the table's types last. A change
is one MERGE, made by the connector of the table's format, whose jars the session must have.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import lru_cache
from typing import TYPE_CHECKING, Any, Literal, Protocol

import pyarrow as pa
from psycopg import Connection

from gdq.consumers.lake.files import ArrowDifference
from gdq.consumers.lake.open import open_lake
from gdq.consumers.lake.table import Lake
from gdq.consumers.lake.types import LakeColumn, lake_column, lake_columns, schema_of
from gdq.consumers.spark.jobs import SparkEngine, own_jobs, text_columns, weighed, worker_errors
from gdq.consumers.spark.join_engine import SparkViews
from gdq.consumers.spark.lake_types import NO_VALUE, as_text, ddl, from_text
from gdq.consumers.spark.source import register
from gdq.consumers.views.engine import Effort, Kind
from gdq.consumers.views.signals import Diverged
from gdq.consumers.views.snapshot_holder import SnapshotHolder
from gdq.consumers.views.target import StoredPosition, Target
from gdq.errors import GdqError, UnsupportedValue
from gdq.plan.spark.plan import SparkPlan
from gdq.plan.table import RefreshPlan
from gdq.typed.arrow import Column
from gdq.view.lake_name import LakeKind
from gdq.view.view import ViewInfo

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

    from gdq.consumers.refresh.view_refresh import ViewRefresh

_JARS = {"delta": "io.delta.tables.DeltaTable", "iceberg": "org.apache.iceberg.spark.SparkCatalog"}
_TOLD = re.compile(re.escape(NO_VALUE) + r"(.*?)!")
# Spark does not find the text of errors that a jar of another adds.
_UNKNOWN = re.compile(r"Cannot find main error class '(\w+)'")
_CONFLICT = re.compile(r"DELTA_CONCURRENT_|DELTA_METADATA_CHANGED|Concurrent\w+Exception|MetadataChangedException")


class CommitConflict(Exception):  # noqa: N818 (says what happened)
    """Another commit came before this one."""


@dataclass(frozen=True, slots=True)
class SparkDifference:
    """A Difference (consumers.views.difference) as frames of the table's types; c1, c2, ... are the view's columns.

    kind full:    `rows` are all rows
         replace: rows with one of `keys` (the columns `by` of the view, by number from 1) go, and `rows` come
         signed:  each of `rows`, none twice, has `image`, a text that is its own, and `w`, as often as it comes
    """

    kind: Literal["full", "replace", "signed"]
    columns: Sequence[LakeColumn]
    rows: DataFrame
    keys: DataFrame | None = None
    by: tuple[int, ...] = ()

    @property
    def schema(self) -> pa.Schema:
        """The columns of the table."""
        return schema_of(self.columns)

    @property
    def values(self) -> str:
        """The columns of a frame, for a list in SQL."""
        return ", ".join(f"c{n}" for n in range(1, len(self.columns) + 1))

    def named(self, rows: DataFrame) -> DataFrame:
        """Rows under the names of the view's columns."""
        return rows.selectExpr(*(f"c{n} as {quoted(column.name)}" for n, column in enumerate(self.columns, 1)))


class TableWriter(Protocol):
    """Writes into one table of a format: DeltaWriter or IcebergWriter."""

    def commit(self, change: SparkDifference, stored: StoredPosition | None, new: StoredPosition) -> int:
        """As Committing.commit()."""


@dataclass(slots=True)
class SparkLakeEngine:
    """One refresh of one view whose lake table Spark fills."""

    computing: SparkEngine | SparkViews
    writer: TableWriter
    lake: Lake
    columns: Sequence[LakeColumn]
    _stack: ExitStack
    _change: SparkDifference | None = field(default=None, init=False)
    _effort: Effort = field(default=Effort("none"), init=False)

    def compute(self, s0: str | None, changed: Mapping[str, str]) -> None:
        """Read and compute; the lake is not touched. Of changes the rows are kept by Spark, a full load is streamed."""
        if s0 is not None and not changed:
            return
        kind: Kind = "full" if s0 is None else "by-key" if self._by() else "incremental"
        self._effort = Effort(kind, weighed(self.computing.holder, changed, self.computing.choose))
        with _told(delta=s0 is not None):
            rows, keys = self._rows(s0, changed)
            if s0 is None:
                self._change = SparkDifference("full", self.columns, self._typed(_copies(rows)))
                return
            by = self._by() if keys is not None else ()
            if keys is not None:
                rows = self._typed(rows)
            else:
                image = ", ".join(f"c{n}" for n in range(1, len(self.columns) + 1))
                rows = self._typed(rows, f"to_json(struct({image}), map('ignoreNullFields', 'false')) as image", "w")
            rows = rows.persist()
            self._stack.callback(rows.unpersist)
            rows.count()
            self._change = SparkDifference("signed" if keys is None else "replace", self.columns, rows, keys, by)

    def effort(self) -> Effort:
        """What the refresh took."""
        return self._effort

    def commit(self, stored: StoredPosition | None, new: StoredPosition) -> int:
        """As Committing.commit()."""
        with _told(delta=False):
            if self._change is None:
                return self.lake.commit(ArrowDifference("none", schema_of(self.columns)), stored, new)
            return self.writer.commit(self._change, stored, new)

    @property
    def _spark(self) -> SparkSession:
        return self.computing.refresher.spark

    def _by(self) -> tuple[int, ...]:
        names = [column.name for column in self.columns]
        plan = self.computing.plan
        if not isinstance(plan, RefreshPlan) or plan.rows is None:
            return ()
        return tuple(names.index(key) + 1 for key in plan.merge.keys)

    def _rows(self, s0: str | None, changed: Mapping[str, str]) -> tuple[DataFrame, DataFrame | None]:
        """The rows as text, signed by w or (all, or those of the keys) without it, and the keys."""
        computing = self.computing
        if isinstance(computing, SparkEngine):
            data, keys = computing.frame(None if s0 is None else changed[computing.view.tables[0]])
            if s0 is None or computing.plan.rows is None:
                return data, None
            by = self._by()
            names = ", ".join(f"c{n} string" for n in by)
            return data, self._typed(self._spark.createDataFrame(keys, names), only=by)
        logs = None if s0 is None else computing.logs(changed)
        data, _ = self._stack.enter_context(computing.frame(logs))
        data.createOrReplaceTempView("gdq_joined")
        parts = []
        for number, branch in enumerate(computing.plan.branches):
            items = ", ".join(f"{item} as c{n}" for n, item in enumerate(branch.items, 1))
            where = f" where b = '{number}'" if len(computing.plan.branches) > 1 else ""
            parts.append(f"select {items}, w from gdq_joined{where}")
        values = ", ".join(f"c{n}" for n in range(1, len(self.columns) + 1))
        net = f"select {values}, sum(w) as w from ({' union all '.join(parts)}) group by {values} having sum(w) <> 0"
        return self._spark.sql(net), None

    def _typed(self, rows: DataFrame, *more: str, only: Sequence[int] = ()) -> DataFrame:
        """Columns c1, c2, ... of text as the table's types, and `more` of the frame's."""
        numbers = only or range(1, len(self.columns) + 1)
        return rows.selectExpr(*(f"{from_text(self.columns[n - 1], f'c{n}')} as c{n}" for n in numbers), *more)


@contextmanager
def spark_lake_engine(work: ViewRefresh, holder: SnapshotHolder) -> Iterator[SparkLakeEngine]:
    """The engine for a refresh; what it keeps goes with the block. GdqError when the session lacks the jars."""
    refresher, view, plan = work.refresher, work.view, work.plan
    assert view.lake is not None
    kind = view.lake.kind
    spark = refresher.spark
    _check_jars(spark, kind)

    def texts(connection: Connection[Any], columns: Sequence[tuple[str, int, str]]) -> list[Column]:
        plain = text_columns(connection, columns)
        return [as_text(lake_column(*column, kind), own) for column, own in zip(columns, plain, strict=True)]

    # of the target nothing is used
    place = (refresher.control, Target(view.view_name, view.source, view.target), view)
    computing: SparkEngine | SparkViews
    if isinstance(plan, RefreshPlan):
        computing = SparkEngine(refresher, holder, *place, plan, (), work.choose, texts)
    elif isinstance(plan, SparkPlan):
        computing = SparkViews(refresher, holder, *place, plan, (), work.choose, texts)
    else:
        raise AssertionError("the plan is not Spark's")
    with own_jobs(spark), ExitStack() as stack:
        lake = open_lake(view.lake, view.view_name, view.source)
        yield SparkLakeEngine(computing, _writer(spark, view), lake, lake_columns(work.columns, kind), stack)


def _writer(spark: SparkSession, view: ViewInfo) -> TableWriter:
    assert view.lake is not None
    if view.lake.kind == "delta":
        from gdq.consumers.spark.lake_delta import DeltaWriter  # noqa: PLC0415 (needs deltalake)

        return DeltaWriter(spark, view)
    from gdq.consumers.spark.lake_iceberg import IcebergWriter  # noqa: PLC0415 (needs pyiceberg)

    return IcebergWriter(spark, view)


# Kept from refresh to refresh: a catalog has connections of its own.
@lru_cache(maxsize=64)
def own_session(spark: SparkSession, settings: tuple[tuple[str, str], ...]) -> SparkSession:
    """A session for writers, whose settings and catalogs are nobody else's; it shares Spark's tasks and storage."""
    session = spark.newSession()
    machine: Any = spark._jvm
    # Spark looks for a source of that name in the active session and not in the one that it is to be known to
    machine.SparkSession.setActiveSession(session._jsparkSession)
    try:
        register(session)
    finally:
        machine.SparkSession.setActiveSession(spark._jsparkSession)
    for name, value in settings:
        session.conf.set(name, value)
    return session


def quoted(name: str) -> str:
    """A name as an identifier of Spark."""
    return "`" + name.replace("`", "``") + "`"


def copies_found(change: SparkDifference, table: str) -> str:
    """The SELECT of the rows that go, by image, and how many copies of each `table` holds."""
    same = same_row(change, "t", "s")
    return f"select s.image, count(*) as copies from {table} t join gdq_signed s on s.w < 0 and {same} group by s.image"


def same_row(change: SparkDifference, target: str, source: str) -> str:
    """The condition that a row of the table equals one of the frame: 0 and -0 are two values, NaN and NULL are one."""
    parts = []
    for n, column in enumerate(change.columns, 1):
        left, right = f"{target}.{quoted(column.name)}", f"{source}.c{n}"
        if pa.types.is_floating(column.arrow):
            left, right = f"cast({left} as string)", f"cast({right} as string)"
        parts.append(f"{left} <=> {right}")
    return " and ".join(parts)


def merge(session: SparkSession, change: SparkDifference, table: str) -> int:
    """Apply a change that is signed or replace to `table` by one MERGE; the rows deleted and inserted.

    Nothing is done where that is none. Diverged when rows that should go are not there.
    """
    if change.kind == "replace":
        assert change.keys is not None
        keys = {f"c{n}" for n in change.by}
        every = [f"c{n}" for n in range(1, len(change.columns) + 1)]
        listed = ", ".join(
            c if c in keys else f"cast(null as {ddl(change.columns[int(c[1:]) - 1])}) as {c}" for c in every
        )
        change.keys.distinct().createOrReplaceGlobalTempView("gdq_keys")
        change.rows.createOrReplaceGlobalTempView("gdq_rows")
        same = " and ".join(f"t.{quoted(change.columns[n - 1].name)} <=> s.c{n}" for n in change.by)
        went = session.sql(f"select count(*) from {table} t join global_temp.gdq_keys s on {same}").collect()[0][0]
        came = change.rows.count()
        source = (
            f"select true as gone, {listed} from global_temp.gdq_keys "
            f"union all select false, {change.values} from global_temp.gdq_rows"
        )
    else:
        change.rows.createOrReplaceGlobalTempView("gdq_rows")
        session.sql("select * from global_temp.gdq_rows").createOrReplaceTempView("gdq_signed")
        session.sql(copies_found(change, table)).createOrReplaceTempView("gdq_found")
        went, came = _expected(session)
        left = "coalesce(f.copies, 0) + s.w"
        source = (
            f"select true as gone, {change.values} from gdq_signed where w < 0 union all "
            f"select false, {change.values} from (select s.*, explode(sequence(1, int({left}))) from gdq_signed s "
            f"left join gdq_found f on f.image = s.image where {left} > 0)"
        )
        same = same_row(change, "t", "s")
    if not went + came:
        return 0
    names = ", ".join(quoted(column.name) for column in change.columns)
    values = ", ".join(f"s.c{n}" for n in range(1, len(change.columns) + 1))
    session.sql(
        f"merge into {table} t using ({source}) s on s.gone and {same} when matched then delete "
        f"when not matched and not s.gone then insert ({names}) values ({values})"
    )
    return int(went) + int(came)


def _expected(session: SparkSession) -> tuple[int, int]:
    """How many rows go and come; Diverged when not all that go are there."""
    (row,) = session.sql(
        "select coalesce(sum(-least(s.w, 0)), 0), coalesce(sum(greatest(s.w, 0)), 0), "
        "coalesce(sum(least(-least(s.w, 0), coalesce(f.copies, 0))), 0) "
        "from gdq_signed s left join gdq_found f on f.image = s.image"
    ).collect()
    if row[2] != row[0]:
        raise Diverged(f"{row[2]} of the {row[0]} rows that went were there")
    return row[0], row[1]


def _check_jars(spark: SparkSession, kind: LakeKind) -> None:
    machine: Any = spark._jvm
    loader = machine.java.lang.Thread.currentThread().getContextClassLoader()
    try:
        loader.loadClass(_JARS[kind])
    except Exception as error:
        if not type(error).__module__.startswith("py4j."):
            raise
        name = {"delta": "Delta Lake", "iceberg": "Iceberg"}[kind]
        raise GdqError(
            f"Spark has no jar of {name}: it cannot fill {kind} targets",
            hint="Start it with --packages, as docs/spark.md says.",
        ) from error


@contextmanager
def _told(*, delta: bool) -> Iterator[None]:
    """The errors of Spark in one line, and a value that the table cannot hold by the name of its column."""
    with worker_errors(delta=delta):
        try:
            yield
        except Exception as error:
            found, unknown = _TOLD.search(str(error)), _UNKNOWN.search(str(error))
            if unknown is not None:
                raise GdqError(f"Spark failed: {unknown[1]}") from error
            if found is None:
                raise
            raise UnsupportedValue(found[1], hint="Cast it to text in the view.") from error


@contextmanager
def conflicts() -> Iterator[None]:
    """CommitConflict for Spark's error of a commit that another one came before."""
    try:
        yield
    except Exception as error:
        if type(error).__module__.startswith(("pyspark.", "py4j.")) and _CONFLICT.search(str(error)):
            raise CommitConflict(str(error).splitlines()[0]) from error
        raise


def _copies(rows: DataFrame) -> DataFrame:
    """Rows as often as their weight says."""
    if "w" not in rows.columns:
        return rows
    return rows.selectExpr("*", "explode(sequence(1, int(w)))")
