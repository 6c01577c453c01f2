"""Snapshots compared with a slot's transactions, whose numbers have only 32 bits."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Self


@dataclass(frozen=True, slots=True)
class PgSnapshot:
    """A pg_snapshot, whose transaction numbers have 64 bits."""

    xmin: int
    xmax: int
    running: frozenset[int]

    @classmethod
    def parse(cls, text: str) -> Self:
        """A snapshot from PostgreSQL's text, xmin:xmax:running,..."""
        xmin, xmax, running = text.split(":")
        return cls(int(xmin), int(xmax), frozenset(int(xid) for xid in running.split(",") if xid))

    @property
    def text(self) -> str:
        """The snapshot as PostgreSQL writes it."""
        return f"{self.xmin}:{self.xmax}:{','.join(str(xid) for xid in sorted(self.running))}"

    def full(self, xid: int) -> int:
        """The 64-bit number of a 32-bit transaction number less than 2^31 transactions away from this snapshot."""
        distance = (xid - self.xmax) % 2**32
        return self.xmax + (distance if distance < 2**31 else distance - 2**32)

    def sees(self, xid: int) -> bool:
        """True if this snapshot sees a transaction that is committed by now; `xid` has 64 bits."""
        return xid < self.xmin or (xid < self.xmax and xid not in self.running)

    def covers(self, earlier: PgSnapshot) -> bool:
        """True if this snapshot sees everything that `earlier` sees."""
        return earlier.xmax <= self.xmax and not any(earlier.sees(xid) for xid in self.running)
