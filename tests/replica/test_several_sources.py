"""Several sources that bring rows of different keys to the same tables of one target, and names that change there."""

from __future__ import annotations

import pytest

from tests.replica.test_two_ways import Node, Nodes, nodes
from tests.support.programs import gdq

__all__ = ["nodes"]

pytestmark = pytest.mark.server

NAMES = ("one", "two")


@pytest.fixture
def regions(nodes: Nodes) -> list[Node]:
    """Two sources and their target, with two tables."""
    *sources, target = nodes("abt")
    for node in sources:
        for name in NAMES:
            node.run(
                f"create table {name} (id text primary key, what text)",
                f"insert into {name} values ('{node.name}', '{name}')",
                f"alter table {name} owner to gdq_owner",
                f"select gdq.add_table('shop', '{name}')",
            )
    for node in sources:
        assert apply(node, target, "--create") == ""
    return [*sources, target]


def apply(source: Node, target: Node, *options: str) -> str:
    """What a replica says that fails; empty if it arrives."""
    done = gdq("replicate", "shop", f"of_{source.name}", "--to", target.db.su_dsn, *options, dsn=source.db.su_dsn)
    return done.stderr if done.returncode else ""


def swap(source: Node) -> None:
    source.run(
        "begin; alter table one rename to other; alter table two rename to one; alter table other rename to two; commit"
    )


def write(source: Node) -> None:
    """A change of each table."""
    source.run(*(f"insert into {name} select id || 'x', what from {name}" for name in NAMES))


def check(regions: list[Node]) -> None:
    *sources, target = regions
    for name in NAMES:
        rows = f"select * from {name} order by id"
        assert target.rows(rows) == sorted(row for node in sources for row in node.rows(rows))


def test_names_that_change_hands_at_once(regions: list[Node]) -> None:
    """Two swaps would undo each other in the target, and one would mix up the rows of the other source."""
    a, b, target = regions
    before = {name: target.rows(f"select * from {name}") for name in NAMES}
    for node in (a, b):
        swap(node)
        write(node)
        told = apply(node, target)
        assert "in the source by now, and replica of_" in told
        assert "Names change hands one at a time" in told
    assert {name: target.rows(f"select * from {name}") for name in NAMES} == before
    for node in (a, b):
        swap(node)
        assert apply(node, target) == ""
    check(regions)


def test_names_that_change_hands_one_at_a_time(regions: list[Node]) -> None:
    a, b, target = regions
    for rename in ("one rename to other", "two rename to one", "other rename to two"):
        for node in (a, b):
            node.run(f"alter table {rename}")
        for node in (a, b):
            assert apply(node, target) == ""
    for node in (a, b):
        write(node)
        assert apply(node, target) == ""
    check(regions)


def test_a_source_that_is_a_step_ahead(regions: list[Node]) -> None:
    a, b, target = regions
    a.run("alter table one rename to other")
    assert apply(a, target) == ""
    a.run("alter table two rename to one")
    assert "replica of_b of another source has a table public.one" in apply(a, target)
    b.run("alter table one rename to other")
    assert apply(b, target) == ""
    assert apply(a, target) == ""
    b.run("alter table two rename to one")
    assert apply(b, target) == ""
    for node in (a, b):
        node.run("alter table other rename to two")
        write(node)
        assert apply(node, target) == ""
    check(regions)
