"""Tables that a queue and a slot watch from the same moment on, and what both say of the same statements."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import psycopg
from psycopg import sql

from gdq.consumer import Consumer, register_consumer
from gdq.consumers.compare.comparison import Comparison
from gdq.consumers.compare.rules import NO_NUMBERS, SLOT_PLUGINS, Mismatch, RuleTable, rule_tables
from gdq.consumers.slot.slot import create_slot, drop_slot
from gdq.consumers.slot.source import SlotSource
from gdq.source import Event
from tests.support.replay import Replay, Row
from tests.support.server import Database
from tests.support.slot_plugins import attach, detach, events_from

# What a value's text depends on is as docs/types.md says.
PINNED = "-c datestyle=ISO -c intervalstyle=postgres -c timezone=UTC -c bytea_output=hex -c lc_monetary=C"


@dataclass(frozen=True, slots=True)
class Compared:
    """What both paths gave of the same statements, and what differs; the slot has the output plugin `plugin`."""

    plugin: str
    queue: list[Event]
    slot: list[Event]
    tables: dict[str, RuleTable]
    comparison: Comparison
    differences: list[Mismatch]

    @property
    def errors(self) -> list[str]:
        return [str(one) for one in self.differences if one.rule is None]


@dataclass(frozen=True, slots=True)
class Pair:
    """The queue q with a consumer, and its slot; `others` are plugins with slots beside it.

    `unpublished`: tables that pgoutput does not give.
    """

    db: Database
    consumer: str
    others: tuple[str, ...] = ()
    unpublished: tuple[str, ...] = ()

    def outcome(self) -> Compared:
        """What has happened since the last time, of the pair itself; table names are those of today."""
        return self.outcomes()["pgoutput"]

    def outcomes(self) -> dict[str, Compared]:
        """The same by plugin, each beside the same events of the queue."""
        with Consumer(self.db.dsn, "q", self.consumer) as consumer:
            queue = [event.in_json() for batch in consumer.batches(once=True) for event in batch.events()]
        with SlotSource(self.db.su_dsn, "q", self.consumer) as source:
            slots = {"pgoutput": [event.in_json() for batch in source.batches(once=True) for event in batch.events()]}
        slots |= {plugin: events_from(self.db.su_dsn, plugin) for plugin in self.others}
        names = sorted({event.table for events in (queue, *slots.values()) for event in events if event.table})
        with self.db.connect("su") as su:
            known = [name for name in names if su.execute("select to_regclass(%s)", [name]).fetchone() != (None,)]
            facts = rule_tables(su, known)
        published = [event for event in queue if event.table not in self.unpublished]
        return {
            plugin: compare(published if plugin == "pgoutput" else queue, slot, facts, plugin)
            for plugin, slot in slots.items()
        }

    def states(self, outcome: Compared) -> Iterator[tuple[str, str, list[Any], list[Any]]]:
        """Each table's rows in the server, and after the events of each path, as sorted texts."""
        facts = outcome.tables
        # Without replica identity a slot does not say which row.
        roots = [table for table in sorted(facts) if not facts[table].root and table not in self.unpublished]
        # Slots give events in their order, the queue's may go back from one batch to the next.
        queue = sorted(outcome.queue, key=lambda event: event.id)
        slot = [self._whole(_rooted(event, facts), outcome) for event in outcome.slot]
        for path, events in (("queue", queue), ("slot", slot)):
            replay = Replay(event for event in events if event.table in roots)
            for table in roots:
                left_out = path == "slot" and outcome.plugin == "pgoutput"
                names = self._columns(table, facts[table].generated if left_out else frozenset())
                replayed = [{name: row.get(name) for name in names} for row in replay.rows(table)]
                rows = self._rows(table, names)
                if path == "slot" and outcome.plugin == "wal2json":
                    rows = [_without_no_numbers(row, facts[table].fractions) for row in rows]
                yield table, path, sorted(map(_texts, rows)), sorted(map(_texts, replayed))

    def _whole(self, event: Event, outcome: Compared) -> Event:
        """With the NULLs that test_decoding leaves out, without which the old row of a table without key is another."""
        if outcome.plugin != "test_decoding" or event.key or event.old is None or event.table is None:
            return event
        return replace(event, old={**dict.fromkeys(self._columns(event.table, frozenset())), **event.old})

    def _columns(self, table: str, without: frozenset[str]) -> list[str]:
        with self.db.connect() as owner:
            query = "select attname from pg_attribute where attrelid = %s::regclass and attnum > 0 and not attisdropped"
            return [name for (name,) in owner.execute(query, [table]) if name not in without]

    def _rows(self, table: str, names: list[str]) -> list[Row]:
        with self.db.connect(options=PINNED) as owner:
            # as the types' own output functions write them: a cast to text takes the padding of a character
            one = "case when {0} is not null then format('%s', {0}) end"
            columns = sql.SQL(", ").join(sql.SQL(one).format(sql.Identifier(name)) for name in names)
            rows = owner.execute(sql.SQL("select {} from {}").format(columns, sql.SQL(table))).fetchall()
        return [dict(zip(names, row, strict=True)) for row in rows]


