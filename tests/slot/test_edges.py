"""Slots beside others of the server, keys that are large or special, and readers of a busy server."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

import psycopg
import pytest
from psycopg import sql

from gdq.consumers.slot.replication import Replication
from gdq.consumers.slot.slot import create_slot, drop_slot, slot_info, slot_of_view
from gdq.consumers.slot.source import SlotSource
from gdq.embedded.server import EmbeddedServer
from gdq.errors import GdqError
from tests.support.server import Database, chosen_binaries
from tests.support.slot import VIEWS, Scene
from tests.support.waiting import SECONDS

pytestmark = pytest.mark.server


@pytest.fixture
def su(empty_db: Database) -> Iterator[psycopg.Connection[Any]]:
    with empty_db.connect("su") as connection:
        yield connection
        for info in slot_info(connection):
            connection.execute("select pg_drop_replication_slot(%s)", [info.slot_name])


def read(db: Database) -> list[Any]:
    with SlotSource(db.su_dsn, "q", "c") as source:
        return [event.in_json() for batch in source.batches(once=True) for event in batch.events()]


def test_slot_of_another_database_stays(db: Database, su: psycopg.Connection[Any]) -> None:
    """Slots are the server's: the same queue may be in two databases."""
    su.execute("create table item (id int primary key)")
    create_slot(su, "q", "c", ["public.item"])
    with db.connect("su") as other:
        assert slot_of_view(other, "q", "c") is None
        with pytest.raises(GdqError, match="slot gdq_q_c is in database"):
            drop_slot(other, "q", "c")
    assert [info.slot_name for info in slot_info(su)] == ["gdq_q_c"]
    assert drop_slot(su, "q", "c")


@pytest.mark.parametrize(
    ("columns", "since"),
    [
        ("id int primary key deferrable", 150000),
        ("id int, n int generated always as (id + 1) stored primary key", 180000),
    ],
)
def test_keys_that_identify_no_row(su: psycopg.Connection[Any], columns: str, since: int) -> None:
    """The server refuses UPDATE and DELETE of such a published table."""
    su.execute(f"create table item ({columns})".encode())
    su.execute("insert into item (id) values (1)")
    if su.info.server_version >= since:
        with pytest.raises(GdqError, match="UPDATE and DELETE would fail"):
            create_slot(su, "q", "c", ["public.item"])
        su.execute("alter table item drop constraint item_pkey, add primary key (id)")
    create_slot(su, "q", "c", ["public.item"])
    assert su.execute("update item set id = 5").rowcount == 1
    assert drop_slot(su, "q", "c")


def test_no_slot_is_left_where_its_old_position_cannot_be_deleted(
    empty_db: Database, su: psycopg.Connection[Any]
) -> None:
    su.execute("create schema gdq_target create table slot_position (slot_name text primary key)")
    role = f"{empty_db.name}_maker"
    su.execute(sql.SQL("create role {} replication").format(sql.Identifier(role)))
    su.execute(sql.SQL("grant create on database {} to {}").format(*map(sql.Identifier, (empty_db.name, role))))
    su.execute(sql.SQL("grant create on schema public to {}").format(sql.Identifier(role)))
    su.execute(sql.SQL("set role {}").format(sql.Identifier(role)))
    su.execute("create table item (id int primary key)")
    try:
        with pytest.raises(psycopg.errors.InsufficientPrivilege, match="gdq_target"):
            create_slot(su, "q", "c", ["public.item"])
        assert slot_info(su) == []
        assert su.execute("select from pg_publication").rowcount == 0
    finally:
        su.execute("reset role")
        su.execute(sql.SQL("drop owned by {0}; drop role {0}").format(sql.Identifier(role)))


def test_large_keys(empty_db: Database, su: psycopg.Connection[Any]) -> None:
    """An update that leaves a key as it was that is stored outside of its row sends it as the old one only."""
    su.execute("create table item (id text primary key, body text, n int)")
    su.execute("alter table item alter id set storage external, alter body set storage external")
    create_slot(su, "q", "c", ["public.item"])
    key = "k" * 2400
    su.execute("insert into item values (%s, repeat('x', 9000), 1)", [key])
    su.execute("update item set n = 2")
    with SlotSource(empty_db.su_dsn, "q", "c") as source:
        for batch in source.batches(once=True):
            event = list(batch.events())[-1]
            row = batch.arrow("public.item").to_pylist()[-1]
            batch.commit()
    assert (event.op, event.key, event.new) == ("update", {"id": key}, {"id": key, "n": 2})
    assert (row["key_id"], row["new_id"], row["new_body"], row["new_n"]) == (key, key, None, 2)
    assert drop_slot(su, "q", "c")


def test_key_is_without_what_its_index_includes(empty_db: Database, su: psycopg.Connection[Any]) -> None:
    su.execute("create table item (n int, b int, a int, primary key (b, a) include (n))")
    create_slot(su, "q", "c", ["public.item"])
    su.execute("insert into item values (1, 2, 3)")
    (event,) = read(empty_db)
    assert event.key == {"b": 2, "a": 3}
    assert drop_slot(su, "q", "c")


