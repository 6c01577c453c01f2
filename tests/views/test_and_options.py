"""A view and other options of a table that it reads, made beside each other."""

from __future__ import annotations

import threading

import psycopg
import pytest
from psycopg import errors

from gdq import queue as queues
from tests.support.events import Tap
from tests.support.waiting import until

VIEW = "select gdq.create_view('w', 'q', 'select 1', 'shop.w', '{shop.t}')"
FILTER = """select gdq.alter_table_options('q', 'shop.t', '{"where": "code = 1"}')"""


def test_view_that_is_made_meanwhile(tap: Tap) -> None:
    """A view and a row filter beside each other: the second comer sees the first and is refused."""
    tap.write("create table t (id int primary key, code int not null)")
    tap.add("shop.t")
    with tap.db.connect() as other:
        with other.transaction(force_rollback=True):
            other.execute(FILTER)
            maker = Attempt(tap, VIEW)
            other.execute("commit; begin")
        with pytest.raises(errors.FeatureNotSupported, match="captured in part"):
            maker.result()
        assert queues.alter_table_options(tap.owner, "q", "shop.t", where=None)
        with other.transaction(force_rollback=True):
            other.execute(VIEW)
            filterer = Attempt(tap, FILTER)
            other.execute("commit; begin")
        with pytest.raises(errors.ObjectInUse, match='read by the view "w"'):
            filterer.result()


class Attempt:
    """A statement in a session of its own, which waits for another's lock."""

    def __init__(self, tap: Tap, statement: str) -> None:
        self._error: psycopg.Error | None = None
        self._thread = threading.Thread(target=self._run, args=(tap, statement))
        self._thread.start()
        waits = "select from pg_locks where not granted"
        until(lambda: not self._thread.is_alive() or tap.app.execute(waits).rowcount)

    def _run(self, tap: Tap, statement: str) -> None:
        with tap.db.connect() as owner:
            try:
                owner.execute(statement.encode())
            except psycopg.Error as error:
                self._error = error

    def result(self) -> None:
        """Wait for the end; raises what the statement raised."""
        self._thread.join()
        if self._error is not None:
            raise self._error
