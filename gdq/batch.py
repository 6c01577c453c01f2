"""One open batch of a consumer: its events, typed rows and net change."""

from __future__ import annotations

import html
import logging
from collections.abc import Collection, Iterator, Sequence
from contextlib import ExitStack, closing, nullcontext
from datetime import timedelta
from itertools import islice
from typing import TYPE_CHECKING, Any

from psycopg import Connection
from psycopg.pq import TransactionStatus
from psycopg.rows import TupleRow, dict_row, scalar_row

from gdq.batch_state import BatchState, TableVersion, gap_error, refuse_gap
from gdq.call import call, one_round_trip
from gdq.errors import GdqError, mapped_errors
from gdq.event_rows import EventChoice
from gdq.extra import extra_named
from gdq.log_rows import BATCH_WEIGHT, log_header, net_batch_rows, refuse_unchanged
from gdq.member import DEAD_AFTER
from gdq.retry import RETRY_DELAY, RetryOutcome
from gdq.sequence import SequenceValue
from gdq.shown import ROWS_MAX, ShownRows
from gdq.source import Event, Images, Position
from gdq.steps import Statement, execute, is_left_open, run
from gdq.stream import Message, NextBatch, next_batch_statement, read_events
from gdq.typed.arrow import ArrowColumn, ArrowReader, arrow_schema, arrow_select_sql
from gdq.typed.batch_rows import may_read_logs, read_batch_rows
from gdq.typed.pgtypes import READ_AS_TEXT, ColumnType, OnUnsupported, column_type

if TYPE_CHECKING:
    import pyarrow as pa

log = logging.getLogger(__name__)

# The values of ev_op whose log rows hold an old or a new image; o and n are halves of an update too large for one row.
_OLD_IMAGE = ["U", "D", "o"]
_NEW_IMAGE = ["I", "U", "n"]


