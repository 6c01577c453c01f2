"""What the tests of the DDL guard share: an emptied database with a watched queue, and what they ask of it."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.support.events import Tap
from tests.support.history import History, Row
from tests.support.server import Database

T = "create table t (id int primary key, a int, b text)"


def emptied(shared: Database) -> Iterator[Tap]:
    """A new queue `q` with a consumer `c`, and an empty schema."""
    with shared.connect() as owner, shared.connect("su") as su:
        su.execute("drop schema if exists shop, gone, part, closed cascade")
        su.execute("drop foreign data wrapper if exists nowhere cascade")
        su.execute("drop table if exists public.t")
        for queue in ("q", "second"):
            owner.execute("select gdq.drop_queue(%s, true)", [queue])
        assert owner.execute("select from pg_class where relnamespace = 'gdq_log'::regnamespace").rowcount == 0
        assert owner.execute("select from pg_proc where pronamespace = 'gdq_log'::regnamespace").rowcount == 0
    with Tap(shared) as opened:
        yield opened


def watched(tap: Tap) -> History:
    """Also the rights that an application needs for the DDL of these tests."""
    history = History(tap.db)
    history.create()
    with tap.db.connect("su") as su:
        su.execute("grant create, usage on schema public to app")
        su.execute(f"grant create on database {tap.db.name} to app".encode())
    return history


def state(tap: Tap, table: str = "shop.t") -> tuple[str, str | None]:
    found = tap.owner.execute("select state, reason from gdq.table_info() where table_name = %s", [table]).fetchone()
    assert found
    return found[0], found[1]


def reasons(rows: list[Row]) -> list[str]:
    return [row[7]["reason"] for row in rows if row[3] == "resync"]


def maintain(tap: Tap) -> int:
    """All maintenance that is due; how many calls it took."""
    for calls in range(1, 500):
        if tap.owner.execute("select gdq.maintain()").fetchone() == (False,):
            return calls
    pytest.fail("maintenance does not come to an end")


def triggers(tap: Tap) -> dict[str, str]:
    """The quoted names of the capture triggers of shop.t by operation."""
    found = tap.owner.execute(
        "select relid::oid, queue_id from gdq.captured_table where table_name = 'shop.t'"
    ).fetchone()
    assert found
    return {op: f'"!gdq_{found[0]}_{found[1]}_{op}"' for op in "iudt"}


def exact(tap: Tap, history: History, rows: list[Row], *names: str) -> None:
    """Every change of these tables is an event with the right columns, none was missed."""
    for name in names:
        result = history.compare(rows, name)
        assert (name, result.lost, result.missed, result.invented) == (name, [], 0, [])
        assert result.matched
