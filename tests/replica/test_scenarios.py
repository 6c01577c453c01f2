"""Scenarios of other replications, all of them at once: after every round each table is equal to the source's."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable
from typing import Any

import psycopg
import pytest

from gdq import compare_tables
from gdq.consumers.replica.replica import Replica
from gdq.consumers.replica.slot.slot_replica import SlotReplica
from gdq.consumers.slot.slot import create_slot, drop_slot
from gdq.sql_text import quote
from gdq.ticker import take_tick
from tests.replica.scenario import Scenario, read_scenarios
from tests.support.server import Database

pytestmark = pytest.mark.server

QUEUE = "scenarios"
# Of a tick after a statement.
_TICK_CHANCE = 0.1
COLUMNS = read_scenarios("columns")
ALL = [*COLUMNS, *read_scenarios("types"), *read_scenarios("rows"), *read_scenarios("tables")]
_TABLES = """
select format('%%I.%%I', n.nspname, c.relname) from pg_class c join pg_namespace n on n.oid = c.relnamespace
 where c.relnamespace = %s::regnamespace and c.relkind in ('r', 'p') and not c.relispartition
   and c.relname <> all (%s) order by 1"""
_COLUMNS = """
select a.attname::text from pg_attribute a
 where a.attrelid = %s::regclass and a.attnum > 0 and not a.attisdropped and a.attname <> all (%s) order by a.attnum"""


# A slot finds rows by a key that is checked at once, or by all their values.
_WITHOUT_IDENTITY = """
select t.relid::regclass::text
  from (select %(table)s::regclass union select relid from pg_partition_tree(%(table)s::regclass)) t(relid)
 where not exists (select from pg_index i where i.indrelid = t.relid and i.indisprimary and i.indimmediate)"""


class Stage:
    """Scenarios between two databases, in each of which one session runs all statements; `by_slot`: what feeds them."""

    def __init__(
        self, source: psycopg.Connection[Any], target: psycopg.Connection[Any], *, by_slot: bool = False
    ) -> None:
        self.source, self.target, self.by_slot = source, target, by_slot
        self.scenarios = [one for one in ALL if self._can_play(one) and not (by_slot and one.queue)]
        self.tables: dict[str, Scenario] = {}
        self.chance: random.Random | None = None

    def _can_play(self, scenario: Scenario) -> bool:
        return self.source.execute(f"select {scenario.needs}".encode()).fetchone() == (True,)

    def set_up(self) -> None:
        """Make the tables on both sides, and capture them."""
        for extension in ("citext", "hstore"):
            if self.target.execute("select from pg_available_extensions where name = %s", [extension]).rowcount:
                self.target.execute(f"create extension {extension}".encode())
        self.source.execute("select gdq.create_queue(%s)", [QUEUE])
        for scenario in self.scenarios:
            for place, own in ((self.source, scenario.source), (self.target, scenario.target)):
                place.execute(f"create schema {scenario.name}".encode())
                self.run(place, scenario, *scenario.both, *own)
            for (name,) in self.source.execute(_TABLES, [scenario.name, scenario.plain]).fetchall():
                self.tables[name] = scenario
        if self.by_slot:
            for name in self.tables:
                for (table,) in self.source.execute(_WITHOUT_IDENTITY, {"table": name}).fetchall():
                    self.source.execute(f"alter table {table} replica identity full".encode())
            create_slot(self.source, QUEUE, "mirror", list(self.tables))
            return
        for name in self.tables:
            self.source.execute("select gdq.add_table(%s, %s::regclass)", [QUEUE, name])

    def play(self, number: int) -> None:
        """Run a round of every scenario that has one."""
        for scenario in self.scenarios:
            if number < len(scenario.rounds):
                self.run(self.source, scenario, *scenario.rounds[number])

    def run(self, place: psycopg.Connection[Any], scenario: Scenario, *statements: str) -> None:
        place.execute(f"set search_path = {scenario.name}, public".encode())
        for statement in statements:
            place.execute(statement.encode())
            if place is self.source and self.chance is not None and self.chance.random() < _TICK_CHANCE:
                take_tick(place, QUEUE)
        place.execute("set search_path = pg_catalog")

    def differing(self) -> dict[str, tuple[Counter[str], Counter[str]]]:
        """The tables whose rows are not those of the source: what only the source has, what only the target has."""
        found = {}
        for table, scenario in self.tables.items():
            columns = [quote(name) for (name,) in self.source.execute(_COLUMNS, [table, scenario.own])]
            here, there = (self._rows(place, table, columns) for place in (self.source, self.target))
            if here != there:
                found[table] = (here - there, there - here)
        return found

    def _rows(self, place: psycopg.Connection[Any], table: str, columns: list[str]) -> Counter[str]:
        row = place.execute("select relkind::text from pg_class where oid = %s::regclass", [table]).fetchone()
        only = "" if row == ("p",) else "only"
        rows = place.execute(f"select row({', '.join(columns)})::text from {only} {table}".encode()).fetchall()
        return Counter(text for (text,) in rows)


def differing_rounds(stage: Stage, replicate: Callable[[], object]) -> dict[str, tuple[Counter[str], Counter[str]]]:
    """Play all rounds, each followed by a run of the replica; the tables that differ after one."""
    differing: dict[str, tuple[Counter[str], Counter[str]]] = {}
    for number in range(-1, max(len(scenario.rounds) for scenario in ALL)):
        if number >= 0:
            stage.play(number)
        replicate()
        differing |= {f"{table}, round {number}": rows for table, rows in stage.differing().items()}
    return differing


def check_shown(stage: Stage) -> None:
    for scenario in stage.scenarios:
        if scenario.shown:
            stage.target.execute(f"set search_path = {scenario.name}".encode())
            shown = stage.target.execute(scenario.shown.encode()).fetchall()
            assert [" | ".join(map(str, row)) for row in shown] == scenario.rows, scenario.name


@pytest.mark.parametrize("seed", [None, pytest.param(1, marks=pytest.mark.long)])
def test_scenarios(db: Database, empty_db: Database, seed: int | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """`seed`: each round is cut at random into batches, of which the source begins with the next one early.

    In the end all tables are copied again, in parts of two rows.
    """
    with db.connect() as source, empty_db.connect("su") as target:
        stage = Stage(source, target)
        stage.set_up()
        if seed is not None:
            stage.chance = random.Random(seed)
            for name in ("batches.MAX_EVENTS", "batch_apply._AHEAD_ROWS"):
                monkeypatch.setattr(f"gdq.consumers.replica.{name}", 1)

        def replicate(**options: Any) -> None:
            with Replica(db.dsn, empty_db.su_dsn, QUEUE, "mirror", **options) as replica:
                list(replica.run())

        assert differing_rounds(stage, replicate) == {}
        check_shown(stage)
        names = [name for (name,) in source.execute("select table_name from gdq.table_info(%s)", [QUEUE]).fetchall()]
        replicate(copy_again=names, chunk_rows=2)
        assert stage.differing() == {}
    compared = compare_tables(
        db.dsn, empty_db.su_dsn, [f"{scenario.name}.t" for scenario in COLUMNS], queue=QUEUE, replica="mirror"
    )
    assert [table for table in compared if not table.equal] == []


def test_scenarios_by_slot(db: Database, empty_db: Database) -> None:
    with db.connect("su") as source, empty_db.connect("su") as target:
        stage = Stage(source, target, by_slot=True)
        stage.set_up()

        def replicate() -> None:
            with SlotReplica(db.su_dsn, empty_db.su_dsn, QUEUE, "mirror") as replica:
                list(replica.run())

        try:
            assert differing_rounds(stage, replicate) == {}
            check_shown(stage)
        finally:
            drop_slot(source, QUEUE, "mirror")
