"""Rows that change several times in a batch arrive as they are in the end, in whatever order their log has the changes.

Triggers of the application change rows again before the change that fired them is logged.
"""

from __future__ import annotations

import random
from contextlib import suppress

import psycopg
import pytest

from tests.replica.conftest import Pair, apply_here

pytestmark = pytest.mark.server

# What a trigger does to a row after each kind of change, as the row's own note says.
_AGAIN = """
create function again() returns trigger language plpgsql as $$
begin
  if pg_trigger_depth() > 3 then
    return null;
  elsif tg_op = 'DELETE' and old.note like '%back%' then
    insert into item values (old.id, old.n + 1, replace(old.note, 'back', 'came'));
    if old.note like '%more%' then
      update item set n = n + 10 where id = old.id;
    end if;
  elsif tg_op <> 'DELETE' and new.note like '%gone%' then
    delete from item where id = new.id;
  elsif tg_op <> 'DELETE' and new.note like '%next%' then
    update item set n = n + 100, note = replace(note, 'next', '') where id in (new.id, new.id + 1);
  elsif tg_op <> 'DELETE' and new.note like '%moved%' then
    update item set id = id + 100, note = '' where id = new.id;
  end if;
  return null;
end $$"""
# before the trigger of capture, whose name begins with !gdq
_TRIGGER = 'create trigger "!again" after insert or update or delete on item for each row execute function again()'

_NOTES = ("", "", "", "next", "gone", "back", "back more", "moved")


@pytest.fixture(params=["row", "statement"])
def item(pair: Pair, request: pytest.FixtureRequest) -> Pair:
    """A replica of a table whose trigger changes rows again; capture logs each row, or each statement."""
    pair.make("create table item (id int primary key, n int, note text)")
    pair.run(_AGAIN, _TRIGGER, f"select gdq.add_table('shop', 'item', granularity => '{request.param}')")
    pair.run("insert into item select i, 0, '' from generate_series(1, 6) i")
    pair.apply()
    return pair


@pytest.mark.parametrize(
    "statement",
    [
        "update item set n = n + 1, note = 'next'",
        "update item set note = 'gone' where id in (2, 3)",
        "update item set note = 'back'; delete from item where id < 4",
        "update item set note = 'back more'; delete from item where id < 4",
        "insert into item values (7, 0, 'gone'), (8, 0, 'next'), (9, 1, '')",
        "update item set note = 'moved' where id < 3",
        "insert into item values (7, 0, ''); update item set n = 1 where id = 7; delete from item where id = 7",
        "insert into item values (7, 0, ''); update item set n = 1 where id = 7",
        "delete from item where id = 1; insert into item values (1, 5, '')",
        "update item set id = -id; update item set id = 7 + id",
        "update item set n = n",
        "truncate item; insert into item values (1, 9, 'next'), (2, 9, '')",
    ],
)
def test_within_a_transaction(item: Pair, statement: str) -> None:
    item.run(f"do $do$ begin {statement}; end $do$")
    apply_here(item)
    item.same("item")


def test_by_many_transactions(item: Pair) -> None:
    """Of many changes of a row one is applied, also of rows that got another key, and of a key that has another row."""
    item.run(
        *(f"update item set n = {n} where id in (1, 2)" for n in range(5)),
        "update item set id = 10 where id = 2",
        "insert into item values (2, 7, '')",
        "insert into item values (20, 1, '')",
        "delete from item where id in (3, 20)",
    )
    assert apply_here(item) == [(1, 2, 1)]
    item.same("item")


@pytest.mark.parametrize("note", ["back", "back more"])
def test_a_deleted_row_that_comes_back(item: Pair, note: str) -> None:
    """The trigger's insert and update are logged before the delete that fired it."""
    item.run(f"update item set note = '{note}'")
    apply_here(item)
    item.run("delete from item where id < 4")
    apply_here(item)
    item.same("item")


def test_a_key_that_two_rows_have_for_a_while(pair: Pair) -> None:
    """The row that comes is logged before the one that goes, by a transaction that commits later."""
    pair.make("create table item (id int primary key deferrable initially deferred, n int)")
    pair.run("insert into item select i, i from generate_series(1, 4) i")
    pair.capture("item")
    pair.apply()
    with pair.source.connect() as first, pair.source.connect() as second, first.transaction():
        first.execute("insert into item values (4, 44)")
        second.execute("delete from item where n = 4")
    pair.apply()
    pair.same("item")


def test_a_table_that_is_all_key(pair: Pair) -> None:
    pair.make("create table pair (one int, other int, primary key (one, other))")
    pair.capture("pair")
    pair.run("insert into pair select i, i from generate_series(1, 5) i")
    pair.apply()
    pair.run(
        "update pair set one = one where one < 3",
        "update pair set one = 9 where one = 3",
        "delete from pair where one = 5",
    )
    pair.apply()
    pair.same("pair")


def test_swapped_values_of_another_key(pair: Pair) -> None:
    pair.make("create table item (id int primary key, place int unique)")
    pair.run("insert into item values (1, 1), (2, 2), (3, 3)")
    pair.capture("item")
    pair.apply()
    pair.run(
        "update item set place = 0 where id = 1",
        "update item set place = 1 where id = 2",
        "update item set place = 2 where id = 1",
        "delete from item where id = 3",
        "insert into item values (4, 3)",
    )
    pair.apply()
    pair.same("item")


def test_a_row_that_the_target_lacks(item: Pair) -> None:
    """A change that the target does not take is seen, though its old row is not staged: nothing is applied."""
    item.there("delete from item where id = 1")
    item.run("update item set n = 1 where id = 1", "update item set n = 1 where id = 2")
    done = item.replicate()
    assert done.returncode != 0
    assert "update_missing" in done.stderr
    item.apply("--on-conflict", "update_missing=apply")
    item.same("item")


@pytest.mark.parametrize("seed", [1, *(pytest.param(seed, marks=pytest.mark.long) for seed in range(2, 12))])
def test_random(item: Pair, seed: int) -> None:
    choose = random.Random(seed)
    with item.source.connect() as connection:
        for _ in range(5):
            for _ in range(choose.randint(1, 12)):
                with suppress(psycopg.errors.UniqueViolation), connection.transaction():
                    for _ in range(choose.choice((1, 1, 1, 2, 3))):
                        connection.execute(_random_statement(choose).encode())
            apply_here(item)
            item.same("item")


def _random_statement(choose: random.Random) -> str:
    """A change of some rows, whose trigger may change them again."""
    low, note = choose.randint(1, 8), choose.choice(_NOTES)
    rows = f"id between {low} and {low + choose.randint(0, 2)}"
    return choose.choice(
        (
            f"update item set n = n + 1, note = '{note}' where {rows}",
            f"insert into item select i, 0, '{note}' from generate_series({low}, {low + 1}) i on conflict do nothing",
            f"insert into item values ({low}, 5, '{note}') on conflict (id) do update set n = item.n + 1",
            f"delete from item where {rows}",
            f"update item set id = id + 9 where id = {low} and not exists (select from item where id = {low + 9})",
        )
    )
