"""The Python Data Source `gdq_stage` of Apache Spark: writes rows of text into a staging table by COPY.

    data.write.format("gdq_stage").option("dsn", dsn).option("table", "stage_1").mode("append").save()

A task may be tried again after it has committed, and a try that Spark has given up may still be writing. So each try
marks its rows with a name of its own in the column `attempt`; the commit of the job deletes the rows of tries that
Spark does not count, and lets the table take no others from then on. The staging table lies in schema gdq_target and
has the columns of the data, as text, and `attempt`.
"""

from __future__ import annotations

import itertools
import uuid
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

import psycopg
from psycopg import sql
from pyspark.sql.datasource import DataSource, DataSourceArrowWriter, WriterCommitMessage
from pyspark.sql.types import StructType

if TYPE_CHECKING:
    import pyarrow as pa
    from pyspark.sql import DataFrame, SparkSession

_SCHEMA = "gdq_target"

# How long a try that does not count may go on writing.
_LATE = "60s"


@dataclass
class Attempt(WriterCommitMessage):
    """One try of a task that has written its rows."""

    name: str


class StageDataSource(DataSource):
    """df.write.format("gdq_stage")"""

    @classmethod
    def name(cls) -> str:
        return "gdq_stage"

    def writer(self, schema: StructType, overwrite: bool) -> StageWriter:  # noqa: ARG002 (Spark calls it so)
        return StageWriter(self.options["dsn"], self.options["table"])


class StageWriter(DataSourceArrowWriter):
    """Writes the partitions of one job."""

    def __init__(self, dsn: str, table: str) -> None:
        self.dsn = dsn
        self.table = table

    def write(self, iterator: Iterator[pa.RecordBatch]) -> Attempt:
        """Copy one partition in one transaction."""
        import pyarrow as pa  # noqa: PLC0415 (only in workers)
        from adbc_driver_postgresql import dbapi  # noqa: PLC0415

        name = uuid.uuid4().hex
        filled = (batch for batch in iterator if batch.num_rows)
        first = next(filled, None)
        if first is not None:  # most tasks of a small delta have nothing to write
            with dbapi.connect(self.dsn) as connection, connection.cursor() as cursor:
                for batch in itertools.chain([first], filled):
                    marked = batch.append_column("attempt", pa.repeat(pa.scalar(name), batch.num_rows))
                    cursor.adbc_ingest(self.table, marked, mode="append", db_schema_name=_SCHEMA)
                connection.commit()
        return Attempt(name)

    def commit(self, messages: list[WriterCommitMessage | None]) -> None:
        """Leave the rows of the tries that count, and refuse those that come later.

        psycopg.errors.LockNotAvailable when a try that does not count goes on writing.
        """
        names = [message.name for message in messages if isinstance(message, Attempt)]
        table = sql.Identifier(_SCHEMA, self.table)
        counted = sql.Literal(names) if names else sql.SQL("array[]::text[]")
        with psycopg.connect(self.dsn) as connection:
            connection.execute(sql.SQL("set local lock_timeout = {}").format(sql.Literal(_LATE)))
            # the lock waits for tries that are writing; not valid: the rows are looked at by the delete
            check = "alter table {} add constraint counted check (attempt = any ({})) not valid"
            connection.execute(sql.SQL(check).format(table, counted))
            connection.execute(sql.SQL("delete from {} where attempt <> all ({})").format(table, counted))

    def abort(self, messages: list[WriterCommitMessage | None]) -> None:
        """Nothing: the staging table of a failed job is dropped by the next refresh."""


def register_stage(spark: SparkSession) -> None:
    """Make the data source known to a session."""
    spark.dataSource.register(StageDataSource)


def write_stage(data: DataFrame, dsn: str, table: str) -> None:
    """Write `data` into the staging table gdq_target.`table`."""
    _text(data).write.format("gdq_stage").options(dsn=dsn, table=table).mode("append").save()


def text_rows(data: DataFrame) -> list[tuple[str | None, ...]]:
    """The rows of `data` as text, in this process: for small results, which need no table to pass through."""
    columns = [column.to_pylist() for column in _text(data).toArrow().columns]
    return list(zip(*columns, strict=True))


def _text(data: DataFrame) -> DataFrame:
    return data.selectExpr(*(f"cast({column} as string) as {column}" for column in data.columns))
