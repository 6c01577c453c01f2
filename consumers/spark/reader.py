"""Batch reader of Spark's data source gdq: options become statements, and each of Spark's tasks runs one."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import psycopg
from psycopg import Connection, sql
from psycopg.conninfo import make_conninfo
from pyspark.sql.datasource import DataSourceReader, InputPartition

from gdq.conninfo import connect, resolve_conninfo
from gdq.consumers.spark.net_sql import check_netted, net_changes_sql, split_transactions
from gdq.consumers.spark.options import image_option, listed_option, option_number, required_option
from gdq.consumers.spark.table_sql import (
    block_ranges,
    key_condition_sql,
    log_rows_sql,
    signed_form_sql,
    split_log_rows_sql,
    table_rows_sql,
)
from gdq.consumers.views.change_source import LogColumn, log_columns
from gdq.consumers.views.snapshot_holder import READER_LOCK_TIMEOUT
from gdq.errors import GdqError
from gdq.owner_sql import functions_sql
from gdq.typed.arrow import (
    ARROW_LOG_SETTINGS,
    ArrowColumn,
    arrow_schema,
    arrow_select_sql,
    arrow_server_errors,
    connect_arrow,
    convert_arrow_batch,
)
from gdq.typed.pgtypes import COLUMN_NAMES, READ_AS_TEXT, READ_SETTINGS, ColumnType, column_type
from gdq.view.table_schema import load_schema

if TYPE_CHECKING:
    import pyarrow as pa

_PARTITION_BYTES = 64 * 2**20
CHANGE_HEADER = (
    ArrowColumn("_change_type", ColumnType("string", "string", "{c}")),
    ArrowColumn("_commit_version", ColumnType("int64", "bigint", "{c}")),
    ArrowColumn("_commit_timestamp", ColumnType("timestamp[us, tz=UTC]", "timestamp", "{c}")),
    ArrowColumn("ev_id", ColumnType("int64", "bigint", "{c}")),
)
# Follows them where updates may leave out large values: the names of the columns that a row lacks, else NULL.
CHANGE_UNCHANGED = ArrowColumn("_unchanged", COLUMN_NAMES)


@dataclass
class ReaderStatement(InputPartition):
    """One partition: a SELECT of the schema's columns."""

    query: str


class GdqReader(DataSourceReader):
    """Reads statements, each on a connection of its own that imports the shared snapshot."""

    def __init__(self, options: Mapping[str, str], names: Sequence[str]) -> None:
        self.options = options
        self.conninfo = reader_conninfo(options)
        if "statements" in options:
            self.columns = [ArrowColumn(*_column(part)) for part in json.loads(options["columns"])]
        else:
            with connect(self.conninfo, application_name="gdq:spark") as connection:
                self.columns = read_columns(connection, options, names)

    def partitions(self) -> Sequence[ReaderStatement]:
        if "statements" in self.options:
            return [ReaderStatement(query) for query in json.loads(self.options["statements"])]
        relations = _relations(self.options, self.conninfo, self.columns)
        return [ReaderStatement(arrow_select_sql(f"{relation} as r", self.columns)) for relation in relations]

    def read(self, partition: ReaderStatement) -> Iterator[pa.RecordBatch]:  # type: ignore[override]
        settings = json.loads(self.options.get("settings", "{}"))
        if not settings:
            settings = ARROW_LOG_SETTINGS if "from" in self.options else READ_SETTINGS
        yield from read_statement(
            self.conninfo,
            partition.query,
            self.columns,
            settings,
            self.options.get("snapshot"),
            counter=self.options.get("counter"),
        )


def spark_schema(columns: Sequence[ArrowColumn]) -> str:
    """The columns as a Spark schema in DDL."""
    return ", ".join(f"`{column.label.replace('`', '``')}` {column.type.spark}" for column in columns)


