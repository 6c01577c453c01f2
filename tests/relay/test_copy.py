"""`gdq relay --copy`: the rows that are there come first, then the changes from exactly that place on."""

from __future__ import annotations

import signal
import threading
from typing import Any

import pytest

from tests.relay.conftest import Hook, always, relay, relaying, sent_all, table_now, table_of, wait_for_line, write
from tests.support.programs import gdq, start_gdq
from tests.support.server import Database
from tests.support.waiting import until

pytestmark = pytest.mark.server

ROWS = "insert into orders select g, g % 7, 'a' from generate_series(1, {}) g"


@pytest.fixture
def copied(shop: Database) -> Database:
    """The consumer c has to copy the table first, which has 1200 rows."""
    write(shop, ROWS.format(1200), "select gdq.require_copy('q', 'c')")
    return shop


def test_the_rows_come_first(shop: Database, hook: Hook) -> None:
    write(shop, ROWS.format(3))
    arguments = ("relay", "q", "new", f"{hook.url}/{{table}}/{{op}}/{{key}}", "--register", "--copy", "--once")
    done = gdq(*arguments, dsn=shop.dsn)
    assert done.returncode == 0, done.stderr
    write(shop, "update orders set note = 'b' where id = 2", "delete from orders where id = 3")
    assert gdq(*arguments, dsn=shop.dsn).returncode == 0
    first, *rows = [path for path, _, _ in hook.requests]
    assert first == "/orders/truncate/"
    assert sorted(rows[:3]) == [f"/orders/read/{number}" for number in (1, 2, 3)]
    assert sorted(rows[3:]) == ["/orders/delete/3", "/orders/update/2"]
    assert len({headers["Idempotency-Key"] for _, headers, _ in hook.requests}) == 6
    assert table_of(hook.taken) == table_now(shop)


def test_forms(shop: Database, hook: Hook) -> None:
    write(shop, ROWS.format(1), "select gdq.require_copy('q', 'c')")
    relay(shop, hook.url, "--copy", "--form", "debezium")
    truncate, row = hook.taken
    assert (truncate["op"], row["op"], row["source"]["snapshot"]) == ("t", "r", "true")
    assert (row["before"], row["after"]) == (None, {"id": 1, "customer": 1, "note": "a"})
    write(shop, "select gdq.require_copy('q', 'c')")
    relay(shop, hook.url, "--copy", "--form", "cloudevents")
    event = hook.taken[-1]
    assert (event["type"], event["partitionkey"], event["data"]["op"]) == ("gdq.read", "1", "read")
    assert event["data"]["new"] == {"id": 1, "customer": 1, "note": "a"}


def test_changes_go_on_from_exactly_there(copied: Database, hook: Hook) -> None:
    """Rows are changed, added and deleted while they are copied."""
    counter = iter(range(2000, 9000))

    def answer(body: Any) -> int:
        number = next(counter)
        if body["op"] == "read" and number % 10 == 0:
            key = body["key"]["id"]
            write(copied, f"update orders set note = '{number}' where id in ({key}, {1201 - key})")
            write(copied, f"delete from orders where id = {(key * 7) % 1200}", f"insert into orders values ({number})")
        return 204

    hook.answer = answer
    relay(copied, hook.url, "--copy")
    assert table_of(hook.taken) == table_now(copied)
    assert len({body["new"]["note"] for body in hook.taken if body["op"] == "update"}) > 50


@pytest.mark.parametrize("place", [1, 700, 1200])
def test_a_relay_that_is_killed_begins_the_copy_again(copied: Database, hook: Hook, place: int) -> None:
    """What the receiver has is void by the truncate; rows that were changed and deleted since are as they are now."""
    hang = threading.Event()
    lock, seen = threading.Lock(), 0

    def answer(body: Any) -> int:
        nonlocal seen
        with lock:
            seen += body["op"] == "read"
            last = seen >= place
        return 500 if last and hang.wait(60) else 204

    hook.answer = answer
    process = start_gdq("relay", "q", "c", hook.url, "--copy", dsn=copied.dsn)
    until(lambda: seen >= place, "the place in the copy")
    process.kill()
    process.communicate()
    hang.set()
    hook.answer = always(204)
    write(copied, "update orders set note = 'b' where id % 3 = 0", "delete from orders where id % 5 = 0")
    write(copied, "insert into orders select g from generate_series(2000, 2009) g")
    before, count = len(hook.requests), len(hook.taken)
    relay(copied, hook.url, "--copy")
    assert hook.taken[count]["op"] == "truncate"
    write(copied, "update orders set note = 'c' where id % 7 = 0")
    relay(copied, hook.url, "--copy")
    assert table_of(hook.taken) == table_now(copied)
    ids = [headers["Idempotency-Key"] for _, headers, _ in hook.requests]
    assert not set(ids[:before]) & set(ids[before:])