def compare(
    queue: Sequence[Event], slot: Sequence[Event], tables: dict[str, RuleTable], plugin: str = "pgoutput"
) -> Compared:
    comparison = Comparison(tables, plugin)
    return Compared(plugin, list(queue), list(slot), tables, comparison, list(comparison.differences(queue, slot)))


@contextmanager
def watched(
    db: Database,
    schema: Sequence[str],
    tables: Sequence[str],
    consumer: str = "c",
    *,
    others: bool = False,
    unpublished: Sequence[str] = (),
) -> Iterator[Pair]:
    """`schema` is made by the owner, then both paths watch `tables`; no slot outlives the block.

    No tables: all that the owner has outside of gdq's schemas,
    partitions by their roots, children before their parents. `others`: slots with the other output plugins too, as far
    as the server has them; they and the queue also watch `unpublished`.
    """
    attached: list[str] = []
    with db.connect() as owner, db.connect("su") as su:
        for statement in schema:
            owner.execute(statement.encode(owner.info.encoding))
        owner.execute("select gdq.create_queue('q')")
        for table in (*(tables or _made(owner)), *unpublished):
            owner.execute("select gdq.add_table('q', %s::regclass)", [table])
        register_consumer(owner, "q", consumer)
        # create_slot makes none over a table without replica identity
        published = ", ".join(tables or _made(owner))
        publish = f"create publication gdq_q for table {published} with (publish_via_partition_root = true)"
        su.execute(publish.encode(su.info.encoding))
        create_slot(su, "q", consumer)
        try:
            attached += [plugin for plugin in SLOT_PLUGINS[1:] if others and attach(su, plugin)]
            yield Pair(db, consumer, tuple(attached), tuple(f"public.{table}" for table in unpublished))
        finally:
            drop_slot(su, "q", consumer)
            for plugin in attached:
                detach(su, plugin)


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


def _rooted(event: Event, tables: dict[str, RuleTable]) -> Event:
    """The change of a partition as one of its root; a root's TRUNCATE has an event of its own."""
    root = tables[event.table].root if event.table in tables else None
    return replace(event, table=root) if root and event.op != "truncate" else event


def _without_no_numbers(row: Row, fractions: frozenset[str]) -> Row:
    """The row as wal2json gives it."""
    return {name: None if name in fractions and value in NO_NUMBERS else value for name, value in row.items()}


def _texts(row: dict[str, Any]) -> str:
    return str(sorted((name, _text(value)) for name, value in row.items()))


def _text(value: Any) -> str | None:
    if value is None or isinstance(value, str):
        return value
    return ("t" if value else "f") if isinstance(value, bool) else str(value)
