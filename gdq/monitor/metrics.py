"""The status of queues, consumers, tables and views as metrics for Prometheus."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
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
class _Measure:
    """One metric: the rows of a Status to measure, and the function that gets a row's value, None for no value."""

    name: str
    help: str
    rows: str
    labels: tuple[str, ...]
    value: Callable[[Any], float | None]

    @property
    def counts(self) -> bool:
        """True if the metric only grows."""
        return self.name.endswith("_total")


def _number(name: str, missing: float | None = None) -> Callable[[Any], float | None]:
    """The value of a row's number, or of its span of time in seconds; `missing` for None."""

    def value(row: Any) -> float | None:
        found = getattr(row, name)
        if isinstance(found, timedelta):
            return found.total_seconds()
        return missing if found is None else float(found)

    return value


def _rows_changed(row: Any) -> float | None:
    return None if row.last_action is None else float(row.rows_changed or 0)


def _measure(of: str, name: str, text: str, value: Callable[[Any], float | None]) -> _Measure:
    """A metric of queues, or of what belongs to a queue."""
    labels = ("queue",) if of == "queue" else ("queue", of)
    return _Measure(f"gdq_{of}_{name}", text, f"{of}s", labels, value)


_queue, _consumer, _table, _view = (partial(_measure, of) for of in ("queue", "consumer", "table", "view"))

MEASURES = (
    _queue(
        "events_total", "Event numbers given out, those of rolled back transactions included.", _number("last_event")
    ),
    _queue("tick_age_seconds", "Age of the last tick.", _number("tick_age")),
    _queue("log_bytes", "Bytes of the log segments that hold rows, with indexes.", _number("log_bytes")),
    _queue("log_segments", "Log segments that hold rows.", _number("segments")),
    _queue("tables", "Captured tables.", _number("tables")),
    _queue("tables_resync", "Captured tables whose changes are missing in part.", _number("tables_resync")),
    _queue("consumers", "Registered consumers.", _number("consumers")),
    _queue("open_writers", "Transactions that have changed captured tables and are not over.", _number("open_writers")),
    _consumer("lag_seconds", "Age of the oldest change that is not finished, at most.", _number("lag")),
    _consumer("unread_events", "Event numbers given out that are not finished.", _number("unread_events")),
    _consumer("unread_bytes", "Bytes of the logs that are not finished, without indexes.", _number("unread_bytes")),
    _consumer(
        "batch_age_seconds",
        "Since the oldest open batch was opened; 0 without one.",
        _number("batch_age", missing=0.0),
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
    _view("age_seconds", "Since the start of the last refresh that was finished.", _number("age")),
    _view("rows_changed", "Rows deleted and inserted by the last refresh; 0 when it failed.", _rows_changed),
    _view("delta_rows", "Netted changes that the last refresh worked on.", _number("delta_rows")),
    _Measure(
        "gdq_view_kind",
        "1 for what the last refresh computed: none, incremental, by-key or full; unknown when it failed.",
        "views",
        ("queue", "view", "kind"),
        lambda row: None if row.last_action is None else 1.0,
    ),
    _view("failed", "1 while the last refresh is one that failed.", lambda row: float(row.last_action == "failed")),
    _view(
        "diverged",
        "1 from an audit that found rows different from the query until the view is loaded in full.",
        lambda row: float(row.diverged is not None),
    ),
    _view("audits_total", "Audits that compared rows.", _number("audits")),
    _view("audits_skipped_total", "Audits that were given up, being too dear.", _number("audits_skipped")),
    _view("audits_failed_total", "Audits that found rows different from the query.", _number("audits_failed")),
)

UP_METRIC = ("gdq_up", "1 when the last look at the database succeeded.")
SCRAPE_METRIC = ("gdq_scrape_seconds", "How long the last look took.")
FAILURES_METRIC = (
    "gdq_scrape_failures_total",
    "Looks that failed and connections that were lost since the program started.",
)


class StatusCollector:
    """Reads the status for each scrape, on its own connection; reconnects if the connection was lost.

    `connect` gives an autocommit connection, also behind a pooler: no setting outlives a transaction.
    """

    def __init__(self, connect: Callable[[], psycopg.Connection[Any]], queue: str | None = None) -> None:
        self._connect = connect
        self._queue = queue
        self._connection: psycopg.Connection[Any] | None = None
        self._failures = 0
        self._lock = threading.Lock()

    def collect(self) -> Iterator[Metric]:
        """All metrics; if the database cannot be read only `gdq_up` 0, the scrape's time and the number of failures."""
        start = time.monotonic()
        with self._lock:
            found = self._read()
            failures = self._failures
        yield GaugeMetricFamily(*UP_METRIC, value=float(found is not None))
        yield GaugeMetricFamily(*SCRAPE_METRIC, value=time.monotonic() - start)
        yield CounterMetricFamily(*FAILURES_METRIC, value=failures)
        if found is not None:
            yield from _families(found)

    def close(self) -> None:
        """Close the connection; the next scrape makes a new one."""
        if self._connection is not None:
            self._connection.close()
            self._connection = None

    def _read(self) -> Status | None:
        """The status. A lost connection is noticed only when it is used: then try once more."""
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


def _families(found: Status) -> Iterator[Metric]:
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


def metrics_registry(collector: StatusCollector) -> CollectorRegistry:
    """A registry with only gdq's metrics."""
    made = CollectorRegistry()
    made.register(cast("Collector", collector))
    return made
