"""What the server sends of a transaction is believed: ends without a beginning, keys by the stream's own identity."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Any

import psycopg
import pytest

from gdq.consumers.slot.slot import create_slot, slot_info
from gdq.consumers.slot.source import SlotSource
from tests.support.server import Database
from tests.support.slot import VIEWS, Scene, read_slot
from tests.support.slot_pair import run

pytestmark = pytest.mark.server

LARGE = "insert into item select i, repeat('x', 50) from generate_series({0}, {0} + 4999) i"
SUB_ABORTED = f"savepoint s; {LARGE.format(10000)}; rollback to s"


def ids(db: Database, **given: Any) -> list[Any]:
    return [(event.key or {}).get("id") for event in read_slot(db, **given)]


def confirmed(connection: psycopg.Connection[Any]) -> str:
    return str(slot_info(connection)[0].confirmed_lsn)


ONE, TWO, BOTH = (f"insert into item values {rows}" for rows in ("(1)", "(2)", "(1), (2)"))
PREPARE, COMMIT_IT, UNDO_IT = "prepare transaction '{gid}'", "commit prepared '{gid}'", "rollback prepared '{gid}'"


@pytest.mark.parametrize(
    "statements",
    [
        ["begin", ONE, SUB_ABORTED, TWO, "commit"],
        ["begin", SUB_ABORTED, BOTH, "commit"],
        ["begin", SUB_ABORTED, SUB_ABORTED, "savepoint a", SUB_ABORTED, "release a", BOTH, "commit"],
        ["begin", ONE, "savepoint a", SUB_ABORTED, "release a", TWO, "commit"],
        ["begin", "savepoint a", SUB_ABORTED, "insert into item values (9)", "rollback to a", BOTH, "commit"],
        ["begin", LARGE.format(20000), "rollback", BOTH],
        ["begin", LARGE.format(20000), SUB_ABORTED, "rollback", BOTH],
        ["begin", SUB_ABORTED, "savepoint a", LARGE.format(20000), "release a", SUB_ABORTED, "rollback", BOTH],
        ["begin", "savepoint a", LARGE.format(20000), "savepoint b", LARGE.format(30000), "rollback", BOTH],
        ["begin", SUB_ABORTED, BOTH, PREPARE, COMMIT_IT],
        ["begin", LARGE.format(20000), PREPARE, UNDO_IT, BOTH],
        ["begin", SUB_ABORTED, "commit", BOTH],
        ["begin", SUB_ABORTED, PREPARE, ONE, COMMIT_IT, TWO],
    ],
    ids=str,
)
def test_rolled_back_before_the_slot_is_read(
    db: Database, slot_owner: psycopg.Connection[Any], statements: list[str]
) -> None:
    """From PostgreSQL 18 on the server then begins no stream, and sends its abort all the same."""
    run(slot_owner, [statement.format(gid=f"g_{db.name}") for statement in statements])
    assert ids(db) == [1, 2]
    assert read_slot(db) == []


@pytest.mark.long
def test_rolled_back_while_the_slot_is_read(db: Database, slot_owner: psycopg.Connection[Any]) -> None:
    """Blocks of a transaction have arrived before its savepoint is undone, and others commit in between."""
    with SlotSource(db.su_dsn, "q", "c") as source:

        def seen() -> list[Any]:
            return [(event.key or {})["id"] for batch in source.batches(once=True) for event in batch.events()]

        run(slot_owner, [f"begin; {LARGE.format(1)}; savepoint s; {LARGE.format(10000)}"])
        with db.connect() as other:
            run(other, ["insert into beside values (1)"])
            assert seen() == [1]
            run(slot_owner, ["rollback to s; savepoint s"])
            run(
                other,
                ["begin; " + "insert into beside select generate_series(10, 9000)", "insert into beside values (2)"],
            )
            assert seen() == []
            run(slot_owner, [f"{LARGE.format(30000)}; commit"])
            assert seen() == [*range(1, 5001), *range(30000, 35000)]
            run(other, ["rollback; insert into beside values (3)"])
            assert seen() == [3]


@pytest.mark.parametrize("end", ["commit", "rollback"])
@pytest.mark.parametrize("nothing", ["insert into unpublished values (1)", SUB_ABORTED, "savepoint s"])
def test_prepared_without_published_rows(
    db: Database, slot_owner: psycopg.Connection[Any], nothing: str, end: str
) -> None:
    """The position goes past the PREPARE, and the server sends the end alone, again at each start."""
    gid = f"none_{db.name}"
    run(slot_owner, [f"begin; {nothing}; prepare transaction '{gid}'", "insert into item values (1)"])
    run(slot_owner, [f"{end} prepared '{gid}'"])
    assert [ids(db), ids(db)] == [[1], []]
    run(slot_owner, ["insert into item values (2)"])
    assert [ids(db), ids(db)] == [[2], []]


def test_open_prepared_transaction_holds_only_its_own_log(db: Database, slot_owner: psycopg.Connection[Any]) -> None:
    """What was committed before the PREPARE is confirmed; what came after it is not given twice."""
    gid = f"open_{db.name}"
    with db.connect("su") as su:
        start = confirmed(su)
        run(
            slot_owner,
            ["insert into item values (1)", f"begin; insert into item values (2); prepare transaction '{gid}'"],
        )
        run(slot_owner, ["insert into item values (3)"])
        assert ids(db, max_events=1) == [1, 3]
        before = confirmed(su)
        assert su.execute("select %s::pg_lsn > %s::pg_lsn", [before, start]).fetchone() == (True,)
        run(slot_owner, ["insert into item values (4)"])
        assert [ids(db), confirmed(su)] == [[4], before]
        run(slot_owner, [f"commit prepared '{gid}'", "insert into item values (5)"])
        assert [ids(db), ids(db)] == [[2, 5], []]


def test_gid_that_is_used_again(db: Database, slot_owner: psycopg.Connection[Any]) -> None:
    gid = f"again_{db.name}"
    for number in (1, 2):
        run(slot_owner, [f"begin; insert into item values ({number}); prepare transaction '{gid}'"])
        assert ids(db) == []
        run(slot_owner, [f"{'rollback' if number == 1 else 'commit'} prepared '{gid}'"])
    assert ids(db) == [2]


@pytest.mark.long
def test_message_right_after_a_commit(db: Database, slot_owner: psycopg.Connection[Any]) -> None:
    """Its place is the end of its record, past the position of the commit before it."""
    run(slot_owner, ["insert into item values (1)"])
    assert ids(db) == [1]
    with SlotSource(db.su_dsn, "q", "c") as source, db.connect("su") as su:
        for number in range(20):
            # one call: nothing else is written in between
            su.execute("insert into item values (%s)", [100 + number])
            su.execute("select pg_logical_emit_message(false, 'one', 'x'), pg_logical_emit_message(false, 'two', 'x')")
            found = []
            for batch in source.batches(once=True):
                found += [event.op for event in batch.events()]
            assert found == ["insert", "message", "message"]
        su.execute("select pg_logical_emit_message(true, 'in', 'x')")
        assert [event.op for batch in source.batches(once=True) for event in batch.events()] == ["message"]


@pytest.mark.parametrize("max_events", [1, 10_000])
def test_message_is_given_once(db: Database, slot_owner: psycopg.Connection[Any], max_events: int) -> None:
    """However the batches are divided, also where each is read by a reader of its own."""
    with db.connect("su") as su:
        for number in range(6):
            su.execute("insert into item values (%s)", [number])
            su.execute("select pg_logical_emit_message(false, 'p', 'x')")
    found = []
    for _ in range(13):
        with SlotSource(db.su_dsn, "q", "c", max_events=max_events) as source:
            for batch in source.batches(once=True):
                found += [event.op for event in batch.events()]
                batch.commit()
                break
    assert found == ["insert", "message"] * 6


def test_time_of_an_origin_that_no_calendar_has(db: Database, slot_owner: psycopg.Connection[Any]) -> None:
    name = f"{db.name}_far"
    with db.connect("su") as su:
        su.execute("select pg_replication_origin_create(%s), pg_replication_origin_session_setup(%s)", [name, name])
        for number, time in enumerate(["infinity", "20000-01-01", "2024-02-29"]):
            su.execute("begin")
            su.execute("insert into item values (%s)", [number])
            su.execute("select pg_replication_origin_xact_setup('0/1', %s)", [time])
            su.execute("commit")
        su.execute("select pg_replication_origin_session_reset()")
        su.execute("select pg_replication_origin_drop(%s)", [name])
    times = [event.time for event in read_slot(db)]
    assert [time.year for time in times] == [9999, 9999, 2024]
    assert times[2].astimezone(UTC).date() in (datetime(2024, 2, 29).date(), datetime(2024, 2, 28).date())


def test_newest_description_of_a_table_counts(db: Database, slot_owner: psycopg.Connection[Any]) -> None:
    """A table is described in a large open transaction, then anew for others, and not again at the commit."""
    with db.connect("su") as su, db.connect() as other, SlotSource(db.su_dsn, "q", "c") as source:

        def seen() -> list[Any]:
            return [event.new for batch in source.batches(once=True) for event in batch.events()]

        run(slot_owner, [f"begin; {LARGE.format(1)}"])
        run(other, ["insert into beside values (1)"])
        assert seen() == [{"id": 1}]
        su.execute("alter publication gdq_q set table item (id), beside")
        run(other, ["insert into item values (9001, 'y')"])
        assert seen() == [{"id": 9001}]
        run(slot_owner, ["commit"])
        assert len(seen()) == 5000
        run(other, ["insert into item values (9002, 'y')"])
        assert seen() == [{"id": 9002}]


def test_truncate_with_cascade(db: Database, slot_owner: psycopg.Connection[Any]) -> None:
    """Each published table that it empties has an event, in a transaction streamed in blocks too."""
    slot_owner.execute("alter table beside add item int references item")
    run(slot_owner, [f"begin; {LARGE.format(1)}; truncate item cascade; insert into item values (1); commit"])
    found = [(event.op, event.table) for event in read_slot(db)][5000:]
    assert sorted(found) == [
        ("insert", "public.item"),
        ("truncate", "public.beside"),
        ("truncate", "public.item"),
    ]


def test_interleaved_streams(db: Database, slot_owner: psycopg.Connection[Any]) -> None:
    """Several large transactions, with types and messages of their own, whose blocks come mixed."""
    slot_owner.execute("create type mood as enum ('sad', 'ok')")
    slot_owner.execute("alter table beside add m mood, add t text")
    statement = "insert into beside select i, 'ok', repeat('x', 50) from generate_series({0}, {0} + 999) i"
    with db.connect() as second, db.connect() as third:
        sessions: Sequence[psycopg.Connection[Any]] = (slot_owner, second, third)
        for session in sessions:
            session.execute("begin")
        for part in range(6):
            for number, session in enumerate(sessions):
                session.execute("savepoint s")
                session.execute(statement.format(number * 100_000 + part * 1000).encode())
                session.execute("select pg_logical_emit_message(true, 'part', %s)", [str(part)])
                session.execute("rollback to s" if (part + number) % 3 == 0 else "release s")
        slot_owner.execute("rollback")
        third.execute("commit")
        second.execute("commit")
    found = read_slot(db)
    rows = [(event.key or {})["id"] for event in found if event.op == "insert"]
    kept = [
        [number * 100_000 + p * 1000 + i for p in range(6) if (p + number) % 3 for i in range(1000)]
        for number in (2, 1)
    ]
    assert rows == [*kept[0], *kept[1]]
    assert len([event for event in found if event.op == "message"]) == 8
    assert {event.new["m"] for event in found if event.op == "insert" and event.new} == {"ok"}


def test_view_past_a_prepared_transaction_without_rows(scene: Scene) -> None:
    """The slot of a view takes ends without a beginning, and an open PREPARE holds only the log after it."""
    scene.make("grouped", VIEWS["grouped"], slot=False)
    create_slot(scene.su, "q", "grouped", ["public.fact"], two_phase=True)
    scene.refresh("grouped")
    gid = f"view_{scene.db.name}"
    scene.write("create table unpublished (id int)")
    scene.write("begin", "insert into unpublished values (1)", f"prepare transaction '{gid}'")
    scene.write("insert into fact (k, qty) values (1, 1)")
    assert scene.refresh("grouped").action == "delta"
    before = confirmed(scene.su)
    scene.write(f"commit prepared '{gid}'", "insert into fact (k, qty) values (1, 2)")
    assert scene.refresh("grouped").action == "delta"
    assert confirmed(scene.su) != before
    scene.write("begin", "insert into fact (k, qty) values (7, 3)", f"prepare transaction '{gid}'")
    scene.write("insert into fact (k, qty) values (1, 4)")
    assert scene.refresh("grouped").action == "delta"
    scene.write("insert into fact (k, qty) values (1, 5)")
    assert scene.refresh("grouped").action == "delta"
    scene.write(f"commit prepared '{gid}'")
    assert scene.refresh("grouped").action == "delta"
    assert scene.refresh("grouped").action == "none"
