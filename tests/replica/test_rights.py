"""A role of the target that may not set session_replication_role: foreign keys fire, and the target is equal even so.

The replica connects as the target's owner, who is no superuser.
"""

from __future__ import annotations

import json
import subprocess
from dataclasses import replace
from typing import Any

import psycopg
import pytest

from gdq.consumers.replica import batch_apply
from gdq.consumers.replica.changes import stage_changes
from gdq.consumers.replica.replica import Replica
from gdq.consumers.replica.table import ReplicaTable
from gdq.consumers.slot.slot import drop_slot
from tests.replica.conftest import Pair
from tests.support.programs import gdq

pytestmark = pytest.mark.server

CUSTOMER = "create table customer (id int primary key, email text unique, boss int references customer)"
ORDERS = "create table orders (id int primary key, customer int not null references customer, note text)"
LINE = "create table line (orders int references orders, n int, primary key (orders, n))"


def replicate(pair: Pair, *options: str) -> subprocess.CompletedProcess[str]:
    return pair.replicate(*options, role="owner")


def apply(pair: Pair, *options: str) -> list[dict[str, Any]]:
    """Run the replica, which must succeed; the batches that it has applied."""
    done = replicate(pair, "--json", *options)
    assert done.returncode == 0, done.stderr
    batches: list[dict[str, Any]] = json.loads(done.stdout)
    return batches


def refused(pair: Pair, *options: str) -> str:
    done = replicate(pair, *options)
    assert done.returncode == 1
    return done.stderr


def shop(pair: Pair, *tables: str, actions: str = "") -> Pair:
    """Tables on both sides that point to each other, of which both sides have rows."""
    for table in tables or (CUSTOMER, ORDERS, LINE):
        pair.make(table.replace("references customer", f"references customer {actions}"))
    names = [table.split()[2] for table in tables or (CUSTOMER, ORDERS, LINE)]
    if not tables:
        pair.run(
            "insert into customer values (1, 'a', null), (2, 'b', 1), (3, 'c', 2), (4, 'd', 3)",
            "insert into orders select i, i % 4 + 1 from generate_series(1, 8) i",
            "insert into line select i, n from generate_series(1, 8) i, generate_series(1, 2) n",
        )
    pair.capture(*names)
    apply(pair)
    pair.same(*names)
    return pair


CHANGES = (
    # rows come with those that they point to, in any order of names
    "insert into customer values (5, 'e', 4), (6, 'f', null)",
    "update customer set boss = 5 where id = 6",
    "insert into orders values (9, 5), (10, 6)",
    "insert into line values (9, 1), (10, 1)",
    # rows move to others before that goes which they pointed to
    "update orders set customer = 5 where customer = 4",
    "update customer set boss = null where boss = 4",
    "delete from customer where id = 4",
    # a new row takes the unique value of one that goes
    "update orders set customer = 6 where customer = 2",
    "update customer set boss = 1 where boss = 2",
    "delete from customer where id = 2",
    "insert into customer values (7, 'b', 6)",
    "insert into orders values (11, 7)",
    # others go with what points to them
    "delete from line where orders = 1",
    "delete from orders where id = 1",
)


@pytest.mark.parametrize("actions", ["", "on delete cascade on update cascade"])
def test_rows_come_move_and_go(pair: Pair, actions: str) -> None:
    """All that the source may do is done in the target, whatever its foreign keys do by themselves."""
    shop(pair, actions=actions)
    pair.run(*CHANGES)
    apply(pair)
    pair.same("customer", "orders", "line")


@pytest.mark.long
def test_a_slot_brings_the_same(pair: Pair) -> None:
    slot_pair = replace(pair, fed_by="slot")
    try:
        shop(slot_pair, actions="on delete cascade")
        slot_pair.run(*CHANGES)
        apply(slot_pair)
        slot_pair.same("customer", "orders", "line")
        slot_pair.run("truncate customer, orders, line", "insert into customer values (1, 'a', null)")
        slot_pair.there("create table local (customer int references customer)")
        slot_pair.run("alter table orders add place int", "insert into orders values (1, 1, 'x', 5)")
        apply(slot_pair)
        slot_pair.same("customer", "orders", "line")
    finally:
        with pair.source.connect("su") as su:
            drop_slot(su, "shop", "mirror")


CIRCLE = (
    "create table a (id int primary key, b int)",
    "create table b (id int primary key, a int not null references a)",
    "alter table a add foreign key (b) references b",
)


