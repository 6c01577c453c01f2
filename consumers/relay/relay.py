"""A relay: sends the events of a consumer's batches to a sink, and puts aside what the sink refuses."""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Mapping, Sequence
from datetime import timedelta
from typing import Any

from psycopg import Connection

from gdq.batch import Batch
from gdq.consumers.relay.avro import AvroForm, avro_topic
from gdq.consumers.relay.copy import CopySending
from gdq.consumers.relay.form import Form, FormName, json_form
from gdq.consumers.relay.note import Note, is_new, note_of
from gdq.consumers.relay.order import Keys, Place, Waiting
from gdq.consumers.relay.registry import Registry
from gdq.consumers.relay.sink import Record, Sink, TransactionalSink
from gdq.copy_batch import CopyBatch
from gdq.era import check_position, position
from gdq.errors import GdqError
from gdq.retry import DeadLetter, Retry, RetryOutcome
from gdq.source import Event, Position

log = logging.getLogger(__name__)

RETRY_DELAY = timedelta(seconds=10)
_RETRY_DELAY_MAX = timedelta(hours=1)

# Events sent to the sink at a time: so many are in memory.
_EVENTS = 500


class Relay:
    """Sends the events of one consumer to a sink, those of each key in their order.

    `form`: json, cloudevents, debezium or avro. `keys`: for tables, as `schema.table`, the columns of the key in place
    of the primary key. `retry_delay`: the pause before the first retry of an event; each later one is twice as long, up
    to an hour. `tombstones`: with the forms debezium and avro a record without a value after each delete. With the form
    avro, `registry`: where its schemas are registered; `as_text`: columns to send as text.
    """

    def __init__(
        self,
        sink: Sink,
        queue: str,
        consumer: str,
        *,
        form: FormName = "json",
        keys: Mapping[str, Sequence[str]] | None = None,
        retry_delay: timedelta = RETRY_DELAY,
        tombstones: bool = False,
        registry: Registry | None = None,
        as_text: Collection[str] = (),
    ) -> None:
        if form == "avro":
            avro_topic(sink)  # an error now, not at the first record
        self._sink = sink
        self._queue = queue
        self._consumer = consumer
        self._form_name = form
        self._keys = Keys(keys or {})
        self._retry_delay = retry_delay
        self._tombstones = tombstones
        self._registry = registry
        self._as_text = as_text
        self._made: tuple[Connection[Any], Form] | None = None
        # Records that the sink has taken of a batch that was rolled back: they are not sent a second time.
        self._sent: set[str] = set()
        self._copying: CopySending | None = None

    def send(self, batch: Batch) -> None:
        """Send the events of a batch, and finish it.

        What the sink refuses is put aside for a retry or given up, as it says, and so are later events of its key until
        it is through. SinkUnavailable if the sink takes nothing at all: roll the batch back, and call again with the
        batch when it comes again. What the sink has taken is then not sent a second time by this object.
        """
        if isinstance(self._sink, TransactionalSink):
            while not self._send_in_transaction(self._sink, batch):
                log.info("records were refused: the batch is sent again without them")
        else:
            self._send_events(batch, None)
        batch.commit()
        self._sent.clear()

    def send_copy(self, copy: CopyBatch, *, stop: Callable[[], bool] = lambda: False) -> bool:
        """Send the rows of a copy, and commit it; False if `stop` said so before the end: roll the copy back then.

        Nothing is put aside. SinkUnavailable if the sink takes nothing, or not one of the rows for now: call again with
        the same copy, which goes on from there. GdqError if the sink will never take a row.
        """
        if self._copying is None or self._copying.copy is not copy:
            form = self._form(copy.connection)
            self._copying = CopySending(self._sink, copy, form, self._keys, self._consumer)
        if not self._copying.send(stop):
            return False
        self._copying = None
        copy.commit()
        return True

    def _send_in_transaction(self, sink: TransactionalSink, batch: Batch) -> bool:
        """Send a batch in a transaction of the sink, with a note of what it has; False if it has to be sent again.

        If the sink is ahead of the consumer, as after a crash between its COMMIT and the server's, what it has is not
        sent again.
        """
        self._sent.clear()
        text = sink.begin(f"{self._queue}/{self._consumer}")
        try:
            note = Note.parse(text) if text else None
            if note is not None and note.is_ahead(batch):
                check_position(batch.connection, self._queue, str(note.position))
            return sink.commit(str(self._send_events(batch, note)))
        except BaseException:
            sink.abort()
            raise

    def _send_events(self, batch: Batch, note: Note | None) -> Note | None:
        """Send the events that the sink does not have; returns the note of the batch."""
        form = self._form(batch.connection)
        sending = _Sending(self._sink, batch, form, self._keys, retry_delay=self._retry_delay, sent=self._sent)
        sending.waiting = Waiting.read(batch.connection, self._queue, self._consumer, self._keys)
        transactional = isinstance(self._sink, TransactionalSink)
        brought = []
        for event in batch.events():
            if transactional and not is_new(batch, event):
                brought.append(event)
            if note is None or not note.has(batch, event):
                sending.add(event)
        sending.flush()
        if not transactional:
            return None
        unsent = {(event.id, event.op) for event in sending.unsent}
        sent = [event for event in brought if (event.id, event.op) not in unsent]
        return note_of(batch, sent, sending.unsent)

    def _form(self, connection: Connection[Any]) -> Form:
        if self._made is None or self._made[0] is not connection:
            era = Position.parse(position(connection, self._queue, self._consumer)).era
            self._made = connection, self._new_form(connection, era)
        return self._made[1]

    def _new_form(self, connection: Connection[Any], era: str) -> Form:
        if self._form_name != "avro":
            return json_form(self._form_name, connection, self._queue, era, tombstones=self._tombstones)
        if self._registry is None:
            raise GdqError("the form avro needs a schema registry")
        return AvroForm(
            connection, self._queue, era,
            topic=avro_topic(self._sink), registry=self._registry, keys=self._keys, as_text=self._as_text,
            tombstones=self._tombstones,
        )  # fmt: skip


