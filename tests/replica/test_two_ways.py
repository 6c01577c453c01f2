"""Replicas of replicas: chains, databases that replicate to each other, and several sources of one target."""

from __future__ import annotations

import json
import random
import subprocess
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import pytest

from gdq.consumers.slot.slot import create_slot, drop_slot, slot_info
from gdq.consumers.slot.source import SlotSource
from tests.support.programs import gdq
from tests.support.server import Database

ITEM = "create table item (id text primary key, name text, at int, place text)"
NEWEST = ("--on-conflict", "newest:at")
# deletions win: what was deleted on one side is not brought back by an update on the other
DELETED = ("--on-conflict", "update_missing=skip", "--on-conflict", "delete_differs=apply")


@dataclass(frozen=True, slots=True)
class Node:
    """A database with gdq that is a source and a target; its queue is named shop, or its slots feed the others."""

    name: str
    db: Database
    by_slot: bool = False

    def run(self, *statements: str) -> None:
        """Run statements, each a transaction."""
        with self.db.connect("su") as connection:
            for statement in statements:
                connection.execute(statement.encode())

    def rows(self, query: str = "select * from item order by 1") -> list[tuple[object, ...]]:
        with self.db.connect("su") as connection:
            return connection.execute(query.encode()).fetchall()

    def capture(self, table: str = "item") -> None:
        """Capture a table; one that is published needs its old rows sent, for conflicts, and has a slot later."""
        if self.by_slot:
            self.run(f"alter table {table} replica identity full")
            return
        self.run(
            f"alter table {table} owner to gdq_owner",
            f"select gdq.add_table('shop', '{table}', always => true, origin => true)",
        )

    def replicate(self, to: Node, *options: str) -> subprocess.CompletedProcess[str]:
        name = f"{self.name}_{to.name}"
        given = ["replicate", "shop", name, "--to", to.db.su_dsn, *options]
        if self.by_slot:
            given += ["--source", "slot"]
            with self.db.connect("su") as su:
                there = [info.slot_name for info in slot_info(su)]
                if f"gdq_shop_{name}" not in there:
                    create_slot(su, "shop", name, [] if there else ["public.item"])
        return gdq(*given, dsn=self.db.su_dsn)

    def apply(self, to: Node, *options: str) -> subprocess.CompletedProcess[str]:
        done = self.replicate(to, *options)
        assert done.returncode == 0, done.stderr
        return done


Nodes = Callable[..., list[Node]]


@pytest.fixture
def nodes(new_db: Callable[[], Database]) -> Iterator[Nodes]:
    """Makes databases with gdq and the queue shop, one for each letter; slots feed the replicas of some."""
    made = list[Node]()

    def make(names: str, slots: str = "") -> list[Node]:
        made.extend(Node(name, new_db(), name in slots) for name in names)
        for node in made:
            node.run("select gdq.create_queue('shop')")
        return made

    yield make
    for node in made:
        with node.db.connect("su") as su:
            for info in slot_info(su):
                drop_slot(su, "shop", info.slot_name.removeprefix("gdq_shop_"))


def equal(nodes: Sequence[Node]) -> None:
    """All have the same rows."""
    first, *others = [node.rows() for node in nodes]
    for other in others:
        assert other == first


def two_ways(nodes: Nodes, *options: str, slots: str = "") -> tuple[Node, Node]:
    """Two databases that replicate to each other, of which the first had rows."""
    a, b = nodes("ab", slots)
    a.run(ITEM, "insert into item select i::text, 'first', 0, 'a' from generate_series(1, 20) i")
    a.capture()
    a.apply(b, "--create")
    b.capture()
    b.apply(a, "--no-copy", *options)
    equal([a, b])
    return a, b


def written(node: Node) -> int:
    """How many changes of its table a database has had: its log has them all, whoever made them."""
    [(number,)] = node.rows("select last_event from gdq.queue_info('shop')")
    assert isinstance(number, int)
    return number


@pytest.mark.server
def test_a_chain(nodes: Nodes) -> None:
    """The second replica reads what the first one wrote: copies, changes, TRUNCATE, new columns."""
    a, b, c = nodes("abc")
    a.run(ITEM, "insert into item values ('1', 'a', 1, null), ('2', 'b', 1, null)")
    a.capture()
    a.apply(b, "--create")
    b.capture()
    b.apply(c, "--create")
    equal([a, b, c])
    a.run(
        "update item set name = 'new' where id = '1'",
        "delete from item where id = '2'",
        "alter table item add note varchar(20)",
        "insert into item values ('3', 'c', 1, null, 'note')",
    )
    a.apply(b)
    assert "copied" not in b.apply(c).stderr
    equal([a, b, c])
    a.run("truncate item", "insert into item values ('4', 'd', 1, null, null)")
    b.run("insert into item values ('9', 'of b', 1, null, null)")
    b.apply(c)
    b.run("delete from item where id = '9'")
    a.apply(b, "--copy-again", "public.item")
    b.apply(c)
    equal([a, b, c])


