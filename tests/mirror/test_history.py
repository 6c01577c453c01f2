"""`gdq mirror --history feed`: change feeds, from which the table at any tick can be made again."""

from __future__ import annotations

import random
from collections import Counter
from typing import Any

import pytest

from gdq.consumers.mirror.state import History
from tests.mirror.conftest import Lake, plain, plain_rows
from tests.support.programs import gdq

_FEED = ["_change_type", "_commit_version", "_commit_timestamp", "ev_id"]
_SIGNS = {"insert": 1, "update_postimage": 1, "delete": -1, "update_preimage": -1}


# The numbers of a table's columns, and its rows with their counts.
_Rows = tuple[tuple[int, ...], Counter[tuple[Any, ...]]]


class Replay:
    """A history in a lake, and what the source was at some ticks."""

    def __init__(self, lake: Lake, tables: list[str], form: History = "feed") -> None:
        self.lake, self.tables, self.form = lake, tables, form
        self.known: dict[int, dict[str, _Rows]] = {}

    def mirror(self, *columns: str) -> None:
        self.lake.bring_up(*self.tables, history=self.form, columns=columns)

    def note(self) -> None:
        """Take a tick, and note the tables as they are at it."""
        ((tick,),) = self.lake.ask("select gdq.force_tick('shop')")
        self.known[tick] = {table: self.rows(table) for table in self.tables}

    def rows(self, table: str) -> _Rows:
        """The numbers of a table's columns, and its rows."""
        numbers = tuple(number for number, _ in self.lake.columns(table))
        return numbers, plain_rows(self.lake.ask(f"select * from {table}"))

    def replayed(self, table: str, tick: int) -> Counter[tuple[Any, ...]]:
        """The rows that the lake has for a tick, of the columns that the table has now."""
        names = [name for _, name in self.lake.columns(table)]
        if self.form == "scd2":
            return plain_rows(
                row for row, start, end in self.versions(table) if start <= tick and (end or tick + 1) > tick
            )
        found: Counter[tuple[Any, ...]] = Counter()
        for row in self.lake.read(table).to_pylist():
            if row["_commit_version"] <= tick:
                found[tuple(plain(row[name]) for name in names)] += _SIGNS[row["_change_type"]]
        assert min(found.values(), default=0) >= 0
        return +found

    def versions(self, table: str) -> list[tuple[tuple[Any, ...], int, int | None]]:
        """The rows of an SCD2 table with the ticks at their ends."""
        names = [name for _, name in self.lake.columns(table)]
        rows = [
            (tuple(row[name] for name in names), row["__START_AT"], row["__END_AT"])
            for row in self.lake.read(table).to_pylist()
        ]
        assert all(end is None or start < end for _, start, end in rows)
        return rows

    def check(self) -> None:
        """The tables at each tick that was noted, of the columns that they have now: NULL before a column came."""
        for tick, tables in self.known.items():
            for table, (numbers, rows) in tables.items():
                places = [numbers.index(n) if n in numbers else None for n, _ in self.lake.columns(table)]
                expected: Counter[tuple[Any, ...]] = Counter()
                for row, count in rows.items():
                    expected[tuple(plain(None) if place is None else row[place] for place in places)] += count
                assert self.replayed(table, tick) == expected, (table, tick)


def test_a_change_feed(each: Lake) -> None:
    """What each operation leaves, also in one transaction, and the columns beside those of the table."""
    each.run("create table item (id int primary key, name text)", "insert into item values (1, 'a')")
    each.capture("item")
    history = Replay(each, ["public.item"])
    history.mirror()
    history.note()
    each.run(
        "insert into item values (2, 'b')",
        "update item set name = 'c' where id = 2",
        "begin; update item set id = 3 where id = 2; delete from item where id = 3; "
        "insert into item values (2, 'd'); commit",
    )
    history.note()
    each.run("truncate item", "insert into item values (5, 'e')")
    history.note()
    history.mirror()
    rows = sorted(each.read("public.item").to_pylist(), key=lambda row: row["ev_id"])
    assert list(rows[0]) == ["id", "name", *_FEED]
    changes = [(row["_change_type"], row["id"], row["name"]) for row in rows]
    assert changes[:8] == [
        ("insert", 1, "a"),
        ("insert", 2, "b"),
        ("update_preimage", 2, "b"),
        ("update_postimage", 2, "c"),
        ("update_preimage", 2, "c"),
        ("update_postimage", 3, "c"),
        ("delete", 3, "c"),
        ("insert", 2, "d"),
    ]
    assert sorted(changes[8:10]) == [("delete", 1, "a"), ("delete", 2, "d")]
    assert changes[10:] == [("insert", 5, "e")]
    assert all(row["_commit_timestamp"] is not None for row in rows)
    history.check()


