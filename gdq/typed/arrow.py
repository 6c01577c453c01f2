"""Typed reading: a SELECT over PostgreSQL into Arrow, exactly or not at all."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NoReturn

import psycopg
from psycopg.conninfo import conninfo_to_dict, make_conninfo

from gdq.conninfo import conninfo_of
from gdq.errors import GdqError, UnsupportedValue, error_by_sqlstate
from gdq.sql_text import quote
from gdq.typed.pgtypes import READ_SETTINGS, ColumnType

if TYPE_CHECKING:
    import pyarrow as pa
    from adbc_driver_postgresql.dbapi import Connection

# Log rows: a BRIN range is never worth a sequential scan or starting workers, but the planner thinks so.
ARROW_LOG_SETTINGS = READ_SETTINGS | {"enable_seqscan": "off", "max_parallel_workers_per_gather": "0"}

# The driver adds the distance of the epochs without looking: infinity and the last years of PostgreSQL's range come out
# below its first day, in 4714 BC, where no value can be.
_FIRST_DAY = -2440588
_FIRST_MICROSECOND = _FIRST_DAY * 86_400_000_000


@dataclass(frozen=True, slots=True)
class ArrowColumn:
    """One column of a typed SELECT: its name there, how to read it, and its name in Arrow if different.

    `column`: the column of the user's table, for errors. `log_type`: its type in the log.
    """

    source: str
    type: ColumnType
    name: str = ""
    column: str = ""
    log_type: str = ""

    @property
    def label(self) -> str:
        return self.name or self.source


def arrow_select_sql(relation: str, columns: Sequence[ArrowColumn]) -> str:
    """A SELECT that reads `columns` from a subquery or table so that read() gets exact values."""
    expressions = ", ".join(f"{column.type.sql(quote(column.source))} as {quote(column.label)}" for column in columns)
    return f"select {expressions} from {relation}"


def arrow_schema(columns: Sequence[ArrowColumn]) -> pa.Schema:
    """The Arrow schema that read() gives for these columns."""
    import pyarrow as pa  # noqa: PLC0415 (an extra, and slow to load)

    return pa.schema([pa.field(column.label, arrow_type(column.type)) for column in columns])


# Timeouts that a connection string has in its options win; the rest does not.
_TIMEOUTS_OFF = "-c statement_timeout=0 -c lock_timeout=0 -c idle_in_transaction_session_timeout=0"
_PINNED = " ".join(
    f"-c {setting}"
    for setting in (
        *("quote_all_identifiers=off", "search_path=pg_catalog", "standard_conforming_strings=on", "jit=off"),
        *("default_transaction_isolation=read\\ committed", "default_transaction_deferrable=off"),
    )
)
_NO_TRANSACTION_TIMEOUT = """
select pg_catalog.set_config(s.name, '0', false) from pg_catalog.pg_settings s
 where s.name operator(pg_catalog.=) 'transaction_timeout' and s.setting operator(pg_catalog.<>) '0'"""


class ArrowReader:
    """Reads from the database of `beside` on a kept connection, since a new one costs as much as thousands of rows.

    A read during another read, or after an error, gets a new connection. Between reads the connection is outside a
    transaction. Close the reader at the end.
    """

    def __init__(self, beside: psycopg.Connection[Any]) -> None:
        self._beside = beside
        self._idle: Connection | None = None

    def close(self) -> None:
        """End the connection."""
        kept, self._idle = self._idle, None
        if kept is not None:
            kept.close()

    @contextlib.contextmanager
    def read(
        self, query: str, columns: Sequence[ArrowColumn], settings: dict[str, str] = ARROW_LOG_SETTINGS
    ) -> Iterator[Iterator[pa.RecordBatch]]:
        """Run `query`, made by arrow_select_sql(); its rows as record batches, streamed.

        Server errors are raised as psycopg's; UnsupportedValue names the column of a value that Arrow cannot hold.
        """
        whole = False

        def batches(reader: pa.RecordBatchReader) -> Iterator[pa.RecordBatch]:
            nonlocal whole
            for batch in reader:
                yield convert_arrow_batch(batch, columns)
            whole = True

        with arrow_server_errors():
            connection = self._begun(settings)
            try:
                with connection.cursor() as cursor:
                    cursor.execute(query)
                    yield batches(cursor.fetch_record_batch())
                if whole and self._idle is None:
                    connection.rollback()
                    self._idle = connection
            finally:
                if connection is not self._idle:
                    connection.close()

    def _begun(self, settings: dict[str, str]) -> Connection:
        """The kept connection, or a new one, in a transaction with `settings`."""
        from adbc_driver_manager import Error  # noqa: PLC0415

        kept, self._idle = self._idle, None
        if kept is not None:
            try:
                return _with_settings(kept, settings)
            except Error:  # the server has ended the connection
                with contextlib.suppress(Error):
                    kept.close()
        return _with_settings(connect_arrow(conninfo_of(self._beside)), settings)


def _with_settings(connection: Connection, settings: dict[str, str]) -> Connection:
    listed = ", ".join(f"pg_catalog.set_config('{name}', '{value}', true)" for name, value in settings.items())
    with connection.cursor() as cursor:
        cursor.execute(f"select {listed}")
        cursor.fetchall()
    return connection


def connect_arrow(conninfo: str) -> Connection:
    """A connection of the Arrow driver whose session follows no setting of its role or database.

    The driver learns the types by name when it connects, so settings that change names or the meaning of names come as
    startup options. A pooler refuses these: then the connection is made without.
    """
    from adbc_driver_postgresql import dbapi  # noqa: PLC0415

    # the driver takes all text for UTF8
    conninfo = make_conninfo(conninfo, client_encoding="UTF8")
    parameters = conninfo_to_dict(conninfo)
    own = parameters.pop("options", None) or os.environ.get("PGOPTIONS", "")
    options = f"{_TIMEOUTS_OFF} {own} {_PINNED}"
    try:
        connection = dbapi.connect(make_conninfo("", **parameters, options=options))
    except dbapi.Error:
        try:  # one that is shorter than what the driver asks at first
            return dbapi.connect(make_conninfo("", **parameters, options=f"{options} -c transaction_timeout=0"))
        except dbapi.Error:
            return dbapi.connect(conninfo)
    try:
        with connection.cursor() as cursor:
            # not known to all versions, so no startup option
            cursor.execute(_NO_TRANSACTION_TIMEOUT)
            cursor.fetchall()
        connection.commit()
    except BaseException:
        connection.close()
        raise
    return connection


def convert_arrow_batch(batch: pa.RecordBatch, columns: Sequence[ArrowColumn]) -> pa.RecordBatch:
    """A batch of the driver converted to the schema of `columns`; UnsupportedValue for a value that does not fit."""
    import pyarrow as pa  # noqa: PLC0415

    arrays = [_convert_array(array, column) for array, column in zip(batch.columns, columns, strict=True)]
    return pa.RecordBatch.from_arrays(arrays, schema=arrow_schema(columns))


def _convert_array(array: pa.Array, column: ArrowColumn) -> pa.Array:
    import pyarrow as pa  # noqa: PLC0415

    try:
        return convert_arrow_array(array, arrow_type(column.type))
    except pa.ArrowTypeError as error:
        raise GdqError(f'column "{column.label}": {error}') from error
    except pa.ArrowInvalid as error:
        what = "a value such as NaN that its Arrow type cannot hold" if column.type.decimal else str(error)
        _refuse(column, what, error)


def convert_arrow_array(array: pa.Array, wanted: pa.DataType) -> pa.Array:
    """An array of the driver, with decimals as texts, as one of type `wanted`.

    pyarrow.ArrowInvalid for a value that does not fit, ArrowTypeError for another type.
    """
    import pyarrow as pa  # noqa: PLC0415
    import pyarrow.compute as pc  # noqa: PLC0415

    if array.type == wanted:
        if pa.types.is_date(wanted) or pa.types.is_timestamp(wanted):
            integers, first = (pa.int32(), _FIRST_DAY) if pa.types.is_date(wanted) else (pa.int64(), _FIRST_MICROSECOND)
            smallest = pc.min(array.view(integers)).as_py()
            if smallest is not None and smallest < first:
                raise pa.ArrowInvalid("infinity, or a time that Arrow cannot hold")
        return array
    if not (pa.types.is_decimal(wanted) and array.type == pa.string()):
        raise pa.ArrowTypeError(f"the Arrow driver gave {array.type}, not {wanted}")
    return array.cast(wanted)


def arrow_batch_of_texts(texts: Sequence[Sequence[str | None]], columns: Sequence[ArrowColumn]) -> pa.RecordBatch:
    """A batch of the schema of `columns` from PostgreSQL's texts, written with READ_SETTINGS.

    UnsupportedValue for a value that does not fit.
    """
    import pyarrow as pa  # noqa: PLC0415

    arrays = [_text_array(pa.array(values, pa.string()), column) for values, column in zip(texts, columns, strict=True)]
    return pa.RecordBatch.from_arrays(arrays, schema=arrow_schema(columns))


def _text_array(text: pa.Array, column: ArrowColumn) -> pa.Array:
    import pyarrow as pa  # noqa: PLC0415

    try:
        return arrow_array_of_texts(text, arrow_type(column.type))
    except pa.ArrowInvalid as error:
        _refuse(column, "a value that its Arrow type cannot hold", error)


def arrow_array_of_texts(text: pa.Array, wanted: pa.DataType) -> pa.Array:
    """PostgreSQL's texts (READ_SETTINGS) converted to type `wanted`; pyarrow.ArrowInvalid if a value does not fit."""
    import pyarrow as pa  # noqa: PLC0415
    import pyarrow.compute as pc  # noqa: PLC0415

    if pa.types.is_binary(wanted):
        values = [None if value is None else bytes.fromhex(value.removeprefix("\\x")) for value in text.to_pylist()]
        return pa.array(values, wanted)
    if pa.types.is_boolean(wanted):
        return pc.equal(text, "t")
    return text.cast(wanted)


