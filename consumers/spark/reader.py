"""Reads what the data source gdq gives: options become statements, of which each task of Spark runs one."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import psycopg
from psycopg import Connection, sql
from pyspark.sql.datasource import DataSourceReader, InputPartition

from gdq.conninfo import connect
from gdq.consumers.spark.table_sql import base, block_ranges, key_condition, log_rows, signed_form, split_log_rows
from gdq.consumers.views.change_source import log_columns
from gdq.consumers.views.snapshot_holder import READER_LOCK_TIMEOUT
from gdq.errors import GdqError, by_sqlstate
from gdq.typed.arrow import LOG_SETTINGS, Column, convert, schema_of, select_sql
from gdq.typed.arrow import connect as connect_arrow
from gdq.typed.pgtypes import AS_TEXT, READ_SETTINGS, ColumnType, column_type
from gdq.view.table_schema import load_schema

if TYPE_CHECKING:
    import pyarrow as pa

_PARTITION_BYTES = 64 * 2**20
HEADER = (
    Column("_change_type", ColumnType("string", "string", "{c}")),
    Column("_commit_version", ColumnType("int64", "bigint", "{c}")),
    Column("_commit_timestamp", ColumnType("timestamp[us, tz=UTC]", "timestamp", "{c}")),
    Column("ev_id", ColumnType("int64", "bigint", "{c}")),
)


@dataclass
class Statement(InputPartition):
    """One partition: a SELECT of the columns of the schema."""

    query: str


class GdqReader(DataSourceReader):
    """Reads statements, each on a connection of its own that imports the shared snapshot."""

    def __init__(self, options: Mapping[str, str], names: Sequence[str]) -> None:
        self.options = options
        if "statements" in options:
            self.columns = [Column(*_column(part)) for part in json.loads(options["columns"])]
        else:
            with connect(conninfo(options), application_name="gdq:spark") as connection:
                self.columns = read_columns(connection, options, names)

    def partitions(self) -> Sequence[Statement]:
        if "statements" in self.options:
            return [Statement(query) for query in json.loads(self.options["statements"])]
        return [Statement(select_sql(f"{relation} as r", self.columns)) for relation in _relations(self.options)]

    def read(self, partition: Statement) -> Iterator[pa.RecordBatch]:  # type: ignore[override]
        settings = json.loads(self.options.get("settings", "{}"))
        if not settings:
            settings = LOG_SETTINGS if "from" in self.options else READ_SETTINGS
        yield from read_statement(
            conninfo(self.options),
            partition.query,
            self.columns,
            settings,
            self.options.get("snapshot"),
            counter=self.options.get("counter"),
        )


def spark_schema(columns: Sequence[Column]) -> str:
    """The columns as a Spark schema in DDL."""
    return ", ".join(f"`{column.label.replace('`', '``')}` {column.type.spark}" for column in columns)


def read_statement(
    conninfo: str,
    query: str,
    columns: Sequence[Column],
    settings: Mapping[str, str],
    snapshot: str | None,
    *,
    counter: str | None = None,
) -> Iterator[pa.RecordBatch]:
    """Run one SELECT in REPEATABLE READ, in the exported `snapshot` if given; its rows as record batches.

    `counter`: as in read_statements(). psycopg.errors.LockNotAvailable when a statement waits for a table
    that the snapshot's holder has locked.
    """
    from adbc_driver_manager import Error  # noqa: PLC0415 (slow to load, and only needed in workers)

    try:
        with connect_arrow(conninfo) as connection, connection.cursor() as cursor:
            connection.rollback()  # connecting has read something already
            cursor.execute("set transaction isolation level repeatable read, read only")
            if snapshot is not None:
                cursor.execute(f"set transaction snapshot '{snapshot}'")
                cursor.execute(f"set local lock_timeout = '{READER_LOCK_TIMEOUT}'")
            for name, value in settings.items():
                text = sql.Literal(value).as_string(None)
                cursor.execute(f"select pg_catalog.set_config('{name}', {text}, true)")
            cursor.execute(query)
            for batch in cursor.fetch_record_batch():
                yield convert(batch, columns)
            if counter is not None:
                cursor.execute(counter)
                yield _counted(cursor.fetchone(), columns)
    except Error as error:
        details = {str(name): text.decode(errors="replace") for name, text in error.details or []}
        message = details.get("PG_DIAG_MESSAGE_PRIMARY", str(error))
        raise by_sqlstate(error.sqlstate, message) from error
    except OSError as error:
        # What goes wrong while rows stream comes without an SQLSTATE; the statement was fine, so it is a row.
        message = str(error)
        if "ERROR:  " not in message:
            raise
        raise psycopg.DataError(message.partition("ERROR:  ")[2].splitlines()[0]) from error


def _counted(row: Sequence[Any] | None, columns: Sequence[Column]) -> pa.RecordBatch:
    """The row of a counter: NULL but in the last column."""
    import pyarrow as pa  # noqa: PLC0415

    schema = schema_of(columns)
    values = [None] * (len(columns) - 1) + [row[0] if row else 0]
    arrays = [pa.array([value], one.type) for value, one in zip(values, schema, strict=True)]
    return pa.RecordBatch.from_arrays(arrays, schema=schema)


def _column(part: Sequence[str]) -> tuple[str, ColumnType]:
    source, arrow, spark, read_sql = part
    return source, ColumnType(arrow, spark, read_sql)


def conninfo(options: Mapping[str, str]) -> str:
    """The connection string that the options name."""
    if "dsn" in options:
        return options["dsn"]
    return f"service={options['service']}" if "service" in options else ""


def option(options: Mapping[str, str], name: str) -> str:
    """An option that must be there."""
    if name not in options:
        raise GdqError(f'the data source gdq needs the option "{name}"')
    return options[name]


def read_columns(connection: Connection[Any], options: Mapping[str, str], names: Sequence[str]) -> list[Column]:
    """The columns of these names; GdqError when one is not there."""
    known = {column.label: column for column in table_columns(connection, options, names)}
    missing = [name for name in names if name not in known]
    if missing:
        raise GdqError(f"table {options['table']} has no captured column {', '.join(missing)}")
    return [known[name] for name in names]


def table_columns(
    connection: Connection[Any], options: Mapping[str, str], names: Sequence[str] | None = None
) -> list[Column]:
    """The columns that can be read, in order; only those in `names`, if given."""
    as_text = {name.strip() for name in options.get("as_text", "").split(",")}
    queue, table = option(options, "queue"), option(options, "table")
    if "from" in options or "consumer" in options:
        return [
            *HEADER,
            *(
                Column(c.name, _type(c.name, c.type, as_text, c.as_text, c.log_type))
                for c in log_columns(connection, queue, table)
                if names is None or c.name in names
            ),
        ]
    columns = load_schema(connection, queue, table).columns
    return [Column(c.name, _type(c.name, c.type, as_text)) for c in columns if names is None or c.name in names]


def _type(
    name: str, pg_type: str, as_text: set[str], logged_as_text: bool = False, log_type: str | None = None
) -> ColumnType:
    if name in as_text:
        kind = column_type(pg_type, logged_as_text, log_type=log_type, column=name, unsupported="text")
        return kind if kind.arrow == "string" else AS_TEXT
    return column_type(pg_type, logged_as_text, log_type=log_type, column=name)


def change_relations(
    connection: Connection[Any], queue: str, table: str, interval: tuple[str, str], bytes_each: int
) -> list[str]:
    """The changes of a table between two snapshots in signed long form, one relation for FROM each partition."""
    rows = log_rows(connection, queue, table, *interval)
    columns = log_columns(connection, queue, table)
    return [signed_form(part, columns) for part in split_log_rows(connection, queue, table, rows, bytes_each)]


def partition_bytes(options: Mapping[str, str]) -> int:
    """The most bytes that one partition reads."""
    return int(options.get("partition_bytes", _PARTITION_BYTES))


def _relations(options: Mapping[str, str]) -> list[str]:
    """The relations, for FROM, that the partitions read."""
    queue, table = option(options, "queue"), option(options, "table")
    size = partition_bytes(options)
    with connect(conninfo(options), application_name="gdq:spark") as connection:
        if "from" in options:
            return change_relations(connection, queue, table, (options["from"], option(options, "to")), size)
        schema = load_schema(connection, queue, table)
        table = schema.qualified
        if "keys" in options:
            key = [(c.name, c.type) for c in schema.columns if c.key]
            return [base(table, key_condition("t", key, json.loads(options["keys"])))]
        if "snapshot" not in options:
            return [base(table)]
        return [base(table, condition) for condition in block_ranges(connection, table, size)]
