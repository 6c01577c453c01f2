"""`python -m bench.relay`: changes on their way to Kafka, by `gdq relay` and by Debezium in Kafka Connect.

    python -m bench.relay [--changes 100000] [--seconds 20] [--rounds 3]

One broker, one PostgreSQL; a table captured by a queue and one like it with Debezium's slot get the same changes.
Catching up: how fast records become readable, from the first to the last, of changes that gathered. Steady: the delay
from the begin of a transaction to a reader of the topic, at 1,000 changes a second. Both send Debezium's envelope as
JSON without schemas.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from multiprocessing.connection import Connection as Pipe
from pathlib import Path
from statistics import median, quantiles
from typing import Any

import click
import psycopg
from confluent_kafka import Consumer, Producer, TopicPartition
from psycopg.conninfo import conninfo_to_dict

from bench.jars import classpath
from bench.lake import Tell, in_turns, lake_options, rounds_of, run
from bench.lake_report import DEBEZIUM, GATHERED, PRODUCER, RELAY, RELAY_PART, STEADY
from bench.packages import BenchError
from bench.processes import seconds_below, stat
from bench.replica_sides import session
from bench.replica_stage import SETTINGS
from bench.results import Results
from bench.slot_reader import wait_for
from bench.steady import Child, ticker
from gdq.embedded.files import find_binaries
from gdq.embedded.server import EmbeddedServer
from gdq.installer.install import install
from tests.support.kafka import VERSION, KafkaBroker, kafka_broker

_KAFKA = (f"org.apache.kafka:kafka_2.13:{VERSION}",)
_DEBEZIUM_VERSION = "3.6.1.Final"
_CONNECT = (
    f"io.debezium:debezium-api:{_DEBEZIUM_VERSION}",
    f"io.debezium:debezium-embedded:{_DEBEZIUM_VERSION}",
    f"io.debezium:debezium-connector-postgres:{_DEBEZIUM_VERSION}",
    "org.slf4j:slf4j-simple:1.7.36",
)
_QUEUE, _CONSUMER = "bench", "relay"
# Where each reads from, and the topic that it writes to.
_TABLES = {RELAY: "app.by_queue", DEBEZIUM: "app.by_slot"}
_TOPICS = {RELAY: "bench.by_queue", DEBEZIUM: "bench.app.by_slot", PRODUCER: "bench.raw"}
_RATE, _ROWS = 1000, 20
_WAIT_SECONDS = 300.0
_TABLE = """create table {} (id bigint primary key, at double precision not null, customer integer not null,
  amount numeric(12,2) not null, code text not null, name text not null, note text) with (autovacuum_enabled = off)"""
_INSERT = """insert into {} select i, %s, i %% 1000, i * 7919 %% 10000000 / 100.0, 'C-' || i * 31 %% 100000,
  'customer ' || md5(i::text), repeat(md5((i + 1)::text), 2) || ' note' from generate_series(%s::bigint, %s) i"""
_UPDATE = "update {} set at = %s, amount = amount + 1 where id between %s and %s"

_WORKER = """bootstrap.servers={servers}
key.converter=org.apache.kafka.connect.json.JsonConverter
value.converter=org.apache.kafka.connect.json.JsonConverter
key.converter.schemas.enable=false
value.converter.schemas.enable=false
offset.storage.file.filename={folder}/offsets
offset.flush.interval.ms=1000
listeners=http://127.0.0.1:{port}
plugin.path={folder}/plugins
plugin.discovery=only_scan
"""
_CONNECTOR = """name=bench
connector.class=io.debezium.connector.postgresql.PostgresConnector
tasks.max=1
database.hostname={host}
database.port={port}
database.user={user}
database.password={password}
database.dbname={dbname}
topic.prefix=bench
table.include.list={table}
plugin.name=pgoutput
slot.name=debezium
publication.name=debezium
snapshot.mode=no_data
poll.interval.ms=10
"""


@dataclass(frozen=True, slots=True)
class Size:
    """Row changes to catch up, seconds of a steady rate, rounds."""

    changes: int
    seconds: float
    rounds: int


@dataclass(slots=True)
class _Stage:
    """The broker, the server, and a folder for Debezium's worker."""

    broker: KafkaBroker
    conninfo: str
    folder: Path
    connect: str
    size: Size