def test_a_chain_whose_middle_would_not_see_the_rows(nodes: Nodes) -> None:
    """Captured without always, the middle's log would lack all that comes from the first."""
    a, b, c = nodes("abc")
    a.run(ITEM)
    a.capture()
    a.apply(b, "--create")
    b.run("alter table item owner to gdq_owner", "select gdq.add_table('shop', 'item')")
    failed = b.replicate(c, "--create")
    assert failed.returncode == 1
    assert failed.stderr.startswith("Error: table public.item is the target of a replica in the source too")
    assert "gdq alter-table shop public.item --always --origin" in failed.stderr
    b.run("""select gdq.alter_table_options('shop', 'item', '{"always": true, "origin": true}')""")
    b.apply(c, "--create")
    a.run("insert into item values ('1')")
    a.apply(b)
    b.apply(c)
    equal([a, b, c])


@pytest.mark.server
def test_two_ways(nodes: Nodes) -> None:
    """What one side has written does not come back to it, whichever side begins."""
    a, b = two_ways(nodes, *NEWEST)
    before = written(a)
    a.run("insert into item values ('x', 'of a', 1, 'a')", "update item set name = 'A', at = 1 where id = '1'")
    b.run("insert into item values ('y', 'of b', 1, 'b')", "update item set name = 'B', at = 1 where id = '2'")
    b.run("delete from item where id = '3'")
    for _ in range(2):
        a.apply(b, *NEWEST)
        b.apply(a, *NEWEST)
    equal([a, b])
    assert written(a) == before + 2 + 3
    assert a.apply(b, *NEWEST, "--json").stdout.strip() == "[]"
    a.run("truncate item")
    a.apply(b, *NEWEST)
    before = written(a)
    b.apply(a, *NEWEST)
    equal([a, b])
    assert (written(a), a.rows()) == (before, [])


@pytest.mark.server
def test_two_ways_by_slots(nodes: Nodes) -> None:
    """No transaction of a replica comes back: copies, changes, TRUNCATE, large ones that are sent while they run."""
    a, b = two_ways(nodes, *NEWEST, slots="ab")
    with b.db.connect("su") as su:
        create_slot(su, "shop", "see")
    assert a.apply(b, *NEWEST, "--json").stdout.strip() == "[]"
    a.run("insert into item values ('x', 'of a', 1, 'a')", "update item set name = 'A', at = 1 where id = '1'")
    b.run("insert into item values ('y', 'of b', 1, 'b')", "delete from item where id = '3'")
    a.run(f"alter database {a.db.name} set logical_decoding_work_mem = '64kB'")
    b.run(f"alter database {b.db.name} set logical_decoding_work_mem = '64kB'")
    a.run("insert into item select 'many' || i, repeat('n', 50), 1, 'a' from generate_series(1, 3000) i")
    sent = [json.loads(one.apply(other, *NEWEST, "--json").stdout) for one, other in ((a, b), (b, a), (a, b), (b, a))]
    assert [sum(batch["inserted"] for batch in batches) for batches in sent] == [3001, 1, 0, 0]
    assert sent[2:] == [[], []]
    equal([a, b])
    with SlotSource(b.db.su_dsn, "shop", "see") as reader:
        seen = {event.op for batch in reader.batches(once=True) for event in batch.events()}
    assert seen == {"insert", "update", "delete"}  # and not the messages that have the origin
    a.run("truncate item")
    a.apply(b, *NEWEST)
    b.run("insert into item values ('after', 'of b', 2, 'b')")
    b.apply(a, *NEWEST)
    equal([a, b])
    assert len(a.rows()) == 1


