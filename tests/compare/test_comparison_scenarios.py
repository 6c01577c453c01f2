"""Queue and slot say the same in what other systems' tests have found to be hard."""

from __future__ import annotations

import re
import secrets
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack

import psycopg
import pytest

from gdq.conninfo import connect
from gdq.consumer import Consumer
from gdq.consumers.slot.source import SlotSource
from gdq.embedded.server import EmbeddedServer
from gdq.errors import ResyncRequired
from gdq.installer.install import install
from gdq.source import BatchSource, Event
from tests.support.server import Database, _temporary
from tests.support.slot_pair import Compared, Pair, compare, watched
from tests.support.slot_scenario import Scenario
from tests.support.slot_scenarios import SCENARIOS

pytestmark = pytest.mark.server

_OPS = {"I": "insert", "U": "update", "D": "delete", "T": "truncate"}

# The plugin does not tell which columns are the key, and the catalog knows those of today only.
_UNKNOWN_KEY = {"test_decoding": "key_column_renamed"}

Played = tuple[Pair, dict[str, Compared], dict[str, psycopg.Error]]


@pytest.fixture(scope="module")
def played(server: EmbeddedServer, template: str) -> Iterator[Played]:
    """All scenarios, one after the other, read together."""
    for db in _temporary(server, template):
        schema: list[str] = []
        failed: dict[str, psycopg.Error] = {}
        for scenario in SCENARIOS:
            schema += [f"create schema {scenario.name}", f"set search_path = {scenario.name}", *scenario.tables]
        with watched(db, [*schema, "reset search_path"], (), others=True) as pair:
            for scenario in SCENARIOS:
                try:
                    play(db, scenario)
                except psycopg.Error as error:  # the scenario's own test raises it
                    failed[scenario.name] = error
            yield pair, pair.outcomes(), failed


def play(db: Database, scenario: Scenario) -> None:
    with ExitStack() as stack:
        sessions: dict[str, psycopg.Connection[object]] = {}
        for line in scenario.script:
            number, statement = line.split(": ", 1) if re.match(r"\d: ", line) else ("1", line)
            if number not in sessions:
                sessions[number] = stack.enter_context(db.connect())
                sessions[number].execute(f"set search_path = {scenario.name}".encode())
            if not statement.startswith("copy "):
                sessions[number].execute(statement.encode(sessions[number].info.encoding))
                continue
            command, _, rows = statement.partition("\n")
            with sessions[number].cursor() as cursor, cursor.copy(command.encode()) as copy:
                copy.write(rows)


def of(scenario: Scenario, outcome: Compared) -> Compared:
    """What the outcome has of one scenario."""
    schema = f"{scenario.name}."
    queue, slot = (
        [event for event in events if (event.table or "").startswith(schema)]
        for events in (outcome.queue, outcome.slot)
    )
    facts = {name: one for name, one in outcome.tables.items() if name.startswith(schema)}
    return compare(queue, slot, facts, outcome.plugin)


def _of_partition(event: Event, outcome: Compared) -> bool:
    """Whether a TRUNCATE of a partitioned table has come for one of its partitions too."""
    return event.op == "truncate" and outcome.tables[event.table or ""].root is not None


@pytest.mark.parametrize("scenario", SCENARIOS, ids=lambda scenario: scenario.name)
def test_scenario(played: Played, scenario: Scenario) -> None:
    pair, outcomes, failed = played
    if scenario.name in failed:
        raise failed[scenario.name]
    for plugin, outcome in outcomes.items():
        if _UNKNOWN_KEY.get(plugin) == scenario.name:
            continue
        own = of(scenario, outcome)
        assert own.errors == [], plugin
        expected = {_OPS[part[0]]: int(part[1:]) for part in scenario.counts.split()}
        for side, events in (("queue", own.queue), (plugin, own.slot)):
            counted = [event for event in events if event.op in _OPS.values() and not _of_partition(event, own)]
            assert Counter(event.op for event in counted) == expected, side
        for table, path, rows, replayed in pair.states(own) if scenario.rows else ():
            assert replayed == rows, (table, path, plugin)


