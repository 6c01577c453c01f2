"""Copies in chunks of tables without a key, whose rows may be there several times."""

from __future__ import annotations

import random
from typing import Any

import pytest

from gdq.consumers.copy.chunk import ChunkedCopier, ChunkedCopy
from gdq.consumers.copy.chunk_work import TableProgress
from gdq.errors import GdqError
from tests.copy.arrival import check_arrival
from tests.support.events import Tap
from tests.support.server import Database

pytestmark = pytest.mark.server

# json has no equality, and 1.0 and 1.00 are two rows; the target has other types for some
_SOURCE = "create table shop.k (a int, n numeric, j json, b text, twice int generated always as (a * 2) stored)"
_TARGET = "create table shop.k (b varchar, a bigint, n numeric, j json, twice int) partition by hash (a)"


class Keyless:
    """A table of duplicates in a source, its target, and an application that writes at every step of the copy."""

    def __init__(self, tap: Tap, target: Database) -> None:
        self.tap, self.target, self.random = tap, target, random.Random(7)

    def copy(self, **options: Any) -> ChunkedCopy:
        options = {"copy": "one", "consumer": "mirror", "chunk_rows": 1, "workers": 2, "tell": self.write, **options}
        with ChunkedCopier(self.tap.db.dsn, "q", ["shop.k"], self.target.su_dsn, **options) as copier:
            return copier.run()

    def write(self, *_: object) -> None:
        one, other = self.random.randint(1, 9), self.random.randint(1, 9)
        self.tap.write(
            f"insert into shop.k values ({one}, 1.0, '[1, {other}]', null), ({one}, 1.00, null, '{other},')",
            f"update shop.k set b = b || 'x' where a = {one} and length(b) < 9",
            f"delete from shop.k where ctid in (select ctid from shop.k where a = {other} limit 3)",
        )

    def check(self) -> None:
        check_arrival(self.tap.db, self.target, "mirror", {"shop.k": ("a", "n", "j", "b")})


@pytest.fixture
def keyless(tap: Tap, empty_db: Database) -> Keyless:
    with tap.db.connect("su") as su:
        su.execute("alter default privileges for role app grant select on tables to gdq_owner")
    with empty_db.connect("su") as su:
        su.execute("create schema shop")
        su.execute(_TARGET.encode())
        for part in range(2):
            su.execute(
                f"create table shop.k{part} partition of shop.k for values with (modulus 2, remainder {part})".encode()
            )
    tap.write(_SOURCE, "insert into shop.k select i % 9, 1.0, '{}', repeat('y', i % 5) from generate_series(1, 300) i")
    tap.add("shop.k")
    return Keyless(tap, empty_db)


def test_duplicates_arrive_as_often_as_they_are(keyless: Keyless) -> None:
    """The copy is killed once, and goes on; it is one range, which is read block by block."""

    def fail(done: TableProgress, _: str) -> None:
        keyless.write()
        if done.rows:
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        keyless.copy(tell=fail)
    with keyless.target.connect("su") as su:
        ranges = su.execute(
            "select range_no, upto is not null, until from gdq_target.chunked_copy order by 1"
        ).fetchall()
    assert ranges == [(1, True, None)]
    assert keyless.copy().tables[0].rows > 200
    keyless.write()
    keyless.check()


def test_rows_that_the_target_has_lost(keyless: Keyless) -> None:
    """They are looked for when they go in the source; a reading of one step has left none in doubt."""

    def lose(done: TableProgress, _: str) -> None:
        if done.rows:
            with keyless.target.connect("su") as su:
                su.execute("delete from shop.k")
            keyless.tap.write("delete from shop.k")

    with pytest.raises(GdqError, match=r"target table shop\.k lacks \d+ of the rows that it was given"):
        keyless.copy(tell=lose, chunk_rows=1000)


def test_a_log_without_all_columns(tap: Tap, empty_db: Database) -> None:
    tap.write("create table shop.part (a int, b int)")
    tap.add("shop.part", columns=["a"])
    with empty_db.connect("su") as su:
        su.execute("create schema shop; create table shop.part (a int, b int)")
    with (
        ChunkedCopier(tap.db.su_dsn, "q", ["shop.part"], empty_db.su_dsn, "one") as copier,
        pytest.raises(GdqError, match=r"the log of table shop\.part lacks column b"),
    ):
        copier.run()
