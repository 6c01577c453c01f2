"""The path through a logical slot: the queue's events and batches, from the same changes."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import date
from threading import Barrier
from typing import Any

import psycopg
import pytest

from gdq.consumer import Consumer, register_consumer
from gdq.consumers.slot.pgoutput import RowMessage, TupleValue, decode_message
from gdq.consumers.slot.slot import create_slot, drop_slot, slot_info
from gdq.consumers.slot.source import SlotSource
from gdq.consumers.slot.transaction import SlotTransaction
from gdq.errors import GdqError
from gdq.source import BatchSource, Event
from tests.support.programs import gdq
from tests.support.server import Database
from tests.support.slot_pair import run

pytestmark = pytest.mark.server

WORKLOAD = [
    "insert into item values (1, 'a', true, 1.5, 2), (2, null, false, 'NaN', -3), (3, '', null, '-0', null)",
    "update item set name = name || 'x', n = n + 1 where id < 3",
    "begin; update item set id = id + 10 where id = 1",
    "savepoint s; delete from item; rollback to s; insert into item (id, n) values (20, 9); commit",
    "begin; insert into item (id) values (99); rollback",
    "insert into leaf select i, repeat(md5(i::text), 400) from generate_series(1, 4) i",
    "update leaf set id = id + 20 where id < 3",
    "delete from item where id = 2",
    """merge into item as i using (values (3, 'm'), (4, 'n')) as v(id, name) on i.id = v.id
       when matched then update set name = v.name when not matched then insert (id, name) values (v.id, v.name)""",
    "begin; update item set n = 0; prepare transaction 'two'",
    "commit prepared 'two'",
    "truncate item, leaf",
]


@pytest.fixture
def both(db: Database) -> Iterator[psycopg.Connection[Any]]:
    """Tables with a consumer of the queue and a slot, both from the same moment on."""
    with db.connect() as owner, db.connect("su") as su:
        owner.execute("create table item (id int primary key, name text, flag bool, ratio float8, n bigint)")
        owner.execute("create table leaf (id int primary key, body text) partition by range (id)")
        owner.execute("create table leaf_1 partition of leaf for values from (0) to (3)")
        owner.execute("create table leaf_2 partition of leaf for values from (3) to (100)")
        for table in ("item", "leaf", "leaf_1", "leaf_2"):
            owner.execute(f"alter table {table} replica identity full")
        owner.execute("select gdq.create_queue('q')")
        for table in ("item", "leaf"):
            owner.execute("select gdq.add_table('q', %s::regclass)", [table])
        register_consumer(owner, "q", "c")
        create_slot(su, "q", "c", ["public.item", "public.leaf"])
        yield owner
        drop_slot(su, "q", "c")
        assert slot_info(su) == []


def comparable(events: list[Event]) -> list[tuple[Any, ...]]:
    return sorted(
        (event.xid % 2**32, event.op, event.table, *(json.dumps(image, sort_keys=True) for image in images(event)))
        for event in events
        if event.op != "ddl"
    )


def images(event: Event) -> tuple[dict[str, Any] | None, ...]:
    return event.key, event.old, event.new


def queued(db: Database) -> list[Event]:
    with Consumer(db.dsn, "q", "c") as consumer:
        return [event.in_json() for batch in consumer.batches(once=True) for event in batch.events()]


def slotted(db: Database, **given: Any) -> list[Event]:
    with SlotSource(db.su_dsn, "q", "c", **given) as source:
        return [event.in_json() for batch in source.batches(once=True) for event in batch.events()]


def test_same_events_as_the_queue(db: Database, both: psycopg.Connection[Any]) -> None:
    run(both, WORKLOAD)
    ours, theirs = queued(db), slotted(db)
    assert len(theirs) > 20
    assert comparable(theirs) == comparable(ours)
    assert slotted(db) == []


def test_streamed_transactions_without_what_was_rolled_back(db: Database, both: psycopg.Connection[Any]) -> None:
    """Large transactions come in blocks while they run, those of others in between, and what they undo as well."""
    with db.connect() as other:
        both.execute("begin")
        for part in range(6):
            both.execute("savepoint s")
            if part == 1:  # the first change of a table may be one that is undone
                both.execute("insert into leaf values (50, 'gone')")
            low = part * 1000
            both.execute(f"insert into item (id, n) select i, {part} from generate_series({low}, {low + 999}) i")
            both.execute("release s" if part % 3 else "rollback to s")
            other.execute("insert into leaf values (%s, 'beside')", [60 + part])
        both.execute("commit")
        both.execute("begin; insert into item (id) select generate_series(10001, 19000); rollback")
        both.execute("update item set n = 1 where id % 100 = 0")
    with db.connect("su") as su:
        su.execute(f"alter database {db.name} set logical_decoding_work_mem = '64kB'")
    with SlotSource(db.su_dsn, "q", "c", max_events=50) as source:
        sizes = []
        theirs = []
        for batch in source.batches(once=True):
            theirs += [event.in_json() for event in batch.events()]
            assert len(list(batch.events())) == batch.size
            sizes.append(batch.size)
    assert comparable(theirs) == comparable(queued(db))
    assert max(sizes) > 3000
    with db.connect("su") as su:
        query = "select stream_txns from pg_stat_replication_slots where slot_name = 'gdq_q_c'"
        assert (su.execute(query).fetchone() or (0,))[0] > 0


def test_batch_comes_again_until_it_is_committed(db: Database, both: psycopg.Connection[Any]) -> None:
    both.execute("create table copied (id int)")
    both.execute("insert into item (id) values (1)")

    class Mute(SlotSource):
        """Dies before the server is told what is applied."""

        def committed(self, transactions: Sequence[SlotTransaction]) -> None:
            pass

    def apply(*, fails: bool) -> int:
        with Mute(db.su_dsn, "q", "c") as source:
            for batch in source.batches(once=True):
                for event in batch.events():
                    source.connection.execute("insert into copied values (%s)", [(event.key or {})["id"]])
                if fails:
                    raise RuntimeError
                assert batch.position.kind == "slot"
        return len(both.execute("table copied").fetchall())

    with pytest.raises(RuntimeError):
        apply(fails=True)
    assert [apply(fails=False), apply(fails=False)] == [1, 1]
    both.execute("insert into item (id) values (2)")
    assert apply(fails=False) == 2


def test_once_has_what_is_committed_and_not_on_disk_yet(db: Database, both: psycopg.Connection[Any]) -> None:
    both.execute("set synchronous_commit = off")
    found = []
    with SlotSource(db.su_dsn, "q", "c") as source:
        for number in range(5):
            both.execute("insert into item (id) values (%s)", [number])
            found += [event.key for batch in source.batches(once=True) for event in batch.events()]
            assert len(found) == number + 1


def test_a_new_slot_has_no_old_position(db: Database, both: psycopg.Connection[Any]) -> None:
    """As after the restore of a dump, whose server had written more."""
    both.execute("insert into item (id) values (1)")
    assert len(slotted(db)) == 1
    with db.connect("su") as su:
        su.execute("update gdq_target.slot_position set lsn = 'FFFF/0'")
        with pytest.raises(GdqError, match="was read to FFFF/0, which this server has not written yet: diverged"):
            slotted(db)
        su.execute("select pg_drop_replication_slot('gdq_q_c')")
        create_slot(su, "q", "c", ["public.item", "public.leaf"])
    both.execute("insert into item (id) values (2)")
    assert [event.key for event in slotted(db)] == [{"id": 2}]


def test_no_slot_makes_writes_fail(db: Database, both: psycopg.Connection[Any]) -> None:
    """The server refuses UPDATE and DELETE of a published table whose old rows it could not send."""
    both.execute("create table keyless (id int)")
    both.execute("create table parted (id int) partition by range (id)")
    both.execute("create table parted_1 partition of parted for values from (0) to (9)")
    with db.connect("su") as su:
        drop_slot(su, "q", "c")
        for table, found in {"keyless": "keyless", "parted": "parted_1"}.items():
            with pytest.raises(GdqError, match=f"table public.{found} has no replica identity: UPDATE and DELETE"):
                create_slot(su, "q", "c", ["public.item", table])
        assert slot_info(su) == []
        assert su.execute("table pg_publication").fetchall() == []


def test_first_readers_of_a_database(db: Database, both: psycopg.Connection[Any]) -> None:
    """Each makes the table of positions, at the same moment."""
    names = [f"c{n}" for n in range(8)]
    with db.connect("su") as su:
        for name in names:
            create_slot(su, "q", name, ["public.item", "public.leaf"])
        both.execute("insert into item (id) values (1)")
        start = Barrier(len(names))

        def read(name: str) -> int:
            start.wait()
            with SlotSource(db.su_dsn, "q", name) as source:
                return sum(batch.size for batch in source.batches(once=True))

        with ThreadPoolExecutor(len(names)) as pool:
            assert list(pool.map(read, names)) == [1] * len(names)
        for name in names:
            drop_slot(su, "q", name)


def test_prepared_transactions(db: Database, both: psycopg.Connection[Any]) -> None:
    """With a slot of two phases what was prepared before a restart and committed after it comes once."""
    with db.connect("su") as su:
        drop_slot(su, "q", "c")
        create_slot(su, "q", "c", ["public.item", "public.leaf"], two_phase=True)
    run(
        both, ["begin; insert into item (id) values (1); prepare transaction 'one'", "insert into item (id) values (2)"]
    )
    assert [event.key for event in slotted(db)] == [{"id": 2}]
    both.execute("rollback prepared 'one'")
    run(
        both, ["begin; insert into item (id) values (3); prepare transaction 'two'", "insert into item (id) values (4)"]
    )
    assert [event.key for event in slotted(db)] == [{"id": 4}]
    both.execute("commit prepared 'two'")
    assert [event.key for event in slotted(db)] == [{"id": 3}]
    assert slotted(db) == []


def test_what_the_replica_identity_leaves_out(db: Database, both: psycopg.Connection[Any]) -> None:
    both.execute("alter table item replica identity default")
    run(both, ["insert into item (id, name) values (1, repeat(md5('x') || random(), 900))"])
    run(both, ["alter table item alter name set storage external", "update item set name = repeat('x', 9000)"])
    run(both, ["update item set n = 5", "update item set id = 2", "delete from item"])
    last = slotted(db)[-3:]
    assert [event.unchanged for event in last] == [("name",), ("name",), ()]
    found = [(event.op, event.key, event.old, sorted(event.new or {})) for event in last]
    rest = ["flag", "id", "n", "ratio"]
    assert found == [
        ("update", {"id": 1}, None, rest),
        ("update", {"id": 2}, {"id": 1}, rest),
        ("delete", {"id": 2}, {"id": 2}, []),
    ]


def test_origins_and_messages(db: Database, both: psycopg.Connection[Any]) -> None:
    with db.connect("su") as su:
        su.execute("select pg_replication_origin_create(current_database()::text || 'far')")
        su.execute("select pg_replication_origin_session_setup(current_database()::text || 'far')")
        su.execute("begin; insert into item (id) values (1)")
        su.execute("select pg_replication_origin_xact_setup('0/1', now()), pg_logical_emit_message(true, 'in', 'it')")
        su.execute("commit")
        su.execute("select pg_replication_origin_session_reset()")
        su.execute("select pg_logical_emit_message(false, 'beside', 'ä')")
        su.execute("select pg_logical_emit_message(false, 'bytes', '\\xff00'::bytea)")
        su.execute("select pg_replication_origin_drop(current_database()::text || 'far')")
    found = [(event.op, event.new, event.origin) for event in slotted(db)]
    assert found[0][0] == "insert"
    assert found[0][2] == f"{db.name}far"
    assert found[1:] == [
        ("message", {"type": "in", "data": "it"}, f"{db.name}far"),
        ("message", {"type": "beside", "data": "ä"}, None),
        ("message", {"type": "bytes", "data": "\\xff00", "encoding": "bytea"}, None),
    ]


@pytest.mark.long
def test_commands(db: Database, both: psycopg.Connection[Any]) -> None:
    dsn = db.su_dsn
    again = gdq("create-slot", "q", "c", "public.item", dsn=dsn)
    assert (again.returncode, "other tables: public.item, public.leaf" in again.stderr) == (1, True)
    assert gdq("create-slot", "q", "d", dsn=dsn).returncode == 0
    again = gdq("create-slot", "q", "d", dsn=dsn)
    assert (again.returncode, again.stderr) == (0, "already there: slot gdq_q_d\n")
    both.execute("insert into item (id, name) values (1, 'one')")
    done = gdq("consume", "q", "d", "--source", "slot", "--once", dsn=dsn)
    assert json.loads(done.stdout)["new"] == {"id": 1, "name": "one", "flag": None, "ratio": None, "n": None}
    listed = json.loads(gdq("slots", "--json", dsn=dsn).stdout)
    assert [(row["slot_name"], row["publication"], row["lost"]) for row in listed] == [
        ("gdq_q_c", "gdq_q", False),
        ("gdq_q_d", "gdq_q", False),
    ]
    assert listed[0]["lag_bytes"] > listed[1]["lag_bytes"] >= 0
    assert gdq("drop-slot", "q", "d", dsn=dsn).returncode == 0
    assert gdq("drop-slot", "q", "d", dsn=dsn).stderr.startswith("already gone")
    missing = gdq("consume", "q", "d", "--source", "slot", "--once", dsn=dsn)
    assert (missing.returncode, missing.stderr.splitlines()[0]) == (1, "Error: there is no slot gdq_q_d")
    assert gdq("consume", "q", "c", "--source", "slot", "--member", "m", dsn=dsn).returncode == 2
    assert gdq("create-slot", "Q", "c", dsn=dsn).returncode == 1


def test_bytes_that_are_no_message() -> None:
    update = b"U" + (7).to_bytes(4, "big") + b"N\0\2t\0\0\0\1xn"
    assert decode_message(update) == RowMessage("update", 7, None, None, (TupleValue(b"x"), TupleValue(None)))
    for broken in [update[:length] for length in range(len(update))] + [update + b"\0", b"?" + update[1:]]:
        with pytest.raises(GdqError, match="not a message of pgoutput"):
            decode_message(broken)


def test_typed_rows_and_net_change_are_those_of_the_queue(db: Database, both: psycopg.Connection[Any]) -> None:
    both.execute(
        """alter table item add num numeric(12,2), add day date, add at timestamptz, add raw bytea, add tag text[],
             add small smallint, add moment timestamp, add mood text check (mood <> 'x')"""
    )
    queued(db)
    slotted(db)
    both.execute(
        """insert into item select i, 'n' || i, i % 2 = 0, i * 0.5, i, i * 1.25, date '2024-02-28' + i,
             timestamptz '2024-02-28 12:00+05' + i * interval '1.5 s', decode(md5(i::text), 'hex'), array['a', null], i,
             '2024-02-28 23:59:59.5', null from generate_series(1, 9) i"""
    )
    run(both, ["update item set num = num + 1 where id < 4", "update item set num = num - 1 where id = 3"])
    run(both, ["delete from item where id in (1, 9)", "update item set day = null, ratio = 'NaN' where id = 5"])
    table, source = "public.item", "select * from item order by id"

    def read(given: BatchSource) -> list[tuple[Any, ...]]:
        found: list[tuple[Any, ...]] = []
        for batch in given.batches(once=True):
            events = [e for e in batch.events(images="new", columns=["small", "day"]) if e.op != "ddl"]
            some = batch.arrow(table, images="new", columns=["small", "day"])
            whole = (batch.arrow(table), batch.delta(table))
            found.append((*whole, some, [(e.op, e.key, e.old, e.new) for e in events]))
        return found

    with Consumer(db.dsn, "q", "c") as consumer, SlotSource(db.su_dsn, "q", "c") as slot:
        ours, theirs = read(consumer), read(slot)
    assert len(ours) == len(theirs) == 1
    (rows, delta, *some), (slot_rows, slot_delta, *slot_some) = ours[0], theirs[0]
    assert slot_delta.schema.equals(delta.schema)
    order = [("id", "ascending")]
    assert repr(slot_delta.sort_by(order).to_pylist()) == repr(delta.sort_by(order).to_pylist())
    assert delta.num_rows == len(both.execute(source).fetchall()) == 7
    names = [name for name in rows.schema.names if name not in ("ev_id", "ev_txid", "ev_time")]
    assert {name: slot_rows.schema.field(name).type for name in names} == {
        name: rows.schema.field(name).type for name in names
    }
    images = [sorted(map(repr, one.select(names).to_pylist())) for one in (rows, slot_rows)]
    assert images[0] == images[1]
    names = ["ev_op", "old_id", "new_id", "new_day", "new_small"]
    images = [sorted(map(repr, one.select(names).to_pylist())) for one, _ in (some, slot_some)]
    assert images[0] == images[1]
    assert some[0].schema.names[4:] == names[1:]
    assert sorted(some[1], key=repr) == sorted(slot_some[1], key=repr)
    assert {type(new["day"]) for _, _, old, new in some[1] if new and old is None} == {date, type(None)}


def test_no_net_change_without_old_rows(db: Database, both: psycopg.Connection[Any]) -> None:
    both.execute("alter table item replica identity default; insert into item (id) values (1)")
    with SlotSource(db.su_dsn, "q", "c") as source:
        for batch in source.batches(once=True):
            with pytest.raises(GdqError, match="have no old rows"):
                batch.delta("public.item")
            assert batch.arrow("public.item").column("new_id").to_pylist() == [1]
            assert batch.tables() == ["public.item"]
