"""One open batch of a consumer: its events, its typed rows, its net change."""

from __future__ import annotations

import time
from collections.abc import Collection, Iterator, Sequence
from contextlib import ExitStack, closing, nullcontext
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, Any
from uuid import UUID

from psycopg import Connection
from psycopg.pq import TransactionStatus
from psycopg.rows import dict_row, scalar_row

from gdq.call import call, rows, scalar
from gdq.errors import GdqError, ResyncRequired, mapped
from gdq.member import DEAD_AFTER
from gdq.retry import DELAY, Outcome
from gdq.sequence import SequenceValue
from gdq.source import Event, Position
from gdq.stream import next_batch, next_batch_with_events, read_events, round_trip
from gdq.typed.arrow import Column, Reader, schema_of, select_sql
from gdq.typed.batch_rows import may_read_logs, read_rows
from gdq.typed.pgtypes import AS_TEXT, ColumnType, Unsupported, column_type

if TYPE_CHECKING:
    import pyarrow as pa

WEIGHT = "_weight"

# Which images a log row holds, by ev_op; o and n are the halves of an update that did not fit one row.
_OLD_IMAGE = ["U", "D", "o"]
_NEW_IMAGE = ["I", "U", "n"]

# What stands before the images of a log row.
HEADER = [
    Column(name, column_type(kind), log_type=kind)
    for name, kind in {
        "ev_id": "bigint",
        "ev_txid": "bigint",
        "ev_time": "timestamp with time zone",
        "ev_op": "text",
    }.items()
]


@dataclass(frozen=True, slots=True)
class TableVersion:
    """One list of columns that a table has had: rows of a batch that DDL divides are read version by version."""

    id: int
    columns: list[str]


