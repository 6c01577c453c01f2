"""A ticker that stands still, or is cut off, in the middle of its work holds no locks on the server."""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Callable, Iterator
from typing import Any

import psycopg
import pytest
from psycopg.conninfo import conninfo_to_dict, make_conninfo

from gdq.conninfo import connect
from gdq.ticker import maintain_all, take_tick, tick_all
from tests.support.schedules import Stage
from tests.support.server import Database
from tests.support.waiting import until


class Relay:
    """Passes bytes between a program and the server; of the program's nothing more after those that have `last`."""

    def __init__(self, dsn: str, last: bytes) -> None:
        self.deaf = threading.Event()
        given = conninfo_to_dict(dsn)
        self._last = last
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._server = socket.create_connection((str(given["host"]), int(str(given["port"]))))
        self._client: socket.socket | None = None
        self.dsn = make_conninfo(**(given | {"port": self._listener.getsockname()[1], "sslmode": "disable"}))
        threading.Thread(target=self._forward, daemon=True).start()

    def _forward(self) -> None:
        self._client, _ = self._listener.accept()
        threading.Thread(target=self._back, daemon=True).start()
        with contextlib.suppress(OSError):
            while data := self._client.recv(65536):
                if not self.deaf.is_set():
                    self._server.sendall(data)
                if self._last in data:
                    self.deaf.set()

    def _back(self) -> None:
        assert self._client
        with contextlib.suppress(OSError):
            while data := self._server.recv(65536):
                self._client.sendall(data)

    def close(self) -> None:
        for one in (self._client, self._server, self._listener):
            if one is not None:
                with contextlib.suppress(OSError):
                    one.shutdown(socket.SHUT_RDWR)
                one.close()


@pytest.fixture
def stage(db: Database) -> Iterator[Stage]:
    with Stage(db) as opened:
        opened.insert()
        yield opened


@pytest.mark.parametrize("isolation", ["read committed", "repeatable read"])
@pytest.mark.parametrize(
    ("last", "work"),
    [(b"gdq.maintain", maintain_all), (b"gdq.force_tick", lambda c: take_tick(c, "q")), (b"gdq.ticker", tick_all)],
)
def test_no_transaction_stays_open(
    db: Database, stage: Stage, isolation: str, last: bytes, work: Callable[[psycopg.Connection[Any]], object]
) -> None:
    relay = Relay(db.dsn, last)
    with connect(relay.dsn, autocommit=True) as connection:
        connection.execute(f"set default_transaction_isolation = '{isolation}'".encode())
        pid = connection.info.backend_pid

        def run() -> None:
            with contextlib.suppress(psycopg.Error):
                work(connection)

        stuck = threading.Thread(target=run, daemon=True)
        stuck.start()
        try:
            until(relay.deaf.is_set)
            # A session that begins a statement is "active" without a transaction: it is done when idle after this one.
            left = "select state, xact_start is null from pg_stat_activity where pid = %s and query like %s"
            until(lambda: stage.owner.execute(left, [pid, f"%{last.decode()}%"]).fetchone() == ("idle", True))
        finally:
            relay.close()
            stuck.join()
