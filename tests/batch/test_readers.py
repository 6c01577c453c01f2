"""Readers: the functions that give the events of small batches, beside the SELECT that is written for a batch."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from threading import Barrier, BrokenBarrierError
from typing import Any

import psycopg
import pytest
from psycopg import errors

from tests.support.events import Tap
from tests.support.schedules import Stage

READERS = r"select count(*) from pg_proc where pronamespace = 'gdq_log'::regnamespace and proname ~ '^t\d+_v\d+_read$'"
COLUMNS = "ev_id, ev_txid, ev_time, op, tbl, key, old, new, origin"
OPEN = "select batch_id, token from gdq.next_batch('q', 'c')"
EVENTS = "select * from gdq.get_events(%s, %s)"


def maintained(tap: Tap) -> None:
    while tap.owner.execute("select gdq.maintain()").fetchone() == (True,):
        pass


def both_ways(tap: Tap) -> tuple[list[tuple[Any, ...]], bool]:
    """The events of the next batch, the same by either way; and whether readers alone gave them."""
    tap.owner.execute("select gdq.force_tick('q')")
    batch = tap.owner.execute(OPEN).fetchone()
    assert batch
    usual = tap.owner.execute("select gdq.usual_events_sql(b) from gdq.batch b where batch_id = %s", batch[:1])
    read = usual.fetchone() != (None,)
    events = tap.owner.execute(f"select {COLUMNS} from gdq.get_events(%s, %s)".encode(), batch).fetchall()
    assert events == tap.owner.execute(f"select {COLUMNS} from gdq.get_batch(%s, %s)".encode(), batch).fetchall()
    tap.owner.execute("select gdq.finish_batch(%s, %s)", batch)
    return events, read


@pytest.mark.server
def test_the_same_as_a_select_of_the_batch(tap: Tap) -> None:
    """In each mode and format, over all segments, with several tables merged, across DDL and TRUNCATE."""
    options: list[dict[str, Any]] = [{}, {"format": "json"}, {"mode": "pk", "include": ["b"]}, {"origin": True}]
    for number, chosen in enumerate(options):
        tap.write(f"create table t{number} (id int primary key, a numeric, b text, at timestamptz default now())")
        tap.add(f"shop.t{number}", **chosen)
    tap.owner.execute("update gdq.queue set rotation_period = '1 microsecond'")
    tables = [f"t{number}" for number in range(len(options))]

    def change(step: int) -> list[str]:
        return [
            statement
            for table in tables
            for statement in (
                f"insert into {table} values ({step}, 1.50, E'\\\\ ''b''')",
                f"update {table} set a = a + 1, id = id + 1000 where id = {step - 1}",
                f"delete from {table} where id = {step + 998}",
            )
        ]

    tap.write(*change(1))
    assert len(both_ways(tap)[0]) == len(tables)
    for step in range(2, 8):
        maintained(tap)
        assert tap.owner.execute(READERS).fetchone() == (len(tables),)
        # one transaction is open while the others commit: it comes in a later batch
        with tap.db.connect("app") as late:
            late.execute("begin")
            late.execute("insert into t0 values (%s, 7, 'late')", [-step])
            tap.write(*change(step))
            events, read = both_ways(tap)
            late.execute("commit")
        assert read
        assert [event[0] for event in events] == sorted(event[0] for event in events)
        assert {event[4] for event in events} == {f"shop.{table}" for table in tables}
        late_events, read = both_ways(tap)
        assert read
        assert [event[7]["id"] for event in late_events] == [-step]
    tap.write("truncate t1", "alter table t0 add c int", "alter table t2 rename to t9", "alter table t9 rename to t2")
    tap.write(*change(8))
    assert {"truncate", "ddl"} < {event[3] for event in both_ways(tap)[0]}
    for step in range(9, 12):
        maintained(tap)
        tap.write(*change(step))
        events, read = both_ways(tap)
    assert read
    assert {event[4] for event in events} == {f"shop.{table}" for table in tables}
    tap.owner.execute("select gdq.remove_table('q', 'shop.t3')")
    assert tap.owner.execute(READERS).fetchone() == (len(tables) - 1,)


def test_a_log_that_no_reader_can_read(tap: Tap) -> None:
    """The halves of an UPDATE are joined by a SELECT that is planned for the batch."""
    tap.write("create table t (id int primary key, a text)")
    tap.add("shop.t", granularity="statement")
    tap.write("insert into t values (1, 'a')", "update t set a = 'b'")
    maintained(tap)
    events, read = both_ways(tap)
    assert [event[3] for event in events] == ["insert", "delete", "insert"]
    assert not read


@pytest.mark.server
def test_a_zombie_that_knows_the_reader(stage: Stage) -> None:
    """Another worker has finished the batch, and its segment is empty."""
    stage.insert()
    stage.owner.execute("select gdq.create_readers()")
    stage.tick()
    batch = stage.owner.execute(OPEN).fetchone()
    zombie = stage.session()
    assert len(zombie.execute(EVENTS, batch).fetchall()) == 1
    zombie.execute("begin; select 1")
    stage.consume()
    assert stage.maintain() == 1
    with pytest.raises(errors.Error) as error, zombie.transaction():
        zombie.execute(EVENTS, batch)
    assert error.value.sqlstate == "GDQ01"


def test_consumed_segments_may_go_while_a_batch_is_read(stage: Stage) -> None:
    stage.insert()
    stage.owner.execute("select gdq.create_readers()")
    stage.tick()
    stage.consume()
    stage.owner.execute("select gdq.maintain()")
    stage.insert()
    stage.tick()
    batch = stage.owner.execute(OPEN).fetchone()
    reader = stage.session()
    with reader.transaction():
        assert len(reader.execute(EVENTS, batch).fetchall()) == 1
        assert stage.maintain() == 1
        assert len(reader.execute(EVENTS, batch).fetchall()) == 1


@pytest.mark.server
def test_made_by_many_sessions_at_once(tap: Tap) -> None:
    """Whoever comes second leaves a reader as it is, though its session remembers that there was none."""
    sessions, rounds = 4, 12
    together = Barrier(sessions, timeout=300)

    def make(session: psycopg.Connection[Any]) -> None:
        try:
            for number in range(rounds):
                if session is opened[0]:
                    tap.write(f"create table t{number} (id int primary key)")
                    tap.add(f"shop.t{number}")
                    tap.write(f"insert into t{number} values (1)")
                together.wait()
                session.execute("select gdq.create_readers()")
                together.wait()
        except psycopg.Error:
            together.abort()
            raise

    with ExitStack() as stack:
        opened = [stack.enter_context(tap.db.connect()) for _ in range(sessions)]
        with ThreadPoolExecutor(sessions) as pool:
            made = [pool.submit(make, session) for session in opened]
    failed = [error for one in made if (error := one.exception()) is not None]
    assert [error for error in failed if not isinstance(error, BrokenBarrierError)] == []
    assert tap.owner.execute(READERS).fetchone() == (rounds,)