class Batch:
    """The changes of one consumer between two ticks, open in the transaction of `connection`.

    Other programs see no other batch of this consumer until that transaction ends. Reading again gives the same.
    Typed rows are read on a second connection to the same database, since only that driver is fast; `reader` keeps it
    from batch to batch. What it reads was committed before the batch was cut. For a role that may not read the
    logs they are read on `connection`.
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
        reader: Reader | None = None,
    ) -> None:
        self.connection = connection
        self._transaction = transaction
        self._reader = reader
        self._consumer = consumer
        self._first = events
        self.queue = queue
        self.id: int = row["batch_id"]
        self.token: UUID = row["token"]
        self.tick_from: int | None = row["tick_from"]
        self.tick_to: int = row["tick_to"]
        self.snapshot_from: str = str(row["snapshot_from"])
        self.snapshot_to: str = str(row["snapshot_to"])
        self.finished = False
        self.streamed = False  # whether events() was called
        self.retry_at: float | None = None  # once it is finished: when the next retry is due, by time.monotonic()

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
        begin: bool = False,
        reader: Reader | None = None,
    ) -> Batch | None:
        """The next batch of the consumer, or of its `member`; None when there is none.

        The subscription is locked until the caller's transaction ends. commit() closes `transaction`; without one the
        caller commits. `begin`: the transaction is begun here, put into `transaction`, and the first events are fetched
        in the same round trip.
        """
        events = None
        if begin and transaction is not None:
            row, events = next_batch_with_events(connection, queue, consumer, max_events, transaction)
        else:
            row = next_batch(connection, queue, consumer, max_events, member=member, dead_after=dead_after)
        if row is None:
            return None
        return cls(connection, queue, consumer, row, transaction=transaction, events=events, reader=reader)

    @property
    def position(self) -> Position:
        """The consumer's place once the batch is finished."""
        return Position.parse(call(self.connection, "tick_position", self.queue, self.tick_to))

    def tables(self) -> list[str]:
        """The captured tables whose logs may hold rows of the batch, as `%I.%I`."""
        query = "select array(select table_name from gdq.batch_tables(%s, %s))"
        names: list[str] = scalar(self.connection, query, self.id, self.token)
        return names

    def versions(self, table: str) -> list[TableVersion]:
        """The versions of a table that the batch holds rows of, oldest first: more than one when DDL divides it."""
        query = """select version as id, array(select c->>'name' from jsonb_array_elements(columns) c) as columns
                     from gdq.batch_versions(%s, %s, %s::pg_catalog.regclass)"""
        return rows(self.connection, TableVersion, query, self.id, self.token, table)

    def events(self) -> Iterator[Event]:
        """All changes in the order of their numbers, streamed through a cursor of the server.

        Before them, in the same order, the events that were put aside and are due again: their `retries` is not 0.
        ResyncRequired where capture had a gap: what comes after it does not build on what came before.
        """
        self.streamed = True
        first, self._first = self._first, None
        for event in first if first is not None else read_events(self.connection, self.id, self.token):
            if event.op == "resync":
                raise _resync(event.table, event.new)
            yield event

    def retry(self, event: Event, delay: timedelta = DELAY, reason: str | None = None) -> bool:
        """Put an event of this batch aside: it comes again in the first batch that is opened after `delay`.

        It counts with commit(), as everything else in the transaction. False when the event has had all its retries
        (set_retry_limit) and became a dead letter. Only events() brings it again: arrow() and delta() do not.
        """
        return bool(call(self.connection, "retry_event", self.id, self.token, event.id, delay, reason, event.op))

    def put_aside(self, outcomes: Sequence[Outcome]) -> int:
        """Put many events aside at once, each as its Retry or DeadLetter says; how many come again."""
        again = 0
        for dead, delay in {(outcome.dead, outcome.delay) for outcome in outcomes}:
            some = [
                (outcome.event.id, outcome.event.op, outcome.reason)
                for outcome in outcomes
                if outcome.event is not None and (outcome.dead, outcome.delay) == (dead, delay)
            ]
            ids, ops, reasons = map(list, zip(*some, strict=True))
            again += call(self.connection, "put_aside", self.id, self.token, ids, ops, delay, reasons, dead)
        return again

    def dead_letter(self, event: Event, reason: str | None = None) -> None:
        """Give an event of this batch up: it is kept as a dead letter. It counts with commit()."""
        call(self.connection, "dead_letter", self.id, self.token, event.id, reason, event.op)

    def sequences(self, *, changed: bool = True) -> list[SequenceValue]:
        """The values of the queue's sequences at the end of the batch; `changed`: only values that the batch changed.

        Set them in a copy after the events are applied.
        """
        query = "select * from gdq.batch_sequences(%s, %s, %s)"
        return rows(self.connection, SequenceValue, query, self.id, self.token, changed)

    def arrow(
        self,
        table: str,
        *,
        unsupported: Unsupported = "error",
        as_text: Collection[str] = (),
        version: int | None = None,
    ) -> pa.Table:
        """All log rows of one table as one Arrow table; see arrow_batches()."""
        import pyarrow as pa  # noqa: PLC0415

        columns = self._log_columns(table, unsupported, as_text, version)
        return pa.Table.from_batches(self._read(table, columns, version), schema=schema_of(columns))

    def arrow_batches(
        self,
        table: str,
        *,
        unsupported: Unsupported = "error",
        as_text: Collection[str] = (),
        version: int | None = None,
    ) -> Iterator[pa.RecordBatch]:
        """The log rows of one table, typed, in no order, streamed.

        Columns: ev_id, ev_txid, ev_time, ev_op (I, U, D; o and n: the old and new half of an update that did not fit
        one row), then key_, old_ and new_ with the column's name. A TRUNCATE is no row: it is in events().
        After DDL inside the batch the columns are those of the newest version, NULL where a row had none;
        psycopg.errors.ObjectNotInPrerequisiteState when a type has changed. `version`, one of versions(), reads only
        its rows, with its own columns.
        UnsupportedValue names the column that Arrow cannot hold, unless `unsupported` is "text" (types without a home
        in Arrow) or `as_text` names it (any). ResyncRequired when capture had a gap.
        """
        return self._read(table, self._log_columns(table, unsupported, as_text, version), version)

    def delta(
        self,
        table: str,
        *,
        unsupported: Unsupported = "error",
        as_text: Collection[str] = (),
        version: int | None = None,
    ) -> pa.Table:
        """The net change of a table in full mode: its row images, each with a signed count in `_weight`.

        Old images count -1, new ones +1, equal images are added up and zeros left out: no order is needed, and a row
        that was changed and changed back is not there. ResyncRequired when rows were changed that no image shows: by
        a gap in capture, a TRUNCATE or DDL; DDL is no hindrance to reading each `version` of versions() by itself.
        """
        import pyarrow as pa  # noqa: PLC0415
        import pyarrow.compute as pc  # noqa: PLC0415

        self._refuse_gaps(table, ("resync", "truncate", *(("ddl",) if version is None else ())))
        sources = self._sources(table, version)
        if any(source["log_old"] is None for source in sources):
            raise GdqError(f"table {table} is captured in pk mode: its log has no row images")
        names = [source["name"] for source in sources]
        if WEIGHT in names:
            raise GdqError(f'table {table} has a column "{WEIGHT}" itself')
        types = [_type_of(source, unsupported, as_text) for source in sources]
        old = [Column(s["log_old"], t, s["name"], log_type=s["log_type"]) for s, t in zip(sources, types, strict=True)]
        new = [Column(s["log_new"], t, s["name"], log_type=s["log_type"]) for s, t in zip(sources, types, strict=True)]
        schema = schema_of(old).append(pa.field(WEIGHT, pa.int64()))
        images: list[pa.Table] = [schema.empty_table()]
        columns = HEADER + [Column(c.source, c.type, column=c.name, log_type=c.log_type) for c in old + new]
        for batch in self._read(table, columns, version):
            ops = batch.column("ev_op")
            for side, wanted, weight in ((old, _OLD_IMAGE, -1), (new, _NEW_IMAGE, 1)):
                some = batch.filter(pc.is_in(ops, pa.array(wanted)))
                arrays = [some.column(column.source) for column in side]
                weights = pa.repeat(pa.scalar(weight, pa.int64()), some.num_rows)
                images.append(pa.Table.from_arrays([*arrays, weights], schema=schema))
        return net_rows(pa.concat_tables(images), names)

    def commit(self) -> None:
        """Move the consumer past the batch, and commit this with all that was done in its transaction.

        Once is enough. StaleBatch when another worker took the batch over: nothing is committed.
        """
        if self.finished:
            return
        if self._transaction is None:
            call(self.connection, "finish_batch", self.id, self.token)
        else:
            self._finish(self._transaction)
        self.finished = True

    def _finish(self, transaction: ExitStack) -> None:
        """End the batch and its transaction in one round trip, and set `retry_at`."""
        query = """select case when gdq.finish_batch(%s, %s) is not null
                               then extract(epoch from gdq.next_retry(%s, %s) - clock_timestamp())::float8 end"""
        cursor = self.connection.cursor(row_factory=scalar_row)
        try:
            with round_trip(self.connection):
                cursor.execute(query, [self.id, self.token, self.queue, self._consumer])
                transaction.close()
        finally:
            # where that was refused, the transaction takes itself for committed
            if self.connection.info.transaction_status in (TransactionStatus.INERROR, TransactionStatus.INTRANS):
                self.connection.rollback()
        seconds: float | None = cursor.fetchone()
        self.retry_at = None if seconds is None else time.monotonic() + seconds

    def _read(self, table: str, columns: list[Column], version: int | None) -> Iterator[pa.RecordBatch]:
        self._refuse_gaps(table, ("resync",))
        if not may_read_logs(self.connection):
            yield from read_rows(self.connection, self.id, self.token, table, columns, version=version)
            return
        query = call(self.connection, "batch_sql", self.id, self.token, table, version)
        kept = self._reader
        reading = closing(Reader(self.connection)) if kept is None else nullcontext(kept)
        with reading as reader, reader.read(select_sql(f"({query}) r", columns), columns) as batches:
            yield from batches

    def _log_columns(
        self, table: str, unsupported: Unsupported, as_text: Collection[str], version: int | None
    ) -> list[Column]:
        columns = list(HEADER)
        sources = [(source, _type_of(source, unsupported, as_text)) for source in self._sources(table, version)]
        for image in ("log_key", "log_old", "log_new"):
            columns += [
                Column(source[image], kind, column=source["name"], log_type=source["log_type"])
                for source, kind in sources
                if source[image] is not None
            ]
        return columns

    def _sources(self, table: str, version: int | None) -> list[dict[str, Any]]:
        with mapped(), self.connection.cursor(row_factory=dict_row) as cursor:
            query = "select * from gdq.table_columns(%s, %s::pg_catalog.regclass, %s)"
            return cursor.execute(query, [self.queue, table, version]).fetchall()

    def _refuse_gaps(self, table: str, kinds: Collection[str]) -> None:
        """ResyncRequired when the batch holds an event of one of these kinds for the table."""
        query = "select tbl, kind, data from gdq.batch_gaps(%s, %s, %s::pg_catalog.regclass)"
        with mapped(), self.connection.cursor(row_factory=dict_row) as cursor:
            cursor.execute(query, [self.id, self.token, table])
            for row in cursor:
                # a new name or a partition without rows changes nothing that is read here
                if row["kind"] in kinds and (row["kind"] != "ddl" or row["data"].keys() & {"new_version", "dropped"}):
                    raise _resync(row["tbl"], row["data"], row["kind"])


