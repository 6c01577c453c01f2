"""What comes next is staged in the target while the last table is applied, by threads with sessions of their own."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

import psycopg
import pytest

from gdq.consumers.replica.replica import Replica
from gdq.consumers.replica.staging_ahead import StagingAhead, Wanted, drop_stages
from gdq.consumers.replica.table import ReplicaColumn, ReplicaTable
from tests.replica.conftest import Pair
from tests.support.waiting import until

pytestmark = pytest.mark.server

_AHEAD = "select from pg_stat_activity where application_name like '%/ahead'"
_STAGES = "select oid::regclass::text from pg_class where relname like 'replica\\_stage\\_%' order by 1"
_WAITING = "select from pg_locks where not granted and relation = 'number'::regclass"
# No server has so many processes.
_ENDED = 987654321

_COLUMN = ReplicaColumn(
    name="n",
    stage="integer",
    type="integer",
    is_key=True,
    old="",
    new="",
    settable=True,
    always=False,
    rounded="integer",
    equal="=",
    not_null=True,
    padded=False,
    blanks=False,
)
_TABLE = ReplicaTable("public.number", None, (_COLUMN,), partitioned=False, more_keys=False, deferrable=False, own=())


@pytest.fixture
def target(pair: Pair) -> Iterator[psycopg.Connection[Any]]:
    with pair.target.connect("su") as target:
        target.execute("create schema gdq_target")
        yield target


@pytest.fixture
def ahead(pair: Pair, target: psycopg.Connection[Any]) -> Iterator[StagingAhead]:
    pair.make("create table number (n int primary key)")
    with pair.source.connect("su") as source:
        ahead = StagingAhead(source, target)
        yield ahead
        ahead.close()


def wanted(rows: str) -> Wanted:
    """New rows n that a FROM gives, none of which was there before."""
    return Wanted(_TABLE, f"select true, n, false from {rows}")


def test_rows_are_staged_once(ahead: StagingAhead, target: psycopg.Connection[Any]) -> None:
    few, many = wanted("generate_series(1, 3) n"), wanted("generate_series(1, 200000) n")
    assert ahead.taken(few.query) is None
    ahead.begin([few, many])
    names = []
    for one, rows in ((few, 3), (many, 200_000)):
        staged = ahead.taken(one.query)
        assert staged is not None
        assert (staged.coming, staged.going, staged.doubtful) == (rows, 0, False)
        row = target.execute(f"select count(*), sum(c1) from {staged.name}".encode()).fetchone()
        assert row == (rows, rows * (rows + 1) // 2)
        names.append(staged.name)
    assert ahead.taken(many.query) is None
    # a table that is read still is not filled with others
    ahead.begin([wanted("generate_series(1, 5) n")])
    other = ahead.taken(wanted("generate_series(1, 5) n").query)
    assert other is not None
    assert other.name not in names
    ahead.give_back()
    ahead.begin([many])
    again = ahead.taken(many.query)
    assert again is not None
    assert again.name in (*names, other.name)
    assert target.execute(_STAGES).rowcount == 3
    ahead.close()
    assert target.execute(_STAGES).rowcount == 0
    until(lambda: not target.execute(_AHEAD).rowcount, "the end of the sessions")


def test_what_fails_is_left_to_the_usual_way(ahead: StagingAhead) -> None:
    fails, works = wanted("generate_series(1, 100000) n where 1 / (n - 99999) < 2"), wanted("generate_series(1, 3) n")
    ahead.begin([fails, works])
    assert ahead.taken(fails.query) is None
    staged = ahead.taken(works.query)
    assert staged is not None
    assert staged.coming == 3
    ahead.give_back()
    ahead.begin([works])
    assert ahead.taken(works.query) is not None


def test_what_nobody_wants_is_given_up(ahead: StagingAhead) -> None:
    """A statement of an hour does not hold up the program; its staging table is filled with other rows."""
    hour, works = wanted("pg_sleep(3600), generate_series(1, 3) n"), wanted("generate_series(1, 3) n")
    ahead.begin([hour])
    sleeping = f"{_AHEAD} and wait_event = 'PgSleep'"
    until(lambda: ahead.source.execute(sleeping).rowcount, "the statement")
    ahead.begin([works])
    staged = ahead.taken(works.query)
    assert staged is not None
    assert staged.coming == 3
    until(lambda: not ahead.source.execute(sleeping).rowcount, "its end")
    ahead.begin([hour])
    until(lambda: ahead.source.execute(sleeping).rowcount, "the statement")
    ahead.close()
    until(lambda: not ahead.source.execute(sleeping).rowcount, "its end")


def test_nobody_waits_behind_a_lock_that_waits_for_the_batch(pair: Pair, ahead: StagingAhead) -> None:
    """Somebody waits for a table that the batch's session has locked: who stages ahead would wait for both."""
    with pair.source.connect("su") as other, ahead.source.transaction():
        ahead.source.execute("lock table number in access share mode")
        waiter = threading.Thread(target=other.execute, args=("truncate number",))
        waiter.start()
        until(lambda: ahead.source.execute(_WAITING).rowcount, "the lock")
        one = wanted("public.number")
        ahead.begin([one])
        assert ahead.taken(one.query) is None
    waiter.join()


