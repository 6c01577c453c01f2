"""One run of gdq compare: attach both paths to the tables, measure while the application works, detach them.

A run has phases. First only the slot is read, to measure the server without triggers; then both are read; then nobody
reads, so that both retain unread changes. At last both are read up to the same point and compared.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import UTC, datetime
from functools import partial
from itertools import pairwise
from typing import Any

from psycopg import Connection

from gdq.conninfo import connect, conninfo_of
from gdq.consumers.compare import attach
from gdq.consumers.compare.figures import Figures, PathFigures, PhaseFigures, SampleFigures, ratio_error
from gdq.consumers.compare.pairing import Pairing
from gdq.consumers.compare.readers import ReaderPids, ReaderThreads, run_queue_reader, run_slot_reader
from gdq.consumers.compare.rules import rule_tables
from gdq.consumers.compare.server import CPU_TICK, PAGE_BYTES, MeasuredServer
from gdq.errors import GdqError
from gdq.installer.version import check_version
from gdq.source import iso_utc

log = logging.getLogger(__name__)

PHASE_SHARES = {"slot alone": 0.2, "both read": 0.5, "nobody reads": 0.3}

_SAMPLES = 100
_SAMPLE_SECONDS_MIN = 0.1
# Ctrl-C ends also a long run at once.
_STOP_SECONDS_MAX = 0.2

# The server ends a session whose connection is lost within this time.
_LOST_SECONDS = 10.0


_Told = Callable[[str, str], None]


def run_compare(
    dsn: str | None,
    tables: Sequence[str],
    seconds: float,
    *,
    replica_identity_full: bool = False,
    stop: Callable[[], bool] = lambda: False,
    tell: _Told = lambda _phase, _doing: None,
) -> Figures:
    """Attach a queue and a slot to tables for `seconds`, and measure both on the changes of the application.

    Writes nothing to the tables. Everything that it creates in the database is removed at the end; the remains of a
    killed run are removed first, and logged. `tell` gets the progress; `stop` is called all the time. GdqError if the
    server, the role or a table is unsuitable, for less than a second, and when `stop` returns true.
    """
    if not (math.isfinite(seconds) and seconds >= 1):
        raise GdqError(f"a run takes a second or more, not {seconds:g}")
    with connect(dsn, application_name="gdq compare", autocommit=True) as connection:
        check_version(connection)
        names = attach.check_attachable(connection, tables, identity_full=replica_identity_full)
        attach.lock_attach(connection)
        remove_leftovers(connection)
        with _cleaned_up(connection):
            return _CompareRun(
                connection, names, seconds, identity_full=replica_identity_full, stop=stop, tell=tell
            ).figures()


def remove_leftovers(connection: Connection[Any]) -> list[str]:
    """Remove and log what an earlier run has left; returns the names. Call under attach.lock()."""
    found = attach.attached_leftovers(connection)
    if found:
        log.warning("an earlier gdq compare was killed, removing what it left: %s", ", ".join(found))
        attach.detach_all(connection)
    return found


@contextmanager
def _cleaned_up(connection: Connection[Any]) -> Iterator[None]:
    """Clean up at the end, on another connection if this one is lost."""
    dsn = conninfo_of(connection)
    try:
        yield
    finally:
        try:
            if connection.closed:
                with connect(dsn, application_name="gdq compare", autocommit=True) as other:
                    attach.lock_attach(other, wait_seconds=_LOST_SECONDS)
                    attach.detach_all(other)
            else:
                attach.detach_all(connection)
        except BaseException:
            log.error("not all that the run made could be removed: run gdq compare --clean-up, a slot keeps the log")
            raise


class _CompareRun:
    def __init__(
        self,
        connection: Connection[Any],
        tables: list[str],
        seconds: float,
        *,
        identity_full: bool,
        stop: Callable[[], bool],
        tell: _Told,
    ) -> None:
        info = connection.info
        self._connection = connection
        self._stop = stop
        self._tell = tell
        version = info.parameter_status("server_version") or str(info.server_version)
        self._figures = Figures(info.dbname, version, iso_utc(datetime.now(UTC)), seconds, tables, identity_full)
        self._dsn = conninfo_of(connection)
        self._consumer = attach.attached_consumer_name(connection)
        self._server = MeasuredServer(connection, self._consumer)
        self._pairing = Pairing(self._figures, *self._server.clock())
        self._pids: dict[str, ReaderPids] = {"queue": {}, "slot": {}}
        self._started = 0.0
        # by phase: times, with the write-ahead log written by then
        self._log: dict[str, list[tuple[float, int]]] = {}

    def figures(self) -> Figures:
        tables, identity_full = self._figures.tables, self._figures.replica_identity_full
        self._tell("attaching", "slot")
        attach.attach_slot(self._connection, tables, identity_full=identity_full)
        self._started = time.monotonic()
        with self._reading("slot") as reading:
            self._phase("slot alone", reading)
            reading.end()
        self._tell("attaching", "queue")
        self._pairing.began(attach.attach_queue(self._connection, tables), rule_tables(self._connection, tables))
        with self._reading("queue", "slot") as reading:
            self._both(reading)
            reading.end()
        sizes = self._sample(), time.monotonic()
        self._phase("nobody reads", None)
        self._retained(*sizes)
        self._catch_up()
        return self._figures

    def _both(self, reading: ReaderThreads) -> None:
        """The phase in which both are read, with the CPU of their processes."""
        self._wait_for(lambda: self._server.walsender() is not None and all(self._pids.values()), reading)
        # changes written while the triggers were created had to wait for their reader: not a latency
        place = self._server.flush()
        self._wait_for(lambda: self._pairing.slot_position >= place, reading)
        pids: dict[str, dict[str, int | None]] = {
            "queue": {"consumer": self._pids["queue"].get("consumer")},
            "slot": {"consumer": self._pids["slot"].get("consumer"), "walsender": self._server.walsender()},
        }
        before = {name: self._server.cpu(some) for name, some in pids.items()}
        self._pairing.timed_from = self._now()
        self._pairing.timed = True
        self._phase("both read", reading)
        self._pairing.timed = False
        for name, path in self._paths().items():
            for process, after in self._server.cpu(pids[name]).items():
                path.cpu_seconds[process] = self._cpu(f"{name}.cpu_seconds.{process}", before[name][process], after)

    def _phase(self, name: str, reading: ReaderThreads | None) -> None:
        """Take samples for a share of the run's time."""
        seconds = self._figures.seconds * PHASE_SHARES[name]
        pause = max(self._figures.seconds / _SAMPLES, _SAMPLE_SECONDS_MIN)
        begun, sampled = time.monotonic(), -math.inf
        self._note_log(name)
        while (left := begun + seconds - time.monotonic()) > 0:
            self._check(reading)
            if time.monotonic() >= sampled + pause:
                sampled = time.monotonic()
                self._sample()
                self._note_log(name)
            self._pairing.advance()
            seen = self._pairing.seen
            self._tell(name, f"{seen['queue']:,} changes by the queue, {seen['slot']:,} by the slot, {left:.0f} s left")
            time.sleep(min(pause, _STOP_SECONDS_MAX, left))
        self._note_log(name)

    def _note_log(self, phase: str) -> None:
        self._log.setdefault(phase, []).append((self._now(), self._server.wal()))

    def _retained(self, before: SampleFigures, at: float) -> None:
        after, elapsed = self._sample(), time.monotonic() - at
        # a log and its index for each table
        pages = {"queue": 2 * len(self._figures.tables), "slot": 1}
        for name, path in self._paths().items():
            first, path.retained_bytes = getattr(before, f"{name}_bytes"), getattr(after, f"{name}_bytes")
            growth, noise = path.retained_bytes - first, pages[name] * PAGE_BYTES
            path.retained_per_second = self._figures.above_noise(
                f"{name}.retained_per_second", growth / elapsed, noise / elapsed
            )
            if name == "queue":
                self._log_growth = growth, noise

    def _catch_up(self) -> None:
        """Read both paths up to the same point, the slot a little further, and compare."""
        self._tell("catching up", "reading what is left")
        with self._reading("queue", "slot", once=True) as both:
            self._wait_for(lambda: both.done, both)
        for name, path in self._paths().items():
            path.catch_up_seconds = both.seconds[name]
        self._server.flush()
        with self._reading("slot", once=True) as slot:
            self._wait_for(lambda: slot.done, slot)
        self._pairing.finish()
        self._count_changes()

    def _count_changes(self) -> None:
        """The phases, and what is known of one change."""
        origin = next(iter(self._log.values()))[0][0]
        for name, log_noted in self._log.items():
            (begin, wal), (end, wal_end) = log_noted[0], log_noted[-1]
            counted = self._pairing.changes_between(begin, end)
            self._figures.phases.append(PhaseFigures(name, begin - origin, end - origin, *counted, wal_end - wal))
        changes = self._figures.phase("nobody reads").changes
        if changes:
            growth, noise = (number / changes for number in self._log_growth)
            self._figures.log_bytes_per_change = self._figures.above_noise("log_bytes_per_change", growth, noise)
        alone, both = (self._log_error(name) for name in ("slot alone", "both read"))
        if alone is not None and both is not None:
            self._figures.noise["queue_wal_per_change"] = 2 * math.hypot(alone, both)

    def _log_error(self, phase: str) -> float | None:
        """The standard error of a phase's log per change."""
        parts = pairwise(self._log[phase])
        return ratio_error([(self._pairing.changes_between(a, b)[0], wal - was) for (a, was), (b, wal) in parts])

    def _reading(self, *names: str, once: bool = False) -> ReaderThreads:
        readers: dict[str, Callable[..., None]] = {"queue": run_queue_reader, "slot": run_slot_reader}
        for name in names:
            self._pids[name].clear()
        return ReaderThreads(**{name: partial(self._read, readers[name], name, once) for name in names})

    def _read(self, reader: Callable[..., None], name: str, once: bool, stop: Callable[[], bool]) -> None:
        reader(self._dsn, self._consumer, self._pairing, stop, self._pids[name], once=once)

    def _wait_for(self, condition: Callable[[], bool], reading: ReaderThreads) -> None:
        while not condition():
            self._check(reading)
            self._pairing.advance()
            time.sleep(0.02)
        self._check(reading)

    def _check(self, reading: ReaderThreads | None) -> None:
        if self._stop():
            raise GdqError("interrupted: what the run had made is removed again")
        if reading is not None:
            reading.check()

    def _sample(self) -> SampleFigures:
        at = time.monotonic() - self._started
        sample = SampleFigures(round(at, 3), self._server.queue_bytes(), self._server.slot_bytes())
        self._figures.samples.append(sample)
        return sample

    def _cpu(self, name: str, before: float | None, after: float | None) -> float | None:
        if before is None or after is None:
            return None
        return self._figures.above_noise(name, round(after - before, 3), CPU_TICK)

    def _now(self) -> float:
        return time.time() + self._pairing.clock

    def _paths(self) -> dict[str, PathFigures]:
        return {"queue": self._figures.queue, "slot": self._figures.slot}
