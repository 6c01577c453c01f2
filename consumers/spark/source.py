"""Spark's Python data source `gdq`: changes or rows of a captured table, typed, under one snapshot.

    spark.read.format("gdq").option("queue", "shop").option("table", "public.orders")
         .option("from", s0).option("to", s1).load()

Options:
    dsn or service   the connection; neither: GDQ_DSN, DATABASE_URL or libpq's own variables of the driver, for planning
                     and for reading alike. No password goes here: use PGPASSFILE or a connection service
    queue, table     a captured table
    from, to         two snapshots: read the changes after `from` up to `to`, in signed long form: _change_type
                     (insert, delete, update_preimage, update_postimage), _commit_version (transaction id),
                     _commit_timestamp, ev_id, then the columns. Without them: the rows of the table itself
    snapshot         the name of an exported snapshot that every partition imports (see hold_snapshot()); the rows of a
                     table are read in one partition without it
    keys             JSON array of keys (arrays of text or null): only the rows with these
    columns          columns, comma-separated: only these and the key are read
    images           new: changes without update_preimage, and a delete with its key alone; net: one row for each key
                     and transaction, by gdq.consumers.spark.net_sql; both (default)
    as_text          columns, comma-separated, to read as PostgreSQL's text: for types that Spark lacks
    partition_bytes  size of the part of a table or log segment that one partition reads (default 64 MB)
    consumer         for spark.readStream only: gdq.consumers.spark.stream explains the options of a stream

Spark finds it by itself where gdq is installed, as pyspark_gdq.DefaultSource. Columns that a given .schema() leaves out
are not read either. Spark does not tell the data source what a query selects.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from pyspark.sql.datasource import DataSource
from pyspark.sql.types import StructType

from gdq.conninfo import connect
from gdq.consumers.spark.options import check_options
from gdq.consumers.spark.reader import GdqReader, reader_conninfo, spark_schema, table_columns
from gdq.consumers.spark.stream import GdqStreamReader, stream_reader
from gdq.typed.arrow import ArrowColumn

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession


class GdqDataSource(DataSource):
    """spark.read.format("gdq") and spark.readStream.format("gdq")"""

    @classmethod
    def name(cls) -> str:
        return "gdq"

    def schema(self) -> str:
        check_options(self.options, stream=any(name in self.options for name in ("consumer", "gaps", "max_events")))
        with connect(reader_conninfo(self.options), application_name="gdq:spark") as connection:
            return spark_schema(table_columns(connection, self.options))

    def reader(self, schema: StructType) -> GdqReader:
        check_options(self.options, stream=False)
        return GdqReader(dict(self.options), schema.names)

    def streamReader(self, schema: StructType) -> GdqStreamReader:  # noqa: N802 (Spark calls it so)
        return stream_reader(dict(self.options), schema.names)


def register(spark: SparkSession) -> None:
    """Make the data source known to a session that has not found `pyspark_gdq` by itself."""
    spark.dataSource.register(GdqDataSource)


def read_statements(
    spark: SparkSession,
    dsn: str,
    statements: Sequence[str],
    columns: Sequence[ArrowColumn],
    *,
    settings: Mapping[str, str],
    snapshot: str | None,
    counter: str | None = None,
) -> DataFrame:
    """DataFrame of the rows of several SELECTs, all with these columns, one partition each.

    `snapshot`: the name of an exported one; None: each partition reads what it finds.
    `counter`: a SELECT of one bigint that runs after each; its value is the last column of an extra row.
    """
    parts = [[c.source, c.type.arrow, c.type.spark, c.type.read_sql] for c in columns]
    reader = spark.read.format("gdq").schema(spark_schema(columns))
    options = {
        "dsn": dsn,
        "statements": json.dumps(list(statements)),
        "columns": json.dumps(parts),
        "settings": json.dumps(dict(settings)),
    }
    if snapshot is not None:
        options["snapshot"] = snapshot
    if counter is not None:
        options["counter"] = counter
    return reader.options(**options).load()
