"""Rows that the target refuses: found among many, put aside, renewed or settled by later changes, tried again."""

from __future__ import annotations

import json
import subprocess
from typing import Any

import pytest

from gdq.consumers.replica.replica import Replica
from gdq.errors import GdqError
from tests.replica.conftest import Pair
from tests.support.programs import gdq

pytestmark = pytest.mark.server

ITEM = "create table item (id int primary key, place int unique, note text, n numeric)"
ASIDE = ("--on-error", "dead-letter")


@pytest.fixture
def items(pair: Pair) -> Pair:
    """A table of which both sides have rows 1 to 5; the target takes no negative places."""
    pair.make(ITEM)
    pair.run("insert into item select i, i, 'n' || i, 1.0 from generate_series(1, 5) i")
    pair.capture("item")
    pair.apply()
    pair.there("alter table item add constraint positive check (place > 0)")
    return pair


def there(pair: Pair, command: str, *options: str) -> subprocess.CompletedProcess[str]:
    """Run a command of dead letters, which needs no source."""
    return gdq(command, "mirror", "--to", pair.target.su_dsn, *options, dsn="dbname=none")


def letters(pair: Pair) -> list[dict[str, Any]]:
    listed = there(pair, "replica-dead-letters", "--json")
    assert listed.returncode == 0, listed.stderr
    found: list[dict[str, Any]] = json.loads(listed.stdout)
    return found


def keys(pair: Pair) -> list[tuple[str, str]]:
    return sorted((one["operation"], one["key"]["id"]) for one in letters(pair))


def test_a_replica_stops_at_a_row_that_is_refused(items: Pair) -> None:
    items.run("insert into item values (10, -1), (11, 11)")
    failed = items.replicate()
    assert failed.returncode == 1
    said = failed.stderr.splitlines()
    assert said[0].startswith("Error: table public.item of the target refuses a row: new row for relation")
    assert said[-1].startswith("Hint: Change the target, or put such rows aside: ")
    assert letters(items) == []
    assert items.rows(items.target, "(select * from item where id > 5)") == []


def test_refused_rows_are_put_aside(items: Pair) -> None:
    items.run(
        "insert into item values (10, -1, 'ten', 1.50), (11, 11, null, null)",
        "update item set place = -2 where id = 2",
        "update item set note = 'x' where id = 3",
        "delete from item where id = 4",
    )
    [batch] = json.loads(items.apply(*ASIDE, "--json").stdout)
    assert (batch["inserted"], batch["updated"], batch["deleted"], batch["dead_letters"]) == (1, 1, 1, 2)
    assert [row for (row,) in items.rows(items.target, "item")] == [
        "(1,1,n1,1.0)", "(11,11,,)", "(2,2,n2,1.0)", "(3,3,x,1.0)", "(5,5,n5,1.0)",
    ]  # fmt: skip
    update, insert = sorted(letters(items), key=lambda one: one["key"]["id"], reverse=True)
    assert (insert["operation"], insert["key"], insert["local"]) == ("insert", {"id": "10"}, None)
    assert insert["remote"] == {"id": "10", "place": "-1", "note": "ten", "n": "1.50"}
    assert (insert["sqlstate"], insert["table_name"], insert["tick"]) == ("23514", "public.item", batch["tick"])
    assert 'violates check constraint "positive"' in insert["reason"]
    assert (update["operation"], update["local"]["place"], update["remote"]["place"]) == ("update", "2", "-2")
    [listed] = json.loads(gdq("replicas", "--to", items.target.su_dsn, "--json", dsn=items.source.dsn).stdout)
    assert listed["dead_letters"] == 2


def test_later_changes_of_a_key_that_is_put_aside(items: Pair) -> None:
    """A later change renews the dead letter, or settles it: the target takes the row, or needs none."""
    items.run("insert into item values (10, -10), (11, -11), (12, -12)", "update item set place = -1 where id = 1")
    items.run("update item set place = -2 where id = 2")
    items.apply(*ASIDE)
    first = {one["key"]["id"]: one["dead_letter_id"] for one in letters(items)}
    items.run(
        "update item set place = -100 where id = 10",
        "update item set place = 11, note = 'good' where id = 11",
        "delete from item where id = 12",
        "update item set place = 1, note = 'good' where id = 1",
        "delete from item where id = 2",
    )
    items.apply(*ASIDE)
    [left] = letters(items)
    assert (left["dead_letter_id"], left["operation"], left["remote"]["place"]) == (first["10"], "insert", "-100")
    items.run("delete from item where id = 10")
    items.apply()  # where rows that are refused stop the replica, older ones are settled too
    assert letters(items) == []
    items.same("item")


def test_rows_that_depend_on_each_other(items: Pair) -> None:
    """Swapped keys are applied beside a row that is refused; what needs this row's place waits, and is no conflict."""
    items.run(
        "update item set place = null where id in (1, 2, 3)",
        "update item set place = 2 where id = 1",
        "update item set place = 1 where id = 2",
        "update item set place = -3 where id = 3",
        "update item set place = 3 where id = 4",
    )
    items.apply(*ASIDE)
    assert keys(items) == [("update", "3"), ("update", "4")]
    items.run("insert into item values (9, 4), (8, 8)", "update item set note = 'same' where id = 3")
    items.apply(*ASIDE)
    assert keys(items) == [("insert", "9"), ("update", "3"), ("update", "4")]
    items.there("alter table item drop constraint positive")
    replayed = there(items, "replay-replica-dead-letters", "--all")
    assert (replayed.returncode, replayed.stderr) == (0, "replayed 3 of mirror\n")
    assert letters(items) == []
    items.same("item")


