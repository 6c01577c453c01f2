"""Which transactions of a slot a snapshot sees."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Self


@dataclass(frozen=True, slots=True)
class Snapshot:
    """A pg_snapshot, whose transaction numbers have 64 bits."""

    xmin: int
    xmax: int
    running: frozenset[int]

    @classmethod
    def parse(cls, text: str) -> Self:
        """Of PostgreSQL's text, xmin:xmax:running,..."""
        xmin, xmax, running = text.split(":")
        return cls(int(xmin), int(xmax), frozenset(int(xid) for xid in running.split(",") if xid))

    @property
    def text(self) -> str:
        """As PostgreSQL writes it."""
        return f"{self.xmin}:{self.xmax}:{','.join(str(xid) for xid in sorted(self.running))}"

    def full(self, xid: int) -> int:
        """The 64 bits of a transaction number of 32 that is less than 2^31 transactions away from this snapshot."""
        distance = (xid - self.xmax) % 2**32
        return self.xmax + (distance if distance < 2**31 else distance - 2**32)

    def sees(self, xid: int) -> bool:
        """Whether the transaction, which has committed by now, had done so for this snapshot. `xid` has 64 bits."""
        return xid < self.xmin or (xid < self.xmax and xid not in self.running)

    def covers(self, earlier: Snapshot) -> bool:
        """Whether this snapshot sees everything that `earlier` sees."""
        return earlier.xmax <= self.xmax and not any(earlier.sees(xid) for xid in self.running)