@pytest.mark.long
def test_tables_that_point_to_each_other(pair: Pair) -> None:
    """The first copy and the changes go in a circle, of keys that cannot be deferred."""
    for statement in CIRCLE:
        pair.make(statement)
    pair.run("insert into a values (1)", "insert into b values (1, 1)", "update a set b = 1")
    pair.capture("a", "b")
    apply(pair)
    pair.same("a", "b")
    pair.run(
        "insert into a values (2)", "insert into b values (2, 2)", "update a set b = 2 where id = 2",
        "update a set b = 2 where id = 1", "delete from b where id = 1",
    )  # fmt: skip
    apply(pair)
    pair.same("a", "b")


@pytest.mark.parametrize("others", [False, pytest.param(True, marks=pytest.mark.long)])
def test_truncate(pair: Pair, others: bool) -> None:
    """Of tables that point to each other; a table of the target's own keeps the server from TRUNCATE."""
    shop(pair, actions="on delete cascade")
    if others:
        pair.there("create table local (customer int references customer)", "insert into local values (3)")
    pair.run(
        "truncate customer cascade",
        "insert into customer values (9, 'n', null), (3, 'c', 9)",
        "insert into orders values (1, 9), (20, 3)",
    )
    apply(pair)
    pair.same("customer", "orders", "line")


def test_columns_change_among_the_rows(pair: Pair) -> None:
    """Rows before and after ALTER TABLE are applied at once: those before need parents that came later on."""
    shop(pair)
    pair.run(
        "insert into customer values (5, 'e')",
        "insert into orders values (9, 5)",
        "alter table orders rename note to remark",
        "alter table orders add place varchar(5), add day date",
        "insert into customer values (6, 'f')",
        "insert into orders values (10, 6, 'ten', 'x', '2026-01-01')",
        "update orders set customer = 6, place = 'y' where customer = 1",
        "update customer set boss = null where boss = 1",
        "delete from customer where id = 1",
        "alter table orders alter place type text",
        "update orders set place = 'longer than five' where id = 9",
    )
    apply(pair)
    pair.same("customer", "orders", "line")


@pytest.mark.long
def test_values_of_unique_keys_change_hands(pair: Pair) -> None:
    """Rows that others point to are replaced in one statement; not where that would delete the others."""
    shop(pair)
    swap = [
        "update customer set email = null where id in (1, 2)",
        "update customer set email = 'b' where id = 1",
        "update customer set email = 'a' where id = 2",
    ]
    pair.run(*swap)
    apply(pair)
    pair.same("customer", "orders", "line")
    pair.there(
        "alter table orders drop constraint orders_customer_fkey",
        "alter table orders add foreign key (customer) references customer on delete cascade",
    )
    pair.run(*(statement.replace("'b'", "'x'").replace("'a'", "'b'").replace("'x'", "'a'") for statement in swap))
    told = refused(pair)
    assert "table public.customer of the target refuses a row: duplicate key value violates unique" in told
    assert "make its constraint deferrable in the target" in told
    pair.there(
        "alter table customer drop constraint customer_email_key, add unique (email) deferrable initially deferred"
    )
    apply(pair)
    pair.same("customer", "orders", "line")


def test_rows_that_are_refused(pair: Pair) -> None:
    """A child that the target refuses is put aside, and so is what it keeps; all come when the target takes it."""
    shop(pair, actions="on delete cascade")
    pair.there("alter table orders add constraint few check (id < 100 and note is distinct from 'no')")
    pair.run(
        "insert into customer values (50, 'z')",
        "insert into orders values (100, 50), (20, 50)",
        "insert into line values (100, 1), (20, 1)",
        "update orders set customer = 50, note = 'no' where customer = 4",
        "update customer set boss = null where boss = 4",
        "delete from customer where id = 4",
    )
    told = refused(pair)
    assert told.startswith('Error: table public.orders of the target refuses a row: new row for relation "orders"')
    [batch] = apply(pair, "--on-error", "dead-letter")
    # the order and its line, two orders that did not move, and the customer to whom they still point
    assert batch["dead_letters"] == 5
    assert ("(20,50,)",) in pair.rows(pair.target, "orders")
    assert len(pair.rows(pair.target, "(select * from orders where customer = 4)")) == 2
    pair.there("alter table orders drop constraint few")
    done = gdq("replay-replica-dead-letters", "mirror", "--to", pair.target.dsn, "--all", dsn=pair.source.dsn)
    assert (done.returncode, done.stderr) == (0, "replayed 5 of mirror\n")
    pair.same("customer", "orders", "line")


