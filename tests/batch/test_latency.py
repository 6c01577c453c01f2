"""What stands between a commit and its handler: round trips of a consumer, and the moment of a tick."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path
from select import select
from types import SimpleNamespace
from typing import Any
from uuid import uuid4

import psycopg
import pytest
from psycopg.pq import TransactionStatus

from gdq import ticker
from gdq.batch import Batch
from gdq.consumer import Consumer
from gdq.errors import StaleBatch
from gdq.steps import Steps
from gdq.ticker import Housekeeping
from tests.support.programs import gdq
from tests.support.retry_shop import RetryShop, open_shop
from tests.support.server import Database
from tests.support.waiting import SECONDS, until


@pytest.fixture
def shop(db: Database) -> Iterator[RetryShop]:
    """A queue q that captures orders, with the consumer c, for whom three ticks hold one change each."""
    with open_shop(db) as opened:
        opened.connection.execute("update gdq.queue set ticker_max_lag = '1 hour', ticker_idle_period = '1 hour'")
        for key in range(3):
            opened.insert(key)
        yield opened


def keys(consumer: Consumer) -> list[int]:
    """The keys of all events that are left; their batches are finished."""
    return [(event.key or {})["id"] for batch in consumer.batches(once=True) for event in batch.events()]


def round_trips(trace: Path) -> int:
    """How often the client has waited for the server: each time it ends a query or a pipeline."""
    sent = [line.split("\t") for line in trace.read_text().splitlines()]
    return sum(fields[1] == "F" and fields[3] in ("Query", "Sync") for fields in sent if len(fields) > 3)


@pytest.mark.parametrize(("commits", "trips"), [(True, 2), (False, 1)])
def test_round_trips_of_a_batch(shop: RetryShop, tmp_path: Path, trips: int, *, commits: bool) -> None:
    """One brings the batch with its events, one ends it; without batch.commit() the latter brings the next batch.

    So it is from the second batch on, once the program has read events.
    """
    trace = tmp_path / "trace"
    read = []
    with trace.open("w") as file, Consumer(shop.db.dsn, "q", "c", max_events=1) as consumer:
        for batch in consumer.batches(once=True):
            read += [(event.key or {})["id"] for event in batch.events()]
            if commits:
                batch.commit()
            consumer.connection.pgconn.untrace()
            if len(read) == 3:
                break
            file.truncate(0)
            consumer.connection.pgconn.trace(file.fileno())
    assert read == [0, 1, 2]
    assert round_trips(trace) == trips


def test_a_tick_is_committed_before_its_batch(shop: RetryShop) -> None:
    """The consumer takes the ticks itself, each with the message that ends a batch and asks for the next one."""
    shop.connection.execute("update gdq.queue set ticker_max_lag = '0'")
    read: list[int] = []
    with Consumer(shop.db.dsn, "q", "c") as consumer:
        for batch in consumer.batches(timeout=SECONDS):
            assert shop.value("select max(tick_id) from gdq.tick") >= batch.tick_to
            if found := [(event.key or {})["id"] for event in batch.events()]:
                read += found
                shop.connection.execute("insert into orders values (%s)", [100 + len(read)])
            if len(read) > 20:
                break
    assert read == [0, 1, 2, *range(103, 121)]


@pytest.mark.parametrize("fault", ["refused", "constraint"])
def test_a_batch_that_cannot_be_finished_has_no_next_one(shop: RetryShop, fault: str) -> None:
    """Although the next one was asked for in the same message."""
    error = StaleBatch if fault == "refused" else psycopg.errors.UniqueViolation
    shop.connection.execute("alter table seen add unique (ev_id) deferrable initially deferred")
    with Consumer(shop.db.dsn, "q", "c", max_events=1) as consumer:

        def work() -> None:
            for number, batch in enumerate(consumer.batches(once=True)):
                assert [event.key for event in batch.events()] == [{"id": number}]
                batch.connection.execute("insert into seen values (%s)", [0 if fault == "constraint" else number])
                if fault == "refused" and number == 1:
                    batch.token = uuid4()

        with pytest.raises(error):
            work()
        assert consumer.connection.info.transaction_status == TransactionStatus.IDLE
        assert shop.connection.execute("select ev_id from seen").fetchall() == [(0,)]
        assert keys(consumer) == [1, 2]


def test_a_batch_is_finished_though_the_next_one_cannot_be_opened(shop: RetryShop) -> None:
    signature = "gdq.next_events(text, text, integer, bigint, integer)"
    taken: list[Batch] = []
    with Consumer(shop.db.dsn, "q", "c", max_events=1) as consumer:

        def work() -> None:
            for batch in consumer.batches(once=True):
                taken.append(batch)
                assert len(list(batch.events())) == 1
                shop.connection.execute(f"alter function {signature} rename to gone".encode())

        with pytest.raises(psycopg.errors.UndefinedFunction):
            work()
        assert [batch.finished for batch in taken] == [True]
        assert consumer.connection.info.transaction_status == TransactionStatus.IDLE
        shop.connection.execute(
            f"alter function {signature.replace('next_events', 'gone')} rename to next_events".encode()
        )
        assert keys(consumer) == [1, 2]


def test_a_handler_may_not_commit(shop: RetryShop) -> None:
    """Neither in the first batch, nor in one that came with the end of another."""
    with Consumer(shop.db.dsn, "q", "c", max_events=1) as consumer:
        for batch in consumer.batches(once=True):
            assert len(list(batch.events())) == 1
            with pytest.raises(psycopg.ProgrammingError, match="commit"):
                batch.connection.commit()
        assert keys(consumer) == []


def test_a_batch_that_is_refused_at_its_end_leaves_nothing(shop: RetryShop) -> None:
    with Consumer(shop.db.dsn, "q", "c", max_events=1) as consumer:
        for number, batch in enumerate(consumer.batches(once=True)):
            assert [event.key for event in batch.events()] == [{"id": number}]
            batch.connection.execute("insert into seen values (%s)", [number])
            if number == 1:
                batch.token = uuid4()
                with pytest.raises(StaleBatch):
                    batch.commit()
                break
        assert consumer.connection.info.transaction_status == TransactionStatus.IDLE
        assert shop.connection.execute("select ev_id from seen").fetchall() == [(0,)]
        assert keys(consumer) == [1, 2]


def test_a_commit_that_fails_is_no_end_of_the_batch(shop: RetryShop) -> None:
    shop.connection.execute("alter table seen add unique (ev_id) deferrable initially deferred")
    with Consumer(shop.db.dsn, "q", "c", max_events=1) as consumer:
        for number, batch in enumerate(consumer.batches(once=True)):
            batch.connection.execute("insert into seen values (0)")
            if number == 1:
                with pytest.raises(psycopg.errors.UniqueViolation):
                    batch.commit()
                assert not batch.finished
                break
        assert keys(consumer) == [1, 2]


@pytest.mark.server
def test_a_tick_is_begun_ahead_by_what_it_takes(shop: RetryShop) -> None:
    def after(minutes: int, ahead: str) -> int:
        """How many ticks are made when the last is so old."""
        shop.insert(9 + minutes)
        shop.connection.execute("insert into orders values (%s)", [1000 + minutes])
        shop.connection.execute("update gdq.tick set created_at = now() - make_interval(mins => %s)", [minutes])
        return int(shop.value("select gdq.ticker('q', %s)", ahead))

    assert after(40, "0") == 0
    assert after(41, "10 min") == 0
    assert after(42, "20 min") == 1
    # not before half of ticker_max_lag
    assert after(20, "50 min") == 0
    assert after(31, "50 min") == 1


def test_the_ticker_measures_what_its_ticks_take(shop: RetryShop) -> None:
    """Each tick waits 20 ms for a sequence that DDL holds, so the next is begun about so much earlier."""
    shop.connection.execute("update gdq.queue set ticker_max_lag = '200 ms'")
    shop.connection.execute("create sequence s; select gdq.add_sequence('q', 's')")
    housekeeping = Housekeeping("q", interval_seconds=60)
    pauses: list[float] = []
    with shop.db.connect() as holder, shop.db.connect() as ticker, holder.transaction():
        holder.execute("alter sequence s rename to r")
        while len(pauses) < 10:
            shop.connection.execute("insert into orders select max(id) + 1 from orders")
            if housekeeping.step(ticker):
                pauses.append(housekeeping.pause)
    assert min(pauses[-3:]) < 0.200 - 0.020 - 0.015


def test_looks_get_rarer_while_nothing_happens(shop: RetryShop) -> None:
    """A change after that has its tick at the next look; the one after it waits for ticker_max_lag."""
    quiet = "update gdq.tick set created_at = created_at - interval '1 minute'"
    shop.connection.execute(f"update gdq.queue set ticker_max_lag = '30 s'; {quiet}")
    housekeeping = Housekeeping("q", interval_seconds=60)
    with shop.db.connect() as ticker:
        assert housekeeping.step(ticker) == 0
        assert housekeeping.pause <= 0.001
        until(lambda: housekeeping.step(ticker) == 0 and housekeeping.pause > 0.02)
        shop.connection.execute("insert into orders values (9)")
        assert housekeeping.step(ticker) == 1
        assert 10 < housekeeping.pause <= 30


def test_an_idle_queue_is_maintained_rarely(shop: RetryShop, monkeypatch: pytest.MonkeyPatch) -> None:
    clock, maintain = [0.0], ticker._maintain_all
    maintained: list[float] = []

    def noted(stop: Callable[[], bool]) -> Steps[bool]:
        maintained.append(clock[0])
        return (yield from maintain(stop))

    monkeypatch.setattr("gdq.ticker._maintain_all", noted)
    monkeypatch.setattr("gdq.ticker.time", SimpleNamespace(monotonic=lambda: clock[0]))
    shop.connection.execute("update gdq.queue set ticker_max_lag = '1 ms'")
    housekeeping = Housekeeping("q")
    with shop.db.connect() as connection:

        def run(seconds: int) -> list[float]:
            maintained.clear()
            for _ in range(2 * seconds):
                clock[0] += 0.5
                housekeeping.step(connection)
            return [later - earlier for earlier, later in pairwise(maintained)]

        assert run(60)[-1] == 10
        shop.connection.execute("insert into orders values (9)")
        assert min(run(5)) == 1
        assert run(60)[-1] == 10
        # without event triggers it is maintenance that sees DDL
        with shop.db.connect("su") as su:
            su.execute('drop event trigger "!gdq_ddl"')
        assert run(15)[-1] == 1


def test_a_consumer_that_was_busy_first_hears_what_a_ticker_did(
    shop: RetryShop, monkeypatch: pytest.MonkeyPatch
) -> None:
    """While it worked a ticker notified of ticks: it does none of the ticker's work."""
    own: list[object] = []
    steps = Housekeeping.steps

    def noted(self: Housekeeping, *given: Any) -> Steps[int]:
        own.append(self)
        return (yield from steps(self, *given))

    monkeypatch.setattr(Housekeeping, "steps", noted)
    monkeypatch.setattr("gdq.listener.TICKER_SECONDS", 0.0)
    shop.connection.execute("update gdq.queue set ticker_max_lag = '0'")
    read: list[int] = []
    with Consumer(shop.db.dsn, "q", "c") as consumer:
        for batch in consumer.batches(timeout=SECONDS):
            read += [(event.key or {})["id"] for event in batch.events()]
            batch.commit()
            if len(read) == 6:
                break
            own.clear()
            shop.insert(len(read))  # takes a tick
            assert select([consumer.connection.fileno()], [], [], SECONDS)[0], "its notification"
        assert read == [0, 1, 2, 3, 4, 5]
    assert own == []