def test_few_of_many(items: Pair) -> None:
    """Three rows of 20,000 are found by few attempts, which a sequence counts whatever is rolled back."""
    items.there(
        "create sequence attempts",
        "create function count_attempt() returns trigger language plpgsql as "
        "$$ begin perform nextval('public.attempts'); return null; end $$",
        "create trigger counts before insert on item for each statement execute function count_attempt()",
        "alter table item enable always trigger counts",
    )
    items.run("insert into item select i, case when i % 7000 = 0 then -i else i end from generate_series(10, 22000) i")
    [batch] = json.loads(items.apply(*ASIDE, "--json").stdout)
    assert (batch["inserted"], batch["dead_letters"]) == (21988, 3)
    assert keys(items) == [("insert", "14000"), ("insert", "21000"), ("insert", "7000")]
    with items.target.connect("su") as su:
        [attempts] = su.execute("select last_value from attempts").fetchone() or []
    assert attempts < 120


def test_more_than_single_rows(items: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gdq.consumers.replica.refusal.REJECT_LIMIT", 3)
    items.run("insert into item select i, -i from generate_series(10, 20) i")
    with (
        Replica(items.source.dsn, items.target.su_dsn, "shop", "mirror", on_error="dead-letter") as replica,
        pytest.raises(GdqError, match=r"table public\.item of the target refuses a row") as refused,
    ):
        list(replica.run())
    assert refused.value.hint == "More than 3 rows are refused: change the target, then start again."
    assert letters(items) == []


def test_narrower_types(pair: Pair) -> None:
    pair.run("create table wide (id int primary key, n numeric, b bigint, v text)")
    pair.there("create table wide (id int primary key, n int, b int, v varchar(3) not null)")
    pair.capture("wide")
    pair.apply()
    pair.run(
        "insert into wide values (1, 1.5, 1, 'a'), (2, 1, 3000000000, 'a')",
        "insert into wide values (3, 1, 1, 'long'), (4, 1, 1, null), (5, 1, 1, 'ok')",
    )
    pair.apply(*ASIDE)
    assert pair.rows(pair.target, "wide") == [("(5,1,1,ok)",)]
    found = {one["key"]["id"]: one["sqlstate"] for one in letters(pair)}
    assert found == {"1": "22P02", "2": "22003", "3": "22001", "4": "23502"}
    pair.there("alter table wide alter n type numeric, alter b type bigint, alter v type text, alter v drop not null")
    assert there(pair, "replay-replica-dead-letters", "--all").returncode == 0
    pair.same("wide")


def test_triggers_that_refuse(items: Pair) -> None:
    """By an error with a SQLSTATE of their own, or without one."""
    items.there(
        """create function refuse() returns trigger language plpgsql as $$ begin
             if new.note = 'raise' then raise 'not here' using errcode = 'OUR01'; end if;
             if new.note = 'keep' then return null; end if;
             return new; end $$""",
        "create trigger refuses before insert or update on item for each row execute function refuse()",
        "alter table item enable always trigger refuses",
    )
    items.run("insert into item values (10, 10, 'raise'), (11, 11, 'keep'), (12, 12, 'take')")
    items.apply(*ASIDE)
    found = {one["key"]["id"]: (one["sqlstate"], one["reason"]) for one in letters(items)}
    assert found == {"10": ("OUR01", "not here"), "11": (None, "did not take 1 changes")}
    assert len(items.rows(items.target, "item")) == 6


def test_what_stays_refused_is_said(items: Pair) -> None:
    items.run("insert into item values (10, -10), (11, -11), (12, -12)")
    items.apply(*ASIDE)
    ids = {one["key"]["id"]: str(one["dead_letter_id"]) for one in letters(items)}
    items.there("alter table item drop constraint positive, add check (place > -11)")
    failed = there(items, "replay-replica-dead-letters", "--all")
    assert failed.returncode == 1
    assert failed.stderr.splitlines()[:2] == ["replayed 1 of mirror", "Error: the target refuses 2 as before"]
    assert [str(one["dead_letter_id"]) for one in letters(items)] == [ids["11"], ids["12"]]
    assert there(items, "purge-replica-dead-letters", "--id", ids["11"]).stderr == "purged 1 of mirror\n"
    assert keys(items) == [("insert", "12")]
    wrong = gdq("replay-replica-dead-letters", "miror", "--to", items.target.su_dsn, "--all", dsn="dbname=none")
    assert wrong.stderr.splitlines()[0] == 'Error: the target holds no replica "miror"'


def test_dead_letters_follow_their_table(items: Pair) -> None:
    """Columns are renamed, dropped and added in rows that were put aside; a copy of the table settles them."""
    items.run("insert into item values (10, -10, 'ten', 1.0)", "insert into item values (11, -11, 'eleven', 1.0)")
    items.apply(*ASIDE)
    items.run(
        "alter table item rename id to number",
        "alter table item rename note to remark",
        "alter table item drop column n",
        "alter table item add column m int",
        "update item set m = 5, place = 11 where number = 11",
    )
    items.apply(*ASIDE)
    items.there("alter table item drop constraint positive")
    assert [(one["key"], one["remote"]) for one in letters(items)] == [
        ({"number": "10"}, {"number": "10", "place": "-10", "remark": "ten"})
    ]
    assert there(items, "replay-replica-dead-letters", "--all").returncode == 0
    items.same("item")
    items.there("alter table item add check (place > 0) not valid")
    items.run("insert into item values (20, -20)")
    items.apply(*ASIDE)
    assert len(letters(items)) == 1
    items.run("truncate item")
    items.apply()
    assert letters(items) == []
    items.run("insert into item values (20, -20)")
    items.apply(*ASIDE)
    items.there("alter table item drop constraint item_place_check")
    items.apply("--copy-again", "public.item")
    assert letters(items) == []
    items.same("item")