def _type_of(source: dict[str, Any], unsupported: Unsupported, as_text: Collection[str]) -> ColumnType:
    chosen = source["name"] in as_text
    kind = column_type(
        source["type"],
        source["as_text"],
        log_type=source["log_type"],
        column=source["name"],
        unsupported="text" if chosen else unsupported,
    )
    return AS_TEXT if chosen and kind.arrow != "string" else kind


def net_rows(images: pa.Table, names: list[str]) -> pa.Table:
    """Images with a signed count in WEIGHT, the equal ones added up, zeros left out; `names` are their columns."""
    import pyarrow.compute as pc  # noqa: PLC0415

    summed = images.group_by(names).aggregate([(WEIGHT, "sum")]).rename_columns([*names, WEIGHT])
    return summed.filter(pc.not_equal(summed.column(WEIGHT), 0)).cast(images.schema)


def _resync(table: str | None, data: dict[str, Any] | None, kind: str = "resync") -> ResyncRequired:
    what = {"truncate": "was truncated", "ddl": "was altered"}.get(kind, "has a gap in its capture")
    reason = (data or {}).get("reason")
    return ResyncRequired(
        f"table {table} {what}{f': {reason}' if reason else ''}",
        hint="Copy the table anew: Consumer.resync(), or by hand and gdq resynced. Or register the consumer again.",
    )
