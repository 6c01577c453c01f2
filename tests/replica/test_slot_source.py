"""A replica that a logical slot feeds is equal to its source after every run, whatever is written meanwhile."""

from __future__ import annotations

import random
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import psycopg
import pytest

from gdq.consumers.replica.slot.slot_replica import SlotReplica
from gdq.consumers.slot.slot import create_slot, drop_slot, slot_info
from gdq.consumers.slot.source import SlotSource
from gdq.errors import GdqError
from tests.replica.conftest import Pair
from tests.replica.test_columns import columns, equal
from tests.support.programs import gdq
from tests.support.waiting import until

pytestmark = pytest.mark.server


@contextmanager
def slot(pair: Pair, *tables: str, two_phase: bool = False) -> Iterator[None]:
    """The slot of the replica mirror, and a publication of these tables."""
    with pair.source.connect("su") as su:
        create_slot(su, "shop", "mirror", [f"public.{table}" for table in tables], two_phase=two_phase)
        try:
            yield
        finally:
            drop_slot(su, "shop", "mirror")
            assert slot_info(su) == []


def apply(pair: Pair, **options: Any) -> tuple[list[str], list[Any]]:
    """Bring the target up to now; what was told, and the batches."""
    told: list[str] = []
    with SlotReplica(pair.source.su_dsn, pair.target.su_dsn, "shop", "mirror", tell=told.append, **options) as replica:
        return told, list(replica.run())


def test_copy_then_changes(pair: Pair) -> None:
    pair.make("create table orders (id int primary key, customer text, amount numeric(10, 2))")
    pair.run("insert into orders select i, 'c' || i, i from generate_series(1, 100) i")
    with slot(pair, "orders"):
        pair.run("insert into orders values (101)")
        assert apply(pair) == (["copied public.orders: 101 rows"], [])
        pair.same("orders")
        # one transaction, which is never divided: how many go into a batch depends on when they arrive
        pair.run(r"""
            update orders set amount = amount + 1 where id <= 10;
            update orders set amount = amount + 1 where id <= 5;
            delete from orders where id between 20 and 29;
            insert into orders values (200, E'new\t\\\n', 1.5), (201, null, null);
            update orders set id = id + 1000 where id = 40;
            insert into orders values (300, 'gone', 1);
            delete from orders where id = 300""")
        told, [batch] = apply(pair)
        assert (told, batch.inserted, batch.updated, batch.deleted) == ([], 3, 10, 11)
        pair.same("orders")
        assert apply(pair) == ([], [])


def in_line(pair: Pair) -> bool:
    """Bring the target up to now; True if its columns are the source's."""
    apply(pair)
    return columns(pair, target=True) == columns(pair, target=False)


LARGE = "create table large (k text, n int, body text, note text, primary key (k, n))"


def test_large_values_that_an_update_left_unchanged(pair: Pair) -> None:
    pair.make(LARGE)
    pair.run("alter table large alter body set storage external, alter note set storage external")
    body = "repeat('{}', 5000)"
    pair.run(
        f"insert into large select i::text, i, {body.format('a')}, {body.format('b')} from generate_series(1, 9) i"
    )
    with slot(pair, "large"):
        apply(pair)
        pair.run(
            # from the target
            "update large set k = 'x' where n = 1",
            "update large set note = 'short' where n = 2",
            # from an earlier change of the batch, under an older key, or from the target after several
            f"update large set body = {body.format('c')} where n = 3",
            "update large set note = 'z' where n = 3",
            "update large set k = 'moved', n = 30 where n = 3",
            "update large set n = 31 where n = 30",
            "update large set n = 40 where n = 4",
            "update large set n = 41 where n = 40",
            "update large set n = 4 where n = 41",
            # another row under a key that was left
            "delete from large where n = 5",
            f"insert into large values ('5', 5, {body.format('d')}, null)",
            "update large set note = 'n' where n = 5",
            # two rows change places
            "update large set k = 'swap' where n = 6",
            "update large set k = '6', n = 6 where n = 7",
            "update large set k = '7', n = 7 where k = 'swap'",
            f"begin; update large set body = {body.format('e')} where n = 8; rollback",
            "update large set n = n where n = 8",
            f"insert into large values ('new', 10, {body.format('f')}, {body.format('g')})",
            "update large set note = null where n = 10",
        )
        apply(pair)
        pair.same("large")
        # the target lacks the row: its large values are nowhere
        pair.there("delete from large where n = 9")
        pair.run("update large set n = 90 where n = 9")
        with pytest.raises(GdqError, match="lacks 1 rows, of which the slot has not sent the large values"):
            apply(pair, on_conflict=["apply"])
        assert apply(pair, copy_again=["public.large"])[0] == ["copied public.large: 10 rows"]
        pair.same("large")


