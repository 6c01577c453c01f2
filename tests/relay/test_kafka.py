"""`gdq relay` to Kafka: each change exactly once and in the order of its key, whatever becomes of broker and relay."""

from __future__ import annotations

import json
import signal
from collections.abc import Iterator
from contextlib import closing, suppress
from pathlib import Path

import pytest

import gdq as library
from gdq.consumers.relay.kafka_sink import KafkaSink
from tests.relay.conftest import KafkaTopic, relay, relaying, retries, run_shown, sent_all, table_now, table_of, write
from tests.support.kafka import KafkaBroker, kafka_broker
from tests.support.programs import gdq, start_gdq
from tests.support.server import Database
from tests.support.waiting import until

pytestmark = [pytest.mark.server, pytest.mark.long]


@pytest.fixture(scope="module")
def broker(kafka_classpath: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[KafkaBroker]:
    with kafka_broker(kafka_classpath, tmp_path_factory.mktemp("broker") / "kafka") as running:
        yield running


@pytest.fixture
def topic(broker: KafkaBroker) -> KafkaTopic:
    return KafkaTopic(broker)


def test_each_event_is_a_record(shop: Database, topic: KafkaTopic) -> None:
    write(shop, "insert into orders values (1, 7, 'a')", "update orders set note = 'b'", "delete from orders")
    relay(shop, *topic.to, "--form", "debezium", "--tombstones")
    records = topic.broker.records(f"{topic.name}.orders")
    assert [record.key() for record in records] == [b'{"id": 1}'] * 4
    assert [record.value() and json.loads(record.value() or b"")["op"] for record in records] == ["c", "u", "d", None]
    assert len({dict(record.headers() or [])["gdq-id"] for record in records}) == 4
    relay(shop, *topic.to)
    assert len(topic.broker.records(f"{topic.name}.orders")) == 4


def test_keys_go_to_all_partitions(shop: Database, topic: KafkaTopic) -> None:
    write(shop, "insert into orders select g, 0, 'a' from generate_series(1, 100) g", "update orders set note = 'b'")
    relay(shop, *topic.to)
    assert topic.changes() == {key: ["a", "b"] for key in range(1, 101)}
    assert {record.partition() for record in topic.broker.records(f"{topic.name}.orders")} == {0, 1, 2}


@pytest.mark.parametrize("when", ["before", "after"])
def test_a_relay_that_ends_at_its_commit(
    shop: Database, topic: KafkaTopic, monkeypatch: pytest.MonkeyPatch, when: str
) -> None:
    """Before Kafka's COMMIT, or between it and that of the queue: the next relay sends what is missing, and no more."""
    write(shop, "insert into orders values (1, 7, 'a'), (2, 7, 'a')")
    commit = KafkaSink.commit

    def ended(sink: KafkaSink, note: str) -> bool:
        if when == "after":
            commit(sink, note)
        raise KeyboardInterrupt

    monkeypatch.setattr(KafkaSink, "commit", ended)
    address, _, setting = topic.to
    sink = KafkaSink(address, dict([setting.split("=")]))
    with library.Consumer(shop.dsn, "q", "c") as consumer, closing(consumer.batches(once=True)) as batches:
        batch = next(batches)
        with pytest.raises(KeyboardInterrupt):
            library.Relay(sink, "q", "c").send(batch)
    monkeypatch.undo()
    write(shop, "update orders set note = 'b'")
    relay(shop, *topic.to)
    assert topic.changes() == {1: ["a", "b"], 2: ["a", "b"]}


def test_a_relay_that_is_killed_at_any_time(shop: Database, topic: KafkaTopic) -> None:
    write(shop, "insert into orders select g, 0, '0' from generate_series(1, 200) g")
    for number in range(1, 6):
        write(shop, f"update orders set note = '{number}'")
        process = start_gdq("relay", "q", "c", *topic.to, dsn=shop.dsn)
        with shop.connect("su") as su:
            query = "select from pg_stat_activity where application_name = 'gdq:q/c' and state = 'idle in transaction'"
            until(lambda: su.execute(query).rowcount or sent_all(shop), "a batch")  # noqa: B023
        process.kill()
        process.communicate()
    relay(shop, *topic.to)
    assert topic.changes() == {key: ["0", "1", "2", "3", "4", "5"] for key in range(1, 201)}


def test_a_broker_that_is_killed(shop: Database, topic: KafkaTopic) -> None:
    """Amid the sending: each change is there once, and nothing is put aside."""
    write(shop, "insert into orders select g, 0, '0' from generate_series(1, 300) g")
    relay(shop, *topic.to)
    with relaying(shop, *topic.to, "--set", "timeout=10") as process:
        write(shop, "update orders set note = '1'")
        topic.broker.kill()
        write(shop, "update orders set note = '2'")
        topic.broker.start()
        until(lambda: sent_all(shop), "the end")
        assert process.poll() is None
    assert retries(shop) == []
    assert topic.changes() == {key: ["0", "1", "2"] for key in range(1, 301)}


def test_a_copy_of_which_relay_and_broker_are_killed(shop: Database, topic: KafkaTopic) -> None:
    """Each copy that was begun is whole or ends where it was killed; all changes after it are there once."""
    write(shop, "insert into orders select g, 0, '0' from generate_series(1, 10000) g")
    write(shop, "select gdq.require_copy('q', 'c')")
    for number in range(1, 4):
        process = start_gdq("relay", "q", "c", *topic.to, "--copy", dsn=shop.dsn)
        count = topic.count()
        until(lambda: topic.count() > count + 600 * number, "some rows")  # noqa: B023
        process.kill()
        process.communicate()
        write(shop, f"update orders set note = '{number}' where id % 3 = 0", f"delete from orders where id = {number}")
    with relaying(shop, *topic.to, "--copy", "--set", "timeout=10"):
        count = topic.count()
        until(lambda: topic.count() > count + 500, "some rows")
        topic.broker.kill()
        write(shop, "update orders set note = 'b' where id % 5 = 0")
        topic.broker.start()
        until(lambda: sent_all(shop), "the end")
    events = topic.events()
    copies = {event["number"].rpartition("-")[0] for event in events if event["op"] == "read"}
    assert len(copies) == 4
    last = next(event["number"] for event in reversed(events) if event["op"] == "read").rpartition("-")[0]
    after = [event for event in events if event["op"] != "read" or event["number"].startswith(last)]
    assert sum(event["op"] == "read" for event in after) == 10000 - 3
    assert table_of(event for event in after if event["op"] != "truncate") == table_now(shop)


@pytest.mark.parametrize("when", ["before", "after"])
def test_a_copy_whose_commit_is_not_known(
    shop: Database, topic: KafkaTopic, monkeypatch: pytest.MonkeyPatch, when: str
) -> None:
    """The sink says that it takes nothing, whether Kafka has committed or not: each row is there once."""
    write(shop, "insert into orders select g, 0, '0' from generate_series(1, 1200) g")
    write(shop, "select gdq.require_copy('q', 'c')")
    commit = KafkaSink.commit
    calls = iter(range(100))

    def unknown(sink: KafkaSink, note: str) -> bool:
        if next(calls) % 2 == 0:
            if when == "after":
                commit(sink, note)
            raise library.SinkUnavailable("Kafka takes nothing: the end is not known")
        return commit(sink, note)

    monkeypatch.setattr(KafkaSink, "commit", unknown)
    address, _, setting = topic.to
    sending = library.Relay(KafkaSink(address, dict([setting.split("=")])), "q", "c")
    with library.Consumer(shop.dsn, "q", "c") as consumer:
        for copy in consumer.copies():
            while not copy.finished:
                with suppress(library.SinkUnavailable):
                    sending.send_copy(copy)
    monkeypatch.undo()
    write(shop, "update orders set note = '1'")
    relay(shop, *topic.to)
    events = [event for event in topic.events() if event["op"] != "truncate"]
    assert table_of(events) == table_now(shop)
    assert len(events) == 2400


def test_a_copy_to_a_compacted_topic(shop: Database, broker: KafkaBroker) -> None:
    """It takes no record without a key, and so no truncate."""
    topic = KafkaTopic(broker, cleanup_policy="compact")
    write(shop, "insert into orders select g, 0, '0' from generate_series(1, 10) g")
    write(shop, "select gdq.require_copy('q', 'c')")
    done = gdq("relay", "q", "c", *topic.to, "--copy", "--once", dsn=shop.dsn)
    assert done.returncode == 0, done.stderr
    assert "the receiver takes no truncate of table public.orders: Kafka: " in done.stderr
    assert table_of(topic.events()) == table_now(shop)


def test_a_broker_that_stands_still(shop: Database, topic: KafkaTopic) -> None:
    write(shop, "insert into orders values (1, 7, 'a')")
    topic.broker.signal(signal.SIGSTOP)
    try:
        done = gdq("relay", "q", "c", *topic.to, "--once", "--set", "timeout=2", dsn=shop.dsn)
    finally:
        topic.broker.signal(signal.SIGCONT)
    assert done.returncode == 1
    assert done.stderr.startswith("Error: Kafka takes nothing: ")
    assert len(done.stderr.splitlines()) == 1
    relay(shop, *topic.to)
    assert topic.changes() == {1: ["a"]}


def test_a_record_that_is_too_large(shop: Database, broker: KafkaBroker) -> None:
    """Larger than the topic takes, or than the client does: a dead letter, and all others are there once."""
    topic = KafkaTopic(broker, max_message_bytes="5000")
    write(shop, "insert into orders values (1, 7, 'a'), (2, 7, repeat('x', 20000)), (3, 7, repeat('y', 2000000))")
    write(shop, "insert into orders values (4, 7, 'a')")
    relay(shop, *topic.to)
    assert topic.changes() == {1: ["a"], 4: ["a"]}
    with shop.connect() as connection:
        letters = library.dead_letters(connection, "q")
    assert sorted((one.key or {})["id"] for one in letters) == [2, 3]
    assert all((one.reason or "").startswith("Kafka: ") for one in letters)


def test_a_topic_that_is_missing(shop: Database, topic: KafkaTopic) -> None:
    write(shop, "insert into orders values (1)")
    address, *settings = topic.to
    done = gdq("relay", "q", "c", f"{address}.no", *settings, "--once", "--set", "timeout=5", dsn=shop.dsn)
    assert done.returncode == 1
    assert done.stderr.startswith("Error: Kafka takes nothing: ")
    relay(shop, *topic.to)
    assert topic.changes() == {1: [None]}


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        (["kafka://host"], "Error: 'kafka://host' must name a broker and a topic\n"),
        (["kafka://h:1/t", "--set", "no.such=1"], 'Error: kafka: No such configuration property: "no.such"'),
    ],
)
def test_what_is_wrong_is_said_in_a_line(shop: Database, arguments: list[str], line: str) -> None:
    write(shop, "insert into orders values (1)")
    done = gdq("relay", "q", "c", *arguments, "--once", dsn=shop.dsn)
    assert done.returncode == 1
    assert done.stderr.startswith(line)


def test_settings_of_a_file(shop: Database, topic: KafkaTopic, tmp_path: Path) -> None:
    (tmp_path / "kafka.txt").write_text("compression.type=gzip\nlinger.ms=1\n")
    write(shop, "insert into orders values (1, 7, 'a')")
    relay(shop, *topic.to, "--settings", str(tmp_path / "kafka.txt"))
    assert topic.changes() == {1: ["a"]}


def test_the_page(db: Database, broker: KafkaBroker) -> None:
    """What docs/relay.md shows of Kafka works as it stands there."""
    run_shown(db, "tests/relay/test_kafka.py", ("9092", str(broker.port)))
    assert [record.key() for record in broker.records("shop.orders")] == [b"23"]
