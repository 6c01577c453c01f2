"""What a step of a ticker tells its caller: when the next one is due, and that nothing has moved."""

from __future__ import annotations

import json

import psycopg
import pytest

from tests.support.schedules import Stage
from tests.support.waiting import until

Step = tuple[int | None, float | None, float | None, str | None, str | None]


def step(stage: Stage, queue: str | None = "q", seen: str | None = None, snapshot: str | None = None) -> Step:
    """The ticks made, when the next is due, the longest pause between looks, the numbers and the snapshot seen."""
    query = "select made, due, longest, seen, snapshot from gdq.tick_step(%s, seen => %s, snapshot => %s)"
    row: Step | None = stage.owner.execute(query, [queue, seen, snapshot]).fetchone()
    assert row
    return row


def calm(stage: Stage, queue: str | None = "q") -> Step:
    """A step once the last tick is older than ticker_max_lag, and nothing has come since."""
    until(lambda: step(stage, queue)[4])
    return step(stage, queue)


def does_nothing(stage: Stage, queue: str | None = "q") -> bool:
    """Whether nothing is done under the snapshot of the last step; autovacuum, too, may have changed it."""
    *_, seen, snapshot = calm(stage, queue)
    return step(stage, queue, seen, snapshot) == (None, None, None, seen, snapshot)


def test_a_step_says_when_a_tick_is_due(stage: Stage) -> None:
    stage.owner.execute("update gdq.queue set ticker_max_lag = '8 s'")
    stage.tick()
    made, due, longest, seen, snapshot = step(stage)  # for what may come
    assert (made, longest, seen, snapshot) == (0, None, "{}", None)
    assert due is not None
    assert 0 < due <= 8
    stage.insert()
    made, due, *_ = step(stage)
    assert made == 0
    assert due is not None
    assert 0 < due <= 8
    stage.owner.execute("update gdq.queue set ticker_max_lag = '1 ms'")
    until(lambda: step(stage)[0] == 1)
    made, due, longest, seen, snapshot = calm(stage)
    assert (made, longest) == (0, 0.001)  # a tick would be due with the first event
    assert due is not None
    assert 3000 < due <= 3600  # ticker_idle_period
    stage.insert()
    made, due, longest, *_ = step(stage, seen=seen)
    assert made == 1
    assert due is not None
    assert due <= 0.001 or longest == 0.001, "the next one may be due by now"


def test_a_step_does_nothing_while_the_numbers_stay(stage: Stage) -> None:
    stage.owner.execute("update gdq.queue set ticker_max_lag = '1 ms'")
    late = stage.session()
    late.execute("begin")
    stage.insert(late)
    stage.tick()
    until(lambda: does_nothing(stage))
    *_, seen, snapshot = calm(stage)
    late.execute("commit")
    assert step(stage, seen=seen) == (None, None, None, seen, None)
    assert step(stage, seen=seen, snapshot=snapshot)[0] == 1


def test_a_step_of_all_queues(stage: Stage) -> None:
    """A tick says when that of any queue is due; a paused queue is not looked at."""
    stage.owner.execute("update gdq.queue set ticker_max_lag = '300 ms'")
    stage.owner.execute("select gdq.create_queue('r', ticker_max_lag => '1 ms', ticker_idle_period => '1 hour')")
    *_, seen, _ = calm(stage, None)
    assert len(json.loads(seen or "")) == 2
    stage.insert()
    made, due, longest, left, snapshot = step(stage, None, seen)
    assert (made, longest, snapshot) == (1, 0.001, None)
    assert list(json.loads(left or "")) == [str(stage.value("select queue_id from gdq.queue where queue_name = 'r'"))]
    assert due is not None
    assert due <= 0.3
    stage.insert()
    stage.owner.execute("update gdq.queue set ticker_idle_period = '1 min'")
    stage.owner.execute("update gdq.tick set created_at = created_at - interval '1 min'")
    made, due, *_ = step(stage, None)
    assert made == 1
    assert due is not None
    assert due <= 0, "the other one's tick is due, too"
    assert step(stage, None)[0] == 1
    stage.owner.execute("select gdq.pause('q'), gdq.pause('r')")
    assert calm(stage, None)[:4] == (0, None, None, "{}")
    until(lambda: does_nothing(stage, None))
    stage.owner.execute("select gdq.drop_queue('q', true)")
    with pytest.raises(psycopg.errors.UndefinedObject):
        step(stage)
