"""Tables without a key under random writers, in targets of other shapes, with rows that are refused, and DDL."""

from __future__ import annotations

import json
import random

import pytest

from tests.replica.conftest import Pair
from tests.replica.test_conflicts import conflicts
from tests.replica.test_dead_letters import ASIDE, letters, there
from tests.replica.test_no_key import BAG, shown
from tests.support.programs import gdq

pytestmark = [pytest.mark.server, pytest.mark.long]

KINDS = """create table heap (a int, n numeric, v text, j json, f double precision, p point, b bytea, t timestamptz,
                              i int[], c char(4), s varchar(5), d date, o bool)"""

# Few values of each column, so that many rows are equal, or nearly.
VALUES = {
    "a": ["null", "1", "2"],
    "n": ["null", "1.0", "1.00", "2"],
    "v": ["null", "''", "'x'", "'a''b, (\"\\'"],
    "j": ["null", "'{}'", "'{ }'", "'null'"],
    "f": ["0", "'-0'", "'nan'", "0.1"],
    "p": ["null", "'(1,2)'"],
    "b": ["null", "''", "'\\x00ff'"],
    "t": ["null", "'2024-01-01'"],
    "i": ["null", "'{}'", "'{1,null}'"],
    "c": ["null", "'a'"],
    "s": ["''", "'five5'"],
    "d": ["null", "'infinity'"],
    "o": ["null", "true"],
}


def statement(rng: random.Random) -> str:
    """A random statement: rows that come several times, go, or become others that may be there already."""
    column = rng.choice(list(VALUES))
    value = rng.choice(VALUES[column])
    # most rows are made of the first two values
    row = ", ".join(rng.choice(values[: rng.choice([1, 1, 1, 2, 4])]) for values in VALUES.values())
    chosen = f"select ctid from heap order by md5(ctid::text || {rng.random()}) limit {rng.randint(1, 9)}"
    some = f"ctid = any (array({chosen}))"
    return rng.choice(
        [
            f"insert into heap select {row} from generate_series(1, {rng.randint(1, 5)})",
            f"insert into heap select {row} from generate_series(1, {rng.randint(1, 5)})",
            f"insert into heap select * from heap where {some}",
            f"delete from heap where {some}",
            f"update heap set {column} = {value} where {some}",
            f"update heap set {column} = {value} where a is null and {some}",
            f"update heap set {column} = {column} where {some}",
        ]
    )


def write(pair: Pair, rng: random.Random) -> None:
    """Some random transactions, of which a few are rolled back."""
    for _ in range(rng.randint(1, 8)):
        inner = "; ".join(statement(rng) for _ in range(rng.randint(1, 4)))
        pair.run(f"begin; {inner}; {'rollback' if rng.random() < 0.1 else 'commit'}")
    if rng.random() < 0.1:
        pair.run(f"begin; truncate heap; {statement(rng)}; commit")


LISTED = f"(select {', '.join(VALUES)} from heap)"

TARGETS: dict[str, list[str]] = {
    "alike": [KINDS],
    "partitioned": [
        f"{KINDS} partition by list (a)",
        "create table heap_1 partition of heap for values in (1) partition by hash (s)",
        "create table heap_1a partition of heap_1 for values with (modulus 2, remainder 0)",
        "create table heap_1b partition of heap_1 for values with (modulus 2, remainder 1)",
        "create table heap_2 partition of heap default",
    ],
    "columns_of_its_own": [
        "create table heap (own int default 5, twice bigint generated always as (a * 2) stored, "
        + KINDS.removeprefix("create table heap ("),
        "alter table heap alter s set not null, alter f set not null",
        "create index on heap (s, f)",
    ],
    "other_types": [
        KINDS.replace("a int", "a bigint").replace("v text", "v varchar").replace("s varchar(5)", "s text"),
    ],
}


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("shape", TARGETS)
def test_random_writers(fed: Pair, shape: str, seed: int) -> None:
    """After each run of the replica both sides have the same rows, each as often."""
    fed.run(KINDS, "alter table heap replica identity full")
    fed.there(*TARGETS[shape])
    rng = random.Random(seed)
    write(fed, rng)
    fed.capture("heap")
    for step in range(8):
        done = fed.apply()
        fed.same(LISTED)
        assert step == 0 or "copied" not in done.stderr
        write(fed, rng)


