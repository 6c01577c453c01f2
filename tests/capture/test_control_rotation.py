"""Ticks, positions, batches and tokens are carried forward when their tables rotate."""

from __future__ import annotations

from typing import Any

import psycopg
import pytest

from tests.support.schedules import Stage

KINDS = ("tick", "position", "batch", "batch_token")

pytestmark = pytest.mark.server


def rotate(stage: Stage, bytes_max: int = 1) -> int:
    return int(stage.value("select gdq.rotate_control(true, %s)", bytes_max))


def batch(stage: Stage, connection: psycopg.Connection[Any] | None = None) -> tuple[int, str] | None:
    found = (connection or stage.owner).execute("select batch_id, token::text from gdq.next_batch('q', 'c')").fetchone()
    return (int(str(found[0])), str(found[1])) if found else None


def consume(stage: Stage) -> tuple[int, str]:
    stage.insert()
    stage.tick()
    found = batch(stage)
    assert found
    assert stage.value("select gdq.finish_batch(%s, %s)", *found)
    return found


def test_tables_rotate_when_they_have_grown(stage: Stage) -> None:
    assert rotate(stage, 262144) == 0
    consume(stage)
    assert rotate(stage, 262144) == 0
    slots = "select array_agg(distinct slot) from (select slot from gdq.tick union all select slot from gdq.position) s"
    assert stage.value(slots) == [0]
    assert rotate(stage) == 0
    consume(stage)
    assert stage.value(slots) == [0, 1]
    assert rotate(stage) == len(KINDS)
    assert stage.value(slots) == [1]


def test_open_batch_outlives_rotation(stage: Stage) -> None:
    stage.insert()
    stage.tick()
    opened = batch(stage)
    assert opened
    events = "select array_agg(e::text) from gdq.get_batch(%s, %s) e"
    before = stage.value(events, *opened)
    for _ in range(4):
        rotate(stage)
    assert stage.value(events, *opened) == before
    assert stage.value("select gdq.finish_batch(%s, %s)", *opened) is True
    for _ in range(4):
        rotate(stage)
    assert stage.value("select gdq.finish_batch(%s, %s)", *opened) is False
    assert batch(stage) is None


def test_consumed_rows_go_and_no_dead_ones_stay(stage: Stage) -> None:
    stage.owner.execute("alter table gdq.tick alter created_at set default clock_timestamp() - interval '1 hour'")
    holder = stage.session()
    holder.execute("begin isolation level repeatable read; select 1")
    for _ in range(60):
        consume(stage)
        rotate(stage)
    stage.owner.execute("select pg_stat_force_next_flush()")
    for kind in KINDS:
        assert stage.value(f"select count(*) from gdq.{kind}") < 10
        dead = f"select sum(pg_stat_get_dead_tuples(('gdq.{kind}_' || slot)::regclass)) from generate_series(0, 1) slot"
        assert stage.value(dead) == 0


def test_ticks_of_a_lagging_consumer_are_kept(stage: Stage) -> None:
    stage.owner.execute("select gdq.register_consumer('q', 'slow')")
    since = stage.value("select last_tick from gdq.consumer_info('q') where consumer_name = 'slow'")
    stage.owner.execute("alter table gdq.tick alter created_at set default clock_timestamp() - interval '1 hour'")
    ticks = []
    for _ in range(6):
        consume(stage)
        rotate(stage)
        ticks.append(stage.value("select max(tick_id) from gdq.tick"))
    kept = "select array_agg(tick_id order by tick_id) from gdq.tick where tick_id > %s"
    assert stage.value(kept, since) == ticks
    opened = stage.owner.execute("select tick_to from gdq.next_batch('q', 'slow', 1)").fetchone()
    assert opened == (ticks[0],)


def test_reader_in_an_old_snapshot_that_has_pinned_is_not_disturbed(stage: Stage) -> None:
    opened = consume(stage)
    reader = stage.session()
    names = ", ".join(name for (name,) in stage.owner.execute("select s::text from gdq.log_segments('q') s"))
    reader.execute(f"begin isolation level repeatable read; lock table {names} in access share mode; select 1".encode())
    position = "select batch_no from gdq.position_of((select subscription_id from gdq.subscription))"
    before = reader.execute(position.encode()).fetchone()
    rotate(stage)
    assert stage.value("select gdq.rotate_control(false, 1)") == 0
    assert reader.execute(position.encode()).fetchone() == before
    reader.execute("commit")
    assert rotate(stage) == len(KINDS)
    assert stage.value("select gdq.finish_batch(%s, %s)", *opened) is False


def test_rotation_gives_way_to_a_consumer(stage: Stage) -> None:
    stage.insert()
    stage.tick()
    worker = stage.session()
    worker.execute("begin")
    opened = batch(stage, worker)
    assert opened
    rotate(stage)
    assert stage.value("select gdq.rotate_control(false, 1)") == 0
    worker.execute("select gdq.finish_batch(%s, %s)", opened)
    worker.execute("commit")
    assert rotate(stage) == len(KINDS)
