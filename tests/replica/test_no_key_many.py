"""Many rows of a large table without a key that go at once: the target finds them by one hash, not one by one."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from gdq.consumers.replica.changes import STAGE, make_stage
from gdq.consumers.replica.table import SourceColumn, match_target
from gdq.consumers.replica.whole_rows import delete_sql, lacking_sql
from gdq.consumers.views.row_copy import copy_rows
from tests.replica.conftest import Pair, count

pytestmark = pytest.mark.server

HEAP = "create table heap (a int, b text not null, n numeric, at timestamptz)"
COLUMNS = {"a": "integer", "b": "text", "n": "text", "at": "timestamp with time zone"}


def fill(rows: int) -> str:
    """INSERT of so many rows, of which some are equal, and many have NULLs."""
    return f"""
        insert into heap
        select case when i % 10 > 0 then i % 50000 end, 'text ' || i % 100, 1.0,
               timestamptz '2024-01-01' + i % 2 * interval '1 day'
          from generate_series(1, {rows}) i"""


def joins(node: dict[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    """The joins of a plan: their kind, and the side that is looked into for each row of the other one."""
    plans = node.get("Plans", [])
    if node["Node Type"] in ("Nested Loop", "Hash Join", "Merge Join"):
        yield node["Node Type"], plans[1]
    for plan in plans:
        yield from joins(plan)


@pytest.mark.parametrize("staged", [20, 900, 10_000])
@pytest.mark.parametrize("inserted", [0, 20_000])
def test_how_rows_are_found(pair: Pair, staged: int, inserted: int) -> None:
    """No plan reads the table once for each row, whatever the planner knows of what is staged."""
    pair.there(HEAP, fill(60_000), "analyze heap")
    with pair.target.connect("su") as there, there.transaction():
        columns = [SourceColumn(name, stage, is_key=False) for name, stage in COLUMNS.items()]
        table = match_target(there, "public.heap", columns, fires="nothing")
        make_stage(there, table)
        there.execute(
            f"insert into {STAGE} select true, i, 'new', '1', now() from generate_series(1, {inserted}) i".encode()
        )
        there.execute(f"insert into {STAGE} select false, a, b, n::text, at from heap limit {staged}".encode())
        if staged + inserted >= 1_000:
            there.execute(f"analyze {STAGE}".encode())
        for statement in (delete_sql(table), lacking_sql(table)):
            plan: Any = count(there, f"explain (format json) {statement}")
            kinds = [kind for kind, _ in joins(plan[0]["Plan"])]
            assert "Hash Join" in kinds or "Merge Join" in kinds
            for kind, inner in joins(plan[0]["Plan"]):
                assert kind != "Nested Loop" or inner["Node Type"] == "Tid Scan", plan
        assert there.execute(delete_sql(table).encode()).rowcount == staged


@pytest.mark.long
def test_many_rows_of_a_large_table(pair: Pair) -> None:
    pair.make(HEAP)
    pair.run(fill(250_000), "analyze heap")
    pair.capture("heap")
    pair.apply()
    some = "ctid = any (array(select ctid from heap order by hashtid(ctid) {} limit 10000))"
    pair.run(
        f"delete from heap where {some.format('')}",
        f"update heap set n = n + 1 where {some.format('desc')}",
        "update heap set a = null where a < 500",
        "insert into heap select * from heap limit 5000",
    )
    pair.apply()
    differing = []
    rows = "select row(t.*)::text from heap t"
    with pair.source.connect("su") as here, pair.target.connect("su") as there:
        there.execute("create temp table theirs (row text)")
        copy_rows(here, f"({rows})", there, "theirs")
        for one, other in ((rows, "table theirs"), ("table theirs", rows)):
            differing += there.execute(f"{one} except all {other}".encode()).fetchall()
        assert count(there, "select count(*) from theirs") == 245_000
    assert differing == []