def read_statement(
    conninfo: str,
    query: str,
    columns: Sequence[ArrowColumn],
    settings: Mapping[str, str],
    snapshot: str | None,
    *,
    counter: str | None = None,
) -> Iterator[pa.RecordBatch]:
    """Run one SELECT in REPEATABLE READ, under the exported `snapshot` if given, and yield record batches.

    `counter`: as in read_statements(). psycopg.errors.LockNotAvailable when the SELECT has to wait for a table.
    """
    role = settings.get("role")
    try:
        with arrow_server_errors(), connect_arrow(conninfo) as connection, connection.cursor() as cursor:
            connection.rollback()  # connecting has run a query already
            # a session that acts for another role makes functions for it
            cursor.execute(f"set transaction isolation level repeatable read{'' if role else ', read only'}")
            if snapshot is not None:
                cursor.execute(f"set transaction snapshot '{snapshot}'")
                cursor.execute(f"set local lock_timeout = '{READER_LOCK_TIMEOUT}'")
            for name, value in settings.items():
                text = sql.Literal(value).as_string(None)
                cursor.execute(f"select pg_catalog.set_config('{name}', {text}, true)")
            for statement in functions_sql(role) if role else ():
                cursor.execute(statement)
            cursor.execute(query)
            for batch in cursor.fetch_record_batch():
                yield convert_arrow_batch(batch, columns)
            if counter is not None:
                cursor.execute(counter)
                yield _counted(cursor.fetchone(), columns)
    except (OSError, ValueError) as error:  # the latter is Arrow's own
        # An error while rows stream has no SQLSTATE. The statement itself was accepted, so the error is in a row.
        message = str(error)
        if "ERROR:  " not in message:
            raise
        raise psycopg.DataError(message.partition("ERROR:  ")[2].splitlines()[0]) from error


def _counted(row: Sequence[Any] | None, columns: Sequence[ArrowColumn]) -> pa.RecordBatch:
    """The counter's row: its value in the last column, NULL in the others."""
    import pyarrow as pa  # noqa: PLC0415

    schema = arrow_schema(columns)
    values = [None] * (len(columns) - 1) + [row[0] if row else 0]
    arrays = [pa.array([value], one.type) for value, one in zip(values, schema, strict=True)]
    return pa.RecordBatch.from_arrays(arrays, schema=schema)


def _column(part: Sequence[str]) -> tuple[str, ColumnType]:
    source, arrow, spark, read_sql = part
    return source, ColumnType(arrow, spark, read_sql)


def reader_conninfo(options: Mapping[str, str]) -> str:
    """The connection string for planning and for reading: from the options `dsn` or `service`, else as everywhere.

    Call it once, in the process that plans: workers get its result, and may have another environment. Without a DSN it
    names the server that libpq's variables name here; the password is left to each process.
    """
    if "dsn" in options:
        return resolve_conninfo(options["dsn"])
    if "service" in options:
        return make_conninfo(service=options["service"])
    chosen = resolve_conninfo()
    if chosen or "PGSERVICE" in os.environ:
        return chosen or make_conninfo(service=os.environ["PGSERVICE"])
    places = {"host": "PGHOST", "hostaddr": "PGHOSTADDR", "port": "PGPORT", "dbname": "PGDATABASE", "user": "PGUSER"}
    return make_conninfo(**{key: os.environ[name] for key, name in places.items() if os.environ.get(name)})


def read_columns(connection: Connection[Any], options: Mapping[str, str], names: Sequence[str]) -> list[ArrowColumn]:
    """The columns with these names; GdqError if one is missing."""
    known = {column.label: column for column in table_columns(connection, options, names)}
    missing = [name for name in names if name not in known]
    if missing:
        raise GdqError(f"table {options['table']} has no captured column {', '.join(missing)}")
    return [known[name] for name in names]


def table_columns(
    connection: Connection[Any], options: Mapping[str, str], names: Sequence[str] | None = None
) -> list[ArrowColumn]:
    """The readable columns in order; with `names` only these. The option `columns` leaves out others, but no key."""
    listed = {option: listed_option(options, option) for option in ("as_text", "columns")}
    as_text, chosen = listed["as_text"], listed["columns"]
    queue, table = required_option(options, "queue"), required_option(options, "table")

    def is_read(name: str, is_key: bool) -> bool:
        return (not chosen or is_key or name in chosen) and (names is None or name in names)

    if "from" in options or "consumer" in options:
        logged = log_columns(connection, queue, table)
        header = change_header(logged)
        _check_names(table, [c.name for c in logged], listed, header)
        return [
            *header,
            *(
                ArrowColumn(c.name, _type(c.name, c.type, as_text, c.as_text, c.log_type))
                for c in logged
                if is_read(c.name, c.is_key)
            ),
        ]
    columns = load_schema(connection, queue, table).columns
    _check_names(table, [c.name for c in columns], listed, ())
    return [ArrowColumn(c.name, _type(c.name, c.type, as_text)) for c in columns if is_read(c.name, c.key)]


