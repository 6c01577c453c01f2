"""Tables that are applied at once, each in a transaction of its own, and what a kill between two of them leaves."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from gdq.consumers.replica.replica import Replica
from gdq.consumers.replica.state import ReplicaState
from tests.replica.conftest import Pair, count
from tests.support.programs import gdq
from tests.support.waiting import until

pytestmark = pytest.mark.server

# So many changes of each table that the next one is staged meanwhile.
_CHANGES = (
    "update one set n = n + 1 where id <= 1500",
    "update two set n = n + 1 where id > 500",
    "delete from two where id <= 100",
    "insert into two select i, i from generate_series(3001, 3400) i",
)


@pytest.fixture
def filled(pair: Pair) -> Pair:
    """A pair whose replica has two tables."""
    for name in ("one", "two"):
        pair.make(f"create table {name} (id int primary key, n int)")
        pair.run(f"insert into {name} select i, i from generate_series(1, 2000) i")
    pair.capture("one", "two")
    pair.apply()
    return pair


def run(pair: Pair, workers: int, **options: Any) -> list[tuple[int, int, int]]:
    """Apply what is there, in this process; the rows that each batch has inserted, updated and deleted."""
    source, target = pair.source.dsn, pair.target.su_dsn
    with Replica(source, target, "shop", "mirror", apply_workers=workers, **options) as replica:
        return [(batch.inserted, batch.updated, batch.deleted) for batch in replica.run()]


@pytest.mark.parametrize(("workers", "sessions"), [(1, 1), (2, 2), (5, 2)])
def test_each_table_has_a_session(filled: Pair, workers: int, sessions: int) -> None:
    filled.there(*(f"alter table {name} add session int default pg_backend_pid()" for name in ("one", "two")))
    filled.run(*_CHANGES, "insert into one values (3001, 1)")
    assert run(filled, workers) == [(401, 3000, 100)]
    with filled.target.connect("su") as su:
        inserted = "(select session from one where id > 3000 union select session from two where id > 3000)"
        assert count(su, f"select count(*) from {inserted} x") == sessions
        assert count(su, "select bool_and(handed_over) from gdq_target.replica_table") is True
    filled.there("alter table one drop session", "alter table two drop session")
    filled.same("one", "two")
    filled.run(*_CHANGES[:2])
    assert run(filled, workers) == [(0, 3400, 0)]
    filled.same("one", "two")


def test_a_table_that_comes_while_the_workers_are_there(filled: Pair) -> None:
    with Replica(filled.source.dsn, filled.target.su_dsn, "shop", "mirror", apply_workers=2) as replica:
        filled.run(*_CHANGES)
        assert len(list(replica.run())) == 1
        filled.make("create table zero (id int primary key, n int)")
        filled.capture("zero")
        assert list(replica.run()) == []
        names = ("two", "zero")
        filled.there(*(f"alter table {name} add session int default pg_backend_pid()" for name in names))
        filled.run(*(f"insert into {name} select i, i from generate_series(5001, 7000) i" for name in names))
        assert [batch.inserted for batch in replica.run()] == [4000]
    with filled.target.connect("su") as su:
        assert count(su, "select count(distinct session) from (table two union all table zero) x where id > 5000") == 2


def test_killed_between_two_commits(filled: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    """A table that is ahead of the others is like one that was copied then: no change comes twice, none is left out."""
    filled.run(*_CHANGES)

    def killed(*_: object) -> None:
        raise ZeroDivisionError

    with monkeypatch.context() as patched:
        patched.setattr(ReplicaState, "brought", killed)
        with pytest.raises(ZeroDivisionError):
            run(filled, 2)
    filled.same("two")
    assert filled.rows(filled.target, "one") != filled.rows(filled.source, "one")
    compared = gdq("compare-tables", "shop", "mirror", "--to", filled.target.su_dsn, dsn=filled.source.dsn)
    assert compared.returncode == 0, compared.stdout
    filled.run("update two set n = n + 1 where id > 3000", "insert into one values (9000, 1)")
    assert sum(map(sum, run(filled, 2))) == 1500 + 400 + 1
    filled.same("one", "two")


def test_application_in_between(filled: Pair) -> None:
    """A session that waits for a worker's rows while the program waits for hers is let go on."""
    filled.run(*_CHANGES)
    waits = "select from pg_stat_activity where wait_event_type = 'Lock' and application_name like 'gdq:shop/mirror%'"
    with (
        filled.target.connect("su") as application,
        filled.target.connect("su") as looking,
        ThreadPoolExecutor(1) as threads,
    ):
        application.execute("begin")
        application.execute("update one set n = n where id = 1")
        applied = threads.submit(run, filled, 2)
        until(lambda: looking.execute(waits).rowcount, "the program's wait")
        idle = "select from pg_stat_activity where state = 'idle in transaction' and application_name like '%/apply'"
        until(lambda: looking.execute(idle).rowcount, "the worker's")
        application.execute("update two set n = n where id = 600")
        application.execute("rollback")
        assert applied.result() == [(400, 3000, 100)]
    filled.same("one", "two")
    filled.run(*_CHANGES[:2])
    assert run(filled, 2) == [(0, 3400, 0)]
    filled.same("one", "two")


@pytest.mark.parametrize("on_error", ["stop", "dead-letter"])
def test_refused_rows(filled: Pair, on_error: str) -> None:
    """What a worker's table refuses is told and kept as ever, and no other table is ahead then."""
    filled.make("create table zero (id int primary key, n int)")
    filled.capture("zero")
    filled.apply()
    filled.there("alter table two add constraint small check (n < 3400)")
    filled.run(*_CHANGES, "insert into zero select i, i from generate_series(1, 1500) i")
    done = filled.replicate("--apply-workers", "3", "--on-error", on_error)
    with filled.target.connect("su") as su:
        if on_error == "stop":
            assert done.returncode == 1
            assert 'violates check constraint "small"' in done.stderr
            assert count(su, "select count(*) from one where n = id + 1") == 0
            assert count(su, "select count(*) from zero") == 0
        else:
            assert done.returncode == 0, done.stderr
            assert count(su, "select count(*) from gdq_target.replica_dead_letter") == 1
            assert count(su, "select count(*) from two") == 2299
    filled.there("alter table two drop constraint small")
    if on_error == "stop":
        filled.apply("--apply-workers", "2")
        filled.same("one", "two")


def test_ddl_and_truncate_are_left_to_the_program(filled: Pair) -> None:
    filled.run(*_CHANGES, "alter table two add more int default 5", *_CHANGES[:2], "truncate one")
    filled.run("insert into one select i, i from generate_series(1, 3000) i", "update two set more = id")
    run(filled, 2)
    filled.same("one", "two")


def test_needs_the_queue(filled: Pair) -> None:
    done = filled.replicate("--apply-workers", "2", "--source", "slot")
    assert done.returncode == 2
    assert "--apply-workers needs the queue" in done.stderr


def test_workers_end_with_the_program(filled: Pair) -> None:
    filled.run(*_CHANGES)
    run(filled, 3)
    with filled.target.connect("su") as su:
        sessions = "select from pg_stat_activity where application_name like 'gdq:shop/mirror%'"
        until(lambda: not su.execute(sessions).rowcount, "the end of the sessions")
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("gdq-apply")]