def test_nothing_else_differs(played: Played) -> None:
    """Over all scenarios, where transactions of several tables are whole."""
    for plugin, outcome in played[1].items():
        unknown = f" of {_UNKNOWN_KEY.get(plugin)}."
        assert [error for error in outcome.errors if unknown not in error] == [], plugin


@pytest.mark.parametrize("ddl", ["add w int default 7", "alter v type bigint using 1"])
def test_rows_that_change_without_events(db: Database, ddl: str) -> None:
    """DDL that changes rows is a gap for a reader of the queue; a slot says nothing of it."""
    table = ["create table t (id int primary key, v text)"]
    with watched(db, table, ["t"], consumer="gap") as pair, db.connect() as owner:
        owner.execute("insert into t values (1, '1')")
        owner.execute(f"alter table t {ddl}".encode())
        with pytest.raises(ResyncRequired, match="rows changed without events"):
            pair.outcome()
        with SlotSource(db.su_dsn, "q", "gap") as source:
            found = [event.in_json() for batch in source.batches(once=True) for event in batch.events()]
        assert [event.op for event in found] == ["insert"]


@pytest.fixture
def latin(server: EmbeddedServer, template: str) -> Iterator[Database]:
    """A database whose encoding is not UTF8, with gdq installed."""
    name = f"test_latin_{secrets.token_hex(4)}"
    with psycopg.connect(server.conninfo(), autocommit=True) as su:
        su.execute(f"create database {name} owner gdq_owner template template0 encoding LATIN1 locale 'C'".encode())
        try:
            db = Database(server, name)
            install(db.dsn)
            with db.connect("su") as own:
                own.execute("select gdq.create_event_triggers()")
            yield db
        finally:
            su.execute(f"drop database {name} with (force)".encode())


def test_database_in_another_encoding(latin: Database) -> None:
    """Values, names and messages beyond ASCII, of clients in either encoding."""
    table = 'create table "größe" ("schlüssel" int primary key, v text, j jsonb)'
    with watched(latin, [table, 'alter table "größe" replica identity full'], ['"größe"'], consumer="latin") as pair:
        for encoding in ("UTF8", "LATIN1"):
            with latin.connect(client_encoding=encoding) as client:
                number = len(encoding)
                client.execute('insert into "größe" values (%s, %s, %s)', [number, "aé¡ÿ", '{"é": "ü"}'])
                client.execute('update "größe" set v = v || %s', ["ß"])
                client.execute("select pg_logical_emit_message(false, 'prüfung', %s::text)", ["Ã©"])
                client.execute("select gdq.insert_event('q', 'prüfung', %s)", ['{"é": "Ã©"}'])
        outcome = pair.outcome()
        assert outcome.errors == []
        assert Counter(event.op for event in outcome.slot) == {"insert": 2, "update": 3, "message": 2}
        assert {event.table for event in outcome.slot if event.table} == {'public."größe"'}
        images = [event.new for event in outcome.slot if event.op == "insert"]
        assert images == [{"schlüssel": n, "v": "aé¡ÿ", "j": '{"é": "ü"}'} for n in (4, 6)]
        messages = [event.new for event in outcome.slot if event.op == "message"]
        assert messages == [{"type": "prüfung", "data": "Ã©"}] * 2
        for name, path, rows, replayed in pair.states(outcome):
            assert replayed == rows, (name, path)
        with connect(latin.dsn) as given:
            assert given.info.encoding == "utf-8"
        # also over connections that come with the database's own encoding
        with latin.connect() as owner, latin.connect("su") as su:
            owner.execute("insert into \"größe\" values (9, 'ÿ', '[\"ü\"]')".encode("latin1"))
            with SlotSource(su, "q", "latin") as slot:
                readers: tuple[BatchSource, ...] = (Consumer(owner, "q", "latin"), slot)
                for reader in readers:
                    (rows,) = [batch.arrow('public."größe"').to_pylist() for batch in reader.batches(once=True)]
                    assert [(row["new_v"], row["new_j"]) for row in rows] == [("ÿ", '["ü"]')]
