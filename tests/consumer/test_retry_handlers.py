"""Retries and dead letters in Python and on the command line: batches, handlers, commands."""

from __future__ import annotations

import json
from datetime import timedelta
from pathlib import Path
from typing import Any

import psycopg
import pytest

from gdq import Consumer, DeadLetter, Event, GdqError, Retry, dead_letters
from gdq.batch import Batch
from gdq.retry import handle_each_event, retry_info, settle_outcomes
from tests.support.programs import gdq
from tests.support.retry_shop import RetryShop
from tests.support.waiting import SECONDS

NOW = timedelta(0)
HOUR = timedelta(hours=1)


@pytest.fixture
def shop(retry_shop: RetryShop) -> RetryShop:
    return retry_shop


def test_consumer_gives_retries_first(shop: RetryShop) -> None:
    shop.insert(1, 2)
    seen: list[list[tuple[int, int]]] = []
    with Consumer(shop.db.dsn, "q", "c") as consumer:
        for batch in consumer.batches(timeout=SECONDS):
            seen.append([])
            for event in batch.events():
                assert event.key
                seen[-1].append((event.key["id"], event.retries))
                if event.key["id"] == 2 and event.retries < 2:
                    assert batch.retry(event, NOW, "later") is True
                if event.retries == 2:
                    batch.dead_letter(event, "enough")
            if len(seen) == 1:
                shop.insert(3)
            if len(seen) == 3:
                batch.commit()
                break
        assert [event for batch in consumer.batches(once=True) for event in batch.events()] == []
    assert seen == [[(1, 0), (2, 0)], [(2, 1), (3, 0)], [(2, 2)]]
    assert [letter.reason for letter in dead_letters(shop.connection, "q")] == ["enough"]


def test_a_waiting_consumer_wakes_for_a_retry(shop: RetryShop, monkeypatch: pytest.MonkeyPatch) -> None:
    """No tick comes, and it would look for one by itself only after minutes."""
    monkeypatch.setattr("gdq.listener._LOOK_SECONDS", 2 * SECONDS)
    shop.insert(1)
    retries = []
    with Consumer(shop.db.dsn, "q", "c") as consumer:
        for batch in consumer.batches(timeout=SECONDS):
            for event in batch.events():
                retries.append(event.retries)
                if not event.retries:
                    batch.retry(event, timedelta(seconds=0.5))
            if 1 in retries:
                break
    assert retries == [0, 1]


def each(shop: RetryShop, handler: Any, on_error: timedelta | None = None) -> None:
    with Consumer(shop.db.dsn, "q", "c") as consumer:
        for batch in consumer.batches(once=True):
            handle_each_event(batch, batch.events(), handler, on_error=on_error)


def test_one_event_at_a_time(shop: RetryShop) -> None:
    """What a handler did for an event that it puts aside is undone, and only that."""

    def handle(connection: psycopg.Connection[Any], event: Event) -> None:
        connection.execute("insert into seen values (%s)", [event.id])
        assert event.key
        match event.key["id"]:
            case 1:
                raise Retry("later", delay=HOUR)
            case 2:
                raise DeadLetter("never")
            case 3:
                connection.execute("select 1 / 0")
            case 4:
                raise TimeoutError("no answer\0")

    shop.insert(1, 2, 3, 4, 5)
    with pytest.raises(psycopg.errors.DivisionByZero):
        each(shop, handle)
    assert (shop.seen(), retry_info(shop.connection, "q")) == (0, [])
    each(shop, handle, on_error=HOUR)
    assert shop.seen() == 1
    assert [info.reason for info in retry_info(shop.connection, "q")] == [
        "later",
        "DivisionByZero: division by zero",
        "TimeoutError: no answer",
    ]
    assert [letter.reason for letter in dead_letters(shop.connection, "q")] == ["never"]


def test_a_lost_connection_puts_nothing_aside(shop: RetryShop) -> None:
    def handle(connection: psycopg.Connection[Any], event: Event) -> None:
        with shop.db.connect("su") as su:
            su.execute("select pg_terminate_backend(%s)", [connection.info.backend_pid])
        connection.execute("select 1")

    shop.insert(1)
    with pytest.raises(psycopg.OperationalError):
        each(shop, handle, on_error=HOUR)
    assert retry_info(shop.connection, "q") == []
    assert len(shop.fresh(shop.opened())) == 1


