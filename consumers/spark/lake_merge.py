"""A difference as Spark has it, and the MERGE that writes it into a Delta or Iceberg table."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import lru_cache
from typing import TYPE_CHECKING, Any, Literal, Protocol

import pyarrow as pa

from gdq.consumers.lake.types import LakeColumn, schema_of
from gdq.consumers.spark.lake_types import ddl
from gdq.consumers.spark.source import register
from gdq.consumers.views.signals import Diverged
from gdq.consumers.views.target import StoredPosition

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

_CONFLICT = re.compile(r"DELTA_CONCURRENT_|DELTA_METADATA_CHANGED|Concurrent\w+Exception|MetadataChangedException")


class CommitConflict(Exception):  # noqa: N818 (says what happened)
    """Another commit came before this one."""


@dataclass(frozen=True, slots=True)
class SparkDifference:
    """A Difference (consumers.views.difference) as frames of the table's types; c1, c2, ... are the view's columns.

    kind full:    `rows` are all rows
         replace: rows that have one of `keys` in each of these columns (number from 1) go, and `rows` come
         signed:  each of `rows`, none twice, has `image`, a text that is its own, and `w`, as often as it comes
    """

    kind: Literal["full", "replace", "signed"]
    columns: Sequence[LakeColumn]
    rows: DataFrame
    keys: Mapping[int, DataFrame] = field(default_factory=dict)

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


def merge_into(session: SparkSession, change: SparkDifference, table: str) -> int:
    """Apply a change that is signed or replace to `table` by one MERGE; the rows deleted and inserted.

    Nothing is done where that is none. Diverged when rows that should go are not there.
    """
    if change.kind == "replace":
        went, source = _replaced(session, change, table)
        came = change.rows.count()
        same = " and ".join(f"t.{quoted(change.columns[n - 1].name)} <=> s.c{n}" for n in change.keys)
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


def _replaced(session: SparkSession, change: SparkDifference, table: str) -> tuple[int, str]:
    """How many rows of `table` have the keys of a replace, and the source of its MERGE: those keys, and the rows."""
    names = {n: f"t.{quoted(change.columns[n - 1].name)}" for n in change.keys}
    joins = []
    for n, keys in change.keys.items():
        keys.distinct().createOrReplaceGlobalTempView(f"gdq_keys_{n}")
        joins.append(f"left semi join global_temp.gdq_keys_{n} k{n} on {names[n]} <=> k{n}.c{n}")
    values = ", ".join(f"{name} as c{n}" for n, name in names.items())
    groups = ", ".join(names.values())
    held = f"select {values}, count(*) as copies from {table} t {' '.join(joins)} group by {groups}"
    session.sql(held).createOrReplaceTempView("gdq_held")
    change.rows.createOrReplaceGlobalTempView("gdq_rows")
    went = session.sql("select coalesce(sum(copies), 0) from gdq_held").collect()[0][0]
    listed = ", ".join(
        f"c{n}" if n in change.keys else f"cast(null as {ddl(column)}) as c{n}"
        for n, column in enumerate(change.columns, 1)
    )
    source = (
        f"select true as gone, {listed} from gdq_held union all select false, {change.values} from global_temp.gdq_rows"
    )
    return int(went), source


def _expected(session: SparkSession) -> tuple[int, int]:
    """The numbers of rows that go and come; Diverged when a row that goes is not in the table."""
    (row,) = session.sql(
        "select coalesce(sum(-least(s.w, 0)), 0), coalesce(sum(greatest(s.w, 0)), 0), "
        "coalesce(sum(least(-least(s.w, 0), coalesce(f.copies, 0))), 0) "
        "from gdq_signed s left join gdq_found f on f.image = s.image"
    ).collect()
    if row[2] != row[0]:
        raise Diverged(f"{row[2]} of the {row[0]} rows that went were there")
    return row[0], row[1]


@contextmanager
def conflicts() -> Iterator[None]:
    """CommitConflict for Spark's error of a commit that another one came before."""
    try:
        yield
    except Exception as error:
        if type(error).__module__.startswith(("pyspark.", "py4j.")) and _CONFLICT.search(str(error)):
            raise CommitConflict(str(error).splitlines()[0]) from error
        raise