def measure(size: Size, results: Results, tell: Tell) -> None:
    """Measure what is missing in `results`, on a broker and a server of its own."""
    with ExitStack() as stack:
        stage = _opened(stack, size)
        results.tell(Kafka=VERSION, Debezium=_DEBEZIUM_VERSION)
        tell("the broker and the server are ready")
        for number in range(1, size.rounds + 1):
            for who in in_turns((RELAY, DEBEZIUM, PRODUCER), number):
                if not results.has(RELAY_PART, GATHERED, who, number):
                    values = _produced(stage) if who == PRODUCER else _caught_up(stage, who)
                    results.add(RELAY_PART, GATHERED, who, number, values | {"load": os.getloadavg()[0]})
                    tell(f"round {number}, {GATHERED}: {who} {values['rate']:,.0f} events/s")
            for who in in_turns((RELAY, DEBEZIUM), number):
                if not results.has(RELAY_PART, STEADY, who, number):
                    values = _steady(stage, who)
                    results.add(RELAY_PART, STEADY, who, number, values | {"load": os.getloadavg()[0]})
                    tell(f"round {number}, {STEADY}: {who} p50 {values['p50']:.0f} ms, p99 {values['p99']:.0f} ms")


def _opened(stack: ExitStack, size: Size) -> _Stage:
    folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="gdq-bench-")))
    broker = stack.enter_context(kafka_broker(classpath(_KAFKA), folder / "kafka"))
    for topic in _TOPICS.values():
        broker.make_topic(topic)
    server = stack.enter_context(EmbeddedServer(binaries=find_binaries(18), settings=SETTINGS))
    install(server.conninfo())
    with session(server.conninfo()) as connection:
        connection.execute("create schema app")
        for table in _TABLES.values():
            connection.execute(_TABLE.format(table).encode())
        connection.execute(f"alter table {_TABLES[DEBEZIUM]} replica identity full".encode())
        connection.execute("select gdq.create_queue(%s)", [_QUEUE])
        connection.execute("select gdq.add_table(%s, %s)", [_QUEUE, _TABLES[RELAY]])
        connection.execute("select gdq.register_consumer(%s, %s)", [_QUEUE, _CONSUMER])
        connection.execute(f"create publication debezium for table {_TABLES[DEBEZIUM]}".encode())
        connection.execute("select pg_create_logical_replication_slot('debezium', 'pgoutput')")
    (folder / "plugins").mkdir()
    return _Stage(broker, server.conninfo(), folder, classpath(_CONNECT), size)


def _caught_up(stage: _Stage, who: str) -> dict[str, float]:
    """Changes gather, then the program starts; from the first of its records to the last."""
    with session(stage.conninfo) as connection:
        first = _last_id(connection, who) + 1
        inserted, step = stage.size.changes // 2, 1000
        for start in range(first, first + inserted, step):
            end = min(start + step, first + inserted) - 1
            connection.execute(_INSERT.format(_TABLES[who]).encode(), [0.0, start, end])
            connection.execute(_UPDATE.format(_TABLES[who]).encode(), [0.0, start, end])
        connection.execute("checkpoint")
    with Child(read_topic, stage.broker.servers, _TOPICS[who], 2 * inserted, False) as reader:
        reader.hear()
        with _programs(stage, who) as cpu:
            told = reader.hear(_WAIT_SECONDS)
            used = cpu()
    seconds = told["last"] - told["first"]
    return {"rate": (2 * inserted - told["at_first"]) / seconds, "cpu_us": used * 1e6 / (2 * inserted)}


