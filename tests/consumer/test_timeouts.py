"""Commands that run for ever under timeouts that somebody has set, and while no synchronous standby answers."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator

import pytest
from psycopg import sql

from tests.support.programs import gdq, start_gdq
from tests.support.server import Database
from tests.support.waiting import SECONDS, until

pytestmark = pytest.mark.server

COMMANDS = [["ticker"], ["consume", "q", "c"], ["consume", "q", "d", "--member", "m"], ["refresh", "--follow"]]


@pytest.fixture
def shop(db: Database) -> Database:
    """A queue with a table, a consumer and a view."""
    with db.connect() as connection:
        connection.execute("select gdq.create_queue('q', ticker_max_lag => '1 ms')")
        connection.execute("create table t (id int primary key)")
        connection.execute("select gdq.add_table('q', 't')")
        connection.execute("select gdq.register_consumer('q', 'c')")
        connection.execute("select gdq.register_consumer('q', 'd')")
        connection.execute("select gdq.register_member('q', 'd', 'm')")
    made = gdq(
        *("create-view", "v", "--queue", "q", "--sql", "-", "--target", "public.v"),
        dsn=db.dsn,
        stdin="select id from public.t",
    )
    assert made.returncode == 0, made.stderr
    return db


def insert(shop: Database, number: int) -> None:
    with shop.connect("su") as su:
        su.execute("set synchronous_commit = local")
        su.execute("insert into t values (%s)", [number])


def last_tick(shop: Database) -> object:
    with shop.connect("su") as su:
        return su.execute("select max(tick_id) from gdq.tick").fetchone()


def wait_for_a_tick(shop: Database, process: subprocess.Popen[str], number: int) -> None:
    before = last_tick(shop)
    insert(shop, number)
    until(lambda: last_tick(shop) != before or process.poll() is not None)
    assert process.poll() is None, process.communicate()


def set_timeouts(shop: Database, milliseconds: int) -> None:
    with shop.connect("su") as su:
        names = [
            name
            for (name,) in su.execute("select name from pg_settings where name ~ '_timeout$' and context = 'user'")
            if name not in ("idle_session_timeout", "tcp_user_timeout")
        ]
        assert "statement_timeout" in names
        for name in names:
            command = "alter role gdq_owner in database {} set {} = {}"
            su.execute(
                sql.SQL(command).format(sql.Identifier(shop.name), sql.Identifier(name), sql.Literal(milliseconds))
            )


@pytest.mark.long
@pytest.mark.parametrize("command", COMMANDS, ids=" ".join)
def test_timeouts_of_the_role_are_not_those_of_gdq(shop: Database, command: list[str]) -> None:
    set_timeouts(shop, 20)
    with start_gdq(*command, dsn=shop.dsn) as process:
        for number in range(3):
            wait_for_a_tick(shop, process, number)
        process.terminate()
        _, errors = process.communicate(timeout=SECONDS)
    assert process.returncode == 0, errors
    assert "timeout" not in errors
    assert "lost" not in errors


@pytest.mark.long
@pytest.mark.parametrize("command", COMMANDS, ids=" ".join)
def test_a_timeout_of_the_connection_string_ends_no_command(shop: Database, command: list[str]) -> None:
    """A statement is cancelled, and from PostgreSQL 17 on a transaction, with another class of error."""
    table = "gdq.view" if "--follow" in command else "gdq.tick"
    with (
        shop.connect("su") as su,
        shop.connect("su") as holder,
        start_gdq(*command, dsn=f"{shop.dsn} options='-c statement_timeout=500'") as process,
    ):
        wait_for_a_tick(shop, process, 1)
        holder.execute(f"begin; lock table {table}")
        insert(shop, 2)
        sessions = set(su.execute(_SESSIONS).fetchall())
        until(lambda: sessions.isdisjoint(su.execute(_SESSIONS).fetchall()) or process.poll() is not None)
        holder.execute("commit")
        wait_for_a_tick(shop, process, 3)
        process.terminate()
        _, errors = process.communicate(timeout=SECONDS)
    assert process.returncode == 0, errors
    assert "trying again: canceling statement due to statement timeout" in errors


_SESSIONS = "select pid from pg_stat_activity where datname = current_database() and application_name ~ '^gdq'"


@pytest.fixture
def unanswered(shop: Database) -> Iterator[Database]:
    """The database of a server that waits for a synchronous standby, which does not exist."""
    with shop.connect("su") as su:
        su.execute("alter system set synchronous_standby_names = 'nobody'")
        su.execute("select pg_reload_conf()")
        try:
            yield shop
        finally:
            su.execute("alter system reset synchronous_standby_names")
            su.execute("select pg_reload_conf()")
            until(lambda: su.execute("show synchronous_standby_names").fetchone() == ("",))


@pytest.mark.parametrize("command", COMMANDS, ids=" ".join)
def test_a_signal_ends_the_wait_for_a_standby(unanswered: Database, command: list[str]) -> None:
    insert(unanswered, 1)
    with unanswered.connect("su") as su, start_gdq(*command, dsn=unanswered.dsn) as process:
        waiting = "select from pg_stat_activity where datname = current_database() and wait_event = 'SyncRep'"
        until(lambda: su.execute(waiting).rowcount or process.poll() is not None)
        process.terminate()
        _, errors = process.communicate(timeout=60)
    assert process.returncode == 0, errors
