"""What tests of relays share: a queue of orders, and a web hook that answers as the test says."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import threading
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from uuid import uuid4

import pytest

import gdq as library
from tests.support.kafka import KafkaBroker, kafka_classpath
from tests.support.nats import NatsServer, nats_program, nats_server
from tests.support.page import blocks
from tests.support.programs import client_program, environment, gdq, start_gdq
from tests.support.server import Database

__all__ = ["kafka_classpath", "nats_program"]


def always(status: int) -> Callable[[Any], int]:
    """Gives every request this status."""
    return lambda _: status


class Hook(ThreadingHTTPServer):
    """A web hook. `answer` gives the status of a request, or an exception to end the connection without one."""

    daemon_threads = True

    def __init__(self, port: int = 0) -> None:
        super().__init__(("127.0.0.1", port), _Request)
        self.requests: list[tuple[str, dict[str, str], Any]] = []
        self.taken: list[Any] = []
        self.answer: Callable[[Any], int] = always(204)
        self.headers: dict[str, str] = {}
        self.lock = threading.Lock()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"

    def keys(self) -> list[int]:
        """The keys of the events that were taken, in the order of their arrival."""
        return [body["key"]["id"] for body in self.taken]


class _Request(BaseHTTPRequestHandler):
    server: Hook
    protocol_version = "HTTP/1.1"

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        with self.server.lock:
            self.server.requests.append((self.path, dict(self.headers), body))
        status = self.server.answer(body)
        if 200 <= status < 300:
            with self.server.lock:
                self.server.taken.append(body)
        self.send_response(status)
        for name, value in self.server.headers.items():
            self.send_header(name, value)
        text = b"" if status == 204 else f"answer {status}".encode()
        if status != 204:
            self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        self.wfile.write(text)

    def log_message(self, *_: Any) -> None:
        """Nothing: the test says what it saw."""


@contextmanager
def open_hook(port: int = 0) -> Iterator[Hook]:
    """A web hook at a port, closed in the end."""
    with Hook(port) as server:
        thread = threading.Thread(target=server.serve_forever, args=[0.01])
        thread.start()
        try:
            yield server
        finally:
            server.shutdown()
            thread.join()


@pytest.fixture
def hook() -> Iterator[Hook]:
    with open_hook() as server:
        yield server


@pytest.fixture
def shop(db: Database) -> Database:
    """A queue q that captures orders, with the consumer c."""
    with db.connect() as connection:
        connection.execute("create table orders (id int primary key, customer int, note text)")
        connection.execute("select gdq.create_queue('q')")
        connection.execute("select gdq.add_table('q', 'orders')")
        connection.execute("select gdq.register_consumer('q', 'c')")
    return db


def write(shop: Database, *statements: str) -> None:
    """Each statement in a transaction of its own."""
    with shop.connect() as connection:
        for statement in statements:
            connection.execute(statement.encode())


def relay(shop: Database, address: str, *options: str) -> None:
    done = gdq("relay", "q", "c", address, "--once", *options, dsn=shop.dsn)
    assert done.returncode == 0, done.stderr


def retries(shop: Database) -> list[tuple[int, str | None]]:
    """Key and reason of the events that wait."""
    with shop.connect() as connection:
        found = sorted(library.retry_info(connection, "q", "c"), key=lambda one: one.ev_id)
    return [((one.key or {})["id"], one.reason) for one in found]


def due(shop: Database) -> None:
    """Make all retries due."""
    write(shop, "update gdq.retry_event set due_at = clock_timestamp() - interval '1 second'")


class KafkaTopic:
    """A topic of one test, and the address and settings with which a relay sends to it."""

    def __init__(self, broker: KafkaBroker, **config: str) -> None:
        self.broker = broker
        self.name = f"t{uuid4().hex}"
        broker.make_topic(f"{self.name}.orders", **config)
        self.to = (f"kafka://{broker.servers}/{self.name}.{{table}}", "--set", f"positions={self.name}.positions")

    def count(self) -> int:
        """How long its partitions are."""
        return self.broker.count(f"{self.name}.orders")

    def changes(self) -> dict[int, list[str | None]]:
        """What the topic has of each key, in order; a key is in one partition."""
        found, partitions = defaultdict(list), defaultdict(set)
        for record in self.broker.records(f"{self.name}.orders"):
            body = json.loads(record.value() or b"")
            found[body["key"]["id"]].append(body["new"]["note"])
            partitions[record.key()].add(record.partition())
        assert {len(some) for some in partitions.values()} <= {1}
        return dict(found)

    def events(self) -> list[dict[str, Any]]:
        """The bodies of the records, those of each key in order; `number` is that of the identity."""
        found = []
        for record in self.broker.records(f"{self.name}.orders"):
            identity = dict(record.headers() or [])["gdq-id"]
            assert isinstance(identity, bytes)
            found.append(json.loads(record.value() or b"") | {"number": identity.decode().split("/")[2]})
        return found


@contextmanager
def relaying(shop: Database, address: str, *options: str) -> Iterator[subprocess.Popen[str]]:
    """The command at work; it ends well."""
    process = start_gdq("relay", "q", "c", address, *options, dsn=shop.dsn)
    try:
        yield process
    finally:
        process.send_signal(signal.SIGTERM)
        _, errors = process.communicate()
    assert process.returncode == 0, errors


def table_of(events: Iterable[Any]) -> dict[int, Any]:
    """The rows of a table after its events, each of which goes on from the one before it of its key."""
    rows: dict[int, Any] = {}
    for event in events:
        if event["op"] == "truncate":
            rows.clear()
            continue
        key = event["key"]["id"]
        assert event["old"] == (None if event["op"] == "read" else rows.get(key)), event
        if event["new"] is None:
            del rows[key]
        else:
            rows[key] = event["new"]
    return rows


def table_now(shop: Database) -> dict[int, Any]:
    """The rows that the table has, as table_of() gives them."""
    with shop.connect() as connection:
        return dict(connection.execute("select id, to_jsonb(o) from orders o").fetchall())


def wait_for_line(process: subprocess.Popen[str], text: str) -> None:
    """Wait until a command says this in a line of its standard error."""
    assert process.stderr
    assert any(text in line for line in process.stderr), f"the command has ended without {text}"


def sent_all(shop: Database) -> bool:
    with shop.connect() as connection:
        return library.consumer_info(connection, "q")[0].unread_events == 0


def run_shown(db: Database, test: str, *edits: tuple[str, str]) -> None:
    """Run the blocks of docs/relay.md that a test runs, with other ports in place of those of the page."""
    with db.connect() as connection:
        connection.execute("create table orders (id int primary key, customer text, amount numeric(10, 2))")
        connection.execute("select gdq.create_queue('shop')")
        connection.execute("select gdq.add_table('shop', 'orders')")
    env = environment(db.dsn) | {"DATABASE_URL": db.dsn}
    env["PATH"] = os.pathsep.join([str(client_program(db, "psql").parent), env["PATH"]])
    for block in blocks("docs/relay.md"):
        if block.test != test:
            continue
        text = re.sub("(?m)^gdq ", f"{sys.executable} -m gdq ", block.text)
        for old, new in edits:
            text = text.replace(old, new)
        command = [sys.executable, "-c"] if block.language == "python" else ["bash", "-e", "-u", "-c"]
        done = subprocess.run([*command, text], env=env, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr


@pytest.fixture
def nats(nats_program: Path, tmp_path: Path) -> Iterator[NatsServer]:
    with nats_server(nats_program, tmp_path / "nats") as server:
        yield server
