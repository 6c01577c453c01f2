"""Chunked copies of tables whose log leaves out large values that updates leave as they were."""

from __future__ import annotations

import random
from typing import Any

import pytest

from gdq.consumers.copy.chunk import ChunkedCopier, ChunkedCopy
from gdq.errors import GdqError
from tests.support.events import Tap
from tests.support.server import Database

pytestmark = pytest.mark.server

TABLE = "create table shop.t (id int primary key, n int, doc text)"
LARGE = "(select string_agg(md5('{}' || i::text), '') from generate_series(1, 200) i)"


@pytest.fixture
def docs(tap: Tap, empty_db: Database) -> Tap:
    with tap.db.connect("su") as su:
        su.execute("alter default privileges for role app grant select on tables to gdq_owner")
    with empty_db.connect("su") as su:
        su.execute("create schema shop")
        su.execute(TABLE.encode())
    tap.write(TABLE, f"insert into shop.t select i, 0, {LARGE.format('a')} from generate_series(1, 60) i")
    tap.add("shop.t", unchanged="omit")
    return tap


def copy(tap: Tap, target: Database, **options: Any) -> ChunkedCopy:
    options = {"copy": "one", "consumer": "mirror", "chunk_rows": 7, **options}
    with ChunkedCopier(tap.db.dsn, "q", ["shop.t"], target.su_dsn, **options) as copier:
        return copier.run()


def test_rows_that_change_meanwhile(docs: Tap, empty_db: Database) -> None:
    """Ranges that are behind are brought in line by the rows themselves; the log tells which."""
    choose = random.Random(5)

    def write(*_: object) -> None:
        low = choose.randint(1, 60)
        docs.write(
            f"update shop.t set n = n + 1 where id between {low} and {low + 5}",
            f"update shop.t set doc = {LARGE.format(low)} where id = {low}",
            f"delete from shop.t where id = {low + 2}",
            f"update shop.t set id = id + 1000 where id = {low + 3}",
        )

    copy(docs, empty_db, tell=write)
    docs.owner.execute("select gdq.force_tick('q')")
    with docs.db.connect("su") as here, empty_db.connect("su") as there:
        # all that was written lies before the tick at which the copy has arrived, or its consumer gets it
        changed = {
            row[0]
            for row in here.execute(
                """select coalesce(new->>'id', old->>'id')::int from gdq.next_batch('q', 'mirror') b,
                          gdq.get_batch(b.batch_id, b.token)
                   union all
                   select (old->>'id')::int from gdq.next_batch('q', 'mirror') b, gdq.get_batch(b.batch_id, b.token)"""
            )
        }
        ours, theirs = (
            {row for row in one.execute("select id, n, md5(doc) from shop.t") if row[0] not in changed}
            for one in (here, there)
        )
        assert theirs == ours
        assert len(ours) > 20


def test_an_earlier_tick_is_refused(docs: Tap, empty_db: Database) -> None:
    """Rows would have to be taken back by what they were."""
    row = docs.owner.execute("select gdq.force_tick('q')").fetchone()
    assert row is not None
    docs.write("update shop.t set n = 1")
    with pytest.raises(GdqError, match=r"the log of table shop\.t lacks column doc") as refused:
        copy(docs, empty_db, tick=row[0])
    assert refused.value.hint == "Capture all its columns, in mode full, with unchanged both or once."
