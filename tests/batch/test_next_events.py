"""gdq.next_events(): a batch of few events with these, in one call."""

from __future__ import annotations

import json
from typing import Any

import psycopg
import pytest

from gdq.consumer import Consumer
from tests.support.events import Tap

pytestmark = pytest.mark.server

NEXT = "select * from gdq.next_events('q', 'c')"
# where the columns of events begin
EVENT = 7


@pytest.fixture
def shop(tap: Tap) -> Tap:
    """The captured table t."""
    tap.write("create table t (id int primary key, v text)")
    tap.add("shop.t")
    tap.owner.execute("select gdq.create_readers()")
    return tap


def tick(shop: Tap) -> int:
    row = shop.owner.execute("select gdq.force_tick('q')").fetchone()
    assert row
    return int(row[0])


def rows(shop: Tap, query: str = NEXT) -> list[tuple[Any, ...]]:
    """What a call gives, in a transaction that is rolled back."""
    with shop.owner.transaction(force_rollback=True):
        return shop.owner.execute(query.encode()).fetchall()


def test_events_and_then_their_batch(shop: Tap) -> None:
    shop.write("insert into t values (1, 'a')", "update t set v = 'b'", "truncate t")
    shop.owner.execute("select gdq.insert_event('q', 'paid', '{\"order\": 7}')")
    tick(shop)
    *events, batch = shop.owner.execute(NEXT).fetchall()
    assert batch[6] is True
    assert {row[:EVENT] for row in events} == {(None,) * EVENT}
    assert batch[EVENT:] == (None,) * 12
    columns = "ev_id, ev_txid, ev_time, op, tbl, key, old, new, origin, retries"
    wanted = shop.owner.execute(f"select {columns} from gdq.get_events(%s, %s)".encode(), batch[:2]).fetchall()
    assert [row[3] for row in wanted] == ["insert", "update", "truncate", "message"]
    found = [(*row[EVENT:14], wanted[-1][7] if row[10] == "message" else row[14], *row[16:18]) for row in events]
    assert json.loads(events[-1][15]) == wanted[-1][7]
    assert found == wanted
    assert [row[18] for row in events[:2]] == [{"id": "integer", "v": "text"}] * 2
    assert shop.owner.execute("select gdq.finish_batch(%s, %s)", batch[:2]).fetchone() == (True,)
    assert rows(shop) == []


def test_many_events_are_left_to_others(shop: Tap) -> None:
    shop.write("insert into t select i, 'a' from generate_series(1, 3) i")
    tick(shop)
    for few, complete in (("3", True), ("2", False), ("null", False)):
        *events, batch = rows(shop, f"select * from gdq.next_events('q', 'c', few => {few})")
        assert (batch[6], len(events)) == (complete, 3 if complete else 0)


def test_more_events_than_there_are_numbers(shop: Tap) -> None:
    """They got their numbers before the batch begins."""
    with shop.db.connect("app") as late, Consumer(shop.db.dsn, "q", "c", max_events=1) as consumer:
        shop.write("insert into t values (1, 'a')")
        tick(shop)
        late.execute("begin; insert into t select i, 'late' from generate_series(10, 1009) i")
        shop.write("insert into t values (2, 'b')")
        tick(shop)
        late.execute("commit")
        shop.write("insert into t values (3, 'c')")
        tick(shop)
        sizes = [len(list(batch.events())) for batch in consumer.batches(once=True)]
    assert sum(sizes) == 1003
    assert 1001 in sizes


def test_only_after_a_tick(shop: Tap) -> None:
    """Without a lock on the consumer if there is none."""
    shop.write("insert into t values (1, 'a')")
    last = tick(shop)
    with shop.db.connect() as other, other.transaction():
        other.execute("select from gdq.next_batch('q', 'c')")
        assert rows(shop, f"select * from gdq.next_events('q', 'c', after_tick => {last})") == []
    assert len(rows(shop, f"select * from gdq.next_events('q', 'c', after_tick => {last - 1})")) == 2


def test_retries_come_by_other_calls(shop: Tap) -> None:
    shop.write("insert into t values (1, 'a')")
    tick(shop)
    event, batch = shop.owner.execute(NEXT).fetchall()
    shop.owner.execute("select gdq.retry_event(%s, %s, %s, '0')", [*batch[:2], event[EVENT]])
    shop.owner.execute("select gdq.finish_batch(%s, %s)", batch[:2])
    (again,) = rows(shop)
    assert again[6] is False


def test_paused_or_with_members(shop: Tap) -> None:
    shop.write("insert into t values (1, 'a')")
    tick(shop)
    shop.owner.execute("select gdq.pause('q')")
    assert rows(shop) == []
    shop.owner.execute("select gdq.resume('q'), gdq.register_member('q', 'c', 'm')")
    with pytest.raises(psycopg.errors.ObjectNotInPrerequisiteState, match="none is named"):
        rows(shop)
