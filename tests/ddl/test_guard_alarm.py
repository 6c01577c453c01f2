"""The guard raises an alarm before it does anything: DDL that it cannot record is a resync at the next tick."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
from psycopg import errors, sql

from tests.support.events import Tap, drain
from tests.support.guarded import maintain, reasons, state, triggers
from tests.support.waiting import SECONDS, until


@contextmanager
def wanted_by_another(tap: Tap, table: str) -> Iterator[None]:
    """Somebody reads the table in a transaction, and VACUUM FULL waits behind: everybody else waits too."""
    with tap.db.connect("su") as reader, tap.db.connect("su") as cleaner, tap.db.connect("su") as su:
        reader.execute("begin")
        reader.execute(sql.SQL("select from {} limit 1").format(sql.Identifier(*table.split("."))))
        full = sql.SQL("vacuum full {}").format(sql.Identifier(*table.split(".")))
        thread = threading.Thread(target=lambda: cleaner.execute(full), daemon=True)
        thread.start()
        query = "select from pg_locks where pid = %s and not granted"
        until(lambda: su.execute(query, [cleaner.info.backend_pid]).rowcount)
        try:
            yield
        finally:
            reader.execute("rollback")
            thread.join(SECONDS)
            assert not thread.is_alive()


def event_log(tap: Tap) -> str:
    found = tap.owner.execute("select queue_id, current_slot from gdq.event_ring").fetchone()
    assert found
    return f"gdq_log.q{found[0]}_s{found[1]}"


# What the application does: values change without events, updates run without triggers, functions no longer fit.
DDL = {
    "values": ["alter table t alter v type bigint using v + 1000", "alter table t alter v type int"],
    "values of the same type": ["alter table t alter v type int using v + 1000"],
    "triggers off": ["alter table t disable trigger user", "update t set v = 2", "alter table t enable trigger user"],
    "column dropped": ["alter table t drop v", "insert into t values (3)", "alter table t add v int"],
    "labels": ["alter type mood rename value 'good' to 'bad'"],
    "partition": ["alter table p attach partition p2 for values in (2)"],
    "partition gone": ["alter table p detach partition p1"],
    "child": ["alter table c inherit t", "alter table c no inherit t"],
}
LOCKED = ("event log", "gdq.resync", "gdq.witness", "gdq.captured_table", "gdq.queue")


def table_of(kind: str) -> str:
    return {"labels": "shop.m", "partition": "shop.p", "partition gone": "shop.p"}.get(kind, "shop.t")


@pytest.mark.parametrize("locked", LOCKED)
@pytest.mark.parametrize("kind", DDL)
def test_ddl_that_cannot_be_recorded_is_a_resync(alarmed: Tap, kind: str, locked: str) -> None:
    table = event_log(alarmed) if locked == "event log" else locked
    with wanted_by_another(alarmed, table), alarmed.app.transaction():
        for statement in DDL[kind]:
            alarmed.app.execute(statement.encode())
    events = drain(alarmed.db)
    assert (table_of(kind), "resync") in [(row[4], row[3]) for row in events]
    maintain(alarmed)
    alarmed.write("insert into t values (7, 7)")
    assert [row[3] for row in drain(alarmed.db)][-1:] == ["insert"]
    resynced(alarmed)
    alarmed.write("insert into t values (8, 8)")
    assert [row[3] for row in drain(alarmed.db)] == ["insert"]
    assert state(alarmed) == ("ok", None)


def resynced(tap: Tap) -> None:
    for name in ("t", "c", "m", "p"):
        tap.owner.execute("select gdq.resynced('q', 'c', %s::regclass, pg_current_snapshot())", [f"shop.{name}"])


@pytest.mark.parametrize("isolation", ["repeatable read", "serializable"])
@pytest.mark.parametrize("kind", DDL)
def test_ddl_in_an_old_snapshot_that_cannot_be_recorded(alarmed: Tap, kind: str, isolation: str) -> None:
    with wanted_by_another(alarmed, event_log(alarmed)), alarmed.app.transaction():
        alarmed.app.execute(f"set transaction isolation level {isolation}".encode())
        for statement in DDL[kind]:
            alarmed.app.execute(statement.encode())
    events = drain(alarmed.db)
    assert (table_of(kind), "resync") in [(row[4], row[3]) for row in events]


@pytest.mark.parametrize("timeout", ["lock_timeout = '10 ms'", "statement_timeout = '1 s'"])
def test_timeouts_of_the_session(alarmed: Tap, timeout: str) -> None:
    alarmed.write(f"set {timeout}")
    with wanted_by_another(alarmed, event_log(alarmed)):
        alarmed.write("alter table t drop v", "insert into t values (2)")
    assert "resync" in [row[3] for row in drain(alarmed.db)]


def test_rows_wait_for_the_resync(alarmed: Tap) -> None:
    """While the resync cannot be recorded, no tick lets rows pass that were written after the DDL."""
    with wanted_by_another(alarmed, event_log(alarmed)):
        alarmed.write("alter table t alter v type int using v + 1000")
        alarmed.owner.execute("set lock_timeout = '5 s'")
        with pytest.raises(errors.ObjectNotInPrerequisiteState, match=r"table shop\.t was altered"):
            alarmed.owner.execute("select gdq.force_tick('q')")
        assert alarmed.owner.execute("select gdq.ticker()").fetchone() == (0,)
    assert [row[3] for row in drain(alarmed.db)] == ["resync"]


@pytest.mark.parametrize("locked", ["event log", "nothing"])
def test_ddl_that_is_rolled_back_costs_no_copy(alarmed: Tap, locked: str) -> None:
    def migration() -> None:
        for statements in DDL.values():
            with alarmed.app.transaction(force_rollback=True):
                for statement in statements:
                    alarmed.app.execute(statement.encode())

    if locked == "nothing":
        migration()
    else:
        with wanted_by_another(alarmed, event_log(alarmed)):
            migration()
    assert drain(alarmed.db) == []
    assert alarmed.owner.execute("select gdq.check_tables()").fetchone() == (0,)
    assert state(alarmed) == ("ok", None)


def test_savepoint_that_is_rolled_back(alarmed: Tap) -> None:
    with wanted_by_another(alarmed, event_log(alarmed)), alarmed.app.transaction():
        with alarmed.app.transaction(force_rollback=True):
            alarmed.app.execute("alter table t drop v")
        alarmed.app.execute("insert into t values (2, 2)")
    assert [row[3] for row in drain(alarmed.db)] == ["insert"]


def test_ddl_that_is_still_open(alarmed: Tap) -> None:
    """A tick during the DDL neither waits nor settles its alarm."""
    with alarmed.db.connect("app") as other:
        with wanted_by_another(alarmed, event_log(alarmed)):
            other.execute("begin")
            other.execute("alter table t disable trigger user")
            other.execute("update t set v = 2")
            other.execute("alter table t enable trigger user")
        alarmed.write("insert into m values ('good')")
        assert [row[3] for row in drain(alarmed.db)] == ["insert"]
        alarmed.write("insert into m values ('good')")
        assert [row[3] for row in drain(alarmed.db)] == ["insert"]
        other.execute("commit")
    assert "resync" in [row[3] for row in drain(alarmed.db)]


def test_recorded_ddl_needs_no_comparison(alarmed: Tap) -> None:
    with alarmed.db.connect("su") as su:
        su.execute("create function pg_temp.compared() returns void language sql as ''")
        alarmed.write("alter table t add w int", "alter table t drop w", "alter table t alter v set default 3")
        found = su.execute("select due, changed from gdq.alarms()").fetchone()
        assert found == (False, True)
        assert [row[3] for row in drain(alarmed.db)] == ["ddl", "ddl"]
        assert su.execute("select due, changed from gdq.alarms()").fetchone() == (False, False)
        maintain(alarmed)
        assert su.execute("select count(*) from gdq.alarm_answer").fetchone() == (0,)


def test_ddl_of_tables_that_are_not_captured_raises_no_alarm(alarmed: Tap) -> None:
    query = "select last_value, is_called from gdq.alarm"
    before = alarmed.owner.execute(query).fetchone()
    alarmed.write(
        "create table u (id int)",
        "alter table u add v int",
        "create temp table x (id int)",
        "drop table x",
        "create index on t (v)",
        "drop table u",
    )
    assert alarmed.owner.execute(query).fetchone() == before


def test_trigger_that_is_off_in_one_command_among_recorded_ones(alarmed: Tap) -> None:
    """The guard sees the second command, and must not take the state that it meets for the witnessed one."""
    disable, enable = (f"alter table t {how} trigger {triggers(alarmed)['u']}" for how in ("disable", "enable"))
    with wanted_by_another(alarmed, event_log(alarmed)), alarmed.app.transaction():
        alarmed.app.execute(disable.encode())
        alarmed.app.execute("update t set v = 2")
        alarmed.app.execute(enable.encode())
    alarmed.write("alter table t alter v set default 1")
    assert reasons(drain(alarmed.db))