def test_a_role_that_may_make_no_staging_tables(pair: Pair, target: psycopg.Connection[Any]) -> None:
    target.execute("grant usage on schema gdq_target to public")
    one = wanted("generate_series(1, 3) n")
    with pair.source.connect("su") as source, pair.target.connect() as role:
        ahead = StagingAhead(source, role)
        ahead.begin([one])
        assert ahead.taken(one.query) is None
        # it is not tried again
        ahead.begin([one])
        assert ahead.taken(one.query) is None
        until(lambda: not target.execute(_AHEAD).rowcount, "the end of the sessions")
        ahead.close()


def test_stages_of_programs_that_were_killed(pair: Pair, target: psycopg.Connection[Any]) -> None:
    live = f"gdq_target.replica_stage_{target.info.backend_pid}_1"
    others = ("replica_stage_1234567890_1", "replica_stage_x_1", "other")
    for name in (live, f"gdq_target.replica_stage_{_ENDED}_1", *(f"gdq_target.{name}" for name in others)):
        target.execute(f"create table {name} (n int)".encode())
    with pair.target.connect("su") as another:
        drop_stages(another)
    left = "select relname::text from pg_class where relnamespace = 'gdq_target'::regnamespace"
    assert {name for (name,) in target.execute(left)} == {live.removeprefix("gdq_target."), *others}
    drop_stages(target)
    assert {name for (name,) in target.execute(left)} == {*others}


def test_staging_tables_are_kept(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    """Batch after batch goes through the same ones: making them anew would bloat the catalogs of the target."""
    monkeypatch.setattr("gdq.consumers.replica.batch_apply._AHEAD_ROWS", 1)
    for name in ("a", "b"):
        pair.make(f"create table {name} (id int primary key, n numeric)")
    pair.make("create table c (id int primary key)")
    pair.capture("a", "b", "c")
    with Replica(pair.source.dsn, pair.target.su_dsn, "shop", "mirror") as replica:
        seen = list[Any]()
        for number in range(6):
            list(replica.run())
            pair.run(*(f"insert into {name} values ({number})" for name in ("a", "b", "c")))
            list(replica.run())
            query = (
                "select array_agg(oid order by 1) from pg_class where relname like '%replica_stage%' and relkind = 'r'"
            )
            seen.append(replica.state.connection.execute(query).fetchone())
        # which table is staged ahead may differ at first
        assert seen[3] == seen[4] == seen[5]
        assert len(seen[5][0]) <= 5
    pair.same("a", "b", "c")
    with pair.target.connect("su") as su:
        assert su.execute(_STAGES).rowcount == 0


@pytest.mark.parametrize("many", [True, False])
def test_the_first_batch(pair: Pair, many: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Threads stage all tables of the first batch if it is large; a small one is not worth their sessions."""
    monkeypatch.setattr("gdq.consumers.replica.batch_apply._AHEAD_ROWS", 100 if many else 1000)
    for name in ("a", "b"):
        pair.make(f"create table {name} (id int primary key, n numeric)")
    pair.capture("a", "b")
    pair.apply()
    pair.run(*(f"insert into {name} select i, i from generate_series(1, 100) i" for name in ("a", "b")))
    taken = list[bool]()
    take = StagingAhead.taken

    def noted(ahead: StagingAhead, query: str) -> Any:
        staged = take(ahead, query)
        taken.append(staged is not None)
        return staged

    monkeypatch.setattr(StagingAhead, "taken", noted)
    with Replica(pair.source.dsn, pair.target.su_dsn, "shop", "mirror") as replica:
        list(replica.run())
        with pair.source.connect("su") as su:
            assert (su.execute(_AHEAD).rowcount > 0) is many
    assert taken == [many, many]
    pair.same("a", "b")