class _Sending:
    """One batch on its way: events gathered in lanes, one for each key, and what was put aside."""

    waiting: Waiting

    def __init__(
        self, sink: Sink, batch: Batch, form: Form, keys: Keys, *, retry_delay: timedelta, sent: set[str]
    ) -> None:
        self._sink = sink
        self._batch = batch
        self._form = form
        self._keys = keys
        self._retry_delay = retry_delay
        self._sent = sent
        self._lanes: dict[str, list[tuple[Event, Place]]] = {}
        self._count = 0
        self._aside: list[RetryOutcome] = []
        # Events that were put aside, where the sink's transaction notes them.
        self.unsent: list[Event] = []

    def add(self, event: Event) -> None:
        """Take an event up, or put it aside if an earlier one of its key waits."""
        if self._form.takes_json:
            event = event.in_json()  # once: its place and its form both ask for JSON's values
        place = self._keys.place(event)
        alone = len(place.keys) != 1
        if alone:
            self.flush()  # it is in more than one lane
        if self._waits(event, place):
            return
        self._lanes.setdefault(place.keys[0] if place.keys else "", []).append((event, place))
        self._count += 1
        if alone or self._count >= _EVENTS:
            self.flush()

    def flush(self) -> None:
        """Send what was gathered, and put aside what was refused."""
        lanes, self._lanes, self._count = list(self._lanes.values()), {}, 0
        while lanes:
            lanes = self._send([lane for lane in lanes if lane])
        if self._aside:
            self._batch.put_aside(self._aside)
            if isinstance(self._sink, TransactionalSink):
                self.unsent += [outcome.event for outcome in self._aside if outcome.event is not None]
            self._aside.clear()

    def _send(self, lanes: list[list[tuple[Event, Place]]]) -> list[list[tuple[Event, Place]]]:
        """Send lanes; returns what is left of those from which an event was given up."""
        formed = [self._formed(lane) for lane in lanes]
        lanes, made = [lane for lane, _ in formed], [records for _, records in formed]
        wanted = [[record for record in lane if record.id not in self._sent] for lane in made]
        refused: dict[int, tuple[Record, RetryOutcome]] = {}
        lane_of = {record.id: number for number, lane in enumerate(wanted) for record in lane}
        for record, outcome in self._sink.send([lane for lane in wanted if lane]) if lane_of else ():
            if outcome is None:
                self._sent.add(record.id)
            else:
                refused[lane_of[record.id]] = record, outcome
        self._check_told(wanted, {record.id for record, _ in refused.values()})
        left = []
        for number, (record, outcome) in refused.items():
            lane = lanes[number]
            at = next(index for index, (event, _) in enumerate(lane) if event is record.event)
            rest = lane[at + 1 :]
            if outcome.dead:
                self._aside.append(DeadLetter(_reason(outcome), event=record.event))
                left.append(rest)
                continue
            self._put_aside(*lane[at], outcome)
            left.append([(event, place) for event, place in rest if not self._waits(event, place)])
        return left

    def _formed(self, lane: list[tuple[Event, Place]]) -> tuple[list[tuple[Event, Place]], list[Record]]:
        """A lane without the events that the form cannot hold, which are given up, and its records."""
        kept: list[tuple[Event, Place]] = []
        made: list[Record] = []
        for event, place in lane:
            try:
                made += self._form(event, place.text, str(event.id))
            except DeadLetter as outcome:
                self._aside.append(DeadLetter(_reason(outcome), event=event))
            else:
                kept.append((event, place))
        return kept, made

    def _check_told(self, lanes: list[list[Record]], refused: set[str]) -> None:
        """GdqError if the sink has said nothing of a record: whether it was sent is not known."""
        for lane in lanes:
            first = next((record for record in lane if record.id not in self._sent), None)
            if first is not None and first.id not in refused:
                raise GdqError(f"the sink has not told what became of record {first.id}")

    def _put_aside(self, event: Event, place: Place, outcome: RetryOutcome) -> None:
        delay = min(self._retry_delay * 2 ** min(event.retries, 20), max(_RETRY_DELAY_MAX, self._retry_delay))
        self._aside.append(Retry(_reason(outcome), delay=delay, event=event))
        self.waiting.add(event.id, place, delay.total_seconds())

    def _waits(self, event: Event, place: Place) -> bool:
        """Whether an earlier event has to come before this one; if so, this one is put aside."""
        found = self.waiting.before(event.id, place)
        if found is None:
            return False
        first, delay = found
        self._aside.append(Retry(f"waits for event {first}", delay=delay, event=event, counted=False))
        self.waiting.add(event.id, place, delay.total_seconds())
        return True


def _reason(outcome: RetryOutcome) -> str:
    return (outcome.reason or type(outcome).__name__).replace("\0", "")  # PostgreSQL's text cannot hold \0
