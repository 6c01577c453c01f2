"""examples/fastapi: the application under uvicorn pushes changes, says whether it is well, and ends by SIGTERM."""

from __future__ import annotations

import json
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import psycopg
import pytest
from psycopg import sql

from tests.support.examples import EXAMPLES, command_folder, make_shop
from tests.support.programs import environment, start_gdq
from tests.support.server import Database
from tests.support.waiting import SECONDS, until


@contextmanager
def served(database: Database) -> Iterator[tuple[subprocess.Popen[str], httpx.Client]]:
    """The application at work, with a client."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    options = ["--app-dir", str(EXAMPLES / "fastapi"), "--port", str(port), "--timeout-graceful-shutdown", "1"]
    process = subprocess.Popen(
        [sys.executable, "-m", "uvicorn", "live:app", *options],
        env=environment(database.su_dsn),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        with httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=None, trust_env=False) as client:

            def status() -> int:
                assert process.poll() is None, process.communicate()
                try:
                    return client.get("/health").status_code
                except httpx.TransportError:
                    return 0

            until(lambda: status() == 200, "a healthy application")
            yield process, client
    finally:
        if process.poll() is None:
            process.kill()
        process.communicate()


def told(lines: Iterator[str]) -> tuple[str, object]:
    """The next event of a stream."""
    deadline = time.monotonic() + SECONDS
    for line in lines:  # a silent stream has a comment from time to time
        assert time.monotonic() < deadline
        if line.startswith("event: "):
            break
    kind = line.removeprefix("event: ")
    return kind, json.loads(next(lines).removeprefix("data: "))


def allow(database: Database, connections: bool) -> None:
    """Let the database take new sessions, or none."""
    with psycopg.connect(database.server.conninfo(), autocommit=True) as other:
        name = sql.Identifier(database.name)
        other.execute(sql.SQL("alter database {} allow_connections {}").format(name, sql.Literal(connections)))


@pytest.mark.long
@pytest.mark.server
def test_changes_are_pushed(empty_db: Database, tmp_path: Path) -> None:
    make_shop(empty_db, command_folder(tmp_path / "bin"))
    ticker = start_gdq("ticker", dsn=empty_db.su_dsn)
    try:
        with (
            served(empty_db) as (process, client),
            empty_db.connect("su") as su,
            client.stream("GET", "/events") as stream,
        ):
            assert stream.headers["content-type"].startswith("text/event-stream")
            lines = stream.iter_lines()
            assert next(lines) == ": connected"
            su.execute("insert into orders (customer, amount) values ('Zoë', 9.90)")
            kind, event = told(lines)
            assert isinstance(event, dict)
            assert (kind, event["op"], event["table"]) == ("change", "insert", "public.orders")
            assert event["new"] == {"id": "1", "customer": "Zoë", "amount": "9.90"}
            # the database takes no sessions for a while: the application says so, and sends what came meanwhile
            allow(empty_db, False)
            cut = "select pg_terminate_backend(pid) from pg_stat_activity where application_name = 'gdq:shop/live'"
            assert su.execute(cut).fetchall() == [(True,)]
            until(lambda: client.get("/health").status_code == 503)
            su.execute("delete from orders")
            allow(empty_db, True)
            until(lambda: client.get("/health").status_code == 200)
            kind, event = told(lines)
            while isinstance(event, dict) and event["op"] == "insert":  # of a batch that was not finished
                kind, event = told(lines)
            assert isinstance(event, dict)
            assert (kind, event["op"], event["key"]) == ("change", "delete", {"id": "1"})
            process.send_signal(signal.SIGTERM)
            # a browser that stays does not hold it up; uvicorn ends by the signal itself after a graceful stop
            assert process.wait() in (0, -signal.SIGTERM)
    finally:
        ticker.send_signal(signal.SIGTERM)
        ticker.communicate()
    assert ticker.returncode == 0


@pytest.mark.long
@pytest.mark.server
def test_a_gap_is_told(empty_db: Database, tmp_path: Path) -> None:
    """Where changes are missing, browsers are told to load their rows again, and later changes come."""
    make_shop(empty_db, command_folder(tmp_path / "bin"))
    ticker = start_gdq("ticker", dsn=empty_db.su_dsn)
    try:
        with served(empty_db) as (_, client), empty_db.connect("su") as su, client.stream("GET", "/events") as stream:
            lines = stream.iter_lines()
            assert next(lines) == ": connected"
            su.execute("select gdq.note_resync(1, 'public.orders'::regclass, 'gap', 'rows without events')")
            assert told(lines) == ("resync", None)
            # at once: what changes while a browser loads its rows is sent to it
            su.execute("insert into orders (customer, amount) values ('Bob', 2)")
            kind, event = told(lines)
            assert isinstance(event, dict)
            assert (kind, event["key"]) == ("change", {"id": "1"})
    finally:
        ticker.send_signal(signal.SIGTERM)
        ticker.communicate()
