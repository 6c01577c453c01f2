"""Tables that get other names while two databases replicate to each other."""

from __future__ import annotations

import pytest

from tests.replica import test_two_ways
from tests.replica.test_two_ways import Nodes, two_ways

pytestmark = pytest.mark.server

nodes = test_two_ways.nodes


@pytest.mark.parametrize("slots", ["", "ab"])
def test_a_table_that_gets_another_name(nodes: Nodes, slots: str) -> None:
    """It has the name already on the side where it was renamed."""
    a, b = two_ways(nodes, slots=slots)
    a.run("alter table item rename to thing", "update thing set name = 'a', at = 1 where id < '15'")
    a.apply(b)
    b.apply(a)
    b.run("update thing set name = 'b', at = 2 where id = '1'")
    b.apply(a)
    a.run("delete from thing where id = '2'")
    a.apply(b)
    query = "select * from thing order by 1"
    assert a.rows(query) == b.rows(query)
    assert len(a.rows(query)) == 19


def test_names_that_change_hands_between_two_sides(nodes: Nodes) -> None:
    """The other side may have the names already, which nothing tells: they are changed one at a time."""
    a, b = two_ways(nodes)
    a.run("create table other (id int primary key)")
    a.capture("other")
    a.apply(b, "--create")
    b.capture("other")
    b.apply(a, "--no-copy")
    swap = "alter table item rename to between; alter table other rename to item; alter table between rename to other"
    a.run(f"begin; {swap}; commit")
    refused = a.replicate(b)
    assert refused.returncode == 1
    assert "public.item, public.other have other names in the source, which change hands" in refused.stderr
    a.run(f"begin; {swap}; commit")
    a.apply(b)
    for rename in swap.split("; "):
        a.run(rename)
        a.apply(b)
        b.apply(a)
    a.run("insert into item values (7)", "insert into other values ('new')")
    b.run("insert into item values (8)", "delete from other where id = '1'")
    a.apply(b)
    b.apply(a)
    for table in ("item", "other"):
        query = f"select * from {table} order by 1"
        assert a.rows(query) == b.rows(query)
    assert a.rows("table item order by 1") == [(7,), (8,)]
