"""The two readers, each in a thread with its own connections; they give received transactions to a Pairing."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from types import TracebackType
from typing import Self

from gdq.consumer import Consumer
from gdq.consumers.compare.attach import COMPARE_QUEUE
from gdq.consumers.compare.pairing import ArrivedTransaction, Pairing
from gdq.consumers.slot.source import SlotSource
from gdq.source import Event

_Stop = Callable[[], bool]
ReaderPids = dict[str, int]

_END_SECONDS = 30.0


def run_queue_reader(dsn: str, consumer: str, pairing: Pairing, stop: _Stop, pids: ReaderPids, *, once: bool) -> None:
    """Read the queue's batches until `stop`; with `once` up to the present."""
    with Consumer(dsn, COMPARE_QUEUE, consumer) as source:
        pids["consumer"] = source.connection.info.backend_pid
        for batch in source.batches(once=once, stop=stop):
            whole: dict[int, tuple[list[Event], float]] = {}
            for event in batch.events():
                events = whole[event.xid][0] if event.xid in whole else []
                events.append(event.in_json())
                whole[event.xid] = (events, time.time() + pairing.clock)
            batch.commit()
            pairing.queue(
                {xid: ArrivedTransaction(*one, pairing.timed) for xid, one in whole.items()}, batch.snapshot_to
            )


def run_slot_reader(dsn: str, consumer: str, pairing: Pairing, stop: _Stop, pids: ReaderPids, *, once: bool) -> None:
    """Read the slot's batches like run_queue_reader()."""
    with SlotSource(dsn, COMPARE_QUEUE, consumer) as source:
        pids["consumer"] = source.connection.info.backend_pid
        for batch in source.batches(once=once, stop=stop):
            events: list[Event] = []
            for event in batch.events():
                if events and event.xid != events[-1].xid:
                    _hand_over(pairing, events)
                    events = []
                events.append(event.in_json())
            if events:
                _hand_over(pairing, events)
            batch.commit()


def _hand_over(pairing: Pairing, events: list[Event]) -> None:
    arrived = ArrivedTransaction(events, time.time() + pairing.clock, pairing.timed, events[0].time.timestamp())
    pairing.slot(events[0].xid, arrived)


class ReaderThreads:
    """Runs the readers in the background, until end() or the end of the block."""

    def __init__(self, **readers: Callable[[_Stop], None]) -> None:
        self.seconds: dict[str, float] = {}
        self.error: BaseException | None = None
        self._ended = threading.Event()
        self._started = time.monotonic()
        self._threads = [
            threading.Thread(target=self._work, args=(name, read), name=f"gdq compare {name}", daemon=True)
            for name, read in readers.items()
        ]

    def __enter__(self) -> Self:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._ended.set()
        for thread in self._threads:
            thread.join(_END_SECONDS)

    def check(self) -> None:
        """Raise the error that ended a reader, if any."""
        if self.error is not None:
            raise self.error

    def end(self) -> None:
        """Ask the readers to stop, and wait for them."""
        self.__exit__(None, None, None)
        self.check()

    @property
    def done(self) -> bool:
        """True if all readers have ended by themselves."""
        return not any(thread.is_alive() for thread in self._threads)

    def _work(self, name: str, read: Callable[[_Stop], None]) -> None:
        try:
            read(self._ended.is_set)
        except BaseException as error:  # raised by check(), in the thread that waits
            self.error = self.error or error
        self.seconds[name] = time.monotonic() - self._started
