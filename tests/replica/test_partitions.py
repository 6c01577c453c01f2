"""A replica's table may be partitioned on one side only, or otherwise than on the other."""

from __future__ import annotations

import pytest

from tests.replica.conftest import Pair

PLAIN = "create table item (id int, region text, qty int, primary key (id, region))"
BY_REGION = [
    f"{PLAIN} partition by list (region)",
    "create table item_n partition of item for values in ('n')",
    "create table item_s partition of item for values in ('s') partition by range (id)",
    "create table item_s_1 partition of item_s for values from (0) to (100)",
    "create table item_s_2 partition of item_s default",
]
BY_ID = [
    f"{PLAIN} partition by hash (id)",
    *(f"create table part_{n} partition of item for values with (modulus 3, remainder {n})" for n in range(3)),
]
LAYOUTS = {
    "by_region_to_plain": (BY_REGION, [PLAIN]),
    "by_region_to_by_id": (BY_REGION, BY_ID),
    "plain_to_by_region": ([PLAIN], BY_REGION),
}


def make(pair: Pair, layout: str) -> Pair:
    source, target = LAYOUTS[layout]
    pair.run(*source)
    pair.there(*target)
    pair.run("insert into item select i, case when i % 2 = 0 then 'n' else 's' end, i from generate_series(1, 200) i")
    pair.capture("item")
    pair.apply()
    pair.same("item")
    return pair


@pytest.mark.parametrize("layout", LAYOUTS)
def test_rows_that_move_between_partitions(pair: Pair, layout: str) -> None:
    """Moved by their key, and back; beside other changes of the same rows, in one batch and in the next."""
    make(pair, layout)
    pair.run(
        "update item set region = 's' where id = 2",
        "update item set id = id + 1000 where id between 11 and 15",
        "update item set region = 'n', qty = -1 where id = 21",
        "update item set region = 's' where id = 21",
        "update item set qty = qty + 1 where id between 50 and 60",
        "delete from item where region = 'n' and id > 190",
        "insert into item values (500, 'n', 1), (501, 's', 2)",
        "update item set region = 's' where id = 500",
    )
    assert "copied" not in pair.apply().stderr
    pair.same("item")
    pair.run("update item set region = case region when 'n' then 's' else 'n' end where id between 100 and 150")
    assert "copied" not in pair.apply().stderr
    pair.same("item")
    pair.run("truncate item", "insert into item values (1, 'n', 1), (1, 's', 2)")
    assert "copied" not in pair.apply().stderr
    pair.same("item")


def test_conflicts_in_a_partitioned_target(pair: Pair) -> None:
    make(pair, "by_region_to_by_id")
    pair.there("delete from item where id = 2", "insert into item values (300, 'n', 3)")
    pair.run("update item set qty = 0 where id in (2, 3)", "insert into item values (300, 'n', 0), (301, 'n', 0)")
    assert "conflict in table public.item" in pair.replicate().stderr
    pair.apply("--on-conflict", "apply")
    pair.same("item")


def test_truncate_of_a_partition(pair: Pair) -> None:
    """No row of the log shows which rows went, so the table is copied."""
    make(pair, "by_region_to_plain")
    pair.run("insert into item values (1000, 'n', 1)", "truncate item_n", "insert into item values (1001, 'n', 1)")
    assert "copied public.item" in pair.apply().stderr
    pair.same("item")


def test_partitions_that_come_and_go(pair: Pair) -> None:
    """An empty one changes no row; rows that came with one or went with it are copied."""
    make(pair, "by_region_to_plain")
    pair.run("create table item_w partition of item for values in ('w')", "insert into item values (1, 'w', 1)")
    assert "copied" not in pair.apply().stderr
    pair.same("item")
    pair.run(
        "create table item_e (id int not null, region text not null, qty int)",
        "insert into item_e values (1, 'e', 1)",
        "alter table item attach partition item_e for values in ('e')",
        "insert into item values (2, 'e', 2)",
    )
    assert "copied public.item" in pair.apply().stderr
    pair.same("item")
    pair.run("alter table item detach partition item_e", "insert into item_e values (3, 'e', 3)")
    assert "copied public.item" in pair.apply().stderr
    pair.same("item")
    pair.run("drop table item_w", "insert into item values (7777, 'n', 0)")
    assert "copied public.item" in pair.apply().stderr
    pair.same("item")


def test_a_target_without_a_partition_for_the_row(pair: Pair) -> None:
    """It stops before the batch, and goes on when the partition is there."""
    make(pair, "plain_to_by_region")
    pair.run("insert into item values (1, 'w', 1), (3, 'n', 1)")
    failed = pair.replicate()
    assert failed.returncode == 1
    assert 'no partition of relation "item" found for row' in failed.stderr
    pair.there("create table item_w partition of item for values in ('w')")
    pair.apply()
    pair.same("item")