class Batch(BatchState):
    """The changes of one consumer between two ticks, open in the transaction of `connection`.

    No other program gets a batch of this consumer until that transaction ends. Reading again gives the same.
    Typed rows are read on a second connection to the same database, whose driver is faster; all of them were committed
    before the batch was cut. `reader` keeps that connection from batch to batch. For a role that may not read the logs
    they are read on `connection`.
    """

    def __init__(
        self,
        connection: Connection[Any],
        queue: str,
        consumer: str,
        row: dict[str, Any],
        *,
        transaction: ExitStack | None = None,
        events: Iterator[Event] | None = None,
        reader: ArrowReader | None = None,
    ) -> None:
        super().__init__(queue, consumer, row)
        self.connection = connection
        self._transaction = transaction
        self._reader = reader
        self._first = events

    @classmethod
    def open(
        cls,
        connection: Connection[Any],
        queue: str,
        consumer: str,
        max_events: int,
        *,
        member: str | None = None,
        dead_after: timedelta = DEAD_AFTER,
        transaction: ExitStack | None = None,
        reader: ArrowReader | None = None,
    ) -> Batch | None:
        """The next batch of the consumer, or of its `member`; None if there is none.

        The subscription is locked until the caller's transaction ends. commit() closes `transaction`; without one the
        caller commits.
        """
        statement = next_batch_statement(queue, consumer, max_events, member=member, dead_after=dead_after)
        row = next(iter(execute(connection, statement)), None)
        if row is None:
            return None
        return cls(connection, queue, consumer, row, transaction=transaction, reader=reader)

    @classmethod
    def ask(
        cls, connection: Connection[Any], ask: NextBatch, *, transaction: ExitStack, reader: ArrowReader
    ) -> Batch | None:
        """The batch that `ask` brings, with its events if they are few, in a transaction that `transaction` ends.

        One round trip, with BEGIN; None if there is no batch.
        """
        return cls._found(connection, ask, Message(connection).send(transaction, ask), transaction, reader)

    @classmethod
    def _found(
        cls,
        connection: Connection[Any],
        ask: NextBatch,
        rows: Sequence[TupleRow],
        transaction: ExitStack,
        reader: ArrowReader | None,
    ) -> Batch | None:
        if (found := ask.found(rows)) is None:
            return None
        row, events = found
        batch = cls(connection, ask.queue, ask.consumer, row, transaction=transaction, events=events, reader=reader)
        batch.streamed = ask.choice
        return batch

    def _repr_html_(self) -> str:
        return f"<p>{html.escape(repr(self))}</p>{self._first_events()._repr_html_() if self._is_open() else ''}"

    def _is_open(self) -> bool:
        return not self.finished and self.connection.info.transaction_status == TransactionStatus.INTRANS

    def _first_events(self) -> ShownRows[Event]:
        """The first events, by a cursor of their own; rolled back, so that an error does not end the batch."""
        with self.connection.transaction(force_rollback=True):
            return ShownRows(islice(read_events(self.connection, self.id, self.token, EventChoice()), ROWS_MAX))

    @property
    def position(self) -> Position:
        """The consumer's position once the batch is finished."""
        return Position.parse(execute(self.connection, self._position()))

    def tables(self) -> list[str]:
        """The captured tables whose logs may hold rows of the batch, as `%I.%I`."""
        names: list[str] = execute(self.connection, self._tables())
        return names

    def versions(self, table: str) -> list[TableVersion]:
        """The versions of a table with rows in the batch, oldest first; several only if DDL divides the batch."""
        return ShownRows(execute(self.connection, self._versions(table)))

    def events(self, *, images: Images = "both", columns: Sequence[str] | None = None) -> Iterator[Event]:
        """All changes in the order of their numbers, with Python's values, streamed through cursors of the server.

        `images`: "new" leaves the old images out. `columns`: only these columns of the images, of tables that have
        them. The server neither renders nor sends what is left out. A key is always whole. Event.in_json() gives the
        values that `gdq consume` prints (docs/types.md).
        Retried events that are due come first, in the same order; their `retries` is above 0.
        ResyncRequired at a gap in capture: changes are missing between the events before and after it.
        """
        choice = EventChoice.of(images, columns)
        first, self._first = (self._first if self.streamed == choice else None), None
        self.streamed = choice
        for event in first or read_events(self.connection, self.id, self.token, choice):
            refuse_gap(event)
            yield event

    def retry(self, event: Event, delay: timedelta = RETRY_DELAY, reason: str | None = None) -> bool:
        """Put an event of this batch aside: it comes again in the first batch that is opened after `delay`.

        It takes effect with commit(). False if the event has had all its retries (set_retry_limit) and became a dead
        letter. Only events() gives it again: arrow() and delta() do not.
        """
        return bool(execute(self.connection, self._retry(event, delay, reason)))

    def put_aside(self, outcomes: Sequence[RetryOutcome]) -> int:
        """Put many events aside, each by its Retry or DeadLetter; returns the number that come again."""
        return run(self.connection, self._put_aside(outcomes))

    def dead_letter(self, event: Event, reason: str | None = None) -> None:
        """Give up an event of this batch and keep it as a dead letter; takes effect with commit()."""
        execute(self.connection, self._dead_letter(event, reason))

    def sequences(self, *, changed: bool = True) -> list[SequenceValue]:
        """The values of the queue's sequences at the end of the batch; `changed`: only values that the batch changed.

        Set them in a copy of the tables after applying the events.
        """
        return ShownRows(execute(self.connection, self._sequences(changed)))

    @extra_named()
    def arrow(
        self,
        table: str,
        *,
        images: Images = "both",
        columns: Collection[str] | None = None,
        unsupported: OnUnsupported = "error",
        as_text: Collection[str] = (),
        version: int | None = None,
    ) -> pa.Table:
        """All log rows of one table as one Arrow table; see arrow_batches()."""
        import pyarrow as pa  # noqa: PLC0415

        read = self._log_columns(table, EventChoice.of(images, columns), unsupported, as_text, version)
        return pa.Table.from_batches(self._read(table, read, version), schema=arrow_schema(read))

    @extra_named()
    def arrow_batches(
        self,
        table: str,
        *,
        images: Images = "both",
        columns: Collection[str] | None = None,
        unsupported: OnUnsupported = "error",
        as_text: Collection[str] = (),
        version: int | None = None,
    ) -> Iterator[pa.RecordBatch]:
        """The log rows of one table, typed, in no order, streamed.

        Columns: ev_id, ev_txid, ev_time, ev_op (I, U, D; o and n: the old and new half of an update too large for one
        row), then key_, old_ and new_ with the column's name. A TRUNCATE is not a row: it is in events(). Where updates
        may leave out large values (capture with unchanged "omit"), ev_unchanged follows ev_op: None, or the names of
        the columns that the row lacks, since the update left them as they were.
        `images`: "new" leaves the old_ columns out. `columns`: only these of the table; GdqError if it lacks one. Key
        columns are always there, old and new; the server does not read what is left out.
        After DDL inside the batch the columns are those of the newest version, NULL if a row lacks one;
        psycopg.errors.ObjectNotInPrerequisiteState if a type has changed. `version`, one of versions(), reads only the
        rows of this version, with its own columns.
        UnsupportedValue names a column that Arrow cannot hold. To read such columns as text, set `unsupported` to
        "text" (all types that Arrow lacks) or name them in `as_text`. ResyncRequired if capture had a gap.
        """
        import pyarrow as pa  # noqa: F401, PLC0415 (missed here, not at the first row)

        read = self._log_columns(table, EventChoice.of(images, columns), unsupported, as_text, version)
        return self._read(table, read, version)

    @extra_named()
    def delta(
        self,
        table: str,
        *,
        unsupported: OnUnsupported = "error",
        as_text: Collection[str] = (),
        version: int | None = None,
    ) -> pa.Table:
        """The net change of a table in full mode: its row images, each with a signed count in `_weight`.

        Old images count -1, new ones +1; equal images are added, zero counts left out. So the order does not matter,
        and a row that was changed and changed back is missing. ResyncRequired after changes that no image shows: a gap
        in capture, a TRUNCATE or DDL; after DDL each `version` of versions() can be read by itself. GdqError if the log
        lacks a value that an update left as it was (capture with unchanged "omit").
        """
        import pyarrow as pa  # noqa: PLC0415
        import pyarrow.compute as pc  # noqa: PLC0415

        self._refuse_gaps(table, ("resync", "truncate", *(("ddl",) if version is None else ())))
        sources = self._sources(table, version)
        if any(source["log_old"] is None for source in sources):
            raise GdqError(f"table {table} is captured in pk mode: its log has no row images")
        names = [source["name"] for source in sources]
        if BATCH_WEIGHT in names:
            raise GdqError(f'table {table} has a column "{BATCH_WEIGHT}" itself')
        types = [_type_of(source, unsupported, as_text) for source in sources]
        old, new = (
            [ArrowColumn(s[side], t, s["name"], log_type=s["log_type"]) for s, t in zip(sources, types, strict=True)]
            for side in ("log_old", "log_new")
        )
        schema = arrow_schema(old).append(pa.field(BATCH_WEIGHT, pa.int64()))
        images: list[pa.Table] = [schema.empty_table()]
        columns = [ArrowColumn(c.source, c.type, column=c.name, log_type=c.log_type) for c in old + new]
        for batch in self._read(table, [*log_header(sources), *columns], version):
            refuse_unchanged(table, batch)
            ops = batch.column("ev_op")
            for side, wanted, weight in ((old, _OLD_IMAGE, -1), (new, _NEW_IMAGE, 1)):
                some = batch.filter(pc.is_in(ops, pa.array(wanted)))
                arrays = [some.column(column.source) for column in side]
                weights = pa.repeat(pa.scalar(weight, pa.int64()), some.num_rows)
                images.append(pa.Table.from_arrays([*arrays, weights], schema=schema))
        return net_batch_rows(pa.concat_tables(images), names)

    def commit(self) -> None:
        """Move the consumer past the batch, and commit its transaction with all writes in it.

        A second call does nothing. StaleBatch if another worker took the batch over: nothing is committed.
        """
        if self.finished:
            return
        if self._transaction is None:
            call(self.connection, "finish_batch", self.id, self.token)
        else:
            self._finish(self._transaction)
        self.finished = True

    def follow(self, ask: NextBatch, tick: Statement | None) -> tuple[Batch | None, TupleRow | None]:
        """Finish and commit the batch, take a tick, and ask for the next batch, in one round trip.

        Returns the next batch, whose transaction `transaction` of this one ends, and what the tick's statement gave.
        """
        if self._transaction is None:
            raise AssertionError("the batch is in the caller's transaction")
        message = Message(self.connection, self._finish_statement(), tick)
        try:
            rows = message.send(self._transaction, ask)
        finally:
            if message.committed:
                self._note_retry(message.row_of_finish()[0])
                self.finished = True
        following = self._found(self.connection, ask, rows, self._transaction, self._reader)
        return following, None if tick is None else message.row_of_tick()

    def _finish(self, transaction: ExitStack) -> None:
        """End the batch and its transaction in one round trip, and set `retry_at`."""
        finish, cursor = self._finish_statement(), self.connection.cursor(row_factory=scalar_row)
        try:
            with one_round_trip(self.connection):
                cursor.execute(finish.query, finish.values)
                transaction.close()
        finally:
            # if the server refused, psycopg's transaction block still believes that it has committed
            if is_left_open(self.connection):
                self.connection.rollback()
        self._note_retry(cursor.fetchone())

    def _read(self, table: str, columns: list[ArrowColumn], version: int | None) -> Iterator[pa.RecordBatch]:
        self._refuse_gaps(table, ("resync",))
        if not may_read_logs(self.connection):
            yield from read_batch_rows(self.connection, self.id, self.token, table, columns, version=version)
            return
        query = call(self.connection, "batch_sql", self.id, self.token, table, version)
        kept = self._reader
        reading = closing(ArrowReader(self.connection)) if kept is None else nullcontext(kept)
        with reading as reader, reader.read(arrow_select_sql(f"({query}) r", columns), columns) as batches:
            yield from batches

    def _log_columns(
        self,
        table: str,
        choice: EventChoice,
        unsupported: OnUnsupported,
        as_text: Collection[str],
        version: int | None,
    ) -> list[ArrowColumn]:
        sources = self._sources(table, version)
        choice.check(table, [source["name"] for source in sources])
        keys = [source for source in sources if source["is_key"]]
        chosen = [source for source in sources if source["is_key"] or choice.has(source["name"])]
        types = {source["name"]: _type_of(source, unsupported, as_text) for source in chosen}
        columns = log_header(chosen)
        for image, some in (
            ("log_key", keys),
            ("log_old", chosen if choice.images == "both" else keys),
            ("log_new", chosen),
        ):
            columns += [
                ArrowColumn(source[image], types[source["name"]], column=source["name"], log_type=source["log_type"])
                for source in some
                if source[image] is not None
            ]
        return columns

    def _sources(self, table: str, version: int | None) -> list[dict[str, Any]]:
        with mapped_errors(), self.connection.cursor(row_factory=dict_row) as cursor:
            query = "select * from gdq.table_columns(%s, %s::pg_catalog.regclass, %s)"
            return cursor.execute(query, [self.queue, table, version]).fetchall()

    def _refuse_gaps(self, table: str, kinds: Collection[str]) -> None:
        """ResyncRequired if the batch holds an event of one of these kinds for the table."""
        query = "select tbl, kind, data from gdq.batch_gaps(%s, %s, %s::pg_catalog.regclass)"
        with mapped_errors(), self.connection.cursor(row_factory=dict_row) as cursor:
            cursor.execute(query, [self.id, self.token, table])
            for row in cursor:
                # a renamed table or an empty new partition does not concern the rows
                if row["kind"] in kinds and (row["kind"] != "ddl" or row["data"].keys() & {"new_version", "dropped"}):
                    raise gap_error(row["tbl"], row["data"], row["kind"])


def _type_of(source: dict[str, Any], unsupported: OnUnsupported, as_text: Collection[str]) -> ColumnType:
    chosen = source["name"] in as_text
    kind = column_type(
        source["type"],
        source["as_text"],
        log_type=source["log_type"],
        column=source["name"],
        unsupported="text" if chosen else unsupported,
    )
    return READ_AS_TEXT if chosen and kind.arrow != "string" else kind
