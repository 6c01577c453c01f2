"""Publications that somebody alters, and what readers and commands say of that."""

from __future__ import annotations

import json
from typing import Any

import psycopg
import pytest

from gdq.consumers.slot.slot import create_slot, drop_slot, slot_info
from gdq.consumers.slot.source import SlotSource
from tests.support.programs import gdq
from tests.support.server import Database
from tests.support.waiting import until

pytestmark = pytest.mark.server


def test_publication_that_somebody_alters(
    db: Database, su: psycopg.Connection[Any], caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What it says is honoured, and told by reader and list, as long as it lasts and after it, too."""
    monkeypatch.setattr("gdq.consumers.slot.source._PUBLICATION_SECONDS", 0)
    create = "create table {0} (id int primary key, n int)"
    for name in ("more", "parted_1"):
        su.execute(create.format(name).encode())
    for statement, expected in ALTERED:
        caplog.clear()
        su.execute(statement.encode())
        (listed,) = slot_info(su)
        assert listed.narrowed == expected, statement
        with SlotSource(db.su_dsn, "q", "c") as source:
            assert "; ".join(source.narrowed) == (expected or "")
        assert (f"publication gdq_q does not send everything: {expected}" in caplog.text) == (expected is not None)


GAP = "was taken out or filtered and published again: changes in between are missing"


OPTIONS = "its options were altered: operations may have been missing for a while"


ALTERED: tuple[tuple[str, str | None], ...] = (
    ("alter publication gdq_q add table more", None),
    ("alter publication gdq_q drop table more", None),
    (
        "alter publication gdq_q set table item where (id > 5)",
        f"rows of public.item only where (id > 5); public.item {GAP}",
    ),
    ("alter publication gdq_q set table item (id, n)", f"public.item without name; public.item {GAP}"),
    ("alter publication gdq_q drop table item", "public.item is not published any more"),
    ("alter publication gdq_q add table item", f"public.item {GAP}"),
    ("alter publication gdq_q set (publish = 'insert, truncate')", f"no UPDATE, DELETE; public.item {GAP}"),
    (
        "alter publication gdq_q set (publish = 'insert, update, delete, truncate')",
        f"public.item {GAP}; {OPTIONS}",
    ),
    ("comment on publication gdq_q is 'mine'", None),
    ("alter publication gdq_q set table item where (n is null)", "rows of public.item only where (n IS NULL)"),
    ("alter publication gdq_q set table item", None),
)


def test_names_that_must_be_quoted(db: Database, su: psycopg.Connection[Any]) -> None:
    su.execute("""create schema "My Shop"; create table "My Shop"."Item's" ("N" int primary key)""")
    create_slot(su, "quoted", "c", ['"My Shop"."Item\'s"'])
    try:
        su.execute("""insert into "My Shop"."Item's" values (1)""")
        assert slot_info(su)[-1].narrowed is None
        with SlotSource(db.su_dsn, "quoted", "c") as source:
            (event,) = [event.in_json() for batch in source.batches(once=True) for event in batch.events()]
        assert (event.table, event.key) == ('"My Shop"."Item\'s"', {"N": 1})
        su.execute("""alter publication gdq_quoted drop table "My Shop"."Item's\"""")
        assert slot_info(su)[-1].narrowed == '"My Shop"."Item\'s" is not published any more'
    finally:
        drop_slot(su, "quoted", "c")


def test_what_a_new_slot_is_made_for(db: Database, su: psycopg.Connection[Any]) -> None:
    """A publication's first slot begins with what it has; names and drops of tables take nothing away."""
    su.execute("create table root (id int primary key, gone int) partition by range (id)")
    su.execute("create table leaf partition of root for values from (0) to (9)")
    su.execute("alter publication gdq_q set table item, root")
    su.execute("alter publication gdq_q set (publish_via_partition_root = false)")
    (listed,) = slot_info(su)
    assert "publish_via_partition_root is off" in str(listed.narrowed)
    su.execute("alter publication gdq_q set (publish_via_partition_root = true)")
    su.execute("select pg_drop_replication_slot('gdq_q_c')")
    create_slot(su, "q", "c")
    assert slot_info(su)[0].narrowed is None
    su.execute("alter table root rename to trunk")
    su.execute("alter table trunk drop gone")
    su.execute("alter table item set schema gdq")
    su.execute("drop table trunk")
    assert slot_info(su)[0].narrowed is None
    su.execute("alter publication gdq_q drop table gdq.item")
    assert slot_info(su)[0].narrowed == "gdq.item is not published any more"


def test_running_reader_says_what_is_taken_out(
    db: Database, su: psycopg.Connection[Any], caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What was written before comes whole, what comes after is what the filter leaves."""
    monkeypatch.setattr("gdq.consumers.slot.source._PUBLICATION_SECONDS", 0)
    su.execute("alter table item replica identity default")
    with SlotSource(db.su_dsn, "q", "c") as source:
        assert source.narrowed == []
        su.execute("insert into item values (1, 'a', 1)")
        su.execute("alter publication gdq_q set table item (id, name) where (id > 5)")
        su.execute("insert into item values (2, 'a', 2), (6, 'b', 6)")
        found = [event.new for batch in source.batches(once=True) for event in batch.events()]
        assert found == [{"id": 1, "name": "a", "n": 1}, {"id": 6, "name": "b"}]
        assert source.narrowed[:2] == ["rows of public.item only where (id > 5)", "public.item without n"]
        assert caplog.text.count("does not send everything") == 1
        until(lambda: list(source.batches(timeout=0)) == [])
        assert caplog.text.count("does not send everything") == 1


def test_commands_tell_of_a_publication_that_was_altered(db: Database, su: psycopg.Connection[Any]) -> None:
    su.execute("alter publication gdq_q drop table item")
    done = gdq("consume", "q", "c", "--source", "slot", "--once", dsn=db.su_dsn)
    assert done.returncode == 0
    assert len(done.stderr.splitlines()) == 1
    assert "publication gdq_q does not send everything: public.item is not published any more" in done.stderr
    (listed,) = json.loads(gdq("slots", "--json", dsn=db.su_dsn).stdout)
    assert listed["narrowed"] == "public.item is not published any more"
    su.execute("drop publication gdq_q")
    done = gdq("consume", "q", "c", "--source", "slot", "--once", dsn=db.su_dsn)
    assert done.returncode == 1
    assert done.stderr.startswith("Error: there is no publication gdq_q any more")
