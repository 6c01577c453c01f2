"""The change of a view as Spark frames, and the MERGE that writes it into a Delta or Iceberg table."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import lru_cache
from typing import TYPE_CHECKING, Any, Literal, Protocol

import pyarrow as pa

from gdq.consumers.lake.types import LakeColumn, lake_schema
from gdq.consumers.spark.jobs import spark_errors
from gdq.consumers.spark.lake_types import lake_type_ddl
from gdq.consumers.spark.source import register
from gdq.consumers.views.signals import Diverged
from gdq.consumers.views.target import StoredPosition

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

_CONFLICT = re.compile(r"DELTA_CONCURRENT_|DELTA_METADATA_CHANGED|Concurrent\w+Exception|MetadataChangedException")


class SparkCommitConflict(Exception):  # noqa: N818 (says what happened)
    """Another commit to the table came first."""


@dataclass(frozen=True, slots=True)
class SparkDifference:
    """A Difference (consumers.views.difference) as frames of the table's types; c1, c2, ... are the view's columns.

    kind full:    `rows` are all rows
         append:  insert `rows`
         replace: delete the rows with one of `keys` in each of these columns (number from 1), insert `rows`
         signed:  insert each row `w` times, or delete it if w < 0; no row comes twice, `image` is its text
    """

    kind: Literal["full", "append", "replace", "signed"]
    columns: Sequence[LakeColumn]
    rows: DataFrame
    keys: Mapping[int, DataFrame] = field(default_factory=dict)

    @property
    def schema(self) -> pa.Schema:
        """The table's columns."""
        return lake_schema(self.columns)

    @property
    def values(self) -> str:
        """The frame's columns as a list in SQL."""
        return ", ".join(f"c{n}" for n in range(1, len(self.columns) + 1))

    def named_rows(self, session: SparkSession) -> DataFrame:
        """The rows in another session, with the view's column names."""
        self.rows.createOrReplaceGlobalTempView("gdq_rows")
        rows = session.sql("select * from global_temp.gdq_rows")
        return rows.selectExpr(*(f"c{n} as {spark_quoted(column.name)}" for n, column in enumerate(self.columns, 1)))


class SparkTableWriter(Protocol):
    """Writes into one lake table: SparkDeltaWriter, SparkIcebergWriter or SparkParquetWriter.

    `session`: that of its statements.
    """

    session: SparkSession

    def rows(self) -> DataFrame:
        """The table's current rows, in the session."""

    def commit(self, change: SparkDifference, stored: StoredPosition | None, new: StoredPosition) -> int:
        """As CommittingEngine.commit()."""


# One session for all refreshes: a catalog opens its own connections.
@lru_cache(maxsize=64)
def writer_session(spark: SparkSession, settings: tuple[tuple[str, str], ...]) -> SparkSession:
    """A session for writers with its own settings and catalogs; it shares Spark's tasks and storage."""
    session = spark.newSession()
    machine: Any = spark._jvm
    # to register a source Spark looks at the active session, not at the one that register() is given
    machine.SparkSession.setActiveSession(session._jsparkSession)
    try:
        register(session)
    finally:
        machine.SparkSession.setActiveSession(spark._jsparkSession)
    for name, value in settings:
        session.conf.set(name, value)
    return session


def spark_quoted(name: str) -> str:
    """A name as an identifier of Spark."""
    return "`" + name.replace("`", "``") + "`"


def row_image(columns: int) -> str:
    """The column `image` of signed rows: the text of the columns c1, c2, ..., so many."""
    names = ", ".join(f"c{number}" for number in range(1, columns + 1))
    return f"to_json(struct({names}), map('ignoreNullFields', 'false')) as image"


def _copies_found_sql(change: SparkDifference, table: str) -> str:
    """SELECT of the rows to delete, by image, with the number of copies that `table` holds."""
    same = _same_row_sql(change, "t", "s")
    return f"select s.image, count(*) as copies from {table} t join gdq_signed s on s.w < 0 and {same} group by s.image"


def _same_row_sql(change: SparkDifference, target: str, source: str) -> str:
    """Condition that a table's row equals a frame's row: 0 and -0 differ, NaN equals NaN, NULL equals NULL."""
    parts = []
    for n, column in enumerate(change.columns, 1):
        left, right = f"{target}.{spark_quoted(column.name)}", f"{source}.c{n}"
        if pa.types.is_floating(column.arrow):
            left, right = f"cast({left} as string)", f"cast({right} as string)"
        parts.append(f"{left} <=> {right}")
    return " and ".join(parts)


