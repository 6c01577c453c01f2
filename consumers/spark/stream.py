"""Spark's data source `gdq` as a stream: the changes of one captured table, batch by batch.

    gdq register-consumer shop lake --tables public.orders

    spark.readStream.format("gdq").options(queue="shop", table="public.orders", consumer="lake").load()
         .writeStream.option("checkpointLocation", folder).trigger(availableNow=True)...

Rows are those of the batch reader's changes: _change_type, _commit_version, _commit_timestamp, ev_id, then the columns.
A batch ends at a tick: it never divides a transaction, and reading it again gives the same rows.

Options beside dsn or service, queue, table, columns, images, as_text and partition_bytes of the batch reader:
    consumer    a registered consumer that takes the table and belongs to this stream alone: it keeps the changes that
                the checkpoint needs
    from        the position (Batch.position, gdq position) of a start without checkpoint; default: the consumer's
    max_events  join ticks in one batch up to this number of events (Spark 4.2 or newer); default: all ticks
    gaps        for truncate, ddl and resync events, which no row shows. "stop" (default): the stream ends with an
                error. "rows": each is a row with only _change_type (truncate, ddl or resync) and ev_id

The checkpoint's offset decides where the stream stands. Spark reports a batch as done when it has planned the next one;
only then the consumer moves. So the consumer lags by one batch, and a restart finds all changes that it needs. The
stream ends with an error if the queue no longer knows a position or has dropped its changes; it never skips any.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

import psycopg
from psycopg import Connection, sql
from psycopg.rows import dict_row
from pyspark.sql.datasource import DataSourceStreamReader, InputPartition

from gdq.batch_loop import application_name
from gdq.call import scalar
from gdq.conninfo import connect
from gdq.consumer import seek
from gdq.consumers.spark import reader
from gdq.consumers.spark.options import check_options, option_number
from gdq.consumers.spark.table_sql import log_rows_sql
from gdq.consumers.views.change_source import log_columns
from gdq.era import check_position, position
from gdq.errors import (
    DivergedPosition,
    EraEnded,
    GdqError,
    ResyncRequired,
    ServerError,
    TruncatedPosition,
    mapped_errors,
)
from gdq.qualified_sql import qualified
from gdq.source import Position
from gdq.sql_text import quote
from gdq.ticker import Housekeeping, take_tick
from gdq.typed.arrow import ARROW_LOG_SETTINGS, arrow_select_sql

if TYPE_CHECKING:
    import pyarrow as pa

try:
    from pyspark.sql.streaming.datasource import (  # type: ignore[import-not-found, unused-ignore]
        ReadAllAvailable,
        ReadMaxRows,
        SupportsTriggerAvailableNow,
    )
except ImportError:  # Spark 4.1
    ReadMaxRows = None

LIMITS_BATCHES = ReadMaxRows is not None

# Spark asks a hundred times a second; so often the logs are looked at.
_LOOK_SECONDS = 0.05

# A table without changes gets an empty batch after this time, so that the consumer moves on and logs can be dropped.
_IDLE_SECONDS = 300.0

_CURE = "copy the table, register the consumer anew, and start the stream with a new checkpoint"

_Offset = dict[str, Any]
_Result = TypeVar("_Result")


class GdqStreamReader(DataSourceStreamReader):
    """Reader of one stream. Spark keeps it in a process beside the driver and sends copies to the tasks for read()."""

    def __init__(self, options: Mapping[str, str], names: Sequence[str]) -> None:
        self.options = options
        check_options(options, stream=True)
        self.queue, self.table, self.consumer = options["queue"], options["table"], options["consumer"]
        self.gaps = options.get("gaps", "stop")
        self.max_events = option_number(options, "max_events", 0) or None
        if self.max_events is not None and not LIMITS_BATCHES:
            raise GdqError('the option "max_events" of the data source gdq needs Spark 4.2 or newer')
        self._connection: Connection[Any] | None = None
        self._housekeeping = Housekeeping(self.queue)
        self._at: Position | None = None  # the end of the last batch, as far as known
        self._moved_at = 0.0
        self._looked_at = 0.0
        self.conninfo = reader.reader_conninfo(options)
        with connect(self.conninfo, application_name="gdq:spark") as connection:
            self.columns = reader.read_columns(connection, options, names)

    def initialOffset(self) -> _Offset:  # noqa: N802 (Spark calls it so, as the others)
        return self._call(self._initial)

    def latestOffset(self) -> _Offset:  # noqa: N802
        """Offset of the newest tick. Spark 4.1 calls it without a start and a limit."""
        return self._call(lambda connection: self._offset(connection, self._next(connection, self._at, None, None)))

    def partitions(self, start: _Offset, end: _Offset) -> Sequence[InputPartition]:
        if start == end:
            return []
        return self._call(lambda connection: self._partitions(connection, start, end))

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        if not isinstance(partition, reader.ReaderStatement):
            raise TypeError(partition)
        yield from reader.read_statement(self.conninfo, partition.query, self.columns, ARROW_LOG_SETTINGS, None)

    def commit(self, end: _Offset) -> None:
        """Move the consumer to `end`: the checkpoint has recorded this batch as done."""
        self._call(lambda connection: self._move_consumer(connection, _parse(end)))

    def stop(self) -> None:
        if self._connection is not None:
            self._connection.close()

    def _call(self, work: Callable[[Connection[Any]], _Result]) -> _Result:
        """Do `work` on the kept connection; if that is lost, once more on a new one."""
        kept = self._connection
        if kept is not None and not kept.closed:
            try:
                return work(kept)
            except psycopg.OperationalError:
                if not kept.broken:
                    raise
        name = application_name(self.queue, self.consumer)
        self._connection = connect(self.conninfo, autocommit=True, application_name=name)
        return work(self._connection)

    def _initial(self, connection: Connection[Any]) -> _Offset:
        text = self.options.get("from") or position(connection, self.queue, self.consumer)
        start = Position.parse(text)
        with self._told():
            self._stream_end(connection, start, None, None)  # whether a stream can start there at all
        return self._offset(connection, start)

    def _next(
        self, connection: Connection[Any], start: Position | None, max_events: int | None, last_tick: int | None
    ) -> Position:
        """End of the next batch; `start` itself if there is nothing to read. Takes ticks that are due.

        The first call always takes a tick: a stream with trigger availableNow reads all that was committed before.
        """
        first = not self._looked_at
        if first and last_tick is None:
            take_tick(connection, self.queue)
        time.sleep(max(self._looked_at + _LOOK_SECONDS - time.monotonic(), 0))
        self._looked_at = time.monotonic()
        self._housekeeping.step(connection)
        known = start or Position.parse(position(connection, self.queue, self.consumer))
        with self._told():
            end = self._stream_end(connection, known, max_events, last_tick)
            if end is None and start is None:
                # Spark 4.1 did not say where the checkpoint stands, and an offset before it would go back
                raise GdqError(f'consumer "{self.consumer}" of queue "{self.queue}" is paused')
            if end is None:
                return known
            rested = time.monotonic() - self._moved_at < _IDLE_SECONDS
            may_rest = start is not None and not first and last_tick is None and rested
            if may_rest and not self._changed(connection, known, end):
                return known
        self._moved_at = time.monotonic()
        return end

    def _partitions(self, connection: Connection[Any], start: _Offset, end: _Offset) -> list[InputPartition]:
        s0, s1 = _parse(start), _parse(end)
        with self._told():
            for known in (s0, s1):
                check_position(connection, self.queue, str(known))
        if start["table"] != self._table_oid(connection):
            raise GdqError(f"the checkpoint belongs to another table than {self.table}: {_CURE}")
        if s0.tick > s1.tick:
            raise GdqError(
                f"the stream starts at tick {s0.tick}, after the end of its first batch at tick {s1.tick}: consumer"
                f' "{self.consumer}" or the option "from" was moved forward; move it back, or {_CURE}'
            )
        with self._told():
            gaps = self._gaps(connection, s0, s1)
            names = [column.label for column in self.columns]
            if reader.read_columns(connection, self.options, names) != self.columns:
                raise GdqError(
                    f"columns of table {self.table} have other types since the stream was started: restart the stream"
                )
            relations = self._relations(connection, s0, s1)
            if gaps:
                relations.append(self._gap_rows(connection, gaps))
        self._at = s1
        return [reader.ReaderStatement(arrow_select_sql(f"{relation} as r", self.columns)) for relation in relations]

    def _relations(self, connection: Connection[Any], s0: Position, s1: Position) -> list[str]:
        try:
            return reader.change_relations(connection, self.options, (s0.snapshot, s1.snapshot), self.columns)
        except psycopg.errors.ObjectNotInPrerequisiteState as error:
            raise GdqError(f"{error.diag.message_primary}, which no batch can hold: {_CURE}") from error

    def _gaps(self, connection: Connection[Any], s0: Position, s1: Position) -> list[tuple[int, str]]:
        """Events of a batch that no row shows, as (ev_id, kind); ResyncRequired unless the option `gaps` is "rows".

        Also ResyncRequired while capture is off (no ev_id): writes at that time reach no log.
        """
        gaps = []
        for row in self._events(connection, s0, s1):
            # a renamed table or an empty new partition does not concern the stream
            if row["kind"] == "ddl" and not row["data"].keys() & {"new_version", "dropped"}:
                continue
            if self.gaps == "rows" and row["ev_id"] is not None:
                gaps.append((row["ev_id"], row["kind"]))
                continue
            what = {"truncate": "was truncated", "ddl": "was altered"}.get(row["kind"], "has a gap in its capture")
            reason = (row["data"] or {}).get("reason")
            pass_on = ', or pass such events on with the option gaps="rows"' if row["ev_id"] is not None else ""
            raise ResyncRequired(
                f"table {row['tbl']} {what}{f' ({reason})' if reason else ''} between ticks {s0.tick} and {s1.tick},"
                f" which no row shows: {_CURE}{pass_on}"
            )
        return gaps

    def _events(self, connection: Connection[Any], s0: Position, s1: Position) -> list[dict[str, Any]]:
        query = qualified("""select ev_id, kind, tbl, data
                     from gdq.delta_events(%s, %s::pg_snapshot, %s::pg_snapshot, array[%s::pg_catalog.regclass])
                    where kind <> 'message'""")
        with mapped_errors(), connection.cursor(row_factory=dict_row) as cursor:
            return cursor.execute(query, [self.queue, s0.snapshot, s1.snapshot, self.table]).fetchall()

    def _gap_rows(self, connection: Connection[Any], gaps: Sequence[tuple[int, str]]) -> str:
        """The gaps as a relation with the columns of signed_form_sql()."""
        logged = log_columns(connection, self.queue, self.table)
        names = [column.label for column in reader.change_header(logged)]
        kinds = ["text", "bigint", "timestamptz", "bigint", "text[]"][: len(names)]
        for column in logged:
            names.append(column.name)
            kinds.append(column.log_type)
        rows = ", ".join(
            f"({', '.join(self._gap_value(name, kind, gap) for name, kind in zip(names, kinds, strict=True))})"
            for gap in gaps
        )
        return f"(select * from (values {rows}) as v({', '.join(quote(name) for name in names)}))"

    def _gap_value(self, name: str, kind: str, gap: tuple[int, str]) -> str:
        number, event = gap
        value = {"_change_type": event, "ev_id": number}.get(name)
        return f"{sql.Literal(value).as_string(None)}::{kind}"

    def _changed(self, connection: Connection[Any], s0: Position, s1: Position) -> bool:
        """True if there is something to read between two positions."""
        with connection.transaction():
            connection.execute("set local enable_seqscan = off")
            with mapped_errors():
                rows = log_rows_sql(connection, self.queue, self.table, s0.snapshot, s1.snapshot)
                if connection.execute(f"select from ({rows}) as c limit 1").rowcount:
                    return True
                return bool(self._events(connection, s0, s1))

    def _move_consumer(self, connection: Connection[Any], end: Position) -> None:
        """Move the consumer forward to `end`, never back. If another session holds it, the next commit moves it."""
        with contextlib.suppress(psycopg.errors.LockNotAvailable), self._told(), connection.transaction():
            if Position.parse(position(connection, self.queue, self.consumer)).tick < end.tick:
                seek(connection, self.queue, self.consumer, tick=end.tick)

    def _stream_end(
        self, connection: Connection[Any], since: Position, max_events: int | None, last_tick: int | None
    ) -> Position | None:
        query = "select gdq.stream_end(%s, %s, %s::pg_catalog.regclass, %s, %s, %s)"
        end = scalar(connection, query, self.queue, self.consumer, self.table, str(since), max_events, last_tick)
        return None if end is None else Position.parse(end)

    def _offset(self, connection: Connection[Any], at: Position) -> _Offset:
        return {"position": str(at), "table": self._table_oid(connection)}

    def _table_oid(self, connection: Connection[Any]) -> int:
        """OID that identifies the table in a checkpoint, also after a rename; a restored dump ends the era anyway."""
        return int(scalar(connection, qualified("select %s::pg_catalog.regclass::oid::bigint"), self.table) or 0)

    @contextlib.contextmanager
    def _told(self) -> Iterator[None]:
        """Put the remedy into the message of a refused position: Spark shows only one line of a task's error."""
        try:
            yield
        except (TruncatedPosition, EraEnded, DivergedPosition) as error:
            raise type(error)(f"the stream cannot go on from its checkpoint: {error}; {_CURE}") from error
        except ServerError as error:
            if error.hint is None or error.hint in str(error):
                raise
            raise type(error)(f"{error}; {error.hint}", hint=error.hint) from error


