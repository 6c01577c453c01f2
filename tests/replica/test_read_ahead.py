"""The next batch is staged while the target applies the last one: neither is lost, whatever comes between.

Every tick is a batch of its own here, and the target is held up by a lock while it applies one.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import psycopg
import pytest

from gdq.consumers.replica.replica import Replica
from gdq.errors import GdqError
from gdq.ticker import take_tick
from tests.replica.conftest import Pair
from tests.support.server import Database
from tests.support.waiting import until

pytestmark = pytest.mark.server

_AHEAD = "select from pg_stat_activity where application_name like '%/ahead' and query like 'copy %'"
_HELD_UP = "select from pg_stat_activity where application_name = 'gdq:shop/mirror' and wait_event_type = 'Lock'"
_SESSION = """
select pg_terminate_backend(pid) from pg_stat_activity
 where application_name = 'gdq:shop/mirror' and datname = current_database()"""


@pytest.fixture
def items(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> Pair:
    """A replica of two tables that has copied them, and makes a batch of every tick."""
    monkeypatch.setattr("gdq.consumers.replica.batches.MAX_EVENTS", 1)
    monkeypatch.setattr("gdq.consumers.replica.batch_apply._AHEAD_ROWS", 1)
    for table in ("item", "detail"):
        pair.make(f"create table {table} (id int primary key, n int)")
    pair.capture("item", "detail")
    pair.apply()
    return pair


def tick_after(pair: Pair, *statements: str) -> None:
    """Run statements in the source, each a batch."""
    with pair.source.connect() as connection:
        for statement in statements:
            connection.execute(statement.encode())
            take_tick(connection, "shop")


class Program(threading.Thread):
    """A replica that runs in this process; `error`: what it ended with."""

    def __init__(self, pair: Pair, *, on_conflict: Sequence[str] = (), **how: Any) -> None:
        super().__init__(daemon=True)
        self._pair, self._on_conflict, self._how = pair, on_conflict, how
        self.error: Exception | None = None
        self.told: list[str] = []
        self.ticks: list[int] = []
        self.start()

    def run(self) -> None:
        try:
            with Replica(
                self._pair.source.dsn,
                self._pair.target.su_dsn,
                "shop",
                "mirror",
                on_conflict=self._on_conflict,
                tell=self.told.append,
            ) as it:
                self.ticks += [batch.tick for batch in it.run(**self._how)]
        except (psycopg.Error, GdqError) as error:
            self.error = error


@contextmanager
def held_up(pair: Pair, **how: Any) -> Iterator[Program]:
    """A program whose target is in the middle of a batch, while the source is at the next one."""
    with pair.source.connect("su") as source, pair.target.connect("su") as target, target.transaction():
        target.execute("lock table item in share mode")
        program = Program(pair, **how)

        def is_ahead() -> bool:
            assert program.is_alive(), program.error
            return source.execute(_AHEAD).rowcount > 0 and target.execute(_HELD_UP).rowcount > 0

        until(is_ahead, "a batch read ahead")
        yield program


def test_begun_while_the_target_applies(items: Pair) -> None:
    tick_after(items, *(f"insert into item values ({number}, 0)" for number in range(4)))
    before = position(items)
    with held_up(items) as program:
        # the consumer moves when the target has
        assert position(items) == before
    program.join()
    assert program.error is None
    assert len(program.ticks) == 4
    items.same("item")


@pytest.mark.parametrize("victim", ["source", "target"])
def test_killed_while_it_reads_ahead(items: Pair, victim: str) -> None:
    tick_after(
        items, "insert into item values (1, 0), (2, 0)", "update item set n = n + 1", "insert into item values (3, 0)"
    )
    with held_up(items) as program:
        end_session(items.source if victim == "source" else items.target)
        if victim == "target":
            program.join()
    program.join()
    assert isinstance(program.error, psycopg.OperationalError), program.error
    items.apply()
    items.same("item")


def test_what_was_staged_is_gone(items: Pair) -> None:
    """Somebody empties the staging tables before the batch has its turn: its rows are read again."""
    tick_after(items, *(f"insert into item values ({number}, 0)" for number in range(3)))
    stages = "select array_agg(oid::regclass::text) from pg_class where relname like 'replica\\_stage\\_%'"
    with held_up(items) as program, items.target.connect("su") as su:
        until(lambda: su.execute(f"{stages} having count(*) > 0").rowcount, "the staging table")
        row = su.execute(stages).fetchone()
        assert row is not None
        su.execute(f"truncate {', '.join(row[0])}".encode())
    program.join()
    assert program.error is None
    assert len(program.ticks) == 3
    items.same("item")


def test_refused_after_it_was_staged(items: Pair) -> None:
    """A row of the target is in the way of the second batch, whose answer to it needs the old rows, too."""
    tick_after(
        items, "insert into item values (1, 0)", "insert into item values (2, 0)", "update item set n = 5 where id = 1"
    )
    items.there("insert into item values (2, 7)")
    with held_up(items, on_conflict=["insert_exists=apply"]) as program:
        pass
    program.join()
    assert program.error is None
    items.same("item")


def test_paused_while_it_reads_ahead(items: Pair) -> None:
    tick_after(items, "insert into item values (1, 0)", "insert into item values (2, 0)")
    done = threading.Event()
    with items.source.connect("su") as source:
        with held_up(items, once=False, stop=done.is_set) as program:
            until(lambda: source.execute(_AHEAD).rowcount == 2, "a session for either batch")
            items.run("select gdq.pause('shop', 'mirror')")
        try:
            until(lambda: program.told, "the pause told")
            until(lambda: source.execute(_AHEAD).rowcount == 1, "the end of reading ahead")
            assert items.rows(items.target, "item") == [("(1,0)",)]
            items.run("select gdq.resume('shop', 'mirror')")
            until(lambda: len(items.rows(items.target, "item")) == 2, "the second batch")
        finally:
            done.set()
            program.join()
    assert program.error is None


def test_ticks_come_with_the_changes(items: Pair) -> None:
    """Where no ticker runs a replica does not wait for the time that the queue gives to ticks."""
    with items.source.connect("su") as source:
        source.execute("update gdq.queue set ticker_max_lag = '1 day', ticker_idle_period = '1 day'")
    done = threading.Event()
    program = Program(items, once=False, stop=done.is_set)
    try:
        for number in range(3):
            items.run(f"insert into item values ({number}, 0)")
            until(lambda: len(items.rows(items.target, "item")) == number + 1, "the row")  # noqa: B023
    finally:
        done.set()
        program.join()
    assert program.error is None


def test_what_rows_do_not_show_in_the_next_batch(items: Pair) -> None:
    changes = (
        "insert into item values (1, 0), (2, 0)",
        "truncate item",
        "insert into item values (1, 1), (2, 2), (3, 3)",
        "alter table item alter n type bigint using n * 2",
        "update item set n = n + 1 where id < 3",
        "insert into detail select id, 1 from item",
        "alter table detail rename to part",
        "insert into part values (5, 5)",
        "alter table part add m int",
        "update part set m = id",
        "delete from item where id = 2",
    )
    tick_after(items, *changes)
    items.there("alter table item alter n type bigint")
    program = Program(items)
    program.join()
    assert program.error is None
    items.same("item", "part")


def test_the_next_batch_is_moved_behind(items: Pair) -> None:
    """Somebody moves the consumer before the batch that was read ahead has its turn."""
    tick_after(
        items, "insert into item values (1, 0)", "insert into item values (2, 0)", "delete from item where id = 1"
    )
    with held_up(items) as program:
        seek = threading.Thread(target=try_often, args=(items, "select gdq.seek('shop', 'mirror', to_now => true)"))
        seek.start()
    program.join()
    seek.join()
    assert program.error is None
    items.apply()
    items.same("item")


def position(pair: Pair) -> object:
    """The tick that the consumer stands at."""
    with pair.source.connect("su") as su:
        return su.execute("select last_tick from gdq.consumer_info('shop')").fetchone()


def end_session(place: Database) -> None:
    """End the session that holds the batch there."""
    with place.connect("su") as su:
        assert su.execute(_SESSION).rowcount == 1


def try_often(pair: Pair, statement: str) -> None:
    """Run a statement in the source as soon as no worker holds the consumer."""

    def tried() -> bool:
        try:
            pair.run(statement)
        except psycopg.errors.LockNotAvailable:
            return False
        return True

    attempt: Callable[[], bool] = tried
    until(attempt, "the consumer")