def test_a_foreign_key_of_the_target_alone(pair: Pair) -> None:
    """Rows that the source keeps are not deleted by a foreign key that it does not have: the replica says so."""
    for table in (CUSTOMER, "create table orders (id int primary key, customer int)"):
        pair.make(table)
    pair.there("alter table orders add constraint own foreign key (customer) references customer on delete cascade")
    pair.run("insert into customer values (1), (2)", "insert into orders values (1, 1), (2, 2)")
    pair.capture("customer", "orders")
    apply(pair)
    pair.run("delete from customer where id = 1", "insert into orders values (3, 2)")
    assert 'insert or update on table "orders" violates foreign key constraint "own"' in refused(pair)
    assert len(pair.rows(pair.target, "orders")) == 2
    pair.there("alter table orders drop constraint own")
    apply(pair)
    pair.same("customer", "orders")


def test_a_table_is_copied_again_amid_others(pair: Pair) -> None:
    """Tables joined with it are moved to its snapshot by their changes, and nothing of them is copied."""
    shop(pair, actions="on delete cascade")
    pair.run(
        "insert into customer values (5, 'e', 1)",
        "insert into orders values (9, 5)",
        "alter table orders add state text default 'new'",
        "insert into customer values (6, 'f', 5)",
        "insert into orders values (10, 6)",
        "insert into line values (10, 1)",
        "delete from line where orders = 1",
        "delete from orders where id = 1",
    )
    done = replicate(pair)
    assert done.returncode == 0, done.stderr
    assert [line for line in done.stderr.splitlines() if line.startswith("copied")] == ["copied public.orders: 9 rows"]
    pair.same("customer", "orders", "line")
    pair.run("update orders set customer = 6 where id = 2", "insert into line values (2, 7)")
    apply(pair)
    pair.same("customer", "orders", "line")


@pytest.mark.long
def test_a_table_that_is_captured_later(pair: Pair) -> None:
    """It points to rows that the target does not have yet."""
    shop(pair)
    pair.make("create table bill (id int primary key, orders int references orders)")
    pair.run(
        "insert into customer values (5, 'e', 1)",
        "insert into orders values (9, 5)",
        "insert into bill values (1, 9), (2, 1)",
    )
    pair.capture("bill")
    done = replicate(pair)
    assert done.returncode == 0, done.stderr
    assert "copied public.bill: 2 rows" in done.stderr
    assert "copied public.orders" not in done.stderr
    pair.same("customer", "orders", "line", "bill")
    pair.run("delete from bill where id = 1", "insert into bill values (3, 9)")
    apply(pair)
    pair.same("bill")


def test_triggers_of_the_target(pair: Pair) -> None:
    pair.make("create table item (id int primary key, n int)")
    pair.there(
        "create table seen (id int)",
        "create function see() returns trigger language plpgsql as "
        "$$ begin insert into public.seen values (new.id); return new; end $$",
        "create trigger sees after insert on item for each row execute function see()",
    )
    pair.capture("item")
    pair.run("insert into item values (1, 1)")
    told = refused(pair)
    assert told.startswith('Error: table public.item of the target has trigger "sees", which this role cannot keep')
    assert "--triggers fire" in told
    apply(pair, "--triggers", "fire")
    pair.run("insert into item values (2, 2)")
    apply(pair, "--triggers", "fire")
    pair.same("item")
    assert pair.rows(pair.target, "seen") == [("(1)",), ("(2)",)]


@pytest.mark.long
def test_a_batch_that_failed_amid_its_tables(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    """What was staged before a log was gone is read again: nothing of it is taken for the next batch's."""
    shop(pair)
    pair.run("update customer set email = 'new' where id = 1", "update orders set note = 'new' where id = 1")
    failures = iter([psycopg.errors.UndefinedTable('relation "gdq_log.t1_v1_s9" does not exist')])

    def stage(source: Any, target: Any, table: ReplicaTable, query: str, *, paired: bool) -> int:
        if table.name == "public.orders" and (failure := next(failures, None)):
            raise failure
        return stage_changes(source, target, table, query, paired=paired)

    monkeypatch.setattr(batch_apply, "stage_changes", stage)
    with Replica(pair.source.dsn, pair.target.dsn, "shop", "mirror") as replica:
        assert [batch.updated for batch in replica.run()] == [2]
    pair.same("customer", "orders", "line")


@pytest.mark.long
def test_tables_are_repaired_in_order(pair: Pair) -> None:
    shop(pair, actions="on delete cascade")
    with pair.target.connect() as there:
        there.execute("delete from line; delete from orders where id = 1; delete from customer where id = 4")
        there.execute("insert into customer values (40, 'x', 3); insert into orders values (40, 40)")
        there.execute("update orders set note = 'other' where id = 2")
    with pair.target.connect("su") as su:
        su.execute("grant usage on schema gdq_target to gdq_owner")
    done = gdq("repair-tables", "shop", "mirror", "--to", pair.target.dsn, dsn=pair.source.dsn)
    assert done.returncode == 0, done.stderr
    pair.same("customer", "orders", "line")