def test_outcomes_of_a_batch_handler(shop: RetryShop) -> None:
    shop.insert(1, 2)
    with Consumer(shop.db.dsn, "q", "c") as consumer:
        for batch in consumer.batches(once=True):
            first, second = batch.events()
            with pytest.raises(GdqError, match="a handler returned 7"):
                settle_outcomes(batch, [7])
            with pytest.raises(GdqError, match="a handler returned Retry"):
                settle_outcomes(batch, [Retry("which?")])
            settle_outcomes(batch, [Retry("later", event=first), DeadLetter("never", event=second)])
    assert [info.reason for info in retry_info(shop.connection, "q")] == ["later"]
    assert [letter.ev_id for letter in dead_letters(shop.connection, "q")] == [second.id]


HANDLERS = """
import gdq
def one(connection, event):
    if event.key["id"] == 1:
        raise gdq.DeadLetter("never")
    if event.key["id"] == 2:
        raise KeyError("shelf")
def all_of_it(connection, events):
    for event in events:
        yield gdq.DeadLetter("returned", event=event)
def raises(connection, events):
    raise gdq.Retry("later")
"""


@pytest.mark.long
def test_commands(shop: RetryShop, tmp_path: Path) -> None:
    (tmp_path / "hands.py").write_text(HANDLERS)
    dsn = shop.db.dsn
    shop.insert(1, 2)
    wrong = gdq("consume", "q", "c", "hands:raises", "--once", dsn=dsn, cwd=tmp_path)
    assert (wrong.returncode, wrong.stderr.splitlines()[0]) == (1, "Error: handler hands:raises raised Retry: later")
    assert gdq("consume", "q", "c", "hands:one", "--retry-errors", "1", dsn=dsn, cwd=tmp_path).returncode == 2
    once = ("consume", "q", "c", "hands:one", "--each", "--retry-errors", "0", "--once")
    done = gdq(*once, dsn=dsn, cwd=tmp_path)
    assert done.returncode == 0
    (said,) = done.stderr.splitlines()
    assert 'msg="events put aside: 1 to come again, 1 dead letters; the first is event ' in said
    assert said.endswith(': never"')
    (waiting,) = json.loads(gdq("retries", "q", "c", "--json", dsn=dsn).stdout)
    assert (waiting["key"], waiting["retries"], waiting["reason"]) == ({"id": 2}, 1, "KeyError: 'shelf'")
    done = gdq("consume", "q", "c", "--once", dsn=dsn)
    (printed,) = [json.loads(line) for line in done.stdout.splitlines()]
    assert (printed["key"], printed["retries"]) == ({"id": 2}, 1)
    shop.insert(3)
    assert gdq("consume", "q", "c", "hands:all_of_it", "--once", dsn=dsn, cwd=tmp_path).returncode == 0
    letters = json.loads(gdq("dead-letters", "q", "--json", dsn=dsn).stdout)
    assert [letter["reason"] for letter in letters] == ["never", "returned"]
    assert gdq("replay-dead-letters", "q", "c", dsn=dsn).returncode == 2
    number = str(letters[0]["dead_letter_id"])
    assert gdq("replay-dead-letters", "q", "c", "--id", number, dsn=dsn).stderr == "replayed 1 of c on q\n"
    assert gdq("purge-dead-letters", "q", "c", "--all", dsn=dsn).stderr == "purged 1 of c on q\n"
    assert gdq("set-retry-limit", "q", "c", "3", dsn=dsn).stderr == "events of c on q are retried 3 times\n"


def test_batch_class_outside_a_consumer(shop: RetryShop) -> None:
    """The caller owns the transaction."""
    shop.insert(1)
    with shop.connection.transaction():
        batch = Batch.open(shop.connection, "q", "c", 10)
        assert batch
        (event,) = batch.events()
        batch.retry(event, NOW)
        batch.commit()
    with shop.connection.transaction():
        batch = Batch.open(shop.connection, "q", "c", 10)
        assert batch
        (event,) = batch.events()
        assert (event.retries, batch.tick_from) == (1, batch.tick_to)
