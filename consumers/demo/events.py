"""The demo's first step: lines of a small table are written, and each arrives as an event."""

from __future__ import annotations

import statistics
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import psycopg

from gdq.consumer import Consumer, register_consumer
from gdq.consumers.demo.outcome import Step
from gdq.errors import GdqError
from gdq.json_text import json_text
from gdq.queue import add_table
from gdq.units import delay

_TABLE = "public.parcel"
_CONSUMER = "watcher"
_REST_SECONDS = 0.4
_PATIENCE_SECONDS = 30.0

# What is written, one transaction each, and the event that is to arrive: operation, key, new row.
_LINES: tuple[tuple[str, str, int, dict[str, Any] | None], ...] = (
    ("insert into parcel values (1, 'packed')", "insert", 1, {"id": 1, "place": "packed"}),
    ("insert into parcel values (2, 'packed')", "insert", 2, {"id": 2, "place": "packed"}),
    ("update parcel set place = 'on the road' where id = 1", "update", 1, {"id": 1, "place": "on the road"}),
    ("update parcel set place = 'delivered' where id = 1", "update", 1, {"id": 1, "place": "delivered"}),
    ("delete from parcel where id = 2", "delete", 2, None),
    ("insert into parcel values (3, 'packed')", "insert", 3, {"id": 3, "place": "packed"}),
)


@dataclass
class _Clerk:
    """The thread that writes the lines, and when it began to write each."""

    conninfo: str
    begun: list[float] = field(default_factory=list)
    stop: threading.Event = field(default_factory=threading.Event)

    def work(self) -> None:
        with psycopg.connect(self.conninfo, autocommit=True) as connection:
            for statement, *_ in _LINES:
                if self.stop.wait(_REST_SECONDS):
                    return
                self.begun.append(time.monotonic())
                connection.execute(statement)


def show_events(connection: psycopg.Connection[Any], conninfo: str, queue: str, say: Callable[[str], None]) -> Step:
    """Write the lines, print the events as they arrive with their delays, and compare them with what was written."""
    connection.execute("create table parcel (id int primary key, place text not null)")
    add_table(connection, queue, _TABLE)
    register_consumer(connection, queue, _CONSUMER, tables=[_TABLE])
    clerk = _Clerk(conninfo)
    thread = threading.Thread(target=clerk.work)
    found: list[tuple[Any, ...]] = []
    delays: list[float] = []
    with Consumer(conninfo, queue, _CONSUMER) as consumer:
        thread.start()
        try:
            for batch in consumer.batches(timeout=_PATIENCE_SECONDS, stop=lambda: len(found) >= len(_LINES)):
                for event in batch.events():
                    delays.append(time.monotonic() - clerk.begun[min(len(found), len(clerk.begun) - 1)])
                    found.append((event.op, (event.key or {}).get("id"), event.new))
                    shown = event.in_json()
                    row = json_text(shown.new or shown.old)
                    say(f"  {event.op}  {row:<36} {delay(delays[-1])} after its write began")
        finally:
            clerk.stop.set()
            thread.join()
    if not found:
        raise GdqError(f"no event of {_TABLE} has arrived")
    right = sum(one == (op, key, new) for one, (_, op, key, new) in zip(found, _LINES, strict=False))
    right -= max(len(found) - len(_LINES), 0)
    return Step("changes as events", delay(statistics.median(delays)), verified=right, checked=len(_LINES))
