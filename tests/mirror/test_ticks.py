"""The tick that a change belongs to: the first one whose snapshot sees its transaction."""

from __future__ import annotations

import random

import pytest

from gdq.consumers.mirror.batch_changes import Tick
from gdq.consumers.mirror.tick_changes import numbered_rows
from gdq.consumers.slot.snapshot import PgSnapshot
from tests.support.server import Database


@pytest.mark.server
@pytest.mark.parametrize("seed", range(5))
def test_the_first_tick_that_sees_a_transaction(db: Database, seed: int) -> None:
    choice = random.Random(seed)
    running, xmax, ticks = set[int](), 100, list[Tick]()
    for number in sorted(choice.sample(range(1, 100), choice.randint(1, 12))):
        running = {txid for txid in running if choice.random() < 0.6}
        new = xmax + choice.randrange(0, 15)
        running |= {txid for txid in range(xmax, new) if choice.random() < 0.4}
        xmax = new
        ticks.append(Tick(number, PgSnapshot(min(running, default=xmax), xmax, frozenset(running))))
    txids = range(90, xmax + 5)
    rows = numbered_rows("select g as ev_txid from generate_series(90::bigint, %s) g", ticks)
    with db.connect() as connection:
        found = connection.execute(f"select ev_txid, _commit_version from ({rows}) t".encode(), [txids[-1]]).fetchall()
    expected = {
        txid: next((tick.number for tick in ticks if tick.snapshot.sees(txid)), ticks[-1].number) for txid in txids
    }
    assert dict(found) == expected
