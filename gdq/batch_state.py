"""A batch without I/O: what it is, and the statements that Batch and AsyncBatch send."""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any
from uuid import UUID

from gdq.call import typed
from gdq.errors import ResyncRequired
from gdq.event_rows import EventChoice
from gdq.member import named
from gdq.qualified_sql import qualified
from gdq.retry import RetryOutcome
from gdq.sequence import SequenceValue
from gdq.source import Event
from gdq.steps import Statement, Steps, called

log = logging.getLogger("gdq.batch")

# The operation of events that show a gap: no user sees one, so it is none of those that Event names.
_GAP: str = "resync"


@dataclass(frozen=True, slots=True)
class TableVersion:
    """One version of a table's columns: a batch with DDL inside has rows of several versions."""

    id: int
    columns: list[str]


class BatchState:
    """What Batch and AsyncBatch share: the numbers of a batch, and the statements of their methods."""

    def __init__(self, queue: str, consumer: str, row: dict[str, Any]) -> None:
        self._consumer = consumer
        self.queue = queue
        self.id: int = row["batch_id"]
        self.token: UUID = row["token"]
        self.tick_from: int | None = row["tick_from"]
        self.tick_to: int = row["tick_to"]
        self.snapshot_from: str = str(row["snapshot_from"])
        self.snapshot_to: str = str(row["snapshot_to"])
        self.finished = False
        self.streamed: EventChoice | None = None  # what of its events was read
        self.retry_at: float | None = None  # once it is finished: when the next retry is due, by time.monotonic()

    def __repr__(self) -> str:
        ticks = f"ticks {'' if self.tick_from is None else f'{self.tick_from} '}to {self.tick_to}"
        end = "finished" if self.finished else "not finished"
        return f"<{type(self).__name__} {self.id} of consumer {named(self.queue, self._consumer)}: {ticks}, {end}>"

    def _position(self) -> Statement:
        return called("tick_position", self.queue, self.tick_to)

    def _tables(self) -> Statement:
        return Statement("select array(select table_name from gdq.batch_tables(%s, %s))", [self.id, self.token])

    def _versions(self, table: str) -> Statement:
        query = qualified("""
            select version as id, array(select c ->> 'name' from jsonb_array_elements(columns) c) as columns
              from gdq.batch_versions(%s, %s, %s::regclass)""")
        return typed(TableVersion, query, self.id, self.token, table)

    def _retry(self, event: Event, delay: timedelta, reason: str | None) -> Statement:
        return called("retry_event", self.id, self.token, event.id, delay, reason, event.op)

    def _put_aside(self, outcomes: Sequence[RetryOutcome]) -> Steps[int]:
        """Put events aside; the result is the number of those that come again."""
        again = 0
        for kind in {_kind(outcome) for outcome in outcomes}:
            some = [
                (outcome.event.id, outcome.event.op, outcome.reason)
                for outcome in outcomes
                if outcome.event is not None and _kind(outcome) == kind
            ]
            ids, ops, reasons = map(list, zip(*some, strict=True))
            dead, delay, counted = kind
            again += yield called("put_aside", self.id, self.token, ids, ops, delay, reasons, dead, counted)
        if outcomes:
            counts = f"{again} to come again, {len(outcomes) - again} dead letters"
            first = outcomes[0]
            number = None if first.event is None else first.event.id
            log.warning("events put aside: %s; the first is event %s: %s", counts, number, first)
        return again

    def _dead_letter(self, event: Event, reason: str | None) -> Statement:
        return called("dead_letter", self.id, self.token, event.id, reason, event.op)

    def _sequences(self, changed: bool) -> Statement:
        query = "select * from gdq.batch_sequences(%s, %s, %s)"
        return typed(SequenceValue, query, self.id, self.token, changed)

    def _finish_statement(self) -> Statement:
        """Finishes the batch; the result is for _note_retry()."""
        query = qualified("""select case when gdq.finish_batch(%s, %s) is not null
                               then extract(epoch from gdq.next_retry(%s, %s) - clock_timestamp())::float8 end""")
        return Statement(query, [self.id, self.token, self.queue, self._consumer])

    def _note_retry(self, seconds: float | None) -> None:
        """Note when the next retry is due, once the batch is finished."""
        self.retry_at = None if seconds is None else time.monotonic() + seconds


def refuse_gap(event: Event) -> None:
    """ResyncRequired if an event shows a gap in capture."""
    if event.op == _GAP:
        raise gap_error(event.table, event.new)


def gap_error(table: str | None, data: dict[str, Any] | None, kind: str = "resync") -> ResyncRequired:
    """The error for changes of a table that are missing."""
    what = {"truncate": "was truncated", "ddl": "was altered"}.get(kind, "has a gap in its capture")
    reason = (data or {}).get("reason")
    table = (data or {}).get("now", table)
    return ResyncRequired(
        f"table {table} {what}{f': {reason}' if reason else ''}",
        hint="Copy the table again: by Consumer.resync(), or by hand and gdq resynced. "
        "Or unregister the consumer, register it again and load the tables.",
    )


def _kind(outcome: RetryOutcome) -> tuple[bool, timedelta, bool]:
    """What events that one statement puts aside have in common."""
    return outcome.dead, outcome.delay, outcome.counted