def test_a_target_that_rounds(pair: Pair) -> None:
    """Rows that differ in the source may be the same in the target; each that goes takes one."""
    pair.run("create table heap (n numeric, at timestamptz)")
    pair.there("create table heap (n numeric(6, 1), at timestamptz(0))")
    pair.capture("heap")
    pair.run(
        "insert into heap values (1.5, '2024-01-01 00:00:00.2'), (1.50, '2024-01-01'), (1.52, '2024-01-01')",
        "insert into heap values (null, null), (7, null)",
    )
    pair.apply()
    pair.run("delete from heap where n::text <> '1.52'")
    pair.apply()
    assert shown(pair, "(select n from heap)") == ["()", "(1.5)"]


def test_a_target_with_a_unique_key(pair: Pair) -> None:
    """Rows of it that are in the way are conflicts; rows of the source that are in each other's way are refused."""
    pair.make("create table heap (a int, v text)")
    pair.there("alter table heap add unique (a)")
    pair.capture("heap")
    pair.run("insert into heap values (1, 'one'), (2, 'two'), (null, 'none'), (null, 'none')")
    pair.apply()
    pair.run("update heap set a = case a when 1 then 2 else 1 end where a is not null")
    pair.apply()
    pair.same("heap")
    pair.there("insert into heap values (8, 'theirs'), (9, 'theirs')")
    pair.run("insert into heap values (8, 'ours'), (10, 'ten')")
    failed = pair.replicate()
    assert failed.stderr.splitlines()[0] == (
        'Error: conflict in table public.heap of the target: insert_exists, key {"a": 8, "v": "ours"}'
    )
    pair.apply("--on-conflict", "insert_exists=skip")
    assert "(8,theirs)" in shown(pair, "heap")
    pair.run("insert into heap values (9, 'ours')", "delete from heap where v = 'none'")
    pair.apply("--on-conflict", "apply")
    assert shown(pair, "heap") == ["(1,two)", "(10,ten)", "(2,one)", "(8,theirs)", "(9,ours)"]
    assert [(one["kind"], one["local"]["v"], one["resolution"]) for one in conflicts(pair)] == [
        ("insert_exists", "theirs", "skip"),
        ("insert_exists", "theirs", "apply"),
    ]
    pair.run("insert into heap values (20, 'x'), (20, 'x')")
    [batch] = json.loads(pair.apply(*ASIDE, "--json").stdout)
    assert (batch["inserted"], batch["dead_letters"]) == (1, 1)
    pair.run("delete from heap where a = 20")
    pair.apply()
    assert letters(pair) == []
    assert "(20,x)" not in shown(pair, "heap")


def test_the_newest_row_of_a_unique_key(pair: Pair) -> None:
    pair.make("create table heap (a int, at int)")
    pair.there("alter table heap add unique (a)")
    pair.capture("heap")
    pair.apply()
    pair.there("insert into heap values (1, 5), (2, 5)")
    pair.run("insert into heap values (1, 4), (2, 6)")
    pair.apply("--on-conflict", "newest:at")
    assert shown(pair, "heap") == ["(1,5)", "(2,6)"]


def test_a_row_that_the_target_does_not_give_up(pair: Pair) -> None:
    """Its dead letter is settled by an equal row that comes, for the target has it, or when it is tried again."""
    pair.make(BAG)
    pair.run("insert into bag values (1, 1.0), (1, 1.0), (2, 2)")
    pair.capture("bag")
    pair.apply()
    pair.there(
        "create function keep() returns trigger language plpgsql as $$ begin return null; end $$",
        "create trigger keeps before delete on bag for each row execute function keep()",
        "alter table bag enable always trigger keeps",
    )
    pair.run("delete from bag where a = 1", "delete from bag where a = 2")
    pair.apply(*ASIDE)
    found = sorted((one["operation"], one["local"]["a"], one["remote"], one["sqlstate"]) for one in letters(pair))
    assert found == [("delete", a, None, None) for a in ("1", "1", "2")]
    pair.run("insert into bag values (1, 1.0), (3, 1)", "insert into bag values (1, 1.00)")
    pair.apply(*ASIDE)
    assert sorted(one["local"]["a"] for one in letters(pair)) == ["1", "2"]
    assert shown(pair) == ["(1,1.0,,)", "(1,1.0,,)", "(1,1.00,,)", "(2,2,,)", "(3,1,,)"]
    pair.there("drop trigger keeps on bag")
    assert there(pair, "replay-replica-dead-letters", "--all").stderr == "replayed 2 of mirror\n"
    assert letters(pair) == []
    pair.same("bag")


