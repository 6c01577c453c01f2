"""What a relay notes in the transaction of a sink: which events of the queue that transaction has."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass
from functools import lru_cache
from typing import Self

from gdq.batch import Batch
from gdq.consumers.slot.snapshot import PgSnapshot
from gdq.source import Event, Position


@dataclass(frozen=True, slots=True)
class Note:
    """The events that a sink has: those up to a position but some, and some that were brought again.

    `unsent`: number and op of events before the position that the sink does not have. `brought`: number, op and retries
    of events that the batch brought again and that the sink has. `copied`: the last record of a copy that it has, if
    the transaction was a part of a copy.
    """

    position: Position
    unsent: frozenset[tuple[int, str]] = frozenset()
    brought: frozenset[tuple[int, str, int]] = frozenset()
    copied: str | None = None

    @classmethod
    def parse(cls, text: str) -> Self:
        """The note that str() wrote."""
        found = json.loads(text)
        unsent, brought = (frozenset(tuple(one) for one in found[name]) for name in ("unsent", "brought"))
        return cls(Position.parse(found["position"]), unsent, brought, found.get("copied"))

    def __str__(self) -> str:
        unsent, brought = sorted(self.unsent), sorted(self.brought)
        copied = {} if self.copied is None else {"copied": self.copied}
        return json.dumps({"position": str(self.position), "unsent": unsent, "brought": brought} | copied)

    def is_ahead(self, batch: Batch) -> bool:
        """Whether the sink is ahead of the consumer."""
        return batch.tick_from is None or self.position.tick > batch.tick_from

    def has(self, batch: Batch, event: Event) -> bool:
        """Whether the sink has an event of a batch already."""
        if not is_new(batch, event):
            return (event.id, event.op, event.retries) in self.brought
        if not self.is_ahead(batch):
            return False
        sees = _snapshot(self.position.snapshot).sees(event.xid)
        return sees and (event.id, event.op) not in self.unsent


def is_new(batch: Batch, event: Event) -> bool:
    """Whether an event comes for the first time, as far as the consumer's position tells."""
    return not _snapshot(batch.snapshot_from).sees(event.xid)


@lru_cache(maxsize=4)
def _snapshot(text: str) -> PgSnapshot:
    """The snapshot of a batch, which is asked for with each of its events."""
    return PgSnapshot.parse(text)


def note_of(batch: Batch, sent: Iterable[Event], unsent: Iterable[Event]) -> Note:
    """The note of a batch, of which these events were sent, and those were not."""
    brought = frozenset((event.id, event.op, event.retries) for event in sent if not is_new(batch, event))
    left = frozenset((event.id, event.op) for event in unsent if is_new(batch, event))
    return Note(batch.position, left, brought)
