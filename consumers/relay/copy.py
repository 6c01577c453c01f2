"""Copies that a relay sends: the rows of a table, in portions of which each is known to be sent or not."""

from __future__ import annotations

import itertools
import logging
import time
import uuid
from collections.abc import Callable, Iterable
from dataclasses import replace

from gdq.call import scalar
from gdq.consumers.relay.form import Form
from gdq.consumers.relay.note import Note
from gdq.consumers.relay.order import Keys
from gdq.consumers.relay.sink import Record, Sink, TransactionalSink
from gdq.copy_batch import CopyBatch, tables_to_copy
from gdq.era import position
from gdq.errors import GdqError, SinkUnavailable
from gdq.qualified_sql import qualified
from gdq.retry import DeadLetter, RetryOutcome
from gdq.source import Event, Position
from gdq.steps import execute

log = logging.getLogger(__name__)

# Rows sent to the sink at a time: so many are in memory, and in one transaction of a sink that has them.
_ROWS = 500

_LOCK = qualified("select pg_catalog.pg_try_advisory_xact_lock(pg_catalog.hashtextextended(%s, 0))")
# Seconds that another relay may take to end, and between two looks.
_LOCK_SECONDS, _PAUSE_SECONDS = 60.0, 0.1
_ONE_RELAY = "Run one relay for each consumer."


class CopySending:
    """One copy on its way to a sink; send() goes on where it stopped."""

    def __init__(self, sink: Sink, copy: CopyBatch, form: Form, keys: Keys, consumer: str) -> None:
        self.copy = copy
        self._sink = sink
        self._form = form
        self._keys = keys
        self._consumer = consumer
        # A copy that begins again has other rows: no receiver may take them for those that it has.
        self._number = uuid.uuid4()
        self._events = enumerate(copy.events())
        # The truncate goes by itself, so that it comes before all rows.
        self._portion = list(itertools.islice(self._events, 1))
        self._lanes: list[list[Record]] = []
        self._locked = False

    def send(self, stop: Callable[[], bool]) -> bool:
        """Send all that is left; False if `stop` said so before the end."""
        self._locked = self._locked or self._lock(stop)
        while not stop():
            if self._lanes:
                self._send()
            elif self._portion:
                self._lanes, self._portion = self._formed(self._portion), list(itertools.islice(self._events, _ROWS))
            else:
                return True
        return False

    def _lock(self, stop: Callable[[], bool]) -> bool:
        """Keep other relays of the consumer out until the transaction ends: their rows would come after its changes."""
        connection, consumer = self.copy.connection, f"{self.copy.queue}/{self._consumer}"
        until = time.monotonic() + _LOCK_SECONDS
        while not stop():
            if scalar(connection, _LOCK, f"gdq relay {consumer}"):
                if self.copy.table not in execute(connection, tables_to_copy(self.copy.queue, self._consumer)):
                    raise GdqError(f"another relay of {consumer} has copied table {self.copy.table}", hint=_ONE_RELAY)
                return True
            if time.monotonic() > until:
                raise GdqError(f"another relay of {consumer} sends a copy", hint=_ONE_RELAY)
            time.sleep(_PAUSE_SECONDS)
        return False

    def _formed(self, portion: list[tuple[int, Event]]) -> list[list[Record]]:
        """The records of events, in the lanes of their keys."""
        lanes: dict[str, list[Record]] = {}
        for number, event in portion:
            event = event.in_json() if self._form.takes_json else event  # noqa: PLW2901 (once for place and form)
            place = self._keys.place(event)
            lane = lanes.setdefault(place.keys[0] if place.keys else "", [])
            try:
                lane += self._form(event, place.text, f"{self._number}-{number}")
            except DeadLetter as outcome:
                raise _refused(event, place.text, outcome) from None
        return [lane for lane in lanes.values() if lane]

    def _send(self) -> None:
        """Send the lanes at hand; what the sink has then is in them no more, also after an error."""
        taken: set[str] = set()
        try:
            if not isinstance(self._sink, TransactionalSink):
                self._offer(taken)
            elif self._send_in_transaction(self._sink):
                self._lanes = []
        finally:
            self._lanes = _without(self._lanes, taken)

    def _send_in_transaction(self, sink: TransactionalSink) -> bool:
        """Send the lanes at hand in a transaction, which notes the last record; False if they have to be sent again."""
        last = self._lanes[-1][-1].id
        text = sink.begin(f"{self.copy.queue}/{self._consumer}")
        try:
            note = Note.parse(text) if text else Note(self._position())
            if note.copied == last:  # the last transaction, of which it was not known whether it was committed
                sink.abort()
                return True
            self._offer(set())
            return sink.commit(str(replace(note, copied=last)))
        except BaseException:
            sink.abort()
            raise

    def _offer(self, taken: set[str]) -> None:
        """Have the sink send the lanes at hand, and add to `taken` what it has; an error if it has not all of it."""
        refused: tuple[Record, str] | None = None
        for record, outcome in self._sink.send(self._lanes):
            if outcome is None:
                taken.add(record.id)
            elif not outcome.dead:
                refused = refused or (record, str(outcome))
            elif record.event.op == "truncate":
                log.warning("the receiver takes no truncate of table %s: %s", record.event.table, outcome)
                taken.add(record.id)
            else:
                raise _refused(record.event, record.key, outcome)
        if refused is not None:
            record, reason = refused
            raise SinkUnavailable(f"the receiver does not take {_shown(record.event, record.key)}: {reason}")
        for lane in _without(self._lanes, taken):
            raise GdqError(f"the sink has not told what became of record {lane[0].id}")

    def _position(self) -> Position:
        return Position.parse(position(self.copy.connection, self.copy.queue, self._consumer))


def _refused(event: Event, key: str | None, outcome: RetryOutcome) -> GdqError:
    return GdqError(
        f"the receiver will not take {_shown(event, key)}: {outcome}",
        hint="A copy passes over no row. Mend the cause, and begin again.",
    )


def _shown(event: Event, key: str | None) -> str:
    return f"a row of table {event.table} {'without a key' if key is None else f'with the key {key}'}"


def _without(lanes: Iterable[list[Record]], taken: set[str]) -> list[list[Record]]:
    """What is left of lanes."""
    return [left for lane in lanes if (left := [record for record in lane if record.id not in taken])]
