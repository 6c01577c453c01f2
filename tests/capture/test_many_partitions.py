"""Costs that grow with the number of partitions of a captured root."""

from __future__ import annotations

import time

import pytest

from tests.support.events import Tap

pytestmark = pytest.mark.server


def test_truncate_of_a_root_with_many_partitions_is_linear(tap: Tap) -> None:
    """Twice the time of a trigger that does nothing on each partition at most; here with room for a busy machine."""
    count = 300
    seconds = {}
    for name in ("plain", "captured"):
        tap.write(f"create table {name} (id int) partition by range (id)")
        with tap.app.transaction():
            for n in range(count):
                tap.write(f"create table {name}_{n} partition of {name} for values from ({n}) to ({n + 1})")
    tap.write("create function empty() returns trigger language plpgsql as 'begin return null; end'")
    with tap.app.transaction():
        for n in range(count):
            tap.write(f"create trigger x after truncate on plain_{n} execute function empty()")
    tap.add("shop.captured")
    for name in ("plain", "captured"):
        times = []
        for _ in range(3):
            start = time.perf_counter()
            tap.write(f"truncate {name}")
            times.append(time.perf_counter() - start)
        seconds[name] = min(times)
    assert [e.op for e in tap.events() if e.op == "truncate"] == ["truncate"] * 3
    assert seconds["captured"] < 3 * seconds["plain"], seconds
