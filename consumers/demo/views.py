"""The demo's other steps: a view refreshed from changes and, for comparison, computed anew, while writers go on."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import psycopg

from gdq.consumers.demo.outcome import Step, ratio_text
from gdq.consumers.demo.writers import DemoLoad
from gdq.consumers.refresh.refresher import Refresher, RefreshResult
from gdq.consumers.refresh.verify import VerifyResult, compare_with_query
from gdq.consumers.refresh.view_refresh import ViewRefresh
from gdq.consumers.views.snapshot_holder import SnapshotHolder
from gdq.units import span

CUSTOMERS = """select c_custkey, c_name, c_mktsegment, count(*) as lines,
       sum(l_extendedprice * (1 - l_discount)) as revenue
  from customer join orders on o_custkey = c_custkey join lineitem on l_orderkey = o_orderkey
 group by c_custkey, c_name, c_mktsegment"""
BEST = """select l_orderkey, l_linenumber, o_orderdate, c_name, l_shipmode,
       l_extendedprice * (1 - l_discount) as revenue
  from lineitem join orders on o_orderkey = l_orderkey join customer on c_custkey = o_custkey where c_acctbal > 9500"""

# A round begins when so many transactions were written after the one before.
_TRANSACTIONS = 20


@dataclass(frozen=True, slots=True)
class Refreshed:
    """One refresh, compared with the query at its own snapshot. `seconds`: of the refresh alone."""

    result: RefreshResult
    found: VerifyResult
    seconds: float


def refresh_verified(refresher: Refresher, view: str, *, full: bool = False) -> Refreshed:
    """Refresh a view, and compare the target with the query at the same snapshot."""
    found: list[VerifyResult] = []
    comparing = 0.0

    def check(work: ViewRefresh, holder: SnapshotHolder) -> None:
        nonlocal comparing
        began = time.monotonic()
        found.append(compare_with_query(work, holder))
        comparing += time.monotonic() - began

    result = refresher.refresh(view, full=full, check=check)
    return Refreshed(result, found[-1], result.seconds - comparing)


@dataclass
class ViewStep:
    """A step of several rounds with one view. `rival`: what the view is compared with, called once a round.

    `rival` returns its seconds, and the refresh if gdq has made one. `warm_up`: what the first refresh from changes
    does that no later one has to do; it is not counted then, as the first load is not.
    """

    name: str
    view: str
    rival_name: str
    rival: Callable[[], tuple[float, Refreshed | None]]
    refresher: Refresher
    load: DemoLoad
    say: Callable[[str], None]
    warm_up: str = ""
    checked: list[Refreshed] = field(default_factory=list)

    def run(self, rounds: int) -> Step:
        """Load the view, then refresh it in every round and compute it anew beside that."""
        first = self._take(refresh_verified(self.refresher, self.view))
        self.say(f"  first load: {first.result.rows_changed:,} rows in {span(first.seconds)}{self._verdict(first)}")
        if self.warm_up:
            done = self._refreshed()
            self.say(f"  first refresh: {span(done.seconds)}, not counted: {self.warm_up}{self._verdict(done)}")
        own, others = [], []
        for number in range(1, rounds + 1):
            seconds, again = self.rival()
            if again is not None:
                self._take(again)
            done = self._refreshed()
            own.append(done.seconds)
            others.append(seconds)
            took = f"gdq {span(done.seconds)}, {self.rival_name} {span(seconds)}"
            self.say(f"  round {number}: {took}; {_how(done.result)}{self._verdict(done)}")
        mine, other = statistics.median(own), statistics.median(others)
        ratio = other / mine
        self.say(f"  median: gdq {span(mine)}, {self.rival_name} {span(other)}: {ratio_text(ratio)}")
        right = sum(one.found.equal for one in self.checked)
        told = f"{self.rival_name}, {span(other)}"
        return Step(self.name, span(mine), told, ratio, right, len(self.checked))

    def _refreshed(self) -> Refreshed:
        """A refresh from changes, when some were written."""
        self.load.wait_for(_TRANSACTIONS)
        return self._take(refresh_verified(self.refresher, self.view))

    def _take(self, done: Refreshed) -> Refreshed:
        self.load.check()
        self.checked.append(done)
        return done

    @staticmethod
    def _verdict(done: Refreshed) -> str:
        found = done.found
        if found.equal:
            return f"; equals its query, {found.rows:,} rows"
        return f"; DIFFERS from its query: {found.missing:,} rows missing, {found.unexpected:,} unexpected"


def refresh_materialized(connection: psycopg.Connection[Any], name: str) -> tuple[float, None]:
    """The seconds of REFRESH MATERIALIZED VIEW."""
    began = time.monotonic()
    connection.execute(f"refresh materialized view {name}")
    return time.monotonic() - began, None


def recompute(refresher: Refresher, view: str) -> tuple[float, Refreshed]:
    """The seconds of a full load by the view's own engine."""
    done = refresh_verified(refresher, view, full=True)
    return done.seconds, done


def _how(result: RefreshResult) -> str:
    """What a refresh has done, a full load too: that is not what it was made for."""
    if result.action == "full":
        return f"loaded in full, {result.reason}"
    return f"{result.delta_rows or 0:,} changes"
