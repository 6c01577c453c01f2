"""What readers of one snapshot rely on: nobody takes a table or its log from under them."""

from __future__ import annotations

import threading

import pytest
from psycopg import errors
from psycopg.pq import TransactionStatus

from gdq.consumers.views.snapshot_holder import hold_snapshot
from tests.support.events import Tap
from tests.support.guarded import maintain
from tests.support.waiting import SECONDS, until

pytestmark = pytest.mark.server

T = "create table t (id int primary key, a int)"
ROWS = "insert into t select n, n from generate_series(1, 100) n"


@pytest.fixture
def t(tap: Tap) -> Tap:
    """`tap` with the captured table t, which gdq's owner may read."""
    tap.write(T, ROWS, "grant select on t to gdq_owner")
    tap.add("shop.t")
    return tap


EMPTYING = (
    "truncate t",
    "alter table t alter a type bigint",
    "cluster t using t_pkey",
    "vacuum full t",
    "drop table t",
    "alter table t rename a to b",
)


def test_what_would_make_a_table_read_as_empty_waits(t: Tap) -> None:
    t.write("set lock_timeout = '20 ms'", "delete from t where id = 1")
    t.owner.execute("update gdq.queue set rotation_period = '1 us'")
    with hold_snapshot(t.db.dsn, "q", ["shop.t"]) as holder:
        t.write("delete from t where id > 50")
        for statement in EMPTYING:
            with pytest.raises(errors.LockNotAvailable):
                t.write(statement)
        t.events()
        for _ in range(3):
            maintain(t)
        assert holder.connection.execute("select count(*) from shop.t").fetchone() == (99,)
        logged = "select sum(pg_relation_size(segment)) from gdq.log_segment join gdq.table_version using (version_id)"
        assert holder.connection.execute(logged.encode()).fetchone() != (0,)


@pytest.mark.parametrize("statement", ["alter table t alter a type bigint", "truncate t"])
def test_snapshot_comes_after_the_locks(t: Tap, statement: str) -> None:
    """A snapshot holder that waits for a rewrite under way reads what it left, not an empty table."""
    found: list[int] = []

    def read() -> None:
        with hold_snapshot(t.db.dsn, "q", ["shop.t"]) as holder:
            row = holder.connection.execute("select count(*) from shop.t").fetchone()
            found.append(row[0] if row else -1)

    reader = threading.Thread(target=read)
    with t.app.transaction():
        t.write(statement, "insert into t values (101, 1)")
        reader.start()
        waits = "select from pg_locks where relation = 'shop.t'::regclass and not granted"
        until(lambda: t.owner.execute(waits.encode()).rowcount)
    reader.join(SECONDS)
    assert found == [1 if statement.startswith("truncate") else 101]


def test_what_the_session_has_planned_is_there_for_the_next(t: Tap) -> None:
    held = "select count(*) from pg_prepared_statements"
    with hold_snapshot(t.owner, "q", ["shop.t"]) as holder:
        before = holder.connection.execute(held).fetchone()
    assert before is not None
    assert before > (0,)
    assert t.owner.execute(held).fetchone() == before
    with pytest.raises(errors.DivisionByZero), hold_snapshot(t.owner, "q", ["shop.t"]) as holder:
        holder.connection.execute("select 1 / 0")
    assert t.owner.info.transaction_status == TransactionStatus.IDLE


def test_an_application_with_two_locks_is_no_victim(t: Tap) -> None:
    """The holder would have the first table while it waits for the second, whose DDL goes on to the first."""
    t.write("create table u (id int primary key)", "grant select on u to gdq_owner")
    t.add("shop.u")
    held = threading.Event()

    def hold() -> None:
        # the server would end this session, which waits first
        with hold_snapshot(f"{t.db.dsn} options='-c deadlock_timeout=1h'", "q", ["shop.t", "shop.u"]):
            held.set()

    with t.db.connect("su") as app, t.db.connect("su") as su:
        su.execute("grant set on parameter deadlock_timeout to gdq_owner")
        app.execute("set deadlock_timeout = '2s'; begin; alter table shop.u add a int")
        thread = threading.Thread(target=hold)
        thread.start()
        waits = "select from pg_locks where relation = 'shop.u'::regclass and not granted"
        until(lambda: su.execute(waits).rowcount, "the holder at the lock")
        app.execute("alter table shop.t add b int; commit")
        thread.join(SECONDS)
    assert held.is_set()
