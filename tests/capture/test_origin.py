"""Where a change comes from, and consumers that leave out what they wrote themselves."""

from __future__ import annotations

import pytest

from gdq.consumer import Consumer, register_consumer
from tests.support.events import Tap


def origins(tap: Tap) -> list[tuple[str, str | None]]:
    """(op, origin) of what the consumer gets next, in order."""
    with Consumer(tap.db.dsn, "q", tap.consumer) as consumer:
        return [(e.op, e.origin) for batch in consumer.batches(once=True) for e in batch.events()]


@pytest.mark.parametrize("options", [{}, {"mode": "pk"}, {"granularity": "statement"}, {"where": "id < 9"}])
def test_origin_is_the_sessions_setting(tap: Tap, options: dict[str, str]) -> None:
    tap.write("create table t (id int primary key, v int)")
    tap.add("shop.t", origin=True, **options)
    tap.write(
        "insert into t values (1)",
        "set gdq.origin = 'east'",
        "insert into t values (2)",
        "begin; set local gdq.origin = 'we''st'; update t set v = 1 where id = 1; truncate t; commit",
        "insert into t values (3)",
        "set gdq.origin = ''",
        "delete from t",
        "reset gdq.origin",
        "truncate t",
        "alter table t add w int",
        "set gdq.origin = 'east'",
        "insert into t values (4)",
    )
    update = [("delete", "we'st"), ("insert", "we'st")] if "granularity" in options else [("update", "we'st")]
    assert [o for o in origins(tap) if o[0] != "ddl"] == [
        ("insert", None),
        ("insert", "east"),
        *update,
        ("truncate", "we'st"),
        ("insert", "east"),
        ("delete", None),
        ("truncate", None),
        ("insert", "east"),
    ]
    assert tap.owner.execute("select state from gdq.table_info('q')").fetchone() == ("ok",)


def test_split_updates_and_changed_keys_carry_it(tap: Tap) -> None:
    wide = ", ".join(f"w{n} name" for n in range(70))
    tap.write(f"create table s (id int primary key, {wide})", "create table k (id int primary key)")
    tap.add("shop.s", origin=True)
    tap.add("shop.k", origin=True, mode="pk")
    tap.write("insert into s (id) values (1)", "insert into k values (1)", "set gdq.origin = 'o'")
    tap.write("update s set w1 = 'x'", "update k set id = 2")
    assert origins(tap) == [("insert", None), ("insert", None), ("update", "o"), ("delete", "o"), ("insert", "o")]


def test_without_the_option_there_is_none(tap: Tap) -> None:
    tap.write("create table t (id int primary key)")
    tap.add("shop.t")
    tap.write("set gdq.origin = 'east'", "insert into t values (1)", "truncate t")
    assert origins(tap) == [("insert", None), ("truncate", None)]


def test_consumer_that_skips_its_own(tap: Tap) -> None:
    """The cut of a loop: what is applied under an origin does not come back; nor in typed rows and net changes."""
    tap.write("create table t (id int primary key)", "create table u (id int primary key)")
    tap.add("shop.t", origin=True)
    tap.add("shop.u")
    register_consumer(tap.owner, "q", "loop", skip_origin=["east", "north"])
    tap.write(
        "insert into t values (1)",
        "set gdq.origin = 'east'",
        "insert into t values (2)",
        "insert into u values (2)",
        "truncate t",
        "set gdq.origin = 'west'",
        "insert into t values (3)",
    )
    with Consumer(tap.db.dsn, "q", "loop") as consumer:
        for batch in consumer.batches(once=True):
            seen = [(e.op, e.table, e.origin) for e in batch.events()]
            typed = [row["new_id"] for row in batch.arrow("shop.t").to_pylist()]
    assert seen == [("insert", "shop.t", None), ("insert", "shop.u", None), ("insert", "shop.t", "west")]
    assert sorted(typed) == [1, 3]
    # the other consumer gets all of it
    assert len(origins(tap)) == 5


def test_applications_operators_do_not_run_in_a_capture_function(tap: Tap) -> None:
    tap.write(
        "create table t (id int primary key)",
        "create function shop.no(text, text) returns boolean language plpgsql as 'begin raise ''shadow''; end'",
        "create operator shop.<> (leftarg = text, rightarg = text, function = shop.no)",
        "create operator shop.= (leftarg = text, rightarg = text, function = shop.no)",
    )
    tap.add("shop.t", origin=True)
    tap.write("set search_path = shop, pg_catalog", "set gdq.origin = 'o'", "insert into t values (1)", "truncate t")
    assert origins(tap) == [("insert", "o"), ("truncate", "o")]
