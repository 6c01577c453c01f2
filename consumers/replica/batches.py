"""The batches of a replica's consumer, which are large: the next one may be opened before the last one is committed."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from types import TracebackType
from typing import Any

from psycopg import Connection

from gdq.batch import Batch
from gdq.call import call
from gdq.consumer import Consumer
from gdq.typed.arrow import ArrowReader

# A batch joins the changes of many ticks: a row that was changed several times is written once.
MAX_EVENTS = 1_000_000

# Where no ticker runs, a replica takes a tick as soon as there are changes and it has nothing else to do.
_TICK_SECONDS = 0.005


class ReplicaConsumer(Consumer):
    """The consumer of a replica, on the session that holds its batches. `rest` is called when it gets none any more."""

    def __init__(self, connection: Connection[Any], queue: str, consumer: str, rest: Callable[[], None]) -> None:
        super().__init__(connection, queue, consumer, max_events=MAX_EVENTS)
        self._listener.lag = _TICK_SECONDS
        self._rest = rest

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._rest()
        super().__exit__(kind, error, traceback)

    def following(self, batch: Batch) -> Batch | None:
        """The batch after one that was read whole, which is finished in the open transaction; None if there is none.

        Both are committed together, once the first batch is in the target: then the following one is handed out again.
        """
        call(self.connection, "finish_batch", batch.id, batch.token)
        return Batch.open(self.connection, self.queue, self.consumer, MAX_EVENTS)

    def _open(self, transaction: ExitStack, reader: ArrowReader) -> Batch | None:
        batch = super()._open(transaction, reader)
        if batch is None:
            self._rest()
        return batch
