"""A batch of many changes takes the target no more than its number of rows says."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from gdq.consumers.replica.replica import Replica
from gdq.consumers.replica.slot.slot_replica import SlotReplica
from tests.replica.conftest import Pair

pytestmark = pytest.mark.server


def processor_seconds(pid: int) -> float:
    """What a process has used up: however busy the machine is."""
    fields = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


@pytest.mark.parametrize("key", ["int", "numeric"])
def test_pairs_of_rows_are_found_by_no_join(fed: Pair, key: str) -> None:
    """Nothing says which rows of a slot, and which of a key that travels as text, are two of one key."""
    fed.make(f"create table price (id {key} primary key, n int)")
    fed.run("insert into price select i, i from generate_series(1, 12000) i")
    fed.capture("public.price")
    kind = SlotReplica if fed.fed_by == "slot" else Replica
    used = []
    with kind(fed.reader_dsn, fed.target.su_dsn, "shop", "mirror") as replica:
        assert list(replica.run()) == []
        pid = replica.state.connection.info.backend_pid
        for rows in (1_500, 12_000):
            fed.run(f"update price set n = n + 1 where id <= {rows}")
            before = processor_seconds(pid)
            [batch] = replica.run()
            assert batch.updated == rows
            used.append(processor_seconds(pid) - before)
    few, many = used
    assert many < 20 * few + 0.5
    fed.same("price")
