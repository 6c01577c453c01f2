"""`gdq relay` to NATS JetStream: each change once and in the order of its key, whatever becomes of the server."""

from __future__ import annotations

import json
import signal
from collections import defaultdict

import pytest

import gdq as library
from tests.relay.conftest import due, relay, relaying, retries, run_shown, sent_all, table_now, table_of, write
from tests.support.nats import NatsServer
from tests.support.programs import gdq, start_gdq
from tests.support.server import Database
from tests.support.waiting import until

pytestmark = [pytest.mark.server, pytest.mark.long]

PLACE = "shop.{table}.{key}"


def changes(nats: NatsServer) -> dict[int, list[str | None]]:
    """What the stream has of each key, in order."""
    found = defaultdict(list)
    for message in nats.messages():
        body = json.loads(message.data)
        found[body["key"]["id"]].append(body["new"]["note"])
    return dict(found)


def test_each_event_is_a_message(shop: Database, nats: NatsServer) -> None:
    nats.make_stream()
    write(shop, "insert into orders values (1, 7, 'a.b')", "update orders set note = 'c'")
    relay(shop, f"{nats.url}/{PLACE}")
    first, second = nats.messages()
    assert (first.subject, second.subject) == ("shop.orders.1", "shop.orders.1")
    assert first.headers
    assert first.headers["Content-Type"] == "application/json"
    assert first.headers["Nats-Msg-Id"].endswith(f"/{json.loads(first.data)['id']}/insert")
    write(shop, "select gdq.insert_event('q', 'paid > * é', '1'::jsonb, 'a.b')", "truncate orders")
    relay(shop, f"{nats.url}/shop.{{type}}.{{key}}", "--form", "cloudevents")
    message, truncate = nats.messages()[2:]
    assert message.subject == "shop.paid%20%3E%20%2A%20%C3%A9.a%2Eb"
    assert truncate.subject == "shop._._"
    assert json.loads(message.data)["data"] == 1


def test_what_is_sent_again_is_there_once(shop: Database, nats: NatsServer) -> None:
    """The consumer is set back, as after a crash: the stream knows what it has."""
    nats.make_stream()
    with shop.connect() as connection:
        tick = library.take_tick(connection, "q")
    write(shop, "insert into orders values (1, 7, 'a'), (2, 7, 'a')", "update orders set note = 'b'")
    relay(shop, f"{nats.url}/{PLACE}")
    with shop.connect() as connection:
        library.seek(connection, "q", "c", tick=tick)
    relay(shop, f"{nats.url}/{PLACE}")
    assert changes(nats) == {1: ["a", "b"], 2: ["a", "b"]}


def test_a_server_that_is_killed(shop: Database, nats: NatsServer) -> None:
    """Again and again amid the sending: each change is there once, those of a key in order, nothing is put aside."""
    nats.make_stream()
    write(shop, "insert into orders select g, 0, '0' from generate_series(1, 300) g")
    with relaying(shop, f"{nats.url}/{PLACE}") as process:
        for number in range(1, 4):
            write(shop, f"update orders set note = '{number}'")
            nats.kill()
            assert process.poll() is None
            nats.start()
        until(lambda: sent_all(shop), "the end")
    assert retries(shop) == []
    assert changes(nats) == {key: ["0", "1", "2", "3"] for key in range(1, 301)}


def test_a_copy_of_which_relay_and_server_are_killed(shop: Database, nats: NatsServer) -> None:
    """The copy begins again with the relay, not with the server; rows that the stream has are in it once."""
    nats.make_stream()
    write(shop, "insert into orders select g, 0, '0' from generate_series(1, 8000) g")
    write(shop, "select gdq.require_copy('q', 'c')")
    for number in range(1, 4):
        process = start_gdq("relay", "q", "c", f"{nats.url}/{PLACE}", "--copy", dsn=shop.dsn)
        count = nats.count()
        until(lambda: nats.count() > count + 300 * number, "some rows")  # noqa: B023
        process.kill()
        process.communicate()
        write(shop, f"update orders set note = '{number}' where id % 3 = 0", f"delete from orders where id = {number}")
    with relaying(shop, f"{nats.url}/{PLACE}", "--copy"):
        count = nats.count()
        until(lambda: nats.count() > count + 300, "some rows")
        nats.kill()
        write(shop, "update orders set note = 'b' where id % 5 = 0")
        nats.start()
        until(lambda: sent_all(shop), "the end")
    events = [json.loads(message.data) for message in nats.messages()]
    assert table_of(events) == table_now(shop)
    begun = [number for number, event in enumerate(events) if event["op"] == "truncate"]
    assert len(begun) == 4
    assert sum(event["op"] == "read" for event in events[begun[-1] :]) == 8000 - 3