def merge_into(session: SparkSession, change: SparkDifference, table: str) -> int:
    """Apply a change of kind signed or replace to `table` by one MERGE, or none without rows.

    Returns the rows deleted plus the rows inserted. Diverged if rows to delete are missing.
    """
    with ExitStack() as stack:
        if change.kind == "replace":
            went, source = _replaced(session, change, table, stack)
            came = change.rows.count()
            same = " and ".join(f"t.{spark_quoted(change.columns[n - 1].name)} <=> s.c{n}" for n in change.keys)
        else:
            went, came, source = _signed(session, change, table, stack)
            same = _same_row_sql(change, "t", "s")
        if not went + came:
            return 0
        names = ", ".join(spark_quoted(column.name) for column in change.columns)
        values = ", ".join(f"s.c{n}" for n in range(1, len(change.columns) + 1))
        session.sql(
            f"merge into {table} t using ({source}) s on s.gone and {same} when matched then delete "
            f"when not matched and not s.gone then insert ({names}) values ({values})"
        )
    return went + came


def _kept_view(session: SparkSession, name: str, query: str, stack: ExitStack) -> None:
    """A view of a query that reads the lake table once, though it is asked for twice, until the stack is closed."""
    rows = session.sql(query).persist()
    stack.callback(rows.unpersist)
    rows.createOrReplaceTempView(name)


def _signed(session: SparkSession, change: SparkDifference, table: str, stack: ExitStack) -> tuple[int, int, str]:
    """For signed rows: the numbers of rows to delete and to insert, and the MERGE's source.

    That deletes all copies of a row, and inserts those that stay.
    """
    change.rows.createOrReplaceGlobalTempView("gdq_rows")
    session.sql("select * from global_temp.gdq_rows").createOrReplaceTempView("gdq_signed")
    _kept_view(session, "gdq_found", _copies_found_sql(change, table), stack)
    went, came = _expected(session)
    left = "coalesce(f.copies, 0) + s.w"
    source = (
        f"select true as gone, {change.values} from gdq_signed where w < 0 union all "
        f"select false, {change.values} from (select s.*, explode(sequence(1, int({left}))) from gdq_signed s "
        f"left join gdq_found f on f.image = s.image where {left} > 0)"
    )
    return went, came, source


def _replaced(session: SparkSession, change: SparkDifference, table: str, stack: ExitStack) -> tuple[int, str]:
    """For a replace: the number of rows of `table` with its keys, and the MERGE's source (these keys, the new rows)."""
    names = {n: f"t.{spark_quoted(change.columns[n - 1].name)}" for n in change.keys}
    joins = []
    for n, keys in change.keys.items():
        keys.distinct().createOrReplaceGlobalTempView(f"gdq_keys_{n}")
        joins.append(f"left semi join global_temp.gdq_keys_{n} k{n} on {names[n]} <=> k{n}.c{n}")
    values = ", ".join(f"{name} as c{n}" for n, name in names.items())
    groups = ", ".join(names.values())
    held = f"select {values}, count(*) as copies from {table} t {' '.join(joins)} group by {groups}"
    _kept_view(session, "gdq_held", held, stack)
    change.rows.createOrReplaceGlobalTempView("gdq_rows")
    went = session.sql("select coalesce(sum(copies), 0) from gdq_held").collect()[0][0]
    listed = ", ".join(
        f"c{n}" if n in change.keys else f"cast(null as {lake_type_ddl(column)}) as c{n}"
        for n, column in enumerate(change.columns, 1)
    )
    source = (
        f"select true as gone, {listed} from gdq_held union all select false, {change.values} from global_temp.gdq_rows"
    )
    return int(went), source


def _expected(session: SparkSession) -> tuple[int, int]:
    """The numbers of rows to delete and to insert; Diverged if a row to delete is not in the table."""
    (row,) = session.sql(
        "select coalesce(sum(-least(s.w, 0)), 0), coalesce(sum(greatest(s.w, 0)), 0), "
        "coalesce(sum(least(-least(s.w, 0), coalesce(f.copies, 0))), 0) "
        "from gdq_signed s left join gdq_found f on f.image = s.image"
    ).collect()
    if row[2] != row[0]:
        raise Diverged(f"{row[2]} of the {row[0]} rows that went were there")
    return int(row[0]), int(row[1])


@contextmanager
def commit_conflicts() -> Iterator[None]:
    """Turn Spark's error of a conflicting commit into SparkCommitConflict."""
    try:
        yield
    except spark_errors() as error:
        if _CONFLICT.search(str(error)):
            raise SparkCommitConflict(str(error).splitlines()[0]) from error
        raise