def test_dead_letters_follow_columns(pair: Pair) -> None:
    pair.make(BAG)
    pair.capture("bag")
    pair.apply()
    pair.there("alter table bag add constraint few check (a < 100)")
    pair.run("insert into bag values (100, 1.0, 'x'), (100, 1.0, 'x'), (101, 1, 'y')")
    pair.apply(*ASIDE)
    pair.run(
        "alter table bag drop j",
        "alter table bag rename v to w",
        "alter table bag add e int",
        "delete from bag where ctid = (select min(ctid) from bag where a = 100)",
        "update bag set e = 5 where a = 101",
    )
    pair.apply(*ASIDE)
    found = sorted((one["remote"]["a"], one["remote"]["w"], one["remote"].get("e")) for one in letters(pair))
    assert found == [("100", "x", None), ("101", "y", "5")]
    pair.there("alter table bag drop constraint few")
    assert there(pair, "replay-replica-dead-letters", "--all").returncode == 0
    assert letters(pair) == []
    pair.same("(select a, n, w, e from bag)")


def test_dead_letters_of_a_table_that_loses_its_key(pair: Pair) -> None:
    """They say what the target has in place of what, so a later deletion of the row takes that."""
    pair.make("create table item (id int primary key, v int)")
    pair.run("insert into item values (1, 1), (2, 2), (3, 3)")
    pair.capture("item")
    pair.apply()
    pair.there("alter table item add constraint few check (v < 100)")
    pair.run(
        "update item set v = 100 where id = 1",
        "update item set v = 200 where id = 2",
        "insert into item values (4, 400)",
    )
    pair.apply(*ASIDE)
    pair.run(
        "alter table item drop constraint item_pkey", "delete from item where id = 1", "delete from item where id = 4"
    )
    pair.apply(*ASIDE)
    assert [(one["operation"], one["key"], one["remote"]["v"]) for one in letters(pair)] == [
        ("update", {"id": "2"}, "200")
    ]
    assert shown(pair, "item") == ["(2,2)", "(3,3)"]
    pair.there("alter table item drop constraint item_pkey, drop constraint few")
    assert there(pair, "replay-replica-dead-letters", "--all").returncode == 0
    assert letters(pair) == []
    pair.same("item")


def test_tables_that_are_made_renamed_and_copied_again(pair: Pair) -> None:
    pair.run("create table heap (a int not null, v text default 'x')", "insert into heap values (1), (1)")
    pair.capture("heap")
    pair.apply("--create")
    pair.same("heap")
    pair.run(
        "delete from heap where ctid = (select min(ctid) from heap)",
        "alter table heap rename to pile",
        "alter table pile add n numeric",
        "insert into pile values (2, 'y', 1.50), (2, 'y', 1.5)",
        "alter table pile drop v",
        "delete from pile where n::text = '1.5'",
    )
    assert "copied" not in pair.apply().stderr
    pair.same("pile")
    with pair.target.connect("su") as su:
        su.execute("delete from pile; insert into pile values (9)")
    pair.apply("--copy-again", "public.pile")
    pair.same("pile")


def test_it_is_compared(pair: Pair) -> None:
    pair.make(BAG)
    pair.run("insert into bag values (1), (1), (2)")
    pair.capture("bag")
    pair.apply()
    pair.run("insert into bag values (1)")  # under way
    to = ("shop", "mirror", "--to", pair.target.su_dsn)
    assert gdq("compare-tables", *to, dsn=pair.source.dsn).returncode == 0
    pair.there("insert into bag values (1)", "delete from bag where a = 2")
    differing = gdq("compare-tables", *to, dsn=pair.source.dsn)
    assert differing.returncode == 3
    assert "public.bag: missing 1 rows without a key" in differing.stdout
    assert "public.bag: extra 1 rows without a key" in differing.stdout


