"""What tests of relays share: a queue of orders, and a web hook that answers as the test says."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

import gdq as library
from tests.support.nats import NatsServer, nats_program, nats_server
from tests.support.page import blocks
from tests.support.programs import client_program, environment, gdq, start_gdq
from tests.support.server import Database

__all__ = ["nats_program"]


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


def sent_all(shop: Database) -> bool:
    with shop.connect() as connection:
        return library.consumer_info(connection, "q")[0].unread_events == 0


def run_shown(db: Database, test: str, port: tuple[str, str]) -> None:
    """Run the blocks of docs/relay.md that a test runs, with another port in place of that of the page."""
    with db.connect() as connection:
        connection.execute("create table orders (id int primary key, customer text, amount numeric(10, 2))")
        connection.execute("select gdq.create_queue('shop')")
        connection.execute("select gdq.add_table('shop', 'orders')")
    env = environment(db.dsn) | {"DATABASE_URL": db.dsn}
    env["PATH"] = os.pathsep.join([str(client_program(db, "psql").parent), env["PATH"]])
    for block in blocks("docs/relay.md"):
        if block.test != test:
            continue
        text = re.sub("(?m)^gdq ", f"{sys.executable} -m gdq ", block.text.replace(*port))
        command = [sys.executable, "-c"] if block.language == "python" else ["bash", "-e", "-u", "-c"]
        done = subprocess.run([*command, text], env=env, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr


@pytest.fixture
def nats(nats_program: Path, tmp_path: Path) -> Iterator[NatsServer]:
    with nats_server(nats_program, tmp_path / "nats") as server:
        yield server