def test_a_hook_that_takes_nothing_for_a_while(copied: Database, hook: Hook) -> None:
    """The copy waits, and goes on with the rows that are missing: as they were, then as they are."""
    stopped = threading.Event()
    hook.answer = lambda _: 503 if len(hook.taken) > 600 and not stopped.is_set() else 204
    hook.headers = {"Retry-After": "0"}
    with relaying(copied, hook.url, "--copy") as process:
        wait_for_line(process, "web hook takes nothing: HTTP 503")
        write(copied, "update orders set note = 'b'")
        stopped.set()
        until(lambda: sent_all(copied), "the end")
    assert [body["op"] for body in hook.taken].count("truncate") == 1
    assert [body["op"] for body in hook.taken].count("read") == 1200
    assert table_of(hook.taken) == table_now(copied)


def test_a_signal_ends_a_copy_between_its_rows(copied: Database, hook: Hook) -> None:
    hang = threading.Event()
    hook.answer = lambda body: 204 if body["op"] == "truncate" or hang.wait(60) else 500
    process = start_gdq("relay", "q", "c", hook.url, "--copy", dsn=copied.dsn)
    until(lambda: len(hook.requests) > 1, "a row")
    process.send_signal(signal.SIGTERM)
    hang.set()
    _, errors = process.communicate()
    assert process.returncode == 0, errors
    assert 0 < [body["op"] for body in hook.taken].count("read") < 1200
    relay(copied, hook.url, "--copy")
    assert table_of(hook.taken) == table_now(copied)


def test_a_row_that_is_refused_for_now(copied: Database, hook: Hook) -> None:
    """The copy waits for it, and says so; no other row is sent twice."""
    refused: list[Any] = []

    def answer(body: Any) -> int:
        if body["op"] == "read" and body["key"]["id"] == 3 and len(refused) < 2:
            refused.append(body)
            return 500
        return 204

    hook.answer = answer
    with relaying(copied, hook.url, "--copy") as process:
        line = "does not take a row of table public.orders with the key 3: HTTP 500: answer 500: trying again in 1 s"
        wait_for_line(process, line)
        until(lambda: sent_all(copied), "the end")
    assert len(refused) == 2
    assert len(hook.requests) == 1201 + 2
    assert table_of(hook.taken) == table_now(copied)


def test_a_row_that_is_refused_for_good(copied: Database, hook: Hook) -> None:
    """The command ends; the copy begins again when the hook takes the row."""
    hook.answer = lambda body: 422 if body["op"] == "read" and body["key"]["id"] == 900 else 204
    done = gdq("relay", "q", "c", hook.url, "--copy", "--once", dsn=copied.dsn)
    assert done.returncode == 1
    line = "Error: the receiver will not take a row of table public.orders with the key 900: HTTP 422: answer 422"
    assert line in done.stderr.splitlines()
    hook.answer = always(204)
    relay(copied, hook.url, "--copy")
    assert table_of(hook.taken) == table_now(copied)


def test_a_receiver_without_truncate(copied: Database, hook: Hook) -> None:
    hook.answer = lambda body: 422 if body["op"] == "truncate" else 204
    done = gdq("relay", "q", "c", hook.url, "--copy", "--once", dsn=copied.dsn)
    assert done.returncode == 0, done.stderr
    assert "the receiver takes no truncate of table public.orders: HTTP 422: answer 422" in done.stderr
    assert table_of(hook.taken) == table_now(copied)


def test_a_table_without_a_key(shop: Database, hook: Hook) -> None:
    """Its rows are sent one by one, equal ones too."""
    write(shop, "create table visits (page text)", "insert into visits select 'a' from generate_series(1, 600)")
    write(shop, "select gdq.add_table('q', 'visits')", "select gdq.require_copy('q', 'c', '{visits}')")
    relay(shop, hook.url, "--copy")
    assert [body["new"] for body in hook.taken[1:]] == [{"page": "a"}] * 600
    assert len({headers["Idempotency-Key"] for _, headers, _ in hook.requests}) == 601


def test_a_gap_is_copied(shop: Database, hook: Hook) -> None:
    """A change of type computes values anew, which no event shows."""
    write(shop, ROWS.format(5))
    write(shop, "alter table orders alter note type int using 7")
    done = gdq("relay", "q", "c", hook.url, "--once", dsn=shop.dsn)
    assert done.returncode == 3
    relay(shop, hook.url, "--copy")
    assert table_of(body for body in hook.taken if body["op"] != "ddl") == table_now(shop)


def test_two_relays_of_a_consumer(copied: Database, hook: Hook) -> None:
    """The second waits, and ends without a row: its rows would be older than the changes that the first sends."""
    hang = threading.Event()
    hook.answer = lambda body: 204 if body["op"] == "truncate" or hang.wait(60) else 500
    with relaying(copied, hook.url, "--copy"):
        until(lambda: len(hook.requests) > 1, "a row")
        other = start_gdq("relay", "q", "c", hook.url, "--copy", dsn=copied.dsn)
        with copied.connect("su") as su:
            query = "select from pg_stat_activity where application_name = 'gdq:q/c' and query ~ 'pg_try_advisory'"
            until(lambda: su.execute(query).rowcount, "the other relay")
        hang.set()
        _, errors = other.communicate()
        until(lambda: sent_all(copied), "the end")
    assert other.returncode == 1
    assert "another relay of q/c has copied table public.orders\n" in errors
    assert len(hook.requests) == 1201
