"""Keys and old rows are those of the stream's own identity: an index, FULL, or what it was when a change was made."""

from __future__ import annotations

from typing import Any

import psycopg
import pytest

from gdq.consumers.slot.slot import create_slot, drop_slot
from gdq.consumers.slot.source import SlotSource
from gdq.errors import GdqError
from tests.support.server import Database
from tests.support.slot import read_slot
from tests.support.slot_pair import run, watched

pytestmark = pytest.mark.server


def changes(db: Database) -> list[tuple[Any, ...]]:
    return [(event.op, event.key, event.old, event.new) for event in read_slot(db)]


def test_identity_of_another_index_than_the_key(db: Database, slot_owner: psycopg.Connection[Any]) -> None:
    """The key is what the stream has of each row, before and after."""
    slot_owner.execute("alter table item add code int not null unique")
    slot_owner.execute("alter table item replica identity using index item_code_key")
    run(slot_owner, ["insert into item values (1, 'a', 10)", "update item set id = 2", "update item set code = 20"])
    run(slot_owner, ["delete from item"])
    assert changes(db) == [
        ("insert", {"code": 10}, None, {"id": 1, "name": "a", "code": 10}),
        ("update", {"code": 10}, None, {"id": 2, "name": "a", "code": 10}),
        ("update", {"code": 20}, {"code": 10}, {"id": 2, "name": "a", "code": 20}),
        ("delete", {"code": 20}, {"code": 20}, None),
    ]


@pytest.mark.long
@pytest.mark.parametrize("late", [False, True])
def test_identity_that_changes(db: Database, slot_owner: psycopg.Connection[Any], late: bool) -> None:
    """Each change has the key that the table had when it was made, in one session and read after the fact."""
    slot_owner.execute("alter table item add code int not null unique")
    statements = [
        "insert into item values (1, 'a', 10), (2, 'b', 20), (3, 'c', 30)",
        "update item set name = 'x' where id = 1",
        "alter table item replica identity using index item_code_key",
        "update item set name = 'y' where id = 1",
        "begin; update item set id = 7 where id = 2; alter table item replica identity full",
        "delete from item where id = 7; commit",
        "alter table item replica identity default",
        "alter table item drop constraint item_pkey",
        "alter table item add primary key (code)",
        "delete from item where id = 3",
    ]
    with SlotSource(db.su_dsn, "q", "c") as source:
        found = []
        for statement in statements:
            run(slot_owner, [statement])
            if not late:
                found += [event.in_json() for batch in source.batches(once=True) for event in batch.events()]
        found += [event.in_json() for batch in source.batches(once=True) for event in batch.events()]
    keys = [(event.op, event.key) for event in found[3:]]
    assert keys[:3] == [("update", {"id": 1}), ("update", {"code": 10}), ("update", {"code": 20})]
    assert (keys[3][0], found[6].old) == ("delete", {"id": 7, "name": "b", "code": 20})
    assert keys[4] == ("delete", {"code": 30})


def test_primary_key_that_changes_under_identity_full(db: Database, slot_owner: psycopg.Connection[Any]) -> None:
    """The stream names no key then, and today's is asked for anew after each change of the table."""
    slot_owner.execute("alter table item replica identity full; alter table item add code int not null default 5")
    with SlotSource(db.su_dsn, "q", "c") as source:

        def key() -> dict[str, Any] | None:
            return [event.key for batch in source.batches(once=True) for event in batch.events()][-1]

        run(slot_owner, ["insert into item values (1, 'a')"])
        assert key() == {"id": 1}
        run(slot_owner, ["alter table item drop constraint item_pkey", "alter table item add primary key (id, code)"])
        run(slot_owner, ["update item set name = 'b'"])
        assert key() == {"id": 1, "code": 5}
        run(slot_owner, ["alter table item drop constraint item_pkey", "delete from item"])
        assert key() is None


