"""Replicas of tables whose log leaves out large values that updates leave as they were: rows arrive whole."""

from __future__ import annotations

import random
from contextlib import suppress

import psycopg
import pytest

from tests.replica.conftest import Pair, apply_here
from tests.replica.test_compare_tables import compare, compared, counts
from tests.replica.test_dead_letters import letters
from tests.replica.test_rights import apply as apply_by_role

pytestmark = pytest.mark.server

ITEM = "create table item (id int primary key, n int, note text, doc text, more jsonb, tag boolean)"

# beyond 2,000 bytes, which compression does not change
LARGE = "(select string_agg(md5('{}' || i::text), '') from generate_series(1, 200) i)"
ONE, TWO, THREE = (LARGE.format(c) for c in "abc")


def capture(pair: Pair, table: str, *, also: str = "") -> None:
    pair.run(f"select gdq.add_table('shop', '{table}', unchanged => 'omit'{also})")


@pytest.fixture
def items(pair: Pair) -> Pair:
    """Rows 1 to 6 on both sides, each with two large values."""
    pair.make(ITEM)
    pair.run(f"insert into item select i, 0, '', {ONE}, to_jsonb({TWO} || i), true from generate_series(1, 6) i")
    capture(pair, "item")
    pair.apply()
    return pair


@pytest.mark.parametrize(
    "statement",
    [
        "update item set n = 1, tag = null",
        f"update item set doc = {THREE} where id < 3",
        f"update item set n = 1; update item set doc = {THREE}; update item set n = 2",
        f"update item set doc = {THREE}; update item set doc = {ONE}; update item set n = 2",
        "update item set n = 1; update item set n = 0",
        "update item set id = id + 100; update item set n = 1; update item set id = id - 100; update item set n = 3",
        "update item set id = 7 where id = 1; update item set id = 1 where id = 2; update item set id = 2 where id = 7",
        f"insert into item values (7, 0, '', {ONE}, null, true); update item set n = 1 where id = 7",
        f"delete from item where id = 1; insert into item values (1, 0, '', {TWO}, null); update item set n = 5",
        f"delete from item where id = 1; insert into item values (1, 0, '', {ONE}, null); update item set n = 5",
        "update item set n = 5; delete from item where id = 1",
        "update item set more = null where id = 2; update item set n = 5; update item set doc = 'small' where id = 2",
        f"truncate item; insert into item values (1, 9, '', {ONE}, null); update item set n = 1",
    ],
)
@pytest.mark.parametrize("together", [True, False])
def test_changes(items: Pair, statement: str, together: bool) -> None:
    if together:
        items.run(f"do $do$ begin {statement}; end $do$")
    else:
        items.run(*statement.split("; "))
    apply_here(items)
    items.same("item")


def test_one_row_of_the_target_for_each_row_that_changed(items: Pair) -> None:
    items.run(
        *(f"update item set n = {n} where id < 3" for n in range(1, 9)),
        f"update item set doc = {THREE} where id = 3",
        f"insert into item values (8, 0, '', {ONE}, null)",
        "update item set n = 7 where id = 8",
        "delete from item where id = 4",
    )
    assert apply_here(items) == [(1, 3, 1)]
    items.same("item")


def test_large_values_are_not_written_again(items: Pair) -> None:
    """Neither in the source's log nor in the target's table."""
    size = "select pg_relation_size(reltoastrelid) from pg_class where oid = 'item'::regclass"
    items.there("alter table item set (autovacuum_enabled = off, toast.autovacuum_enabled = off)")
    with items.target.connect() as there:
        before = there.execute(size).fetchone()
        for n in range(1, 4):
            items.run(f"update item set n = {n}")
            assert apply_here(items) == [(0, 6, 0)]
        assert there.execute(size).fetchone() == before
        items.run(f"update item set doc = {THREE}")
        apply_here(items)
        assert there.execute(size).fetchone() != before
    items.same("item")


