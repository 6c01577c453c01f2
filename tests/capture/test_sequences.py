"""Values of sequences, published with ticks: never behind a transaction of the batch, and in nobody's way."""

from __future__ import annotations

import json
import threading
from typing import Any

import psycopg
import pytest
from psycopg import errors

import gdq
from gdq.sequence import SequenceValue, add_sequence, remove_sequence, sequence_info
from tests.support.events import Tap
from tests.support.programs import gdq as command
from tests.support.server import Database


@pytest.fixture
def publisher(tap: Tap) -> Tap:
    """A tap whose owner may read the sequences of the application."""
    tap.write("alter default privileges in schema shop grant select on sequences to gdq_owner")
    return tap


def value(connection: psycopg.Connection[Any], query: str) -> Any:
    row = connection.execute(query.encode()).fetchone()
    return row[0] if row else None


def batch_values(db: Database, *, changed: bool = True) -> dict[str, tuple[int | None, bool | None]]:
    """What the next batches of `c` bring, up to a new tick."""
    seen: dict[str, tuple[int | None, bool | None]] = {}
    with db.connect() as connection, gdq.Consumer(connection, "q", "c") as consumer:
        for batch in consumer.batches(once=True):
            seen |= {s.sequence_name: (s.last_value, s.is_called) for s in batch.sequences(changed=changed)}
    return seen


def test_values_come_with_the_batch_that_changed_them(publisher: Tap) -> None:
    publisher.write(
        "create sequence plain",
        "create sequence cached cache 20",
        "create sequence down increment -1",
        "create sequence round maxvalue 3 cycle",
        "create table t (id int generated always as identity primary key, n serial)",
    )
    names = ["plain", "cached", "down", "round", "t_id_seq", "t_n_seq"]
    for name in names:
        assert add_sequence(publisher.owner, "q", f"shop.{name}") is True
    assert add_sequence(publisher.owner, "q", "shop.plain") is False
    fresh = {f"shop.{name}": (-1 if name == "down" else 1, False) for name in names}
    assert batch_values(publisher.db) == fresh
    assert batch_values(publisher.db) == {}
    assert batch_values(publisher.db, changed=False) == fresh
    publisher.write(
        "select nextval('cached')",
        "select nextval('down'), nextval('down')",
        "select nextval('round') from generate_series(1, 4)",
        "insert into t default values",
    )
    assert batch_values(publisher.db) == {
        "shop.cached": (20, True),
        "shop.down": (-2, True),
        "shop.round": (1, True),
        "shop.t_id_seq": (1, True),
        "shop.t_n_seq": (1, True),
    }
    publisher.write("select setval('cached', 5)", "alter sequence plain restart with 70", "truncate t restart identity")
    assert batch_values(publisher.db) == {
        "shop.cached": (5, True),
        "shop.plain": (70, False),
        "shop.t_id_seq": (1, False),
        "shop.t_n_seq": (1, False),
    }


def test_copy_is_ready_to_take_over(publisher: Tap) -> None:
    """setval() with what is published leaves a copy where the source stands."""
    publisher.write("create sequence a", "create sequence b start 5 increment 3", "select nextval('a')")
    for name in "ab":
        add_sequence(publisher.owner, "q", f"shop.{name}")
    published = batch_values(publisher.db)
    publisher.owner.execute("create sequence copy_a")
    publisher.owner.execute("create sequence copy_b start 5 increment 3")
    for name in "ab":
        publisher.owner.execute(f"select setval('copy_{name}', %s, %s)".encode(), published[f"shop.{name}"])
        assert value(publisher.owner, f"select nextval('copy_{name}')") == value(
            publisher.app, f"select nextval('{name}')"
        )


def test_never_behind_a_transaction_of_the_batch(publisher: Tap) -> None:
    """Writers on cached sequences, batches as fast as they come."""
    publisher.write("create sequence s cache 7", "create table t (id int primary key default nextval('s'), w int)")
    publisher.add("shop.t")
    add_sequence(publisher.owner, "q", "shop.s")
    stop = threading.Event()

    def write() -> None:
        with publisher.db.connect("app") as writer:
            while not stop.is_set():
                writer.execute("insert into t values (default, 1), (default, 1)")

    writers = [threading.Thread(target=write) for _ in range(2)]
    for writer in writers:
        writer.start()
    batches = highest = published = 0
    try:
        with publisher.db.connect() as connection, gdq.Consumer(connection, "q", "c") as consumer:
            while batches < 25:
                for batch in consumer.batches(once=True):
                    highest = max(highest, *(int((event.key or {})["id"]) for event in batch.events()), 0)
                    published = max(published, *(s.last_value or 0 for s in batch.sequences()), 0)
                    assert published >= highest
                    batches += 1
    finally:
        stop.set()
        for writer in writers:
            writer.join()
    assert highest > 100


