"""New tables that match a rule while another transaction captures one: no writer waits for long, none is a victim."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

import psycopg
import pytest

from tests.support.events import Tap
from tests.support.guarded import maintain
from tests.support.waiting import SECONDS, until


@contextmanager
def captured_elsewhere(tap: Tap) -> Iterator[psycopg.Connection[object]]:
    """A transaction of the application that has made a captured table and stays open."""
    tap.owner.execute("select gdq.add_new_tables('q', '{shop.*,app.*}')")
    with tap.db.connect("su") as other, other.transaction():
        other.execute("set deadlock_timeout = '20ms'; set role app; create table shop.first (id int)")
        yield other


def test_a_transaction_that_waits_for_the_maker_of_a_table_is_no_victim(tap: Tap) -> None:
    """Were the turn a lock that is waited for, the server would find a deadlock and end the other transaction."""
    with tap.db.connect("su") as su, captured_elsewhere(tap) as other, tap.app.transaction():
        tap.app.execute("select pg_advisory_xact_lock(1)")
        making = threading.Thread(target=tap.app.execute, args=["create table second (id int)"])
        making.start()
        waits = "select from pg_stat_activity where pid = %s and wait_event in ('advisory', 'PgSleep')"
        until(lambda: su.execute(waits, [tap.app.info.backend_pid]).rowcount, pause=0)
        other.execute("set lock_timeout = '2s'")
        with pytest.raises(psycopg.errors.LockNotAvailable), other.transaction():
            other.execute("select pg_advisory_xact_lock(1)")
        making.join(SECONDS)
    maintain(tap)
    assert tap.owner.execute("select from gdq.table_info('q')").rowcount == 1


TWELVE = {
    "one command": "create schema authorization app " + " ".join(f"create table t{n} (id int)" for n in range(12)),
    "one transaction": "do $$ begin for i in 1 .. 12 loop execute format('create table t%s (id int)', i); "
    "end loop; end $$",
}


@pytest.mark.parametrize("form", TWELVE)
@pytest.mark.parametrize("timeout", ["900ms", "4s"])
def test_many_tables_wait_once(tap: Tap, form: str, timeout: str) -> None:
    """A transaction waits for its turn once, or its statement_timeout would pass."""
    with tap.db.connect("su") as su:
        su.execute(f"grant create on database {tap.db.name} to app".encode())
    with captured_elsewhere(tap):
        tap.app.execute(f"set statement_timeout = '{timeout}'".encode())
        tap.app.execute(TWELVE[form].encode())
