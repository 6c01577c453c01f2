"""Tables that come, go and change their names in the source, and what becomes of them in a replica's target."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator

import pytest

from tests.replica.conftest import Pair
from tests.support.programs import gdq, start_gdq
from tests.support.waiting import until

ITEM = "create table item (id int primary key, name text)"


def there(pair: Pair, query: str) -> list[tuple[object, ...]]:
    with pair.target.connect("su") as connection:
        return connection.execute(query.encode()).fetchall()


def tables(pair: Pair) -> set[str]:
    return {
        str(name)
        for (name,) in there(
            pair,
            """select format('%I.%I', schemaname, tablename) from pg_tables
                where schemaname not in ('pg_catalog', 'information_schema', 'gdq_target')""",
        )
    }


@pytest.fixture
def following(pair: Pair) -> Iterator[Pair]:
    """A replica of all tables that match a rule, which follows and makes them in the target."""
    done = gdq("add-table", "shop", "--new-tables", "*.*", dsn=pair.source.dsn)
    assert done.returncode == 0, done.stderr
    follower = start_gdq(
        *("replicate", "shop", "mirror", "--to", pair.target.su_dsn, "--create", "--follow"), dsn=pair.source.dsn
    )
    try:
        yield pair
    finally:
        follower.terminate()
        _, err = follower.communicate()
    assert follower.returncode == 0, err


@pytest.mark.server
def test_a_created_table_arrives_while_the_replica_follows(following: Pair) -> None:
    """With its rows, its schema, its key and its defaults; one without a row as well."""
    pair = following
    pair.run(
        "begin; create schema stock; create table stock.part (id serial primary key, name text default 'none' not null,"
        " made date default current_date, price numeric(8, 2)); insert into stock.part (price) values (1.5); commit",
        "create table empty_one (a int, b int, primary key (b, a))",
    )
    until(lambda: {"stock.part", "public.empty_one"} <= tables(pair), "both tables in the target")
    until(lambda: pair.rows(pair.target, "stock.part") == pair.rows(pair.source, "stock.part"), "the row")
    pair.run("insert into stock.part (price) values (2)", "insert into empty_one values (1, 2)")
    until(lambda: len(pair.rows(pair.target, "empty_one")) == 1, "the second table's row")
    pair.same("stock.part", "empty_one")
    # the target takes rows of its own with the same defaults
    insert = "insert into stock.part (id, price) values (100, 3) returning name, made = current_date"
    assert there(pair, insert) == [("none", True)]
    assert there(pair, "select pg_get_serial_sequence('stock.part', 'id')") == [("stock.part_id_seq",)]


def test_what_a_made_table_has(pair: Pair) -> None:
    """Identity, generated and excluded columns, another key than the primary one, defaults that only the source has."""
    pair.run(
        "create function own() returns int language sql as 'select 7'",
        """create table item (id int generated always as identity primary key, code text not null unique, "n N" int,
             twice int generated always as (coalesce("n N", 0) * 2) stored, secret int not null default 1,
             own int default own())""",
        """select gdq.add_table('shop', 'item', key => '{code}', exclude => '{secret}')""",
        """insert into item (code, "n N") values ('a', 1), ('b', null)""",
    )
    made = pair.apply("--create").stderr
    assert 'column public.item."own" of the target has no default public.own()' in made
    assert "copied public.item: 2 rows" in made
    pair.run("update item set \"n N\" = 5 where code = 'b'", "insert into item (code) values ('c')")
    pair.apply("--create")
    assert there(pair, 'select id, code, "n N", own from item order by id') == [
        (1, "a", 1, 7),
        (2, "b", 5, 7),
        (3, "c", None, 7),
    ]


def test_a_partitioned_table_is_made_plain(pair: Pair) -> None:
    pair.run(
        "create table item (id int primary key, name text) partition by range (id)",
        "create table item_1 partition of item for values from (0) to (100)",
    )
    pair.capture("item")
    pair.run("insert into item values (1, 'a')")
    pair.apply("--create")
    pair.same("item")
    assert tables(pair) == {"public.item"}


def test_a_type_that_the_target_lacks(pair: Pair) -> None:
    """Nothing is made or copied; when the type is there, the same command goes on."""
    pair.run("create type mood as enum ('sad', 'glad')", "create table item (id int primary key, mood mood)")
    pair.capture("item")
    failed = pair.replicate("--create")
    assert failed.returncode == 1
    assert failed.stderr.startswith(
        'Error: table public.item cannot be made in the target: type "public.mood" does not exist'
    )
    assert tables(pair) == set()
    pair.there("create type mood as enum ('sad', 'glad')")
    pair.run("insert into item values (1, 'glad')")
    pair.apply("--create")
    pair.same("item")


@pytest.fixture
def item(pair: Pair) -> Pair:
    """A table with rows 1 and 2 on both sides."""
    pair.make(ITEM)
    pair.run("insert into item values (1, 'a'), (2, 'b')")
    pair.capture("item")
    pair.apply()
    return pair


def test_a_dropped_table_stays(item: Pair) -> None:
    """As it was at the drop; the replica goes on with the others, and takes the name again when it comes again."""
    item.make("create table other (id int primary key)")
    item.capture("other")
    item.run("update item set name = 'last' where id = 1", "drop table item", "insert into other values (1)")
    assert "public.item was dropped in the source: its copy stays in the target" in item.apply().stderr
    assert item.rows(item.target, "item") == [("(1,last)",), ("(2,b)",)]
    item.same("other")
    listed = gdq("replicas", "--to", item.target.su_dsn, "--json", dsn=item.source.dsn)
    assert '["public.other"]' in listed.stdout.replace("\n", "").replace("  ", "")
    item.run("insert into other values (2)")
    assert "public.item" not in item.apply().stderr
    item.run("create table item (name varchar(5) default 'x', id int primary key)")
    item.capture("item")
    item.run("insert into item values ('new', 5)")
    assert "copied public.item: 1 rows" in item.apply().stderr
    assert there(item, "select id, name from item") == [(5, "new")]
    item.run("update item set name = 'newer'")
    item.apply()
    assert there(item, "select id, name from item") == [(5, "newer")]


def test_a_dropped_table_is_dropped(item: Pair) -> None:
    item.make("create table other (id int primary key)")
    item.capture("other")
    item.there("create view seen as select * from other")
    item.apply()
    item.run("drop table item", "drop table other")
    told = item.apply("--on-drop", "drop").stderr
    assert "public.item was dropped in the source, and in the target" in told
    assert "public.other was dropped in the source, and the target keeps it: cannot drop" in told
    assert tables(item) == {"public.other"}


def test_a_table_that_leaves_the_queue(item: Pair) -> None:
    item.run("insert into item values (3, 'c')")
    item.apply()
    item.run("select gdq.remove_table('shop', 'item')", "insert into item values (4, 'd')")
    told = item.apply("--on-drop", "drop").stderr
    assert "public.item is no longer among the tables that replica mirror takes: its copy stands still" in told
    assert len(item.rows(item.target, "item")) == 3
    item.capture("item")
    item.apply()
    item.same("item")


def test_a_renamed_table(item: Pair) -> None:
    """Rows before and after arrive, also in another schema; nothing is copied."""
    item.run(
        "update item set name = 'before' where id = 1",
        "alter table item rename to thing",
        "update thing set name = 'after' where id = 2",
        "create schema stock",
        'alter table thing set schema stock; alter table stock.thing rename to "Odd one"',
        """insert into stock."Odd one" values (3, 'c')""",
    )
    assert "copied" not in item.apply().stderr
    item.same('stock."Odd one"')
    assert tables(item) == {'stock."Odd one"'}
    item.run("""delete from stock."Odd one" where id = 1""", "alter schema stock rename to store")
    assert "copied" not in item.apply().stderr
    item.same('store."Odd one"')


def test_a_name_that_changes_hands(item: Pair) -> None:
    """A table that was filled aside takes the place of another one."""
    item.make("create table item_new (id int primary key, name text)")
    item.capture("item_new")
    item.apply()
    item.run(
        "insert into item_new select * from item",
        "begin; alter table item rename to item_old; alter table item_new rename to item; commit",
        "insert into item values (3, 'new')",
        "update item_old set name = 'old'",
    )
    assert "copied" not in item.apply().stderr
    item.same("item", "item_old")


def test_a_name_that_the_target_has_otherwise(item: Pair) -> None:
    """Nothing of the batch is applied; when the name is free, the next run goes on."""
    item.there("create table thing (x int)")
    item.run("insert into item values (3, 'c')", "alter table item rename to thing")
    failed: subprocess.CompletedProcess[str] = item.replicate()
    assert failed.returncode == 1
    assert 'cannot be renamed in the target: relation "thing" already exists' in failed.stderr.splitlines()[0]
    assert len(item.rows(item.target, "item")) == 2
    item.there("drop table thing")
    item.apply()
    item.same("thing")


def test_a_table_that_moves_past_tables_of_its_names(item: Pair) -> None:
    """The new schema has a table of its old name, and the old one has one of its new name."""
    for statement in (
        "create schema stock",
        "create table stock.item (id int constraint own_name primary key, name text)",
        "create table thing (id int primary key, name text)",
    ):
        item.make(statement)
    item.capture("stock.item", "thing")
    item.run("insert into stock.item values (7, 'g')", "insert into thing values (8, 'h')")
    item.apply()
    item.run(
        "alter table item rename to aside",
        "alter table aside set schema stock; alter table stock.aside rename to thing",
    )
    assert "copied" not in item.apply().stderr
    item.same("stock.thing", "stock.item", "thing")


def test_sequences_of_a_made_table(pair: Pair) -> None:
    """They count as those of the source do."""
    pair.run(
        """create table item (id int generated always as identity (increment by 10 start 100 maxvalue 9000 cycle),
                             n int primary key default 0)""",
        "create sequence down as smallint increment by -2 minvalue -50 maxvalue -1 start -3 cache 5",
        "alter sequence down owned by item.n",
        "alter table item alter n set default nextval('down')",
    )
    pair.capture("item")
    pair.apply("--create")
    counts = """select seqrelid::regclass::text, seqtypid::regtype::text, seqincrement, seqmin, seqmax, seqstart,
                       seqcache, seqcycle
                  from pg_sequence where seqrelid in ('public.down'::regclass, 'public.item_id_seq'::regclass)
                 order by 1"""
    with pair.source.connect("su") as here:
        assert there(pair, counts) == here.execute(counts).fetchall()


def test_not_null_that_is_not_valid(pair: Pair) -> None:
    """A made table takes the rows that were there before; when the constraint is valid it follows."""
    with pair.source.connect("su") as su:
        if su.info.server_version < 180000:
            pytest.skip("NOT NULL is always valid before PostgreSQL 18")
    pair.run(
        "create table item (id int primary key, n int)",
        "insert into item values (1, null), (2, 2)",
        "alter table item add constraint known not null n not valid",
    )
    pair.capture("item")
    pair.apply("--create", "--on-ddl", "follow")
    pair.same("item")
    pair.run("update item set n = 1 where id = 1", "alter table item validate constraint known")
    told = pair.apply("--on-ddl", "follow").stderr
    assert 'not null of column public.item."n" was made in the target' in told
    not_null = "select attnotnull from pg_attribute where attrelid = 'item'::regclass and attname = 'n'"
    assert there(pair, not_null) == [(True,)]
