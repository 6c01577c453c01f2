"""Batches: who holds one, what it holds, where a consumer may start and what a zombie reads."""

from __future__ import annotations

import re
from typing import Any

import psycopg
import pytest

from tests.support.concurrency import Snapshot, next_batch, read_events, read_typed
from tests.support.schedules import Stage

FINISH = "select gdq.finish_batch(%s, %s)"


def refusal(connection: psycopg.Connection[Any], statement: str, *values: Any) -> str | None:
    """The SQLSTATE of an error."""
    with pytest.raises(psycopg.Error) as error:
        connection.execute(statement.encode(), values or None)
    return error.value.sqlstate


def open_batch(stage: Stage) -> tuple[int, str]:
    batch = next_batch(stage.owner, "c")
    assert batch
    return batch[:2]


def test_none_without_a_newer_tick(stage: Stage) -> None:
    assert next_batch(stage.owner, "c") is None
    stage.insert()
    assert next_batch(stage.owner, "c") is None


@pytest.mark.server
def test_open_batch_comes_again_under_a_new_token(stage: Stage) -> None:
    stage.insert()
    stage.tick()
    first_id, first = open_batch(stage)
    changes = read_events(stage.owner, first_id, first)
    stage.insert()
    stage.tick()
    second_id, second = open_batch(stage)
    assert (first_id, len(changes)) == (second_id, 1)
    assert first != second
    assert read_events(stage.owner, second_id, second) == changes
    for function in ("get_batch(%s, %s)", "batch_tables(%s, %s)", "finish_batch(%s, %s)", "batch_sql(%s, %s, 'acct')"):
        assert refusal(stage.owner, f"select * from gdq.{function}", first_id, first) == "GDQ01"
    assert stage.value(FINISH, second_id, second) is True
    assert stage.value(FINISH, second_id, second) is False
    assert refusal(stage.owner, FINISH, first_id, first) == "GDQ01"
    assert refusal(stage.owner, "select * from gdq.get_batch(%s, %s)", second_id, second) == "GDQ01"
    assert refusal(stage.owner, FINISH, 999, second) == "GDQ01"
    assert open_batch(stage)[0] != second_id


def test_rolled_back_finish_leaves_the_batch_open(stage: Stage) -> None:
    stage.insert()
    stage.tick()
    batch = open_batch(stage)
    with stage.owner.transaction(force_rollback=True):
        stage.owner.execute(FINISH, batch)
    assert stage.value(FINISH, *batch) is True


def test_text_of_a_batch_is_the_same_while_it_is_open(stage: Stage) -> None:
    stage.insert()
    stage.tick()
    texts = set()
    for _ in range(3):
        batch = open_batch(stage)
        texts.add(stage.value("select gdq.batch_sql(%s, %s, 'acct')", *batch))
        for _ in range(2):
            stage.insert()
            stage.tick()
            stage.maintain()
    assert len(texts) == 1


def test_ticks_are_joined_up_to_a_number_of_events(stage: Stage) -> None:
    """A tick that holds more than that alone is a batch of its own."""
    for rows in (3, 3, 3, 50, 1):
        stage.owner.execute(
            "insert into acct select n + (select count(*) from acct), n from generate_series(1, %s) n", [rows]
        )
        stage.tick()
    sizes = []
    while batch := next_batch(stage.owner, "c", 7):
        sizes.append(len(read_events(stage.owner, *batch[:2])))
        stage.owner.execute(FINISH, batch[:2])
    assert sizes == [6, 3, 50, 1]


def test_large_transaction_is_one_batch(stage: Stage) -> None:
    stage.owner.execute("drop trigger history on acct")
    stage.owner.execute("insert into acct select n, n from generate_series(1, 200000) n")
    stage.tick()
    batch = open_batch(stage)
    assert stage.value("select count(*) from gdq.get_batch(%s, %s)", *batch) == 200_000
    stage.owner.execute(FINISH, batch)
    assert next_batch(stage.owner, "c") is None


def test_some_tables_only(stage: Stage) -> None:
    stage.owner.execute("select gdq.register_consumer('q', 'some', tables => '{item}')")
    stage.insert()
    stage.owner.execute("insert into item values (1, 1); truncate acct, item")
    stage.tick()
    batch = next_batch(stage.owner, "some")
    assert batch
    rows = stage.owner.execute("select op, tbl from gdq.get_batch(%s, %s)", batch[:2]).fetchall()
    assert sorted(rows) == [("insert", "public.item"), ("truncate", "public.item")]
    assert [row[1] for row in stage.owner.execute("select * from gdq.batch_tables(%s, %s)", batch[:2])] == [
        "public.item"
    ]
    assert refusal(stage.owner, "select gdq.batch_sql(%s, %s, 'acct')", *batch[:2]) == "42704"