def _refuse(column: ArrowColumn, what: str, cause: Exception | None = None) -> NoReturn:
    name = column.column or column.label
    raise UnsupportedValue(
        f'column "{name}" holds {what} ({column.type.arrow})', hint=f"Read it as text: as_text={[name]!r}."
    ) from cause


def arrow_type(kind: ColumnType) -> pa.DataType:
    """The pyarrow type of a column."""
    import pyarrow as pa  # noqa: PLC0415

    if kind.decimal is not None:
        return pa.decimal128(*kind.decimal)
    special = {
        "timestamp[us]": pa.timestamp("us"),
        "timestamp[us, tz=UTC]": pa.timestamp("us", "UTC"),
        "list<item: string>": pa.list_(pa.string()),
    }
    return special.get(kind.arrow) or pa.type_for_alias(kind.arrow)


@contextlib.contextmanager
def arrow_server_errors() -> Iterator[None]:
    """Raise the driver's errors as psycopg's class for their SQLSTATE, or as gdq's own."""
    from adbc_driver_manager import Error  # noqa: PLC0415

    try:
        yield
    except Error as error:
        details = {str(name): text.decode(errors="replace") for name, text in error.details or []}
        message = details.get("PG_DIAG_MESSAGE_PRIMARY", str(error))
        raise error_by_sqlstate(error.sqlstate, message, hint=details.get("PG_DIAG_MESSAGE_HINT")) from error