_AGAIN = f"""
create function again() returns trigger language plpgsql as $$
begin
  if pg_trigger_depth() > 3 then
    return null;
  elsif new.note like '%write%' then
    update item set doc = {THREE} || new.n, note = '' where id = new.id;
  elsif new.note like '%gone%' then
    delete from item where id = new.id;
  elsif new.note like '%next%' then
    update item set n = n + 100, note = replace(note, 'next', '') where id in (new.id, new.id + 1);
  elsif new.note like '%moved%' then
    update item set id = id + 100, note = '' where id = new.id;
  end if;
  return null;
end $$"""


@pytest.mark.parametrize("seed", [1, *(pytest.param(seed, marks=pytest.mark.long) for seed in range(2, 12))])
def test_random(items: Pair, seed: int) -> None:
    """Also where a trigger's change is logged before the one that fired it."""
    items.run(
        _AGAIN,
        'create trigger "!again" after insert or update on item for each row execute function again()',
    )
    choose = random.Random(seed)
    with items.source.connect() as connection:
        for _ in range(5):
            for _ in range(choose.randint(1, 12)):
                with suppress(psycopg.errors.UniqueViolation), connection.transaction():
                    for _ in range(choose.choice((1, 1, 1, 2, 3))):
                        connection.execute(_random_statement(choose).encode())
            apply_here(items)
            items.same("item")


def _random_statement(choose: random.Random) -> str:
    low, note = choose.randint(1, 8), choose.choice(("", "", "write", "gone", "next", "moved"))
    rows = f"id between {low} and {low + choose.randint(0, 2)}"
    large = LARGE.format(choose.choice("abcd"))
    return choose.choice(
        (
            f"update item set n = n + 1, note = '{note}' where {rows}",
            f"update item set n = n + 1 where {rows}",
            f"update item set doc = {large} where {rows}",
            f"update item set more = to_jsonb({large}), n = n + 1 where {rows}",
            f"update item set doc = 'small' where {rows}",
            f"insert into item select i, 0, '{note}', {large} from generate_series({low}, 9) i on conflict do nothing",
            f"insert into item values ({low}, 5, '', {large}) on conflict (id) do update set n = item.n + 1",
            f"delete from item where {rows}",
            f"update item set id = id + 9 where id = {low} and not exists (select from item where id = {low + 9})",
        )
    )


def test_keys_that_are_equal_by_text_alone(pair: Pair) -> None:
    pair.make("create table item (id numeric, k timestamptz, n int, doc text, primary key (id, k))")
    pair.run(f"insert into item select i / 2.0, '2020-01-01', 0, {ONE} from generate_series(1, 4) i")
    capture(pair, "item")
    pair.apply()
    pair.run(
        "update item set n = 1",
        "update item set id = id * 1.00 where n = 1",
        "update item set n = 2 where id = 1",
        "update item set k = k + '1 day' where id = 2",
        "update item set n = 3 where id = 2",
    )
    apply_here(pair)
    pair.same("item")


def test_two_ways_and_origins(items: Pair) -> None:
    """Log rows with origins are read otherwise."""
    items.run("select gdq.alter_table_options('shop', 'item', '{\"always\": true, \"origin\": true}')")
    items.apply()
    items.run(
        "update item set n = 1",
        f"update item set doc = {THREE} where id = 1",
        "update item set n = 2 where id < 3",
        "update item set id = 20 where id = 2",
        "update item set n = 9 where id = 20",
    )
    apply_here(items)
    items.same("item")


def test_foreign_keys_that_fire(pair: Pair) -> None:
    """All tables are changed in one statement, and the versions of a table's columns are read together."""
    pair.make("create table kind (id int primary key, n int, doc text)")
    pair.make("create table item (id int primary key, kind int references kind, n int, doc text)")
    pair.run(
        f"insert into kind select i, 0, {ONE} from generate_series(1, 3) i",
        f"insert into item select i, 1 + i % 3, 0, {TWO} from generate_series(1, 6) i",
    )
    for table in ("kind", "item"):
        capture(pair, table)
    apply_by_role(pair)
    pair.run(
        "update kind set n = 1",
        "update item set n = 1, kind = 3",
        f"update item set doc = {THREE} where id < 3",
        "alter table item add x int",
        "alter table item rename doc to body",
        "update item set x = 1, n = 2",
        "delete from item where id = 6",
        f"insert into kind values (9, 0, {ONE})",
        "update kind set n = 3 where id = 9",
        "update item set kind = 9 where id = 1",
        "delete from kind where id = 1",
    )
    apply_by_role(pair)
    pair.same("kind", "item")


