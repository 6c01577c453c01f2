"""A source with gdq and a target, between which tables are replicated."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Literal

import psycopg
import pytest

from gdq.consumers.replica.replica import Replica
from gdq.consumers.slot.slot import create_slot, drop_slot, slot_info
from tests.support.programs import gdq
from tests.support.server import Database


@dataclass(frozen=True, slots=True)
class Pair:
    """Source and target of a replica named mirror, which the queue shop feeds, or a slot."""

    source: Database
    target: Database
    fed_by: Literal["queue", "slot"] = "queue"

    def make(self, table: str) -> None:
        """Run a CREATE TABLE on both sides."""
        for place in (self.source, self.target):
            with place.connect() as connection:
                connection.execute(table.encode())

    def run(self, *statements: str) -> None:
        """Run statements in the source, each a transaction."""
        with self.source.connect() as connection:
            for statement in statements:
                connection.execute(statement.encode())

    def there(self, *statements: str) -> None:
        """Run statements in the target."""
        with self.target.connect() as connection:
            for statement in statements:
                connection.execute(statement.encode())

    def capture(self, *tables: str) -> None:
        """Capture tables, or publish them; the slot is made with the first ones."""
        if self.fed_by == "queue":
            for table in tables:
                self.run(f"select gdq.add_table('shop', '{table}')")
            return
        with self.source.connect("su") as su:
            if slot_info(su):
                su.execute(f"alter publication gdq_shop add table {', '.join(tables)}".encode())
            else:
                create_slot(su, "shop", "mirror", tables)

    def replicate(self, *options: str, role: str = "su") -> subprocess.CompletedProcess[str]:
        """Run `gdq replicate` up to now."""
        to = self.target.su_dsn if role == "su" else self.target.dsn
        given = ("replicate", "shop", "mirror", "--to", to, "--source", self.fed_by, *options)
        return gdq(*given, dsn=self.reader_dsn)

    @property
    def reader_dsn(self) -> str:
        """The source for a role that may read what feeds the replica."""
        return self.source.dsn if self.fed_by == "queue" else self.source.su_dsn

    def apply(self, *options: str) -> subprocess.CompletedProcess[str]:
        """As replicate(), which must succeed."""
        done = self.replicate(*options)
        assert done.returncode == 0, done.stderr
        return done

    def rows(self, place: Database, table: str) -> list[tuple[str, ...]]:
        with place.connect("su") as connection:
            return connection.execute(f"select t::text from {table} t order by 1".encode()).fetchall()

    def same(self, *tables: str) -> None:
        """Both sides have the same rows, to the text; nobody writes meanwhile."""
        for table in tables:
            assert self.rows(self.target, table) == self.rows(self.source, table)


@pytest.fixture
def pair(db: Database, empty_db: Database) -> Pair:
    pair = Pair(db, empty_db)
    pair.run("select gdq.create_queue('shop')")
    return pair


@pytest.fixture(params=["queue", "slot"])
def fed(request: pytest.FixtureRequest, pair: Pair) -> Iterator[Pair]:
    """A pair whose replica the queue feeds, and one that a slot feeds."""
    yield replace(pair, fed_by=request.param)
    if request.param == "slot":
        with pair.source.connect("su") as su:
            drop_slot(su, "shop", "mirror")
            assert slot_info(su) == []


def apply_here(pair: Pair) -> list[tuple[int, int, int]]:
    """Apply what is there, in this process; the rows that each batch has inserted, updated and deleted."""
    with Replica(pair.source.dsn, pair.target.su_dsn, "shop", "mirror") as replica:
        return [(batch.inserted, batch.updated, batch.deleted) for batch in replica.run()]


def count(connection: psycopg.Connection[tuple[object, ...]], query: str) -> object:
    row = connection.execute(query.encode()).fetchone()
    assert row is not None
    return row[0]
