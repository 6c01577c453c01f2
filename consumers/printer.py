"""Every event as a line of JSON on stdout: what `gdq consume QUEUE CONSUMER` runs without a handler."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from typing import Any

from psycopg import Connection

from gdq.source import Event, iso_utc


def consume(_connection: Connection[Any], events: Iterator[Event]) -> None:
    """Print the events; flushed before the batch is finished, so that none is lost, though one may come twice."""
    for event in events:
        print(line(event))
    sys.stdout.flush()


def line(event: Event) -> str:
    """One event as JSON: id, xid, time (UTC), op, table, key, old, new."""
    record = {
        "id": event.id,
        "xid": event.xid,
        "time": iso_utc(event.time),
        "op": event.op,
        "table": event.table,
        "key": event.key,
        "old": event.old,
        "new": event.new,
    }
    return json.dumps(record, ensure_ascii=False)