def _parse(offset: _Offset) -> Position:
    return Position.parse(offset["position"])


def stream_reader(options: Mapping[str, str], names: Sequence[str]) -> GdqStreamReader:
    """The stream reader for the installed Spark version."""
    return GdqStreamReader(options, names) if not LIMITS_BATCHES else LimitedStreamReader(options, names)


if LIMITS_BATCHES:

    class LimitedStreamReader(GdqStreamReader, SupportsTriggerAvailableNow):  # type: ignore[misc]
        """Stream reader for Spark 4.2: batches of a limited size, and an end that is fixed at the start."""

        _last_tick: int | None = None

        def prepareForTriggerAvailableNow(self) -> None:  # noqa: N802
            self._last_tick = self._call(lambda connection: take_tick(connection, self.queue))

        def getDefaultReadLimit(self) -> Any:  # noqa: N802
            return ReadAllAvailable() if self.max_events is None else ReadMaxRows(self.max_events)

        def latestOffset(self, start: _Offset, limit: Any) -> _Offset:  # type: ignore[override]  # noqa: N802
            most = limit.max_rows if isinstance(limit, ReadMaxRows) else None
            at = _parse(start)
            end = self._call(lambda connection: self._next(connection, at, most, self._last_tick))
            return start if end == at else {"position": str(end), "table": start["table"]}
