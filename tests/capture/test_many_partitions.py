"""Costs that grow with the number of partitions of a captured root."""

from __future__ import annotations

import pytest

from tests.support.events import Tap

pytestmark = pytest.mark.server

# Rows of the catalogs that the transaction has read, in tables or by their indexes.
READ = "select sum(coalesce(seq_tup_read, 0) + coalesce(idx_tup_fetch, 0))::bigint from pg_stat_xact_sys_tables"


@pytest.mark.long
def test_truncate_of_a_root_with_many_partitions_is_linear(tap: Tap) -> None:
    """Three times the partitions cost three times the rows read in the catalogs; work for each pair would cost nine."""
    read = {}
    for count in (60, 180):
        tap.write(f"create table t{count} (id int) partition by range (id)")
        with tap.app.transaction():
            for n in range(count):
                tap.write(f"create table t{count}_{n} partition of t{count} for values from ({n}) to ({n + 1})")
        tap.add(f"shop.t{count}")
        tap.write(f"truncate t{count}")  # the session's caches are warm from here on
        with tap.app.transaction():
            before = tap.app.execute(READ).fetchall()[0][0]
            tap.write(f"truncate t{count}")
            read[count] = tap.app.execute(READ).fetchall()[0][0] - before
    assert [e.op for e in tap.events() if e.op == "truncate"] == ["truncate"] * 4
    assert 180 < read[180] < 4 * read[60], read