def test_consumer_of_some_tables_does_not_hold_the_others(stage: Stage) -> None:
    """But what it holds stays readable, although the horizon of the queue has passed it."""
    stage.owner.execute("select gdq.register_consumer('q', 'some', tables => '{item}')")
    behind = stage.scene.register(stage.owner, "behind")
    stage.owner.execute("select gdq.unregister_consumer('q', 'behind')")
    stage.owner.execute("insert into item values (1, 1)")
    stage.insert()
    stage.tick()
    stage.consume()
    assert stage.maintain() == 1
    del stage.scene.streams["behind"]
    start = f"{behind.start.xmax}:{behind.start.xmax}:"
    delta = "select gdq.delta_sql('q', %s, %s::pg_snapshot, pg_current_snapshot())"
    assert "segment_is" in stage.value(delta, "item", start)
    assert refusal(stage.owner, delta, "acct", start) == "GDQ02"
    assert (
        stage.owner.execute(
            "select * from gdq.delta_events('q', %s::pg_snapshot, pg_current_snapshot())", [start]
        ).fetchall()
        == []
    )
    batch = next_batch(stage.owner, "some")
    assert batch
    assert len(read_typed(stage.owner, *batch[:2])) == 1


def test_start_at_an_old_tick(stage: Stage) -> None:
    first = stage.value("select gdq.force_tick('q')")
    stage.insert()
    stage.tick()
    assert stage.value("select gdq.register_consumer('q', 'old', at_tick => %s)", first) is True
    assert stage.value("select gdq.register_consumer('q', 'old')") is False
    batch = next_batch(stage.owner, "old")
    assert batch
    assert len(read_events(stage.owner, *batch[:2])) == 1
    assert refusal(stage.owner, "select gdq.register_consumer('q', 'd', at_tick => 999)") == "42704"
    assert refusal(stage.owner, "select gdq.register_consumer('q', '')") == "22023"
    assert refusal(stage.owner, "select gdq.register_consumer('q', 'd', tables => '{history}')") == "42704"


def test_start_below_the_horizon_is_refused(stage: Stage) -> None:
    first = stage.value("select gdq.force_tick('q')")
    stage.insert()
    stage.tick()
    stage.consume()
    last = stage.value("select max(tick_id) from gdq.tick")
    assert stage.maintain() == 1
    assert refusal(stage.owner, "select gdq.register_consumer('q', 'd', at_tick => %s)", first) == "GDQ02"
    assert stage.value("select gdq.register_consumer('q', 'd', at_tick => %s)", last) is True
    stage.insert()
    stage.tick()
    batch = next_batch(stage.owner, "d")
    assert batch
    assert len(read_events(stage.owner, *batch[:2])) == 1


@pytest.mark.server
@pytest.mark.parametrize("level", ["read committed", "repeatable read"])
def test_zombie_gets_an_error_not_an_empty_batch(stage: Stage, level: str) -> None:
    """Its batch is finished by another worker, and the rows are truncated, before it reads."""
    stage.insert()
    stage.tick()
    batch = open_batch(stage)
    text = stage.value("select gdq.batch_sql(%s, %s, 'acct')", *batch)
    zombie = stage.session()
    zombie.execute(f"begin isolation level {level}; select 1".encode())
    stage.consume()
    assert stage.maintain() == 1
    for query, values in (
        (text, None),
        ("select * from gdq.get_batch(%s, %s)", batch),
        ("select gdq.batch_sql(%s, %s, 'acct')", batch),
        (f"select gdq.delta_sql('q', 'acct', '{snapshot_of(stage)}', pg_current_snapshot())", None),
    ):
        with pytest.raises(psycopg.Error) as error, zombie.transaction():
            zombie.execute(query.encode(), values)
        assert error.value.sqlstate in {"GDQ01", "GDQ02"}


def snapshot_of(stage: Stage) -> str:
    return str(stage.value("select min(snapshot::text) from gdq.tick"))


def test_reader_of_an_open_batch_is_not_disturbed_by_truncation(stage: Stage) -> None:
    """Its text names only segments that hold its rows; those that are consumed may go."""
    stage.insert()
    stage.tick()
    stage.consume()
    stage.owner.execute("select gdq.maintain()")
    stage.insert()
    stage.tick()
    batch = open_batch(stage)
    reader = stage.session()
    reader.execute("begin")
    row = reader.execute("select gdq.batch_sql(%s, %s, 'acct')", batch).fetchone()
    assert row
    stage.maintain()
    assert len(reader.execute(row[0].encode()).fetchall()) == 1


