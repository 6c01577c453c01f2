"""Indexes, constraints, defaults and NOT NULL that change in the source follow in a replica's target, if asked to."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest

from gdq.consumers.replica.slot.slot_replica import SlotReplica
from gdq.consumers.slot.slot import drop_slot
from tests.replica.conftest import Pair
from tests.support.programs import start_gdq
from tests.support.waiting import until

pytestmark = pytest.mark.server

ITEM = "create table item (id int primary key, name text, qty int)"
FOLLOW = ("--on-ddl", "follow")

# What a table has beside its columns, as the server says it.
DEFINED = """
select pg_get_indexdef(indexrelid) from pg_index where indrelid in (select oid from pg_class where relname = any (%s))
union all
select conrelid::regclass || ' ' || conname || ' ' || pg_get_constraintdef(oid) from pg_constraint
 where conrelid in (select oid from pg_class where relname = any (%s)) and contype <> 'n'
union all
select attrelid::regclass || ' ' || attname || coalesce(' default ' || pg_get_expr(adbin, adrelid), '')
         || case when attnotnull then ' not null' else '' end
  from pg_attribute left join pg_attrdef on adrelid = attrelid and adnum = attnum
 where attrelid in (select oid from pg_class where relname = any (%s)) and attnum > 0 and not attisdropped
 order by 1"""


def defined(pair: Pair, *tables: str, target: bool) -> list[str]:
    with (pair.target if target else pair.source).connect("su") as connection:
        # of an index that is dropped meanwhile the server tells NULL
        return [line for (line,) in connection.execute(DEFINED, [list(tables)] * 3) if line is not None]


def alike(pair: Pair, *tables: str) -> None:
    """Both sides have the same definitions and rows."""
    assert defined(pair, *tables, target=True) == defined(pair, *tables, target=False)
    pair.same(*tables)


@pytest.fixture(params=["queue", pytest.param("slot", marks=pytest.mark.long)])
def items(request: pytest.FixtureRequest, pair: Pair) -> Iterator[Pair]:
    """A replica with one table, which the queue feeds, or a slot."""
    fed = replace(pair, fed_by=request.param)
    fed.make(ITEM)
    fed.capture("item")
    fed.run("insert into item values (1, 'a', 10), (2, 'b', 20)")
    fed.apply(*FOLLOW)
    yield fed
    if request.param == "slot":
        with pair.source.connect("su") as su:
            drop_slot(su, "shop", "mirror")


@pytest.mark.parametrize("items", ["queue", "slot"], indirect=True)
def test_what_is_made_changed_and_dropped(items: Pair) -> None:
    """In its place among the rows: what the source has no longer hinders no row, what it has is satisfied."""
    items.run(
        "create index by_name on item (lower(name)) where qty > 0",
        'create index "made USING hash (" on item (qty)',
        "alter table item add constraint one_name unique (name), add constraint few check (qty < 100)",
        "alter table item alter qty set default 7, alter name set not null",
    )
    told = items.apply(*FOLLOW).stderr
    assert 'index "by_name" of public.item was made in the target' in told
    assert 'not null of column public.item."name" was made in the target' in told
    alike(items, "item")
    assert items.apply(*FOLLOW).stderr == ""
    items.run(
        "alter table item drop constraint one_name, drop constraint few, alter name drop not null",
        "alter table item alter qty drop default",
        "insert into item values (3, 'a', 500), (4, null, 1)",
        "alter table item rename name to title",
        "alter index by_name rename to by_title",
        "alter table item add constraint less check (qty < 1000)",
    )
    told = items.apply(*FOLLOW).stderr
    assert 'unique "one_name" of public.item was dropped in the target' in told
    alike(items, "item")
    items.run("reindex index concurrently by_title")
    assert items.apply(*FOLLOW).stderr == ""
    items.run("drop index by_title")
    items.apply(*FOLLOW)
    alike(items, "item")


@pytest.mark.parametrize("items", ["queue", "slot"], indirect=True)
def test_made_while_others_write(items: Pair) -> None:
    """Who has written and not committed yet holds up no definition, though nobody sends what he wrote."""
    items.run("create table other (n int)")
    with items.source.connect() as writer:
        items.run("create index by_qty on item (qty)")
        with writer.transaction():
            writer.execute("insert into other values (1)")
            assert 'index "by_qty" of public.item was made in the target' in items.apply(*FOLLOW).stderr


def test_columns_that_are_added(items: Pair) -> None:
    items.run("alter table item add made date not null default current_date, add note text default 'none'")
    items.apply(*FOLLOW)
    alike(items, "item")


def test_a_target_that_is_left_alone(items: Pair) -> None:
    items.run("create index by_name on item (name)")
    assert items.apply().stderr == ""
    assert len(defined(items, "item", target=True)) < len(defined(items, "item", target=False))


def test_what_the_target_refuses(items: Pair) -> None:
    """It is told once a run, and the rows come; where it is required, the replica stops."""
    items.run("create function even(int) returns boolean immutable language sql as 'select $1 % 2 = 0'")
    items.run("alter table item add constraint is_even check (even(qty))", "insert into item values (3, 'c', 30)")
    stopped = items.replicate("--on-ddl", "require")
    assert stopped.returncode == 1
    assert stopped.stderr.startswith('Error: check "is_even" of public.item was not made in the target: function')
    told = items.apply(*FOLLOW).stderr
    assert told.startswith('check "is_even" of public.item was not made in the target: function public.even(integer)')
    items.same("item")
    items.there("create function even(int) returns boolean immutable language sql as 'select $1 % 2 = 0'")
    items.apply("--on-ddl", "require")
    alike(items, "item")


@pytest.mark.long
def test_made_tables_get_all(pair: Pair) -> None:
    """With --create: foreign keys, too, and no second index for the key by which rows are found."""
    pair.run(
        "create table customer (id int primary key, email text unique)",
        "create table orders (id int, code text not null unique, customer int references customer, "
        "exclude using gist (int4range(id, id + 1) with &&))",
        "create index on orders (customer)",
        """select gdq.add_table('shop', 'customer'), gdq.add_table('shop', 'orders', key => '{code}')""",
        "insert into customer values (1, 'a')",
        "insert into orders values (1, 'x', 1)",
    )
    pair.apply("--create", *FOLLOW)
    assert "FOREIGN KEY (customer) REFERENCES customer(id)" in " ".join(defined(pair, "orders", target=True))
    assert len(defined(pair, "orders", target=True)) == len(defined(pair, "orders", target=False)) - 1
    pair.run("alter table orders drop constraint orders_customer_fkey", "insert into orders values (2, 'y', 9)")
    pair.apply("--create", *FOLLOW)
    pair.same("customer", "orders")
    assert "FOREIGN KEY" not in " ".join(defined(pair, "orders", target=True))


@pytest.mark.long
def test_what_the_target_has_of_its_own(items: Pair) -> None:
    """An index of another definition stays; one that was dropped there does not come again."""
    items.there("create index by_name on item (qty)")
    items.run("create index by_name on item (name)", "create index by_qty on item (qty)")
    told = items.apply(*FOLLOW).stderr
    assert 'index "by_name" of public.item is another one in the target, and stays' in told
    items.there("drop index by_qty")
    items.run("create index by_both on item (name, qty)")
    items.apply(*FOLLOW)
    have = " ".join(defined(items, "item", target=True))
    assert "by_both" in have
    assert "by_qty" not in have
    assert "by_name ON public.item USING btree (qty)" in have
    items.run("drop index by_name, by_qty, by_both")
    items.apply(*FOLLOW)
    assert "by_name ON public.item USING btree (qty)" in " ".join(defined(items, "item", target=True))


@pytest.mark.long
def test_a_constraint_that_is_altered(pair: Pair) -> None:
    pair.make("create table a (id int primary key)")
    pair.make("create table b (id int primary key, a int references a)")
    pair.capture("a", "b")
    pair.apply(*FOLLOW)
    pair.run(
        "alter table b alter constraint b_a_fkey deferrable initially deferred",
        "alter table b add constraint big check (id > 0) not valid",
    )
    pair.apply(*FOLLOW)
    alike(pair, "a", "b")
    pair.run("alter table b validate constraint big")
    pair.apply(*FOLLOW)
    alike(pair, "a", "b")


@pytest.mark.long
def test_while_the_replica_follows(items: Pair) -> None:
    """An index arrives without a row, and one that is made CONCURRENTLY when it is valid."""
    follower = start_gdq(
        *("replicate", "shop", "mirror", "--to", items.target.su_dsn, "--follow", *FOLLOW, "--source", items.fed_by),
        dsn=items.reader_dsn,
    )
    try:
        items.run("create index concurrently by_name on item (name)", "alter table item add check (qty > 0)")
        wanted = defined(items, "item", target=False)
        until(lambda: defined(items, "item", target=True) == wanted, "the index and the constraint")
        items.run("drop index by_name", "insert into item values (3, 'c', 30)")
        until(lambda: not any("by_name" in line for line in defined(items, "item", target=True)), "the index dropped")
    finally:
        follower.terminate()
        _, err = follower.communicate()
    assert follower.returncode == 0, err


@pytest.mark.long
def test_rows_that_swap_a_key_which_has_just_been_made(pair: Pair) -> None:
    """A program that has applied changes of the table before looks at it anew."""
    fed = replace(pair, fed_by="slot")
    fed.make(ITEM)
    fed.capture("item")
    swapped = """
        update item set name = 'x' where id = 1;
        update item set name = 'a' where id = 2;
        update item set name = 'b' where id = 1"""
    statements = [
        "insert into item values (1, 'a', 10), (2, 'b', 20)",
        "alter table item add unique (name); insert into item values (3, 'c', 30)",
        swapped,
    ]

    both = ((fed.source, False), (fed.target, True))

    def stop() -> bool:
        """Take the next step when the target has arrived; True if there is none."""
        sides = [(fed.rows(place, "item"), defined(fed, "item", target=here)) for place, here in both]
        if sides[0] != sides[1]:
            return False
        if statements:
            fed.run(statements.pop(0))
            return False
        return True

    try:
        with SlotReplica(pair.source.su_dsn, pair.target.su_dsn, "shop", "mirror", on_ddl="follow") as replica:
            list(replica.run(once=False, stop=stop))
    finally:
        with pair.source.connect("su") as su:
            drop_slot(su, "shop", "mirror")
