"""What `gdq consume` does without a handler: print every event as a line of JSON on stdout."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator
from typing import Any

from psycopg import Connection

from gdq.json_text import json_text
from gdq.sequence import SequenceValue
from gdq.source import Event, iso_utc


def print_events(_connection: Connection[Any], events: Iterator[Event]) -> None:
    """Print the events. They are flushed before the batch is finished: none is lost, but an event may come twice."""
    for event in events:
        print(json_text(event_json(event)))
    sys.stdout.flush()


def print_sequences(sequences: Iterable[SequenceValue]) -> None:
    """Print the sequences that changed in a batch, after its events, as lines of the same form with op "sequence"."""
    for sequence in sequences:
        new = {"last_value": sequence.last_value, "is_called": sequence.is_called}
        print(json_text(_object(None, None, None, "sequence", sequence.sequence_name, None, None, new)))
    sys.stdout.flush()


def event_json(event: Event) -> dict[str, Any]:
    """One event as JSON: id, xid, time (UTC), op, table, key, old, new; unchanged and retries if there are any."""
    event, time = event.in_json(), iso_utc(event.time)
    more: dict[str, Any] = {"unchanged": list(event.unchanged)} if event.unchanged else {}
    more |= {"retries": event.retries} if event.retries else {}
    return _object(event.id, event.xid, time, event.op, event.table, event.key, event.old, event.new, **more)


def _object(*values: Any, **more: Any) -> dict[str, Any]:
    names = ("id", "xid", "time", "op", "table", "key", "old", "new")
    return dict(zip(names, values, strict=True)) | more