@pytest.mark.server
def test_position_never_goes_back_to_a_tick_that_commits_late(stage: Stage) -> None:
    """A tick is taken and not yet committed while a refresh moves the position past it."""
    tick = stage.session()
    tick.execute("begin; select gdq.force_tick('q')")
    stage.insert()
    row = stage.owner.execute("select batch_id, token from gdq.begin_refresh('q', 'c')").fetchone()
    assert row
    snapshot = stage.value("select pg_current_snapshot()::text")
    stage.owner.execute("select gdq.set_position('q', 'c', %s, %s)", [row[1], snapshot])
    stage.stream.start = Snapshot.parse(snapshot)
    tick.execute("commit")
    stage.consume()
    stage.insert()
    stage.finish()


def test_refresh_fences_older_holders(stage: Stage) -> None:
    stage.insert()
    begin = "select batch_id, token::text, snapshot::text from gdq.begin_refresh('q', 'c')"
    first, second = (stage.owner.execute(begin.encode()).fetchone() for _ in range(2))
    assert first
    assert second
    assert first[0] == second[0]
    move = "select gdq.set_position('q', 'c', %s, {}::pg_snapshot)"
    assert refusal(stage.owner, "select * from gdq.next_batch('q', 'c')") == "55000"
    assert refusal(stage.owner, move.format("pg_current_snapshot()"), first[1]) == "GDQ01"
    assert refusal(stage.owner, FINISH, *second[:2]) == "55000"
    assert refusal(stage.owner, move.format("'1:1:'"), second[1]) == "22023"
    assert refusal(stage.owner, move.format("'900000000:900000000:'"), second[1]) == "22023"
    assert refusal(stage.owner, "select gdq.add_tick('q', '900000000:900000000:')") == "55000"
    snapshot = stage.value("select pg_current_snapshot()::text")
    tick = stage.owner.execute("select tick_id, nonce from gdq.add_tick('q', %s)", [snapshot]).fetchone()
    assert tick
    assert stage.value("select gdq.tick_nonce(%s)", tick[0]) == tick[1]
    assert stage.value("select gdq.tick_nonce(999)") is None
    stage.owner.execute(move.format("%s").encode(), [second[1], snapshot])
    assert refusal(stage.owner, move.format("pg_current_snapshot()"), second[1]) == "GDQ01"
    assert next_batch(stage.owner, "c") is None
    stage.stream.start = Snapshot.parse(snapshot)
    stage.insert()
    stage.finish()


def test_interval_beyond_the_snapshot_is_refused(stage: Stage) -> None:
    """In an old snapshot the rows of a later interval are invisible, and would be taken for none."""
    session = stage.session()
    session.execute("begin isolation level repeatable read; select 1")
    before = stage.value("select pg_current_snapshot()::text")
    stage.insert()
    now = stage.value("select pg_current_snapshot()::text")
    query = f"select gdq.delta_sql('q', 'acct', '{before}', '{now}')"
    assert refusal(session, query) == "22023"
    assert "segment_is" in stage.value(query)


def test_unregister(stage: Stage) -> None:
    stage.owner.execute("select gdq.create_queue('r')")
    stage.owner.execute("select gdq.register_consumer('r', 'c')")
    assert stage.value("select gdq.unregister_consumer('q', 'c')") is True
    assert stage.value("select gdq.unregister_consumer('q', 'c')") is False
    assert refusal(stage.owner, "select * from gdq.next_batch('q', 'c')") == "42704"
    assert stage.value("select count(*) from gdq.consumer_info('r')") == 1
    stage.insert()
    stage.tick()
    assert stage.maintain() == 1


@pytest.mark.server
def test_window_is_read_by_brin(stage: Stage) -> None:
    """A small batch amid a big log costs a small read, also with a long writer interleaved."""
    stage.owner.execute("drop trigger history on acct")
    long = stage.session()
    long.execute("begin")
    rows = "insert into acct select n, n, repeat('x', 200) from generate_series(%s::int, %s) n"

    def bulk(first: int) -> None:
        for key in range(first, first + 20_000, 2000):
            stage.owner.execute(rows, [key, key + 1900])
            # more than a page of them, or they would all go to the page that its session has begun
            long.execute(rows, [key + 1901, key + 1980])

    bulk(0)
    stage.tick()
    stage.owner.execute(FINISH, open_batch(stage))
    stage.owner.execute(rows, [100_000, 100_050])
    stage.tick()
    bulk(200_000)
    stage.owner.execute("select gdq.summarise_logs()")
    text = stage.value("select gdq.batch_sql(%s, %s, 'acct')", *open_batch(stage))
    with stage.owner.transaction():
        stage.owner.execute("set local enable_seqscan = off")
        explained = stage.owner.execute(f"explain (analyze, costs off) {text}".encode())
        plan = "\n".join(row[0] for row in explained)
    assert "Seq Scan" not in plan
    assert "Bitmap Index Scan" in plan
    blocks = sum(map(int, re.findall(r"Heap Blocks:.*lossy=(\d+)", plan)))
    assert stage.value("select max(pg_relation_size(segment)) / 8192 from gdq.log_segment") > 1000
    assert 0 < blocks <= 64, plan