def test_a_server_that_stands_still(shop: Database, nats: NatsServer) -> None:
    nats.make_stream()
    write(shop, "insert into orders values (1, 7, 'a')")
    nats.signal(signal.SIGSTOP)
    done = gdq("relay", "q", "c", f"{nats.url}/{PLACE}", "--once", "--set", "timeout=1", dsn=shop.dsn)
    assert done.returncode == 1
    assert done.stderr.startswith("Error: NATS server unreachable: ")
    assert len(done.stderr.splitlines()) == 1
    nats.signal(signal.SIGCONT)
    relay(shop, f"{nats.url}/{PLACE}")
    assert changes(nats) == {1: ["a"]}


def test_a_stream_that_is_full(shop: Database, nats: NatsServer) -> None:
    """The relay waits until there is room; nothing is put aside."""
    nats.make_stream(max_msgs=2, discard="new")
    write(shop, "insert into orders values (1, 7, 'a')", "update orders set note = 'b'", "update orders set note = 'c'")
    with relaying(shop, f"{nats.url}/{PLACE}") as process:
        assert process.stderr
        assert "maximum messages exceeded" in process.stderr.readline()
        assert changes(nats) == {1: ["a", "b"]}
        nats.run(lambda streams: streams.purge_stream("shop"))
        until(lambda: sent_all(shop), "the end")
    assert changes(nats) == {1: ["c"]}
    assert retries(shop) == []


def test_only_the_key_that_is_full_waits(shop: Database, nats: NatsServer) -> None:
    nats.make_stream(max_msgs_per_subject=1, discard="new", discard_new_per_subject=True)
    write(
        shop, "insert into orders values (1, 7, 'a')", "update orders set note = 'b'", "insert into orders values (2)"
    )
    relay(shop, f"{nats.url}/{PLACE}")
    assert changes(nats) == {1: ["a"], 2: [None]}
    ((key, reason),) = retries(shop)
    assert key == 1
    assert "maximum messages per subject exceeded" in (reason or "")
    nats.run(lambda streams: streams.purge_stream("shop", subject="shop.orders.1"))
    due(shop)
    relay(shop, f"{nats.url}/{PLACE}")
    assert changes(nats) == {1: ["b"], 2: [None]}


def test_a_message_that_is_too_large(shop: Database, nats: NatsServer) -> None:
    """Larger than the stream takes, or than the server does: a dead letter, and its key goes on."""
    nats.make_stream(max_msg_size=2000)
    for size in (5000, 2_000_000):
        write(shop, f"insert into orders values ({size}, 7, repeat('x', {size}))")
        write(shop, f"delete from orders where id = {size}", f"insert into orders values ({size}, 7, 'a')")
    relay(shop, f"{nats.url}/{PLACE}")
    with shop.connect() as connection:
        letters = library.dead_letters(connection, "q")
    assert len(letters) == 4  # the delete has the old image
    assert {one.reason for one in letters} >= {"JetStream 10054: message size exceeds maximum allowed"}
    assert changes(nats) == {5000: ["a"], 2_000_000: ["a"]}


def test_a_subject_without_a_stream(shop: Database, nats: NatsServer) -> None:
    write(shop, "insert into orders values (1)")
    done = gdq("relay", "q", "c", f"{nats.url}/{PLACE}", "--once", dsn=shop.dsn)
    assert (done.returncode, done.stderr) == (1, "Error: no stream takes subject shop.orders.1\n")
    nats.make_stream()
    relay(shop, f"{nats.url}/{PLACE}")
    assert changes(nats) == {1: [None]}


@pytest.mark.parametrize("address", ["nats://host", "nats:///shop"])
def test_an_address_that_lacks_a_part(shop: Database, address: str) -> None:
    done = gdq("relay", "q", "c", address, "--once", dsn=shop.dsn)
    assert done.returncode == 1
    assert done.stderr.startswith(f"Error: '{address}' must name a server and a subject\n")


def test_the_page(db: Database, nats: NatsServer) -> None:
    """What docs/relay.md shows of NATS works as it stands there."""
    run_shown(db, "tests/relay/test_nats.py", ("4222", str(nats.port)))
    assert [message.subject for message in nats.messages()] == ["shop.orders.22"]
