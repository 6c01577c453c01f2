"""A queue with one consumer in a test's database, and what that consumer sees."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any, NamedTuple, Self

import psycopg
import pytest
from psycopg import sql
from psycopg.rows import dict_row, tuple_row
from psycopg.types.json import set_json_loads

from gdq.event_rows import EventChoice
from gdq.stream import read_events
from gdq.typed.values import load_json
from tests.support.server import Database

SCHEMA = "shop"


class Event(NamedTuple):
    """One row of gdq.get_batch(), without its number, transaction and time."""

    op: str
    tbl: str | None
    key: dict[str, Any] | None
    old: dict[str, Any] | None
    new: dict[str, Any] | None


@dataclass(frozen=True, slots=True)
class Batch:
    """All events of one batch, in order, and the typed rows of the tables that were asked for."""

    events: list[Event]
    rows: dict[str, list[dict[str, Any]]]


def drain(db: Database, queue: str = "q", consumer: str = "c") -> list[tuple[Any, ...]]:
    """Force a tick, read all batches up to it and finish them; returns the rows of gdq.get_batch()."""
    rows: list[tuple[Any, ...]] = []
    with db.connect() as owner:
        owner.execute("select gdq.force_tick(%s)", [queue])
        while found := owner.execute(
            "select batch_id, token from gdq.next_batch(%s, %s)", [queue, consumer]
        ).fetchone():
            rows += _read(owner, found, "ev_id, ev_txid, ev_time, op, tbl, key, old, new")
            owner.execute("select gdq.finish_batch(%s, %s)", found)
    return rows


def _read(owner: psycopg.Connection[Any], batch: tuple[Any, ...], columns: str) -> list[tuple[Any, ...]]:
    """The rows of gdq.get_batch(), which readers and Python's events give as well."""
    owner.execute("select gdq.create_readers()")
    rows = owner.execute(f"select {columns} from gdq.get_batch(%s, %s)".encode(), batch).fetchall()
    brought = owner.execute(f"select {columns} from gdq.get_events(%s, %s) where retries = 0".encode(), batch)
    assert brought.fetchall() == rows
    _compare_with_python(owner, batch)
    return rows


def _compare_with_python(owner: psycopg.Connection[Any], batch: tuple[Any, ...]) -> None:
    """Read the batch by readers, or from the logs' own columns without old images, and compare JSON's values."""
    choice = EventChoice("new" if batch[0] % 2 else "both")
    cursor = owner.cursor(row_factory=tuple_row)
    set_json_loads(load_json, cursor)
    wanted = cursor.execute("select ev_id, op, tbl, key, old, new from gdq.get_events(%s, %s)", batch).fetchall()
    with owner.transaction():
        found = [event.in_json() for event in read_events(owner, batch[0], batch[1], choice)]
    assert [(e.id, e.op, e.table) for e in found] == [row[:3] for row in wanted]
    for event, (_, op, _, key, old, new) in zip(found, wanted, strict=True):
        assert (event.key, event.old) == (key, choice.old(old))
        assert op == "message" or event.new == new  # a message's numbers stay as they were sent


class Tap:
    """A queue with a consumer; the role `app` owns the tables, in the schema `shop`, which is on its search_path.

    gdq's owner has nothing there but the right to put triggers on tables.
    """

    def __init__(self, db: Database, queue: str = "q", consumer: str = "c") -> None:
        self.db = db
        self.queue = queue
        self.consumer = consumer
        self._stack = ExitStack()

    def __enter__(self) -> Self:
        with self.db.connect("su") as su:
            su.execute(f"create schema if not exists {SCHEMA} authorization app")
            su.execute(f"grant usage on schema {SCHEMA} to gdq_owner")
            su.execute("alter default privileges for role app grant trigger on tables to gdq_owner")
            su.execute(
                sql.SQL("alter role app in database {} set search_path = {}, public").format(
                    sql.Identifier(self.db.name), sql.Identifier(SCHEMA)
                )
            )
        self.owner: psycopg.Connection[Any] = self._stack.enter_context(self.db.connect())
        self.app: psycopg.Connection[Any] = self._stack.enter_context(self.db.connect("app"))
        self.owner.execute("select gdq.create_queue(%s)", [self.queue])
        self.owner.execute("select gdq.register_consumer(%s, %s)", [self.queue, self.consumer])
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def write(self, *statements: str) -> None:
        """Run statements as the application, each in a transaction of its own."""
        for statement in statements:
            self.app.execute(statement.encode())

    def add(self, table: str, **options: Any) -> None:
        """gdq.add_table() on this queue; options by their names there."""
        named = "".join(f', "{name}" => %({name})s' for name in options)
        self.owner.execute(
            f"select gdq.add_table(%(queue)s, %(tbl)s::regclass{named})".encode(),
            {"queue": self.queue, "tbl": table, **options},
        )

    def batch(self, *tables: str) -> Batch:
        """Force a tick, read everything up to it as one batch and finish it."""
        self.owner.execute("select gdq.force_tick(%s)", [self.queue])
        found = self.owner.execute(
            "select batch_id, token from gdq.next_batch(%s, %s, 1000000)", [self.queue, self.consumer]
        ).fetchone()
        assert found
        fetched = _read(self.owner, found, "op, tbl, key, old, new")
        rows = {}
        for table in tables:
            typed = self.owner.execute("select gdq.batch_sql(%s, %s, %s::regclass)", [*found, table]).fetchone()
            assert typed
            with self.owner.cursor(row_factory=dict_row) as cursor:
                rows[table] = cursor.execute(
                    f"select * from ({typed[0]}) r order by ev_id, ev_op in ('I', 'n')".encode()
                ).fetchall()
        self.owner.execute("select gdq.finish_batch(%s, %s)", found)
        return Batch([Event(*row) for row in fetched], rows)

    def events(self) -> list[Event]:
        return self.batch().events

    def images(self) -> list[tuple[Any, ...]]:
        """(op, key, old, new) of each event."""
        return [(e.op, e.key, e.old, e.new) for e in self.events()]


@pytest.fixture
def tap(db: Database) -> Iterator[Tap]:
    """A queue `q` with a consumer `c` in a database of its own."""
    with Tap(db) as opened:
        yield opened
