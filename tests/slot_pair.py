"""Tables that a queue and a slot watch from the same moment on, and what both say of the same statements."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import psycopg
from psycopg import sql

from gdq.consumer import Consumer, register_consumer
from gdq.consumers.slot.comparison import Comparison
from gdq.consumers.slot.replay import Replay
from gdq.consumers.slot.rules import Difference, TableFacts, table_facts
from gdq.consumers.slot.slot import create_slot, drop_slot
from gdq.consumers.slot.source import SlotSource
from gdq.source import Event
from tests.fix_server import Database

# What a value's text depends on is as docs/types.md says.
PINNED = "-c datestyle=ISO -c intervalstyle=postgres -c timezone=UTC -c bytea_output=hex -c lc_monetary=C"


@dataclass(frozen=True, slots=True)
class Outcome:
    """What both paths gave of the same statements, and what differs."""

    queue: list[Event]
    slot: list[Event]
    tables: dict[str, TableFacts]
    comparison: Comparison
    differences: list[Difference]

    @property
    def errors(self) -> list[str]:
        return [str(one) for one in self.differences if one.rule is None]


@dataclass(frozen=True, slots=True)
class Pair:
    """The queue q with a consumer, and its slot."""

    db: Database
    consumer: str

    def outcome(self) -> Outcome:
        """What has happened since the last time; table names are those of today."""
        with Consumer(self.db.dsn, "q", self.consumer) as consumer:
            queue = [event for batch in consumer.batches(once=True) for event in batch.events()]
        with SlotSource(self.db.su_dsn, "q", self.consumer) as source:
            slot = [event for batch in source.batches(once=True) for event in batch.events()]
        names = sorted({event.table for event in (*queue, *slot) if event.table})
        with self.db.connect("su") as su:
            known = [name for name in names if su.execute("select to_regclass(%s)", [name]).fetchone() != (None,)]
            facts = table_facts(su, known)
        return compare(queue, slot, facts)

    def states(self, outcome: Outcome) -> Iterator[tuple[str, str, list[Any], list[Any]]]:
        """Each table's rows in the server, and after the events of each path, as sorted texts."""
        for path, events in (("queue", outcome.queue), ("slot", outcome.slot)):
            replay = Replay(_in_order(events))
            for table in sorted(outcome.tables):
                names = self._columns(table, outcome.tables[table].generated if path == "slot" else frozenset())
                replayed = [{name: row.get(name) for name in names} for row in replay.rows(table)]
                yield table, path, self._rows(table, names), sorted(map(_texts, replayed))

    def _columns(self, table: str, without: frozenset[str]) -> list[str]:
        with self.db.connect() as owner:
            query = "select attname from pg_attribute where attrelid = %s::regclass and attnum > 0 and not attisdropped"
            return [name for (name,) in owner.execute(query, [table]) if name not in without]

    def _rows(self, table: str, names: list[str]) -> list[Any]:
        with self.db.connect(options=PINNED) as owner:
            # as the types' own output functions write them: a cast to text takes the padding of a character
            one = "case when {0} is not null then format('%s', {0}) end"
            columns = sql.SQL(", ").join(sql.SQL(one).format(sql.Identifier(name)) for name in names)
            rows = owner.execute(sql.SQL("select {} from {}").format(columns, sql.SQL(table))).fetchall()
        return sorted(_texts(dict(zip(names, row, strict=True))) for row in rows)


def compare(queue: Sequence[Event], slot: Sequence[Event], tables: dict[str, TableFacts]) -> Outcome:
    comparison = Comparison(tables)
    return Outcome(list(queue), list(slot), tables, comparison, list(comparison.differences(queue, slot)))


@contextmanager
def watched(db: Database, schema: Sequence[str], tables: Sequence[str], consumer: str = "c") -> Iterator[Pair]:
    """`schema` is made by the owner, then both paths watch `tables`; the slot does not outlive the block.

    No tables: all that the owner has outside of gdq's schemas,
    partitions by their roots, children before their parents.
    """
    with db.connect() as owner, db.connect("su") as su:
        for statement in schema:
            owner.execute(statement.encode())
        owner.execute("select gdq.create_queue('q')")
        for table in tables or _made(owner):
            owner.execute("select gdq.add_table('q', %s::regclass)", [table])
        register_consumer(owner, "q", consumer)
        # create_slot makes none over a table without replica identity
        published = ", ".join(tables or _made(owner))
        su.execute(f"create publication gdq_q for table {published} with (publish_via_partition_root = true)".encode())
        create_slot(su, "q", consumer)
        try:
            yield Pair(db, consumer)
        finally:
            drop_slot(su, "q", consumer)


def _made(connection: psycopg.Connection[Any]) -> list[str]:
    query = """select oid::regclass::text from pg_class
                where relkind in ('r', 'p') and not relispartition and oid >= 16384
                  and relnamespace::regnamespace::text not like all (array['gdq%', 'pg\\_%', 'information_schema'])
                order by pg_class.oid desc"""
    return [name for (name,) in connection.execute(query)]


def run(connection: psycopg.Connection[Any], statements: Sequence[str]) -> None:
    """Each text alone, statements that are to be in a transaction divided by `;` and a space."""
    for statement in statements:
        for part in re.split(r";\s", statement):
            connection.execute(part.encode())


def _in_order(events: list[Event]) -> list[Event]:
    """The events of a queue in the order of their numbers: a batch has them so, a later one may go back."""
    queued = all(event.xid >= 0 for event in events) and len({event.id for event in events}) == len(events)
    return sorted(events, key=lambda event: event.id) if queued else events


def _texts(row: dict[str, Any]) -> str:
    return str(sorted((name, _text(value)) for name, value in row.items()))


def _text(value: Any) -> str | None:
    if value is None or isinstance(value, str):
        return value
    return ("t" if value else "f") if isinstance(value, bool) else str(value)