ITEM = "create table item (id int primary key, place int unique, note text)"
PART = "create table part (id int primary key, n int) partition by range (id)"
PARTS = [
    f"create table part_{n} partition of part for values from ({low}) to ({high})"
    for n, low, high in ((0, 0, 50), (1, 50, 1000))
]


class Writer:
    """Random transactions on few keys: some are rolled back in part, some prepared and ended later, some large."""

    def __init__(self, pair: Pair, seed: int) -> None:
        self.rng = random.Random(seed)
        self.pair = pair
        self.seed = seed
        self.prepared: list[str] = []
        self.made = 0

    def change(self) -> str:
        rng = self.rng
        a, b = rng.randint(1, 40), rng.randint(1, 40)
        return rng.choice(
            [
                f"insert into item values ({a}, {a}, 'i') on conflict do nothing",
                f"update item set note = note || '{b}' where id between {a} and {a + 3}",
                f"update item set id = id + 100 where id = {a}",
                f"update item set id = {b} where id = {a + 100} and not exists (select from item where id = {b})",
                f"delete from item where id = {a}",
                f"update item set place = -place where id = {a}",
                f"""insert into large values ('{a % 5}', {b % 7}, repeat('{b % 10}', 4000), repeat('x', {a * 100}))
                    on conflict (k, n) do update set note = large.note || 'y'""",
                f"update large set note = 'short{b}' where k = '{a % 5}'",
                (
                    f"update large set n = n + 7 where k = '{a % 5}' and n = {b % 7} and not exists "
                    f"(select from large where k = '{a % 5}' and n = {b % 7 + 7})"
                ),
                (
                    f"update large set n = n - 7 where k = '{a % 5}' and n = {b % 7 + 7} and not exists "
                    f"(select from large where k = '{a % 5}' and n = {b % 7})"
                ),
                f"update large set body = repeat('{a % 10}', 3000) where n = {b % 7}",
                f"delete from large where k = '{a % 5}' and n = {b % 7}",
                f"insert into part values ({a * 3}, {b}) on conflict (id) do update set n = part.n + 1",
                (
                    f"update part set id = (id + 60) % 120 where id = {a * 3} and not exists "
                    f"(select from part where id = ({a * 3} + 60) % 120)"
                ),
                f"delete from part where id between {a} and {a + 5}",
            ]
        )

    def transaction(self) -> None:
        rng = self.rng
        parts = [self.change() for _ in range(rng.choice([1, 1, 2, 4]))]
        if rng.random() < 0.3:
            parts[1:1] = ["savepoint s", self.change(), rng.choice(["rollback to s", "release s"])]
        if rng.random() < 0.1:
            parts += [
                "insert into item select i, null, repeat('l', 60) from generate_series(1000, 3000) i",
                f"savepoint s; delete from item where id > {rng.randint(1000, 3000)}",
                rng.choice(["rollback to s", "release s", "delete from item where id >= 1000"]),
                "delete from item where id >= 1000",
            ]
        if rng.random() < 0.05:
            parts.insert(0, rng.choice(["truncate item", "truncate large", "truncate part, item"]))
        end = rng.choice(["commit", "commit", "commit", "commit", "rollback"])
        # not after TRUNCATE: everybody who reads the table's publication would wait for its end
        if rng.random() < 0.1 and not parts[0].startswith("truncate"):
            self.made += 1
            end = f"prepare transaction '{self.pair.source.name}_{self.seed}_{self.made}'"
        with self.pair.source.connect("su") as connection:
            connection.execute("set lock_timeout = '100ms'")
            try:
                for statement in ["begin", *parts, end]:
                    connection.execute(statement.encode())
                if "prepare" in end:
                    self.prepared.append(end.split("'")[1])
            except psycopg.Error:
                connection.execute("rollback")
            if self.prepared and rng.random() < 0.4:
                self.end_prepared(connection)

    def end_prepared(self, connection: psycopg.Connection[Any]) -> None:
        what = self.rng.choice(["commit", "commit", "rollback"])
        connection.execute(f"{what} prepared '{self.prepared.pop(0)}'".encode())

    def write(self, transactions: int) -> None:
        for _ in range(transactions):
            self.transaction()

    def end(self) -> None:
        with self.pair.source.connect("su") as connection:
            while self.prepared:
                self.end_prepared(connection)