@pytest.mark.parametrize(
    "ddl", ["drop sequence s", "alter sequence s rename to r", "truncate t restart identity", "drop table t"]
)
def test_tick_does_not_wait_for_ddl(publisher: Tap, ddl: str) -> None:
    """A sequence that an open transaction holds is unknown at that tick, the others are not."""
    publisher.write("create table t (id int)", "create sequence s owned by t.id", "create sequence other")
    for name in ("s", "other"):
        add_sequence(publisher.owner, "q", f"shop.{name}")
    batch_values(publisher.db)
    publisher.write("select nextval('s'), nextval('other')")
    with publisher.app.transaction(force_rollback=True):
        publisher.write(ddl)
        assert batch_values(publisher.db) == {"shop.s": (None, None), "shop.other": (1, True)}
    assert batch_values(publisher.db) == {"shop.s": (1, True)}


def test_dropped_renamed_and_revoked(publisher: Tap) -> None:
    publisher.write("create sequence gone", "create sequence named", "create sequence closed")
    for name in ("gone", "named", "closed"):
        add_sequence(publisher.owner, "q", f"shop.{name}")
    assert {info.last_value for info in sequence_info(publisher.owner, "q")} == {None}
    batch_values(publisher.db)
    publisher.write(
        "drop sequence gone",
        "alter sequence named rename to renamed",
        "revoke select on sequence closed from gdq_owner",
        "select nextval('renamed'), nextval('closed')",
    )
    assert batch_values(publisher.db) == {"shop.renamed": (1, True), "shop.closed": (None, None)}
    listed = [(info.sequence_name, info.last_value, info.state) for info in sequence_info(publisher.owner)]
    assert listed == [("shop.closed", None, "unreadable"), ("shop.gone", None, "dropped"), ("shop.renamed", 1, "ok")]
    assert [remove_sequence(publisher.owner, "q", f"shop.{name}") for name in ("gone", "named", "renamed")] == [
        True,
        False,
        True,
    ]
    publisher.write("grant select on sequence closed to gdq_owner")
    assert batch_values(publisher.db) == {"shop.closed": (1, True)}


def test_refusals(publisher: Tap) -> None:
    publisher.write("create table t (id int)", "create sequence secret", "revoke all on sequence secret from gdq_owner")
    publisher.owner.execute("create temp sequence mine")
    for name in ("shop.t", "mine"):
        with pytest.raises(errors.WrongObjectType):
            add_sequence(publisher.owner, "q", name)
    with pytest.raises(errors.InsufficientPrivilege, match=r"may not read sequence shop\.secret"):
        add_sequence(publisher.owner, "q", "shop.secret")
    with pytest.raises(errors.UndefinedObject):
        add_sequence(publisher.owner, "nothing", "shop.secret")


def test_values_outlive_rotation(publisher: Tap) -> None:
    """Rows are only inserted; what a position may still ask for is carried forward, and the rest goes."""
    publisher.write("create sequence s")
    publisher.owner.execute("alter table gdq.tick alter created_at set default clock_timestamp() - interval '1 hour'")
    add_sequence(publisher.owner, "q", "shop.s")
    for number in range(1, 40):
        publisher.write("select nextval('s')")
        publisher.owner.execute("select gdq.force_tick('q')")
        if number == 30:
            assert batch_values(publisher.db) == {"shop.s": (30, True)}
        publisher.owner.execute("select gdq.rotate_control(true, 1)")
    assert 9 <= value(publisher.owner, "select count(*) from gdq.sequence_tick") < 30
    assert batch_values(publisher.db) == {"shop.s": (39, True)}
    for _ in range(4):
        publisher.owner.execute("select gdq.rotate_control(true, 1)")
    assert batch_values(publisher.db, changed=False) == {"shop.s": (39, True)}
    dead = "select sum(pg_stat_get_dead_tuples(relid) + pg_stat_get_tuples_deleted(relid))::int"
    assert value(publisher.owner, f"{dead} from pg_partition_tree('gdq.sequence_tick')") == 0


def test_command(publisher: Tap) -> None:
    publisher.write("create sequence s", "create table t (id int primary key default nextval('s'))")
    publisher.add("shop.t")
    dsn = publisher.db.dsn
    assert command("add-sequence", "q", "shop.s", dsn=dsn).returncode == 0
    publisher.write("insert into t values (default)")
    done = command("consume", "q", "c", "--once", dsn=dsn)
    lines = [json.loads(line) for line in done.stdout.splitlines()]
    assert [(line["op"], line["table"], line["new"]) for line in lines] == [
        ("insert", "shop.t", {"id": 1}),
        ("sequence", "shop.s", {"last_value": 1, "is_called": True}),
    ]
    assert lines[0].keys() == lines[1].keys()
    (listed,) = json.loads(command("sequences", "q", "--json", dsn=dsn).stdout)
    assert (listed["sequence_name"], listed["last_value"], listed["state"]) == ("shop.s", 1, "ok")
    assert command("remove-sequence", "q", "shop.s", dsn=dsn).returncode == 0
    assert json.loads(command("sequences", "--json", dsn=dsn).stdout) == []


def test_python_gives_values(publisher: Tap) -> None:
    publisher.write("create sequence s")
    add_sequence(publisher.owner, "q", "shop.s")
    with publisher.db.connect() as connection, gdq.Consumer(connection, "q", "c") as consumer:
        (batch,) = consumer.batches(once=True)
        with pytest.raises(gdq.StaleBatch):
            batch.sequences()
    assert SequenceValue("shop.s", 1, False) == SequenceValue("shop.s", 1, is_called=False)