def test_partitions_with_identities_of_their_own(db: Database) -> None:
    """The server describes the root, but sends the columns that identify a row of the partition."""
    schema = [
        "create table root (id int, code int not null, v text, primary key (id)) partition by range (id)",
        "create table same (id int, code int not null, v text, primary key (id)) partition by range (id)",
    ]
    for table, identities in {
        "root": ("default", "using index root_2_i"),
        "same": ("using index same_{}_i",) * 2,
    }.items():
        for number, identity in enumerate(identities, 1):
            leaf = f"{table}_{number}"
            schema += [
                f"create table {leaf} partition of {table} for values from ({number}0) to ({number + 1}0)",
                f"create unique index {leaf}_i on {leaf} (code)",
                f"alter table {leaf} replica identity {identity.format(number)}",
            ]
    with db.connect() as slot_owner, db.connect("su") as su:
        run(slot_owner, schema)
        create_slot(su, "q", "c", ["public.root", "public.same"])
        for table in ("root", "same"):
            run(slot_owner, [f"insert into {table} values (11, 1, 'a'), (21, 2, 'b')"])
            run(
                slot_owner,
                [f"update {table} set v = 'c'", f"update {table} set code = code + 5", f"delete from {table}"],
            )
        slot_owner.execute("alter table root replica identity full")
        run(slot_owner, ["insert into root values (11, 1, 'a'), (21, 2, 'b')", "delete from root"])
        events, refusals = [], []
        with SlotSource(db.su_dsn, "q", "c") as source:
            for batch in source.batches(once=True):  # a busy server sends what was written in several portions
                events += list(batch.events())
                try:
                    batch.delta("public.root")
                except GdqError as error:
                    refusals.append(str(error))
        drop_slot(su, "q", "c")
    assert any("have no old rows" in refusal for refusal in refusals)
    deleted = [(event.key, event.old) for event in events if event.op == "delete"]
    assert deleted[:4] == [
        ({"id": 11}, {"id": 11}),
        ({"code": 7}, {"code": 7}),
        ({"code": 6}, {"code": 6}),
        ({"code": 7}, {"code": 7}),
    ]
    # no column that did not come is said to have been NULL
    assert [old for _, old in deleted[4:]] == [{"id": 11}, {"code": 2}]
    updates = [(event.key, event.old) for event in events if event.op == "update" and event.table == "public.same"]
    assert updates == [({"code": n}, None) for n in (1, 2)] + [({"code": n + 5}, {"code": n}) for n in (1, 2)]


def test_no_net_change_where_an_old_row_is_missing(db: Database, slot_owner: psycopg.Connection[Any]) -> None:
    """The table's identity is full by now, but was not at the first update."""
    run(slot_owner, ["insert into item values (1, 'a')", "update item set name = 'b'"])
    run(slot_owner, ["alter table item replica identity full", "update item set name = 'c'"])
    with SlotSource(db.su_dsn, "q", "c") as source:
        for batch in source.batches(once=True):
            with pytest.raises(GdqError, match="have no old rows"):
                batch.delta("public.item")
    run(slot_owner, ["update item set name = 'd'"])
    with SlotSource(db.su_dsn, "q", "c") as source:
        assert [batch.delta("public.item").num_rows for batch in source.batches(once=True)] == [2]


def test_keys_of_one_batch_as_arrow(db: Database, slot_owner: psycopg.Connection[Any]) -> None:
    """A column for each key that the table had."""
    slot_owner.execute("alter table item add code int not null unique")
    # in one transaction, which no batch divides
    run(slot_owner, ["begin", "insert into item values (1, 'a', 10), (2, 'b', 20)", "delete from item where id = 1"])
    run(slot_owner, ["alter table item replica identity using index item_code_key", "delete from item", "commit"])
    with SlotSource(db.su_dsn, "q", "c") as source:
        (table,) = (batch.arrow("public.item") for batch in source.batches(once=True))
    assert table.column("key_id").to_pylist() == [1, 2, 1, None]
    assert table.column("key_code").to_pylist() == [None, None, None, 20]


def test_comparison_of_an_index_identity(db: Database) -> None:
    """The rule of the key explains the other key, and nothing else of such a table."""
    schema = [
        "create table t (id int primary key, code text not null unique, v int)",
        "alter table t replica identity using index t_code_key",
    ]
    with watched(db, schema, ["t"]) as pair, db.connect() as slot_owner:
        run(slot_owner, ["insert into t values (1, 'a', 1), (2, 'b', 2)", "update t set id = id + 10"])
        run(slot_owner, ["begin; update t set code = code || 'x'; update t set code = 'a' where id = 12; commit"])
        run(slot_owner, ["delete from t where id = 11"])
        outcome = pair.outcome()
        assert outcome.errors == []
        assert outcome.comparison.used["`key`"] == len(outcome.slot)