def _produced(stage: _Stage) -> dict[str, float]:
    """Ready-made bytes, sent by the client that gdq uses, in the same transactions."""
    wanted = stage.size.changes
    with Child(read_topic, stage.broker.servers, _TOPICS[PRODUCER], wanted, False) as reader:
        reader.hear()
        producer = Producer({"bootstrap.servers": stage.broker.servers, "transactional.id": "raw", "linger.ms": 5})
        producer.init_transactions(60)
        before, value = time.process_time(), b"x" * 700
        for start in range(0, wanted, 10_000):
            producer.begin_transaction()
            for number in range(start, min(start + 10_000, wanted)):
                producer.produce(_TOPICS[PRODUCER], value, str(number).encode(), headers=[("gdq-id", str(number))])
                if number % 1000 == 0:
                    producer.poll(0)
            producer.commit_transaction(60)
        told = reader.hear(_WAIT_SECONDS)
    rate = (wanted - told["at_first"]) / (told["last"] - told["first"]) if told["last"] > told["first"] else 0.0
    return {"rate": rate, "cpu_us": (time.process_time() - before) * 1e6 / wanted}


def _steady(stage: _Stage, who: str) -> dict[str, float]:
    """The delays of the second half of what is written at a steady rate; the first half warms up."""
    transactions = round(stage.size.seconds * _RATE / _ROWS)
    with session(stage.conninfo) as connection:
        first = _last_id(connection, who) + 1
    beside = ticker(stage.conninfo) if who == RELAY else ExitStack()
    wanted = (transactions + 1) * _ROWS
    with Child(read_topic, stage.broker.servers, _TOPICS[who], wanted, True) as reader, beside:
        reader.hear()
        with _programs(stage, who) as cpu:
            with session(stage.conninfo) as connection:  # what shows that the program is at work
                connection.execute(_INSERT.format(_TABLES[who]).encode(), [0.0, first, first + _ROWS - 1])
            if reader.hear(_WAIT_SECONDS) != "first":
                raise BenchError(f"{who} has sent nothing")
            before = cpu()
            with Child(write_steadily, stage.conninfo, _TABLES[who], first + _ROWS, transactions) as writer:
                writer.hear(_WAIT_SECONDS)
                told = reader.hear(_WAIT_SECONDS)
            used = cpu() - before
    delays = told["delays"][len(told["delays"]) // 2 :]
    values = {"p50": median(delays) * 1000, "p99": quantiles(delays, n=100)[98] * 1000}
    return values | {"cpu_us": used * 1e6 / wanted}


def _last_id(connection: psycopg.Connection[Any], who: str) -> int:
    row = connection.execute(f"select coalesce(max(id), 0) from {_TABLES[who]}".encode()).fetchone()
    return int(row[0]) if row else 0


def write_steadily(told: Pipe, conninfo: str, table: str, first: int, transactions: int) -> None:
    """Insert rows with the moment at which their transaction begins."""
    with psycopg.connect(conninfo, autocommit=True) as connection:
        due = time.time()
        for number in range(transactions):
            start = first + number * _ROWS
            given = [time.time(), start, start + _ROWS - 1]
            connection.execute(_INSERT.format(table).encode(), given, prepare=True)
            due += _ROWS / _RATE
            time.sleep(max(due - time.time(), 0))
        told.send("written")


def read_topic(told: Pipe, servers: str, topic: str, wanted: int, steady: bool) -> None:
    """Read the records that come to a topic from now on.

    Tells that it is ready, then the moments of the first and of the last record and how many came with the first look.
    `steady`: reads committed records only, tells "first" with the first one, and in the end the delays of rows that
    have a moment.
    """
    level = "read_committed" if steady else "read_uncommitted"
    settings = {"bootstrap.servers": servers, "group.id": f"bench-{time.time()}", "isolation.level": level}
    consumer = Consumer(settings | {"enable.auto.commit": False, "fetch.wait.max.ms": 5})
    places = [TopicPartition(topic, number) for number in range(3)]
    ends = [consumer.get_watermark_offsets(place, 60)[1] for place in places]
    consumer.assign([TopicPartition(topic, number, end) for number, end in enumerate(ends)])
    told.send("ready")
    count, first, at_first, delays = 0, 0.0, 0, list[float]()
    while count < wanted:
        found = consumer.consume(500, 0.05 if steady else 1)
        now = time.time()
        values = [value for message in found if message.error() is None and (value := message.value()) is not None]
        if values and not count:
            first, at_first = now, len(values)
            if steady:
                told.send("first")
        count += len(values)
        if steady:
            moments = (float(json.loads(value)["after"]["at"]) for value in values)
            delays += [now - at for at in moments if at]
    told.send({"first": first, "last": time.time(), "at_first": at_first, "delays": delays})
    consumer.close()


@contextmanager
def _programs(stage: _Stage, who: str) -> Iterator[Callable[[], float]]:
    """What sends the changes, at work; gives what tells its processor time so far, without that of the server."""
    if who == RELAY:
        address = f"kafka://{stage.broker.servers}/{_TOPICS[RELAY]}"
        command = [sys.executable, "-m", "gdq", "relay", _QUEUE, _CONSUMER, address, "--form", "debezium"]
        environment = os.environ | {"GDQ_DSN": stage.conninfo}
    else:
        command, environment = _connect(stage), dict(os.environ)
    log = stage.folder / f"{who.split(maxsplit=1)[0]}.log"
    with log.open("ab") as said:
        program = subprocess.Popen(command, env=environment, stdout=said, stderr=said)
    try:
        yield lambda: _cpu(program)
        if program.poll() is not None:
            raise BenchError(f"{who} has ended: {log.read_text(encoding='utf-8').strip().splitlines()[-1]}")
    finally:
        program.terminate()
        program.wait()
        _wait_until_free(stage)


def _cpu(program: subprocess.Popen[bytes]) -> float:
    own: Mapping[int, str] = dict(enumerate(stat(program.pid)))
    return (int(own[11]) + int(own[12])) / os.sysconf("SC_CLK_TCK") + seconds_below(program.pid)


def _connect(stage: _Stage) -> list[str]:
    """Kafka Connect with Debezium's connector, as a worker of its own."""
    given = conninfo_to_dict(stage.conninfo) | {"table": _TABLES[DEBEZIUM]}
    worker, connector = stage.folder / "worker.properties", stage.folder / "connector.properties"
    worker.write_text(
        _WORKER.format(servers=stage.broker.servers, folder=stage.folder, port=stage.broker.port + 1), encoding="utf-8"
    )
    connector.write_text(_CONNECTOR.format(**given), encoding="utf-8")
    java = ["java", "-Xmx1g", "-Dorg.slf4j.simpleLogger.defaultLogLevel=warn", "-cp", stage.connect]
    return [*java, "org.apache.kafka.connect.cli.ConnectStandalone", str(worker), str(connector)]


def _wait_until_free(stage: _Stage) -> None:
    """Wait until the server has noticed that the program is gone."""
    with session(stage.conninfo) as connection:
        query = """select 1 where not exists (select from pg_replication_slots where active)
                      and not exists (select from pg_stat_activity where application_name like 'gdq:%%')"""
        wait_for("the program's sessions to end", query, connection)


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@click.option("--changes", type=click.IntRange(2000), default=100_000, show_default=True, help="To catch up.")
@click.option("--seconds", type=click.IntRange(2), default=20, show_default=True, help="Of a steady rate.")
@lake_options
def main(changes: int, seconds: int, **options: Any) -> None:
    """Measure relays to Kafka: gdq's beside Debezium's connector in Kafka Connect."""
    if options["quick"]:
        changes, seconds = 4000, 4
    size = Size(changes, seconds, rounds_of(options))
    told = f"{changes:,} changes, {seconds} s"
    run(RELAY_PART, told, lambda results, tell: measure(size, results, tell), options)


if __name__ == "__main__":
    main(prog_name="python -m bench.relay")