@pytest.mark.parametrize("slots", ["", pytest.param("ab", marks=pytest.mark.long)])
def test_columns_in_two_ways(nodes: Nodes, slots: str) -> None:
    """DDL is run on one side, and comes to the other; it does not come back."""
    a, b = two_ways(nodes, *NEWEST, slots=slots)
    a.run("alter table item add note text")
    b.run("insert into item values ('early', 'of b', 1, 'b')")
    a.apply(b, *NEWEST)
    b.apply(a, *NEWEST)
    a.run("alter table item rename name to title")
    a.apply(b, *NEWEST)
    if slots:  # rows between two changes of columns have a slot's table copied again
        b.apply(a, *NEWEST)
    b.run("insert into item values ('late', 'of b', 1, 'b', 'n')", "alter table item drop place")
    b.apply(a, *NEWEST)
    a.run("insert into item values ('last', 'of a', 2, 'n')")
    a.apply(b, *NEWEST)
    b.apply(a, *NEWEST)
    equal([a, b])
    assert len(a.rows()) == 23


@pytest.mark.parametrize("slots", ["", "ab"])
def test_a_row_that_both_sides_change_between_two_batches(nodes: Nodes, slots: str) -> None:
    """The log has changes of both origins on one row; only the own ones after the last of the other are sent."""
    a, b = two_ways(nodes, *NEWEST, slots=slots)
    b.run("update item set name = 'b1', at = 1 where id = '1'", "update item set name = 'b1', at = 1 where id = '2'")
    a.run("update item set name = 'a2', at = 2 where id = '1'", "delete from item where id = '4'")
    a.apply(b, *NEWEST)
    # the clock of b is slow: the row is its own by now, so no conflict
    b.run("update item set name = 'b3', at = 1 where id = '1'", "insert into item values ('4', 'again', 3, 'b')")
    b.apply(a, *NEWEST)
    a.apply(b, *NEWEST)
    equal([a, b])
    assert a.rows("select name from item where id in ('1', '2', '4') order by id") == [("b3",), ("b1",), ("again",)]


def random_changes(node: Node, rng: random.Random, step: int) -> None:
    """Some transactions: new rows with keys of the node's own, changes of any rows, deletions, changed keys."""
    name = node.name
    for n in range(rng.randint(1, 6)):
        at = step * 1000 + n * 10 + "ab".index(name)
        some = f"select id from item order by hashtext(id || '{rng.random()}') limit {rng.randint(1, 4)}"
        new = f"select '{name}{at}.' || i, 'new', {at}, '{name}' from generate_series(1, {rng.randint(1, 5)}) i"
        update = f"update item set name = '{name}', at = {at}"
        change = {
            "insert": f"insert into item {new}",
            "update": f"{update} where id in ({some})",
            "delete": f"delete from item where id in ({some})",
            "key": f"{update}, id = '{name}{at}.k' where id = (select min(id) from ({some}) x)",
        }
        node.run(change[rng.choice(["insert", "update", "update", "update", "delete", "key"])])


@pytest.mark.long
def test_tables_without_a_key(nodes: Nodes) -> None:
    """Rows of both sides are added, and taken away on the other one; nothing comes back."""
    a, b = nodes("ab")
    for node in (a, b):
        node.run("create table heap (v text)")
        node.capture("heap")
    a.run("insert into heap values ('a'), ('a')")
    a.apply(b)
    b.apply(a, "--no-copy")
    for step in range(3):
        a.run(f"insert into heap values ('a'), ('a{step}')")
        b.run("insert into heap values ('a')", f"insert into heap select 'b{step}' from generate_series(1, 3)")
        a.apply(b)
        b.apply(a)
        a.run("delete from heap where ctid = (select min(ctid) from heap where v = 'a')")
        b.run(f"update heap set v = 'c' where v = 'b{step}'")
        b.apply(a)
        a.apply(b)
    found = [node.rows("select v, count(*) from heap group by 1 order by 1") for node in (a, b)]
    assert found[0] == found[1] == [("a", 5), ("a0", 1), ("a1", 1), ("a2", 1), ("c", 9)]


@pytest.mark.long
@pytest.mark.parametrize(("seed", "slots"), [(0, ""), (1, ""), (2, ""), (3, "ab"), (4, "ab"), (5, "a"), (6, "b")])
def test_random_writers_on_both_sides(nodes: Nodes, seed: int, slots: str) -> None:
    """Whatever both write, and in whatever order batches go, the tables are equal when all has arrived."""
    a, b = two_ways(nodes, *NEWEST, *DELETED, slots=slots)
    rng = random.Random(seed)
    for step in range(1, 9):
        for node in rng.sample([a, b], rng.randint(1, 2)):
            random_changes(node, rng, step)
        for one, other in rng.sample([(a, b), (b, a)], rng.randint(0, 2)):
            one.apply(other, *NEWEST, *DELETED)
    for one, other in ((a, b), (b, a), (a, b)):
        one.apply(other, *NEWEST, *DELETED)
    equal([a, b])
    assert len(a.rows()) > 5