def test_columns_that_change(items: Pair) -> None:
    items.run(
        "update item set n = 1",
        "alter table item rename doc to body",
        "update item set n = 2 where id < 4",
        "alter table item add extra text default 'x'",
        f"update item set extra = {TWO}",
        "update item set n = 3 where id < 3",
        "alter table item drop more",
        f"update item set n = 4, extra = {THREE} where id < 2",
        "update item set n = 5",
    )
    apply_here(items)
    items.same("item")


def test_the_option_changes(items: Pair) -> None:
    """The table is copied again, as after any other option."""
    for value in ("once", "omit"):
        items.run(
            "update item set n = n + 1",
            f"select gdq.alter_table_options('shop', 'item', '{{\"unchanged\": \"{value}\"}}')",
            "update item set n = n + 1",
        )
        items.apply()
        items.same("item")


def test_a_row_that_the_target_lacks(items: Pair) -> None:
    items.there("delete from item where id = 1")
    items.run("update item set n = 1 where id < 3")
    stopped = items.replicate()
    assert stopped.returncode == 1
    assert "update_missing" in stopped.stderr
    for answer in ("--on-conflict=update_missing=apply", "--on-error=dead-letter"):
        stopped = items.replicate(answer)
        assert stopped.returncode == 1
        assert stopped.stderr.splitlines()[0] == (
            "Error: table public.item of the target lacks 1 rows, of which the log has not all values, as updates left "
            "them as they were"
        )
    items.apply("--on-conflict", "update_missing=skip")
    assert [row for (row,) in items.rows(items.target, "(select id, n from item where id < 3)")] == ["(2,1)"]
    items.apply("--copy-again", "public.item")
    items.same("item")


@pytest.mark.parametrize("answer", ["newest:n", "skip", "update_differs=apply", "insert_exists=skip"])
def test_answers_that_need_old_values(items: Pair, answer: str) -> None:
    items.run("update item set n = 1")
    refused = items.replicate("--on-conflict", answer)
    assert refused.returncode == 1
    assert refused.stderr.startswith("Error: table public.item is captured without large values that updates leave as")


def test_dead_letters(items: Pair) -> None:
    """A value that the target has refused is that of the letter, not that of the target's older row."""
    items.there("alter table item add constraint low check (n < 10)")
    items.run(f"update item set n = 10, doc = {THREE} where id = 1", "update item set n = 2 where id = 2")
    items.apply("--on-error", "dead-letter")
    items.run("update item set n = 11 where id = 1")
    items.apply("--on-error", "dead-letter")
    [letter] = letters(items)
    assert (letter["remote"]["n"], len(letter["remote"]["doc"])) == ("11", 6400)
    assert letter["remote"]["doc"] != letter["local"]["doc"]
    items.run("update item set n = 3 where id = 1")
    items.apply("--on-error", "dead-letter")
    assert letters(items) == []
    items.same("item")


def test_compared_where_the_log_leads_back(items: Pair) -> None:
    """The source is not moved back past updates whose values are not known: the replica is waited for."""
    items.run("insert into item (id, n) values (50, 1)")
    [table] = compared(items, "mirror", code=0)
    assert counts(table) == (6, 0, 0, 0)
    items.run("update item set n = 1 where id = 1")
    done = compare(items, "mirror", "--wait", "0")
    assert done.returncode == 1
    assert (
        "cannot be compared: there were updates whose log lacks large values that they left as they were"
        in (done.stderr.splitlines()[0])
    )
    items.apply()
    [table] = compared(items, "mirror", code=0)
    assert counts(table) == (7, 0, 0, 0)
