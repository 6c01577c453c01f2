"""Copies of a replica's tables: several at once, and large ones in parts that survive whatever is killed."""

from __future__ import annotations

import pytest

from tests.replica.conftest import Pair, count
from tests.support.programs import start_gdq
from tests.support.waiting import until

pytestmark = pytest.mark.server


def test_tables_are_copied_side_by_side(pair: Pair) -> None:
    """A table that somebody has locked in the target keeps no other one from being copied."""
    for table in ("one", "two"):
        pair.make(
            f"create table {table} (id int primary key, v text); alter table {table} alter v set storage external"
        )
        pair.run(f"insert into {table} select i, repeat('x', 100000) from generate_series(1, 170) i")
    pair.capture("one", "two")
    with pair.target.connect("su") as holder, pair.target.connect("su") as there:
        with holder.transaction():
            holder.execute("lock table one")
            replica = start_gdq("replicate", "shop", "mirror", "--to", pair.target.su_dsn, dsn=pair.source.dsn)
            until(lambda: count(there, "select count(*) from two"), "the copy of the table that is free")
            assert count(holder, "select count(*) from one") == 0
        _, told = replica.communicate()
    assert replica.returncode == 0, told
    assert sorted(told.splitlines()) == ["copied public.one: 170 rows", "copied public.two: 170 rows"]
    pair.same("one", "two")
