"""Spark's Python data source `gdq_stage`: writes rows of text into a staging table by COPY.

    data.write.format("gdq_stage").option("dsn", dsn).option("table", "stage_1").mode("append").save()

Spark may run a task again after it has committed, and an abandoned attempt may still be writing. So each attempt marks
its rows with its own name in the column `attempt`. The job's commit deletes the rows of other attempts and forbids new
ones by a check constraint. The staging table, in schema gdq_target, has the data's columns, as text, and `attempt`.
"""

from __future__ import annotations

import itertools
import uuid
from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING

from psycopg import sql
from pyspark.sql.datasource import DataSource, DataSourceArrowWriter, WriterCommitMessage
from pyspark.sql.types import StructType

from gdq.conninfo import connect, target_conninfo
from gdq.sql_text import pin_transaction
from gdq.typed.arrow import connect_arrow

if TYPE_CHECKING:
    import pyarrow as pa
    from pyspark.sql import DataFrame, SparkSession

_SCHEMA = "gdq_target"

# How long the commit waits for an abandoned attempt that is still writing.
_LATE = "60s"


@dataclass
class StageAttempt(WriterCommitMessage):
    """A task's attempt that has written its rows."""

    name: str


class StageDataSource(DataSource):
    """df.write.format("gdq_stage")"""

    @classmethod
    def name(cls) -> str:
        return "gdq_stage"

    def writer(self, schema: StructType, overwrite: bool) -> StageWriter:  # noqa: ARG002 (Spark calls it so)
        return StageWriter(self.options["dsn"], self.options["table"], elsewhere="elsewhere" in self.options)


class StageWriter(DataSourceArrowWriter):
    """Writes the partitions of one job."""

    def __init__(self, dsn: str, table: str, *, elsewhere: bool = False) -> None:
        self.dsn = dsn
        self.table = table
        self.elsewhere = elsewhere

    def _conninfo(self) -> AbstractContextManager[str]:
        return target_conninfo(self.dsn) if self.elsewhere else nullcontext(self.dsn)

    def write(self, iterator: Iterator[pa.RecordBatch]) -> StageAttempt:
        """Copy one partition in one transaction."""
        import pyarrow as pa  # noqa: PLC0415 (only in workers)

        name = uuid.uuid4().hex
        filled = (batch for batch in iterator if batch.num_rows)
        first = next(filled, None)
        if first is not None:  # most tasks of a small delta have nothing to write
            with self._conninfo() as dsn:
                opened = connect_arrow(dsn)
            with opened as connection, connection.cursor() as cursor:
                for batch in itertools.chain([first], filled):
                    marked = batch.append_column("attempt", pa.repeat(pa.scalar(name), batch.num_rows))
                    cursor.adbc_ingest(self.table, marked, mode="append", db_schema_name=_SCHEMA)
                connection.commit()
        return StageAttempt(name)

    def commit(self, messages: list[WriterCommitMessage | None]) -> None:
        """Keep only the rows of the attempts in `messages`, and refuse rows of others from now on.

        psycopg.errors.LockNotAvailable if an abandoned attempt goes on writing.
        """
        names = [message.name for message in messages if isinstance(message, StageAttempt)]
        table = sql.Identifier(_SCHEMA, self.table)
        counted = sql.Literal(names) if names else sql.SQL("array[]::pg_catalog.text[]")
        with self._conninfo() as dsn:
            opened = connect(dsn)
        with opened as connection:
            pin_transaction(connection)
            connection.execute(sql.SQL("set local lock_timeout = {}").format(sql.Literal(_LATE)))
            # the lock waits for attempts that are writing; not valid, because the delete follows
            check = "alter table {} add constraint counted check (attempt = any ({})) not valid"
            connection.execute(sql.SQL(check).format(table, counted))
            connection.execute(sql.SQL("delete from {} where attempt <> all ({})").format(table, counted))

    def abort(self, messages: list[WriterCommitMessage | None]) -> None:
        """Do nothing: the next refresh drops the staging table of a failed job."""


def register_stage(spark: SparkSession) -> None:
    """Register the data source gdq_stage in a session."""
    spark.dataSource.register(StageDataSource)


def write_stage(data: DataFrame, dsn: str, table: str, *, elsewhere: bool = False) -> None:
    """Write `data` into the staging table gdq_target.`table`; `elsewhere`: not in the source's own database."""
    options = {"dsn": dsn, "table": table} | ({"elsewhere": "true"} if elsewhere else {})
    _text(data).write.format("gdq_stage").options(**options).mode("append").save()


def text_rows(data: DataFrame) -> list[tuple[str | None, ...]]:
    """Rows of a small `data` as text in this process, without a staging table."""
    columns = [column.to_pylist() for column in _text(data).toArrow().columns]
    return list(zip(*columns, strict=True))


def _text(data: DataFrame) -> DataFrame:
    return data.selectExpr(*(f"cast({column} as string) as {column}" for column in data.columns))