@pytest.mark.long
@pytest.mark.parametrize("slots", ["", "abc", "b"])
def test_three_that_replicate_to_each_other(nodes: Nodes, slots: str) -> None:
    """Each sends to the two others what was written there, and nothing that a replica brought."""
    made = nodes("abc", slots)
    a, b, c = made
    a.run(ITEM, "insert into item select i::text, 'first', 0, 'a' from generate_series(1, 20) i")
    a.capture()
    links = [(one, other) for one in made for other in made if one is not other]
    for other in (b, c):
        a.apply(other, "--create", "--origin", "none")
        other.capture()
    for one, other in links:
        if one is not a:
            one.apply(other, "--no-copy", "--origin", "none")
    equal(made)
    rng = random.Random(3)
    for step in range(1, 5):
        for node in made:
            node.run(
                f"insert into item values ('{node.name}{step}', 'new', {step}, '{node.name}')",
                f"update item set name = '{node.name}', at = {step} "
                f"where id in (select id from item order by hashtext(id || '{rng.random()}') limit 5)",
            )
        for one, other in rng.sample(links, 3):
            one.apply(other, "--origin", "none", *NEWEST)
    for one, other in links:
        one.apply(other, "--origin", "none", *NEWEST)
    equal(made)
    assert len(a.rows()) == 32
    if slots:
        return
    taken = gdq("replicate", "shop", "a_b", "--to", b.db.su_dsn, dsn=c.db.su_dsn)
    assert taken.stderr.startswith('Error: the target holds a replica "a_b" of another source')


@pytest.mark.parametrize("slots", ["", pytest.param("ab", marks=pytest.mark.long)])
def test_no_copy_over_rows_of_the_other_side(nodes: Nodes, slots: str) -> None:
    """A gap of capture on one side would have the table copied, and what the other has written be lost."""
    a, b = two_ways(nodes, slots=slots)
    a.run("update item set name = 'a' where id = '1'", "alter table item add flag boolean not null default true")
    b.run("insert into item values ('of b', 'x', 1, 'b')")
    failed = a.replicate(b)
    assert failed.returncode == 1
    assert failed.stderr.startswith("Error: table public.item has to be copied again, and the target replicates back")
    assert len(b.rows()) == 21
    b.apply(a)
    a.apply(b, "--copy-again", "public.item")
    # the catalog of b does not tell a copy after other columns from a rewrite by ALTER TABLE
    b.apply(a, *(["--copy-again", "public.item"] if slots else []))
    assert a.rows("select id, flag from item order by 1") == b.rows("select id, flag from item order by 1")


def test_several_sources_of_one_target(nodes: Nodes) -> None:
    """Each brings the rows of its own keys; none deletes those of the other."""
    a, b, target = nodes("abt")
    for node in (a, b):
        node.run(
            ITEM, f"insert into item select '{node.name}' || i, 'first', 0, '{node.name}' from generate_series(1, 9) i"
        )
        node.capture()
    for node in (a, b):
        done = gdq("replicate", "shop", f"of_{node.name}", "--to", target.db.su_dsn, "--create", dsn=node.db.su_dsn)
        assert done.returncode == 0, done.stderr

    def apply(node: Node, *options: str) -> subprocess.CompletedProcess[str]:
        return gdq("replicate", "shop", f"of_{node.name}", "--to", target.db.su_dsn, *options, dsn=node.db.su_dsn)

    everything = 'select * from item order by id collate "C"'
    assert target.rows(everything) == [*a.rows(everything), *b.rows(everything)]
    for node in (a, b):
        node.run(f"update item set at = 5 where id > '{node.name}5'", f"delete from item where id = '{node.name}1'")
        node.run(f"insert into item values ('{node.name}new', 'x', 1, null)")
        done = apply(node)
        assert done.returncode == 0, done.stderr
    assert target.rows(everything) == [*a.rows(everything), *b.rows(everything)]
    a.run("truncate item")
    failed = apply(a)
    assert failed.returncode == 1
    assert failed.stderr.startswith(
        "Error: table public.item was truncated in the source, and has rows of replica of_b"
    )
    target.run("delete from item where id like 'a%'")
    a.run("insert into item values ('a1', 'again', 9, null)")
    done = apply(a, "--copy-again", "public.item")
    assert done.returncode == 0, done.stderr
    assert target.rows(everything) == [*a.rows(everything), *b.rows(everything)]