@pytest.mark.parametrize(
    ("seed", "two_phase", "full"),
    [
        (1, False, False),
        pytest.param(2, True, False, marks=pytest.mark.long),
        pytest.param(3, True, True, marks=pytest.mark.long),
    ],
)
def test_random_writers(pair: Pair, seed: int, two_phase: bool, full: bool) -> None:
    for statement in (ITEM, LARGE, PART, *PARTS):
        pair.make(statement)
    if full:
        for table in ("item", "large", "part", "part_0", "part_1"):
            pair.run(f"alter table {table} replica identity full")
    with pair.source.connect("su") as su:
        su.execute(f"alter database {pair.source.name} set logical_decoding_work_mem = '64kB'".encode())
    writers = [Writer(pair, 10 * seed + n) for n in range(2)]
    writers[0].write(20)
    with slot(pair, "item", "large", "part", two_phase=two_phase):
        try:
            for number in range(8):
                threads = [threading.Thread(target=writer.write, args=(15,)) for writer in writers]
                for thread in threads:
                    thread.start()
                apply(pair, on_conflict=["update_differs=error", "delete_differs=error"] if full else [])
                for thread in threads:
                    thread.join()
                if number == 7:
                    for writer in writers:
                        writer.end()
                apply(pair)
                pair.same("item", "large", "part")
        finally:
            for writer in writers:
                writer.end()


def test_whoever_else_reads_the_slot(pair: Pair) -> None:
    """What another reader has taken from the slot is copied again; a consumer's slot is refused."""
    pair.make("create table item (id int primary key)")
    with slot(pair, "item"):
        apply(pair)
        pair.run("insert into item values (1)")
        with SlotSource(pair.source.su_dsn, "shop", "mirror") as reader:
            assert len(list(reader.batches(once=True))) == 1
        told, _ = apply(pair)
        assert told[0].startswith("slot gdq_shop_mirror has no changes before")
        assert told[1:] == ["copied public.item: 1 rows"]
        pair.same("item")
        with pair.target.connect("su") as su:
            su.execute("delete from gdq_target.replica; delete from gdq_target.replica_table")
        with pytest.raises(GdqError, match="is read by a consumer or a view"):
            apply(pair)


def test_ddl_that_rows_do_not_show(pair: Pair) -> None:
    keyed = "create table keyed (a int primary key, b int not null unique)"
    for statement in ("create table item (id int primary key, n int)", keyed, PART, *PARTS):
        pair.make(statement)
    pair.run("insert into item values (1, 1), (2, 2)", "insert into part values (1, 1), (60, 2)")
    pair.run("alter table keyed replica identity full")
    with slot(pair, "item", "part", "keyed"):
        apply(pair)
        for change in ("vacuum full item", "truncate item", "alter table item alter n set default 7", "analyze item"):
            pair.run(change, "insert into item select coalesce(max(id), 0) + 1 from item")
            assert apply(pair)[0] == [], change
            pair.same("item", "part")
        attach = "alter table part attach partition part_0 for values from (0) to (50)"
        changes = [
            ("item", "alter table item alter n type int using n + 1"),
            ("item", "alter table item drop n, add n int"),
            ("item", "alter table item add m int default 5"),
            ("keyed", "alter table keyed drop constraint keyed_pkey, add primary key (b)"),
            ("part", "truncate part_1"),
            ("part", f"alter table part detach partition part_0; delete from part_0; {attach}"),
        ]
        for table, change in changes:
            pair.run(*change.split("; "), "insert into item select max(id) + 1 from item")
            assert [line.split(":")[0] for line in apply(pair)[0]] == [f"copied public.{table}"], change
            pair.same("item", "part")