def change_header(logged: Sequence[LogColumn]) -> list[ArrowColumn]:
    """The columns of changes before those of a table."""
    return [*CHANGE_HEADER, CHANGE_UNCHANGED] if any(column.omitted for column in logged) else [*CHANGE_HEADER]


def _check_names(
    table: str, names: Sequence[str], listed: Mapping[str, set[str]], header: Sequence[ArrowColumn]
) -> None:
    """GdqError for columns that Spark cannot tell apart, and for names that an option lists and no column has."""
    for option, some in listed.items():
        unknown = sorted(some - {*names})
        if unknown:
            what = f"lists columns of {table}, which has no {', '.join(unknown)}"
            raise GdqError(f'the option "{option}" of the data source gdq {what}')
    seen = {column.label: "a column of the data source" for column in header}
    for name in names:
        other = seen.setdefault(name.lower(), f"column {name}")
        if other != f"column {name}":
            raise GdqError(
                f"table {table} has a column {name}, which Spark takes for {other}",
                hint="Rename it, or leave it out of capture with exclude.",
            )


def _type(
    name: str, pg_type: str, as_text: set[str], logged_as_text: bool = False, log_type: str | None = None
) -> ColumnType:
    if name in as_text:
        kind = column_type(pg_type, logged_as_text, log_type=log_type, column=name, unsupported="text")
        return kind if kind.arrow == "string" else READ_AS_TEXT
    return column_type(pg_type, logged_as_text, log_type=log_type, column=name)


def change_relations(
    connection: Connection[Any], options: Mapping[str, str], interval: tuple[str, str], read: Sequence[ArrowColumn]
) -> list[str]:
    """Changes of a table between two snapshots in signed long form: one relation for FROM per partition.

    `read`: the columns that are read. Reading fails at a row without the value of one, unless _unchanged is read too.
    """
    queue, table = required_option(options, "queue"), required_option(options, "table")
    columns, images = log_columns(connection, queue, table), image_option(options)
    if images == "net":
        check_netted(connection, table, columns)
        rows = log_rows_sql(connection, queue, table, *interval)
        parts = split_transactions(connection, queue, table, rows, partition_bytes(options))
        return [net_changes_sql(part, columns) for part in parts]
    labels = {column.label for column in read}
    may_lack = None if CHANGE_UNCHANGED.label in labels else [c.name for c in columns if c.name not in labels]
    rows = log_rows_sql(connection, queue, table, *interval, may_lack=may_lack)
    parts = split_log_rows_sql(connection, queue, table, rows, partition_bytes(options))
    return [signed_form_sql(part, columns, images) for part in parts]


def partition_bytes(options: Mapping[str, str]) -> int:
    """The most bytes that one partition reads."""
    return option_number(options, "partition_bytes", _PARTITION_BYTES)


def _relations(options: Mapping[str, str], conninfo: str, read: Sequence[ArrowColumn]) -> list[str]:
    """The relations for FROM, one per partition."""
    queue, table = required_option(options, "queue"), required_option(options, "table")
    with connect(conninfo, application_name="gdq:spark") as connection:
        if "from" in options:
            return change_relations(connection, options, (options["from"], required_option(options, "to")), read)
        schema = load_schema(connection, queue, table)
        table = schema.qualified
        # children have logs of their own
        rows = f"only {table}" if schema.has_children else table
        if "keys" in options:
            key = [(c.name, c.type) for c in schema.columns if c.key]
            width = len(next(iter(json.loads(options["keys"])), key))
            if not key or width != len(key):
                names = ", ".join(name for name, _ in key) or "none"
                what = f"has keys of {width} values, the key of {table} is: {names}"
                raise GdqError(f'the option "keys" of the data source gdq {what}')
            return [table_rows_sql(rows, key_condition_sql("t", key, json.loads(options["keys"])))]
        if "snapshot" not in options:
            return [table_rows_sql(rows)]
        ranges = block_ranges(connection, table, partition_bytes(options))
        return [table_rows_sql(rows, condition) for condition in ranges]
