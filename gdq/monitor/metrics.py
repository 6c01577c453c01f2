"""The numbers of gdq.status for Prometheus."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast

import psycopg
from prometheus_client import CollectorRegistry
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

from gdq.errors import GdqError
from gdq.monitor.status import Status, status
from gdq.sql_text import raw

if TYPE_CHECKING:
    from prometheus_client import Metric
    from prometheus_client.registry import Collector

log = logging.getLogger(__name__)

_STATEMENT_TIMEOUT = "10s"


@dataclass(frozen=True, slots=True)
class Measure:
    """One metric: the rows of a Status to measure, and the function that gets a row's value, None for no value."""

    name: str
    help: str
    rows: str
    labels: tuple[str, ...]
    value: Callable[[Any], float | None]

    @property
    def counts(self) -> bool:
        """Whether the metric only grows."""
        return self.name.endswith("_total")


def _seconds(name: str) -> Callable[[Any], float | None]:
    def value(row: Any) -> float | None:
        span = getattr(row, name)
        return None if span is None else float(span.total_seconds())

    return value


def _number(name: str) -> Callable[[Any], float | None]:
    def value(row: Any) -> float | None:
        number = getattr(row, name)
        return None if number is None else float(number)

    return value


def _rows_changed(row: Any) -> float | None:
    return None if row.last_action is None else float(row.rows_changed or 0)


def _queue(name: str, text: str, value: Callable[[Any], float | None]) -> Measure:
    return Measure(f"gdq_queue_{name}", text, "queues", ("queue",), value)


def _consumer(name: str, text: str, value: Callable[[Any], float | None]) -> Measure:
    return Measure(f"gdq_consumer_{name}", text, "consumers", ("queue", "consumer"), value)


def _table(name: str, text: str, value: Callable[[Any], float | None]) -> Measure:
    return Measure(f"gdq_table_{name}", text, "tables", ("queue", "table"), value)


def _view(name: str, text: str, value: Callable[[Any], float | None]) -> Measure:
    return Measure(f"gdq_view_{name}", text, "views", ("queue", "view"), value)


MEASURES = (
    _queue(
        "events_total", "Event numbers given out, those of rolled back transactions included.", _number("last_event")
    ),
    _queue("tick_age_seconds", "Age of the last tick.", _seconds("tick_age")),
    _queue("log_bytes", "Bytes of the log segments that hold rows, with indexes.", _number("log_bytes")),
    _queue("log_segments", "Log segments that hold rows.", _number("segments")),
    _queue("tables", "Captured tables.", _number("tables")),
    _queue("tables_resync", "Captured tables whose changes are missing in part.", _number("tables_resync")),
    _queue("consumers", "Registered consumers.", _number("consumers")),
    _queue("open_writers", "Transactions that have changed captured tables and are not over.", _number("open_writers")),
    _consumer("lag_seconds", "Age of the oldest change that is not finished, at most.", _seconds("lag")),
    _consumer("unread_events", "Event numbers given out that are not finished.", _number("unread_events")),
    _consumer("unread_bytes", "Bytes of the logs that are not finished, without indexes.", _number("unread_bytes")),
    _consumer(
        "batch_age_seconds", "Since the oldest open batch was opened; 0 without one.", lambda row: _age(row.batch_age)
    ),
    _consumer(
        "last_seen_timestamp_seconds",
        "When the consumer was last heard of.",
        lambda row: None if row.last_seen is None else row.last_seen.timestamp(),
    ),
    _consumer("retries", "Events that wait to come again.", _number("retries")),
    _consumer("dead_letters", "Events that were given up.", _number("dead_letters")),
    _consumer("tables_resync", "Tables that have to be read afresh.", _number("tables_resync")),
    _table(
        "events_total",
        "Rows written to the table's logs, those of rolled back transactions included.",
        _number("events"),
    ),
    _table("log_bytes", "Bytes of the table's log segments that hold rows, with indexes.", _number("log_bytes")),
    _table("resync", "1 while changes of the table are missing.", lambda row: float(row.state != "ok")),
    _view("age_seconds", "Since the start of the last refresh that was finished.", _seconds("age")),
    _view("rows_changed", "Rows deleted and inserted by the last refresh; 0 when it failed.", _rows_changed),
    _view("delta_rows", "Netted changes that the last refresh worked on.", _number("delta_rows")),
    Measure(
        "gdq_view_kind",
        "1 for what the last refresh computed: none, incremental, by-key or full; unknown when it failed.",
        "views",
        ("queue", "view", "kind"),
        lambda row: None if row.last_action is None else 1.0,
    ),
    _view("failed", "1 while the last refresh is one that failed.", lambda row: float(row.last_action == "failed")),
)

UP = ("gdq_up", "1 when the last look at the database succeeded.")
SCRAPE = ("gdq_scrape_seconds", "How long the last look took.")
FAILURES = (
    "gdq_scrape_failures_total",
    "Looks that failed and connections that were lost since the program started.",
)


def _age(span: Any) -> float:
    return 0.0 if span is None else float(span.total_seconds())


class StatusCollector:
    """Reads the status anew for each scrape, over a connection of its own that is made again when it was lost.

    `connect` gives an autocommit connection. It may be a pooler's: nothing is set for longer than a transaction.
    """

    def __init__(self, connect: Callable[[], psycopg.Connection[Any]], queue: str | None = None) -> None:
        self._connect = connect
        self._queue = queue
        self._connection: psycopg.Connection[Any] | None = None
        self._failures = 0
        self._lock = threading.Lock()

    def collect(self) -> Iterator[Metric]:
        """All metrics; when the database cannot be read only `gdq_up` 0, the time it took and the failures."""
        start = time.monotonic()
        with self._lock:
            found = self._read()
            failures = self._failures
        yield GaugeMetricFamily(*UP, value=float(found is not None))
        yield GaugeMetricFamily(*SCRAPE, value=time.monotonic() - start)
        yield CounterMetricFamily(*FAILURES, value=failures)
        if found is not None:
            yield from families(found)

    def close(self) -> None:
        """Close the connection; the next scrape makes a new one."""
        if self._connection is not None:
            self._connection.close()
            self._connection = None

    def _read(self) -> Status | None:
        """The status. A connection that the server has dropped shows only when it is used: then once more."""
        for last_try in (False, True):
            fresh = self._connection is None
            try:
                if self._connection is None:
                    self._connection = self._connect()
                with self._connection.transaction():
                    self._connection.execute(raw(f"set local statement_timeout = '{_STATEMENT_TIMEOUT}'"))
                    return status(self._connection, self._queue)
            except (psycopg.Error, GdqError) as error:
                self._failures += 1
                self.close()
                if fresh or last_try:
                    log.warning("no metrics: %s", str(error).partition("\n")[0])
                    return None
        raise AssertionError


def families(found: Status) -> Iterator[Metric]:
    """A status as metrics."""
    for measure in MEASURES:
        kind = CounterMetricFamily if measure.counts else GaugeMetricFamily
        family = kind(measure.name, measure.help, labels=measure.labels)
        rows: Iterable[Any] = getattr(found, measure.rows)
        for row in rows:
            number = measure.value(row)
            if number is not None:
                family.add_metric([getattr(row, f"{label}_name") for label in measure.labels], number)
        yield family


def registry(collector: StatusCollector) -> CollectorRegistry:
    """A registry of nothing but gdq's metrics."""
    made = CollectorRegistry()
    made.register(cast("Collector", collector))
    return made
