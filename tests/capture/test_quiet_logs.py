"""Logs that nobody looks at until a change is announced."""

from __future__ import annotations

import pytest

from tests.support.events import Tap

pytestmark = pytest.mark.server

# Each kind of capture function: columns and options of a table, statements, and the ops that come of them.
KINDS = {
    "full": ("id int primary key, v text", {}, ["insert", "update", "delete"]),
    "pk": ("id int primary key, v text", {"mode": "pk"}, ["insert", "update", "delete"]),
    "filtered": ("id int primary key, v text", {"where": "v = 'b'"}, ["insert", "delete"]),
    "statement": ("id int primary key, v text", {"granularity": "statement"}, ["insert", "delete", "insert", "delete"]),
    "json": ("id int primary key, v text", {"format": "json"}, ["insert", "update", "delete"]),
    "partitioned": ("id int, v text, primary key (id)", {}, ["insert", "update", "delete"]),
}


@pytest.mark.parametrize("kind", KINDS)
def test_changes_of_a_quiet_log_are_delivered(tap: Tap, kind: str) -> None:
    columns, options, ops = KINDS[kind]
    tap.write(f"create table t ({columns}) {'partition by range (id)' if kind == 'partitioned' else ''}")
    if kind == "partitioned":
        tap.write("create table t_1 partition of t default")
    tap.add("shop.t", **options)
    tap.owner.execute("select gdq.set_activity(1, 'cooling')")
    tap.owner.execute("select gdq.update_activity()")
    assert tap.owner.execute("select activity from gdq.log_ring").fetchone() == ("quiet",)
    assert tap.events() == []
    tap.write("insert into t values (1, 'a')", "update t set v = 'b'", "delete from t")
    assert [event.op for event in tap.events()] == ops
    tap.owner.execute("select gdq.update_activity()")
    assert tap.owner.execute("select activity from gdq.log_ring").fetchone() == ("busy",)
    tap.write("insert into t values (2, 'b')")
    assert [event.op for event in tap.events()] == ["insert"]


def test_logs_become_quiet_only_after_a_while_and_empty(tap: Tap) -> None:
    tap.write("create table t (id int primary key)")
    tap.add("shop.t")
    activity = "select activity from gdq.log_ring"
    tap.owner.execute("select gdq.update_activity()")
    assert tap.owner.execute(activity).fetchone() == ("busy",)
    tap.write("insert into t values (1)")
    tap.owner.execute("update gdq.log_ring set switched_at = switched_at - interval '1 hour'")
    tap.owner.execute("select gdq.update_activity()")
    assert tap.owner.execute(activity).fetchone() == ("busy",)
    assert len(tap.events()) == 1
    tap.owner.execute("update gdq.queue set rotation_period = '1 microsecond'")
    while tap.owner.execute("select gdq.maintain()").fetchone() == (True,):
        pass
    tap.owner.execute("update gdq.log_ring set switched_at = switched_at - interval '1 hour'")
    for wanted in ("cooling", "quiet"):
        tap.owner.execute("select gdq.update_activity()")
        assert tap.owner.execute(activity).fetchone() == (wanted,)