def test_a_key_that_the_target_cannot_get(pair: Pair) -> None:
    """One line says what is missing, and the replica goes on when it is there."""
    pair.make("create table item (id int, v text)")
    pair.run("insert into item values (1, 'a')")
    pair.capture("item")
    pair.apply()
    pair.there("insert into item values (1, 'own')")
    pair.run("alter table item add primary key (id)", "update item set v = 'b'")
    failed = pair.replicate()
    assert failed.returncode == 1
    assert failed.stderr.splitlines()[0] == (
        'Error: table public.item has the key ("id") in the source by now, and cannot get it in the target: '
        'could not create unique index "item_id_idx"'
    )
    pair.there("delete from item where v = 'own'")
    pair.apply()
    pair.same("item")


def test_a_key_that_comes(fed: Pair) -> None:
    """A slot's descriptions of a table under REPLICA IDENTITY FULL do not name its key: the table is copied again."""
    fed.make("create table item (id int, v text)")
    fed.run("alter table item replica identity full", "insert into item values (1, 'a')")
    fed.capture("item")
    fed.apply()
    fed.run(
        "insert into item values (1, 'b')",
        "delete from item where v = 'a'",
        "alter table item add primary key (id)",
        "update item set v = 'c'",
    )
    if fed.fed_by == "slot":
        assert 'has no unique key ("id")' in fed.replicate().stderr
        fed.there("delete from item", "create unique index on item (id)")
    assert ("copied public.item: 1 rows" in fed.apply().stderr) == (fed.fed_by == "slot")
    fed.same("item")
    fed.run("update item set v = 'd'", "insert into item values (2, 'e')")
    fed.apply()
    fed.same("item")


@pytest.mark.parametrize("actions", ["", "on delete cascade"])
def test_where_foreign_keys_fire(pair: Pair, actions: str) -> None:
    """Rows come with those that they point to, go with them and move to others, in one statement."""

    def apply(*options: str) -> str:
        done = pair.replicate(*options, role="owner")
        assert done.returncode == 0, done.stderr
        pair.same("customer", "visit")
        return done.stderr

    def put_aside() -> list[dict[str, object]]:
        listed = gdq("replica-dead-letters", "mirror", "--json", "--to", pair.target.dsn, dsn="dbname=none")
        found: list[dict[str, object]] = json.loads(listed.stdout)
        return found

    pair.make("create table customer (id int primary key)")
    pair.make(f"create table visit (customer int references customer {actions}, v text)")
    pair.run("insert into customer select generate_series(1, 3)")
    pair.run("insert into visit values (1, 'x'), (1, 'x'), (2, null)")
    pair.capture("customer", "visit")
    apply()
    pair.run(
        "insert into customer values (4), (5)",
        "insert into visit values (4, 'y'), (4, 'y'), (1, 'x')",
        "delete from visit where ctid = (select min(ctid) from visit where v = 'x')",
        "update visit set customer = 5 where customer = 2",
        "delete from customer where id = 2",
    )
    apply()
    pair.run("delete from visit where customer = 4", "delete from customer where id = 4")
    apply()
    pair.there("alter table visit add constraint few check (v <> 'z')")
    pair.run("insert into visit values (1, 'z'), (1, 'z'), (3, 'a')", "insert into customer values (6)")
    assert pair.replicate(*ASIDE, role="owner").returncode == 0
    assert [one["remote"] for one in put_aside()] == [{"customer": "1", "v": "z"}] * 2
    pair.there("alter table visit drop constraint few")
    assert (
        gdq("replay-replica-dead-letters", "mirror", "--all", "--to", pair.target.dsn, dsn="dbname=none").returncode
        == 0
    )
    assert put_aside() == []
    pair.same("customer", "visit")
    pair.there("delete from visit where v = 'z'", "insert into visit values (3, 'own')")
    pair.there("insert into customer values (9)")
    to = ("shop", "mirror", "--to", pair.target.dsn)
    assert gdq("repair-tables", *to, dsn=pair.source.dsn).returncode == 0
    pair.same("customer", "visit")
    pair.there(f"create table local (customer int references customer {actions})")
    pair.run("truncate customer, visit", "insert into customer values (1)")
    pair.run("insert into visit values (1, 'x'), (1, 'x')")
    apply()
    pair.run(
        "delete from visit where ctid = (select min(ctid) from visit)",
        "alter table visit add primary key (customer)",
        "update visit set v = 'k'",
    )
    assert "copied public.visit: 1 rows" in apply()