def test_busy_server_hides_no_alteration(
    empty_db: Database, su: psycopg.Connection[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where others write all the time there is never a moment without a message."""
    su.execute("create table item (id int primary key); create table beside (id int)")
    create_slot(su, "q", "c", ["public.item"])
    monkeypatch.setattr("gdq.consumers.slot.source._PUBLICATION_SECONDS", 0.1)
    ended = threading.Event()

    def write() -> None:
        with empty_db.connect("su") as other:
            while not ended.wait(0.05):
                other.execute("insert into beside values (1)")

    writer = threading.Thread(target=write)
    with SlotSource(empty_db.su_dsn, "q", "c") as source:
        writer.start()
        try:
            su.execute("alter publication gdq_q set table beside where (id > 1)")
            assert list(source.batches(timeout=SECONDS, stop=lambda: bool(source.narrowed))) == []
        finally:
            ended.set()
            writer.join()
        assert "public.item is not published any more" in source.narrowed
    assert drop_slot(su, "q", "c")


def test_names_that_two_queues_could_have(empty_db: Database, su: psycopg.Connection[Any]) -> None:
    """A slot is of the queue with the longest name that fits; one of another would lose its publication."""
    su.execute("create table item (id int primary key)")
    create_slot(su, "shop", "audit", ["public.item"])
    create_slot(su, "shop", "eu_audit")
    with pytest.raises(GdqError, match="gdq_shop_eu_audit"):
        create_slot(su, "shop_eu", "mirror", ["public.item"])
    assert drop_slot(su, "shop", "eu_audit")
    create_slot(su, "shop_eu", "mirror", ["public.item"])
    with pytest.raises(GdqError, match="gdq_shop_eu_audit"):
        create_slot(su, "shop", "eu_audit")
    assert [info.publication for info in slot_info(su)] == ["gdq_shop", "gdq_shop_eu"]
    assert drop_slot(su, "shop", "audit")
    assert drop_slot(su, "shop_eu", "mirror")
    assert su.execute("select from pg_publication").rowcount == 0


def test_prepared_transaction_that_commits_between_snapshot_and_reading(scene: Scene) -> None:
    """It comes again, and so must all of it: a slot of two phases sends it when it is prepared."""
    scene.make("grouped", VIEWS["grouped"], slot=False)
    create_slot(scene.su, "q", "grouped", ["public.fact"], two_phase=True)
    scene.refresh("grouped")
    gid = f"two_{scene.db.name}"
    scene.write("begin", "insert into fact (k, qty) values (7, 3)", f"prepare transaction '{gid}'")
    scene.write("insert into fact (k, qty) values (1, 1)")

    def at(point: str) -> None:
        if point == "exported":
            scene.write(f"commit prepared '{gid}'")

    scene.refresher.at = at
    assert scene.refresh("grouped").action == "delta"
    scene.refresher.at = lambda _: None
    assert scene.refresh("grouped").action == "delta"
    assert scene.refresh("grouped").action == "none"


def test_publication_that_was_dropped_and_made_anew(empty_db: Database, su: psycopg.Connection[Any]) -> None:
    """PostgreSQL 18 leaves out what was written in between, older ones say that there was none."""
    su.execute("create table item (id int primary key)")
    create_slot(su, "q", "c", ["public.item"])
    for statement in (
        "drop publication gdq_q",
        "insert into item values (1)",
        "create publication gdq_q for table item",
        "insert into item values (2)",
    ):
        su.execute(statement.encode())
    assert "it was made anew" in str(slot_info(su)[0].narrowed)
    if su.info.server_version >= 180000:
        with SlotSource(empty_db.su_dsn, "q", "c") as source:
            found = [event.key for batch in source.batches(once=True) for event in batch.events()]
            assert (found, "it was made anew" in str(source.narrowed)) == ([{"id": 2}], True)
    else:
        with pytest.raises(psycopg.errors.UndefinedObject):
            read(empty_db)


def test_refused_in_bytes_that_are_no_text(empty_db: Database) -> None:
    """The server cuts a name off within a letter."""
    with pytest.raises(psycopg.OperationalError, match="aaa"):
        Replication(f"{empty_db.su_dsn} dbname={'a' * 62}ä", "gdq_q_c", {})


@pytest.mark.long
def test_server_ends_while_a_transaction_is_prepared(
    pytestconfig: pytest.Config, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It waits for readers until they have confirmed everything, which they cannot."""
    monkeypatch.setattr("gdq.consumers.slot.source._PUBLICATION_SECONDS", 0.5)
    settings: dict[str, str | float | bool] = {"wal_level": "logical", "max_prepared_transactions": 1}
    with EmbeddedServer(binaries=chosen_binaries(pytestconfig.getoption("--pg")), settings=settings) as server:
        dsn = server.conninfo()
        with psycopg.connect(dsn, autocommit=True) as su:
            su.execute("create table item (id int primary key)")
            create_slot(su, "q", "c", ["public.item"], two_phase=True)
            for statement in ("begin", "insert into item values (1)", "prepare transaction 'one'"):
                su.execute(statement.encode())

        def read_on() -> None:
            with suppress(psycopg.OperationalError), SlotSource(dsn, "q", "c") as source:
                assert list(source.batches(once=True)) == []
                begun.set()
                list(source.batches())

        begun = threading.Event()
        reader = threading.Thread(target=read_on, daemon=True)
        reader.start()
        assert begun.wait(SECONDS)
        control = server.binaries.program("pg_ctl")
        stop = ("stop", "--wait", "--mode=fast", f"--timeout={SECONDS:.0f}", f"--pgdata={server.data}")
        ended = server.account.run(control, *stop, check=False)
        if ended.returncode:
            server.crash()
        reader.join(SECONDS)
        assert (ended.returncode, reader.is_alive()) == (0, False)