def test_versions_of_rows(each: Lake) -> None:
    """Other keys, rows that go and come within a transaction, TRUNCATE: neither a gap nor an overlap."""
    each.run("create table item (id int primary key, name text)", "insert into item values (1, 'a'), (9, 'z')")
    each.capture("item")
    history = Replay(each, ["public.item"], "scd2")
    history.mirror()
    history.note()
    each.run("update item set name = 'b' where id = 1")
    history.note()
    each.run(
        "begin; delete from item where id = 1; insert into item values (1, 'b'); update item set id = 2 where id = 1; "
        "insert into item values (1, 'c'); commit"
    )
    history.note()
    history.mirror()
    each.run("update item set name = 'd' where id = 2", "truncate item", "insert into item values (2, 'e')")
    history.note()
    history.mirror()
    history.check()
    versions = sorted(history.versions("public.item"), key=lambda one: (one[0][0], one[1]))
    assert [row for row, *_ in versions] == [(1, "a"), (1, "b"), (1, "c"), (2, "b"), (2, "e"), (9, "z")]
    ones = [(start, end) for row, start, end in versions if row[0] == 1]
    assert [end for _, end in ones[:2]] == [start for start, _ in ones[1:]]
    assert [row for row, _, end in versions if end is None] == [(2, "e")]


@pytest.mark.server
@pytest.mark.parametrize("form", ["feed", pytest.param("scd2", marks=pytest.mark.long)])
def test_replayed_to_any_tick(lake: Lake, form: History) -> None:
    """Random changes of a table with a key, of one without, and of a partitioned one; batches of several ticks."""
    choice = random.Random(5)
    lake.run(
        "create table keyed (id int primary key, n int)",
        "create table bare (n int)",
        "create table parts (id int primary key, n int) partition by hash (id)",
        "create table parts_0 partition of parts for values with (modulus 2, remainder 0)",
        "create table parts_1 partition of parts for values with (modulus 2, remainder 1)",
    )
    lake.capture("keyed", "bare", "parts")
    history = Replay(lake, ["public.keyed", "public.bare", "public.parts"], form)
    history.mirror()
    changes = (
        "insert into keyed select i, 0 from generate_series({0}, {0} + 5) i on conflict (id) do update set n = {0}",
        "update keyed set id = id + 100 where id between {0} and {0} + 2 and id + 100 not in (select id from keyed)",
        "delete from keyed where id % 5 = {0} % 5",
        "insert into bare values ({0} % 3), ({0} % 3), (null)",
        "delete from bare where ctid in (select ctid from bare order by n limit 2)",
        "insert into parts values ({0}, 0) on conflict do nothing",
        "update parts set id = id + 100 where id = {0} and {0} + 100 not in (select id from parts)",
        "truncate bare",
        "truncate keyed, parts",
        "truncate parts_1",
    )
    weights = [3] * 7 + [1] * 3
    for _ in range(4):
        for _ in range(5):
            for _ in range(3):
                some = choice.choices(changes, weights, k=3)
                lake.run(f"begin; {'; '.join(some)}; commit".replace("{0}", str(choice.randrange(1, 30))))
            history.note()
        history.mirror()
    partly_truncated = {"public.parts"}  # which is found by a copy, at a later tick
    for tick, tables in history.known.items():
        for table in tables.keys() - partly_truncated:
            assert history.replayed(table, tick) == tables[table][1], (table, tick)
    lake.run("select gdq.force_tick('shop')")
    ((last,),) = lake.ask("select max(last_tick) from gdq.queue_info('shop')")
    history.mirror()
    assert history.replayed("public.parts", last + 10) == plain_rows(lake.ask("select * from parts"))


def test_a_table_is_not_turned_into_a_history(lake: Lake) -> None:
    lake.run("create table item (id int primary key)", "create table odd (ev_id int primary key)")
    lake.capture("item", "odd")
    lake.mirror("public.item")
    done = lake.command("public.item", "--history", "feed")
    assert (done.returncode, 'mirror "copy" keeps the tables as they are' in done.stderr) == (1, True)
    assert gdq("drop-mirror", "shop", "copy", dsn=lake.source.dsn).returncode == 0
    done = lake.command("public.item", "--history", "feed")
    assert (done.returncode, "holds the table as it is" in done.stderr) == (1, True)
    done = lake.command("public.odd", "--history", "feed")
    assert 'cannot have its column "ev_id"' in done.stderr
