"""Views that are refreshed from a slot, beside those that the queue refreshes, and writers at work on their tables."""

from __future__ import annotations

import random
import threading
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import psycopg
import pytest
from psycopg import sql

from gdq.consumers.refresh.refresher import Refresher, RefreshResult
from gdq.consumers.refresh.view_refresh import ViewRefresh
from gdq.consumers.slot.slot import create_slot, drop_slot, slot_info
from gdq.consumers.slot.source import SlotSource
from gdq.consumers.views.snapshot_holder import SnapshotHolder
from gdq.source import Event
from gdq.view.view import create_view
from tests.support.server import Database
from tests.support.view_churn import fill, transaction
from tests.support.view_grammar import SCHEMA

TABLES = ("item", "fact", "dim", "few")
VIEWS = {
    "projection": "select id, note, amount * 2 as double, doc, at from item",
    "bag": "select label, qty, price, tags, props from fact",
    "joined": "select i.id, f.label, f.qty from item i join fact f on f.k = i.k",
    "outer_joined": "select i.id, d.name, d.mood from item i left join dim d on d.k = i.k",
    "grouped": "select k, count(*) as n, sum(qty) as s, min(label) as l from fact group by k",
    "picked": "select distinct grp, note from item",
    "counted": "select count(*) as n from few",
}


@dataclass
class Scene:
    """Views with a slot each, and a second one of the same query that the queue refreshes."""

    db: Database
    su: psycopg.Connection[Any]
    refresher: Refresher
    compared: int = 0
    views: list[str] = field(default_factory=list)
    published: Sequence[str] = TABLES

    def make(self, name: str, query: str, *, slot: bool = True) -> None:
        """A view of that name, its slot, and the queue's view."""
        self.make_alone(name, query, f"public.out_{name}", slot=slot)
        create_view(self.su, f"{name}_queued", "q", query, f"public.out_{name}_queued", engine="postgres")

    def make_alone(
        self, name: str, query: str, target: str, *, target_dsn: str | None = None, slot: bool = True
    ) -> None:
        """A view of that name and target, and its slot."""
        create_view(self.su, name, "q", query, target, target_dsn=target_dsn, engine="postgres")
        self.views.append(name)
        if slot:
            create_slot(self.su, "q", name, [f"public.{table}" for table in self.published])

    def refresh(self, name: str, *, full: bool = False, slot: bool = True) -> RefreshResult:
        """Refresh the view, whose target is the query at the held snapshot when it commits."""
        return self.refresher.refresh(name, full=full, check=self.check, slot=slot)

    def both(self, name: str) -> RefreshResult:
        """By the slot, and the other view by the queue."""
        self.refresh(f"{name}_queued", slot=False)
        return self.refresh(name)

    def check(self, work: ViewRefresh, holder: SnapshotHolder) -> None:
        wanted, held = (
            Counter(connection.execute(sql.SQL("select r::text from ({}) r").format(sql.SQL(query))).fetchall())
            for connection, query in ((holder.connection, work.plan.query), (work.output, f"table {work.view.target}"))
        )
        assert held == wanted, work.view.view_name
        self.compared += 1

    def write(self, *statements: str) -> None:
        for statement in statements:
            self.su.execute(statement.encode())

    def confirmed(self, name: str) -> int:
        """How far the view's slot is, in bytes of the log."""
        query = "select (confirmed_flush_lsn - '0/0')::bigint from pg_replication_slots where slot_name = %s"
        (found,) = self.su.execute(query, [f"gdq_q_{name}"]).fetchone() or (0,)
        return int(found)


@pytest.fixture
def scene(db: Database) -> Iterator[Scene]:
    with db.connect() as owner, db.connect("su") as su, Refresher(db.su_dsn) as refresher:
        made = Scene(db, su, refresher)
        for statement in (*SCHEMA, "select gdq.create_queue('q')"):
            owner.execute(statement.encode())
        for table in (*TABLES, "part"):
            for one in (table, *({"part": ("part_0", "part_1")}.get(table, ()))):
                owner.execute(f"alter table {one} replica identity full".encode())
            pk = ", mode => 'pk', include => '{grp,name,mood}'" if table == "dim" else ""
            owner.execute(f"select gdq.add_table('q', '{table}'{pk})".encode())
        made.write(*fill(random.Random(1))[1:])
        try:
            yield made
        finally:
            for gid in [
                gid for (gid,) in su.execute("select gid from pg_prepared_xacts where database = %s", [db.name])
            ]:
                su.execute(sql.SQL("rollback prepared {}").format(sql.Literal(gid)))
            for name in made.views:
                drop_slot(su, "q", name)
            assert slot_info(su) == []


def writer(
    db: Database, seed: int, stop: threading.Event, counts: Counter[str], tables: Sequence[str] = TABLES
) -> None:
    """Random transactions, a part of them prepared and ended later, until it is told to stop."""
    rng = random.Random(seed)
    prepared: list[str] = []
    with db.connect("su") as connection:
        connection.execute("set lock_timeout = '100ms'")
        connection.execute("set synchronous_commit = off" if seed % 2 else "set synchronous_commit = on")
        while not stop.is_set() or counts["commits"] < 30 or not counts["prepared"]:
            *statements, end = transaction(rng, tables)
            if rng.random() < 0.1:
                gid = f"{db.name}_{seed}_{counts['prepared']}"
                end = f"prepare transaction '{gid}'"
                prepared.append(gid)
            try:
                for statement in [*statements, end]:
                    connection.execute(statement.encode())
                counts["prepared" if "prepare" in end else f"{end}s"] += 1
            except psycopg.Error:
                connection.execute("rollback")
                if "prepare" in end:
                    prepared.pop()
            if len(prepared) > 1 or (prepared and rng.random() < 0.3):
                connection.execute(
                    f"{rng.choice(['commit', 'commit', 'rollback'])} prepared '{prepared.pop(0)}'".encode()
                )
                counts["ended"] += 1
        for gid in prepared:
            connection.execute(f"commit prepared '{gid}'".encode())


@contextmanager
def writing(db: Database, tables: Sequence[str] = TABLES) -> Iterator[list[Counter[str]]]:
    """Two writers at work on these tables until the block ends; what each has done."""
    stop, counts = threading.Event(), [Counter[str](), Counter[str]()]
    threads = [threading.Thread(target=writer, args=(db, 7 + n, stop, counts[n], tables)) for n in range(2)]
    for thread in threads:
        thread.start()
    try:
        yield counts
    finally:
        stop.set()
        for thread in threads:
            thread.join()
    assert all(one["commits"] > 20 and one["prepared"] > 0 for one in counts), counts


@pytest.fixture
def slot_owner(db: Database) -> Iterator[psycopg.Connection[Any]]:
    """Tables item and beside with the slot c of queue q, which decodes large transactions while they run."""
    with db.connect() as owner, db.connect("su") as su:
        su.execute(f"alter database {db.name} set logical_decoding_work_mem = '64kB'".encode())
        owner.execute("create table item (id int primary key, name text)")
        owner.execute("create table beside (id int primary key)")
        owner.execute("create table unpublished (id int)")
        create_slot(su, "q", "c", ["public.item", "public.beside"], two_phase=True)
        yield owner
        drop_slot(su, "q", "c")
        assert slot_info(su) == []


def read_slot(db: Database, **given: Any) -> list[Event]:
    """The events that the slot c of queue q gives, up to now."""
    with SlotSource(db.su_dsn, "q", "c", **given) as source:
        return [event.in_json() for batch in source.batches(once=True) for event in batch.events()]