def test_columns_change_between_the_rows(pair: Pair) -> None:
    """Whether a row comes after it or not; where descriptions do not tell versions apart the table is copied."""
    pair.make("create table item (id int primary key, name varchar(10), qty int)")
    pair.run("insert into item values (1, 'a', 10), (2, 'b', 20), (3, 'c', 30)")
    with slot(pair, "item"):
        apply(pair)
        for change, row in [
            ("add note text", "values (4, 'd', 40, 'n')"),
            ("rename name to title", "values (5, 'e', 50, 'n')"),
            ("alter title type varchar(50)", "values (6, repeat('f', 40), 60, 'n')"),
            ("drop note", "values (7, 'g', 70)"),
            ("add more int", "select 8"),
            ("rename qty to number", None),
            ("drop number", None),
        ]:
            pair.run(
                "update item set id = id where id < 3",
                f"alter table item {change}",
                *([f"insert into item {row}", "update item set id = id where id = 2"] if row else []),
            )
            assert apply(pair)[0] == [], change
            if row is None:  # a run passes the change only if the server has flushed its log in time
                until(partial(in_line, pair), change)
            equal(pair)
        for steps in (
            ["add x int", "rename x to y"],
            ["drop more, add z int"],
            ["add v int", "drop v, add v int"],
            ["rename title to other", "rename other to title"],
        ):
            for step in steps:
                pair.run(f"alter table item {step}", "update item set id = id where id < 3")
            assert [line.split(":")[0] for line in apply(pair)[0]] == ["copied public.item"], steps
            equal(pair)


def test_what_cannot_be_fed_by_a_slot(pair: Pair) -> None:
    pair.make("create table item (id int primary key, n int generated always as (id * 2) stored)")
    pair.there("alter table item alter n drop expression")
    with pytest.raises(GdqError, match="there is no slot gdq_shop_mirror"):
        apply(pair)
    with slot(pair, "item"):
        with pytest.raises(GdqError, match=r"column n of table public\.item is generated in the source"):
            apply(pair)
        pair.there("alter table item drop n")
        with pytest.raises(GdqError, match=r"no table public\.other"):
            apply(pair, tables=["public.other"])
        apply(pair)
        to = ("--to", pair.target.su_dsn)
        drops = gdq("replicate", "shop", "mirror", *to, "--source", "slot", "--on-drop", "drop", dsn=pair.source.su_dsn)
        assert (drops.returncode, "--on-drop drop needs the queue" in drops.stderr) == (2, True)
        by_queue = gdq("replicate", "shop", "mirror", *to, dsn=pair.source.dsn)
        assert by_queue.stderr.startswith('Error: replica "mirror" is fed by a slot')
        compared = gdq("compare-tables", "shop", "mirror", *to, dsn=pair.source.dsn)
        assert compared.stderr.startswith('Error: replica "mirror" is fed by a slot')
        with pair.source.connect("su") as su:
            su.execute("alter publication gdq_shop drop table item")
        with pytest.raises(GdqError, match=r"table public\.item is no longer published"):
            apply(pair)
        dropped = gdq("drop-replica", "shop", "mirror", *to, dsn=pair.source.su_dsn)
        assert dropped.returncode == 0, dropped.stderr
        with pair.source.connect("su") as su:
            assert slot_info(su) == []