def test_a_commit_that_moves_no_number_is_found(shop: RetryShop) -> None:
    """Its number was given out before the last tick."""
    with shop.db.connect() as late, shop.db.connect() as ticker:
        late.execute("begin; insert into orders values (9)")
        shop.insert(10)
        shop.connection.execute("update gdq.queue set ticker_max_lag = '1 ms'")
        housekeeping = Housekeeping("q", interval_seconds=0.01)
        until(lambda: housekeeping.step(ticker) == 0 and housekeeping.pause > 0)
        late.execute("commit")
        until(lambda: housekeeping.step(ticker))
    with Consumer(shop.db.dsn, "q", "c") as consumer:
        assert sorted(keys(consumer)) == [0, 1, 2, 9, 10]


def test_ticks_of_a_role_that_prefers_serializable(shop: RetryShop) -> None:
    shop.connection.execute("update gdq.queue set ticker_max_lag = '1 ms'")
    dsn = f"{shop.db.dsn} options='-c default_transaction_isolation=serializable'"
    assert gdq("ticker", "--once", dsn=dsn).returncode == 0
    with Consumer(dsn, "q", "c") as consumer:
        read: list[int] = []
        for batch in consumer.batches(timeout=SECONDS):
            read += [(event.key or {})["id"] for event in batch.events()]
            if 7 in read:
                break
            batch.commit()
            shop.connection.execute("insert into orders values (7)")  # no ticker runs: the consumer takes the tick
    assert read == [0, 1, 2, 7]
