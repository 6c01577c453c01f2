"""What comes next is staged in the target while the last table is applied, by threads with sessions of their own."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from typing import Any

import psycopg
import pytest

from gdq.consumers.replica.changes import Staged
from gdq.consumers.replica.refusal import RowsLackingError
from gdq.consumers.replica.replica import Replica
from gdq.consumers.replica.staged_parts import StagedParts
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


def wanted(rows: str, *, in_parts: bool = False) -> Wanted:
    """New rows n that a FROM gives, none of which was there before."""
    return Wanted(_TABLE, f"select true, n, false from {rows}", in_parts=in_parts)


def whole(parts: StagedParts | None) -> Staged:
    """The one part of what is staged."""
    assert parts is not None
    (staged,) = parts.all()
    return staged


def test_rows_are_staged_once(ahead: StagingAhead, target: psycopg.Connection[Any]) -> None:
    few, many = wanted("generate_series(1, 3) n"), wanted("generate_series(1, 200000) n")
    assert ahead.taken(few.query) is None
    ahead.begin([few, many])
    names = []
    for one, rows in ((few, 3), (many, 200_000)):
        staged = whole(ahead.taken(one.query))
        assert (staged.coming, staged.going, staged.doubtful) == (rows, 0, False)
        row = target.execute(f"select count(*), sum(c1) from {staged.name}".encode()).fetchone()
        assert row == (rows, rows * (rows + 1) // 2)
        names.append(staged.name)
    assert ahead.taken(many.query) is None
    # a table that is read still is not filled with others
    ahead.begin([wanted("generate_series(1, 5) n")])
    other = whole(ahead.taken(wanted("generate_series(1, 5) n").query))
    assert other.name not in names
    assert ahead.give_back() == 200_008
    ahead.begin([many])
    again = whole(ahead.taken(many.query))
    assert again.name in (*names, other.name)
    assert target.execute(_STAGES).rowcount == 3
    ahead.close()
    assert target.execute(_STAGES).rowcount == 0
    until(lambda: not target.execute(_AHEAD).rowcount, "the end of the sessions")


def test_what_fails_is_left_to_the_usual_way(ahead: StagingAhead) -> None:
    fails, works = wanted("generate_series(1, 100000) n where 1 / (n - 99999) < 2"), wanted("generate_series(1, 3) n")
    ahead.begin([fails, works])
    assert ahead.taken(fails.query) is None
    assert whole(ahead.taken(works.query)).coming == 3
    ahead.give_back()
    ahead.begin([works])
    assert ahead.taken(works.query) is not None


@pytest.fixture
def small_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Parts begin with a block, and a batch of one row is worth staging ahead."""
    monkeypatch.setattr("gdq.consumers.replica.staging_ahead._PART_BYTES", 1)
    monkeypatch.setattr("gdq.consumers.replica.batch_apply._AHEAD_ROWS", 1)


@pytest.mark.usefixtures("small_parts")
def test_parts(ahead: StagingAhead, target: psycopg.Connection[Any]) -> None:
    """Rows are read from the first part while later ones are still on their way; each row is in one part."""
    many = wanted("generate_series(1, 30000) n where n < 30000 or pg_sleep(3600)::text = ''", in_parts=True)
    ahead.begin([many])
    parts = ahead.taken(many.query)
    assert parts is not None
    first = next(parts.all())
    assert 0 < (first.coming or 0) < 30_000
    assert not parts.ended
    ahead.close()
    many = wanted("generate_series(1, 30000) n", in_parts=True)
    ahead.begin([many])
    parts = ahead.taken(many.query)
    assert parts is not None
    names = [part.name for part in parts.all()]
    assert len(set(names)) == len(names) > 2
    rows = " union all ".join(f"select c1 from {name}" for name in names)
    assert target.execute(f"select count(*), sum(c1) from ({rows}) r".encode()).fetchone() == (30_000, 450_015_000)
    assert ahead.give_back() == 30_000


@pytest.mark.usefixtures("small_parts")
def test_parts_that_do_not_all_come(ahead: StagingAhead) -> None:
    """Who has applied some parts learns that others are lacking; the thread does its next work."""
    fails = wanted("generate_series(1, 100000) n where 1 / (n - 99999) < 2", in_parts=True)
    works = wanted("generate_series(1, 3) n", in_parts=True)
    ahead.begin([fails])
    parts = ahead.taken(fails.query)
    assert parts is not None
    came = parts.all()
    assert next(came).coming
    with pytest.raises(RowsLackingError):
        list(came)
    ahead.give_back()
    ahead.begin([works])
    assert whole(ahead.taken(works.query)).coming == 3


def test_what_nobody_wants_is_given_up(ahead: StagingAhead) -> None:
    """A statement of an hour does not hold up the program; its staging table is filled with other rows."""
    hour, works = wanted("pg_sleep(3600), generate_series(1, 3) n"), wanted("generate_series(1, 3) n")
    ahead.begin([hour])
    sleeping = f"{_AHEAD} and wait_event = 'PgSleep'"
    until(lambda: ahead.source.execute(sleeping).rowcount, "the statement")
    ahead.begin([works])
    assert whole(ahead.taken(works.query)).coming == 3
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


_CHANGES = """
    insert into a select i, 'new ' || i from generate_series(20001, 30000) i;
    update a set note = 'changed' where id % 2 = 0;
    update a set id = -id where id % 97 = 0;
    delete from a where id % 10 = 3"""


def _stages_of_parts(pair: Pair, change: str) -> int:
    """Apply a change of table a; the number of staging tables that it took."""
    pair.apply()
    pair.run(change)
    with Replica(pair.source.dsn, pair.target.su_dsn, "shop", "mirror") as replica:
        list(replica.run())
        query = "select from pg_class where relname like 'replica\\_stage\\_%' and relkind = 'r'"
        stages = replica.state.connection.execute(query).rowcount
    pair.same("a")
    return stages


@pytest.mark.usefixtures("small_parts")
def test_changes_in_parts(pair: Pair) -> None:
    pair.make("create table a (id int primary key, note text)")
    pair.run("insert into a select i, 'note ' || i from generate_series(1, 20000) i")
    pair.capture("a")
    assert _stages_of_parts(pair, _CHANGES) > 2


@pytest.mark.usefixtures("small_parts")
def test_a_key_in_doubt_in_a_late_part(pair: Pair) -> None:
    """A trigger's own update is logged before the one that fired it; parts that were applied are taken back."""
    pair.make("create table a (id int primary key, note text)")
    pair.run(
        """create function again() returns trigger language plpgsql as $$ begin
             update a set note = 'by the trigger' where id = new.id and note <> 'by the trigger'; return null;
           end $$;
           create trigger "A" after update on a for each row when (new.id = 20000 and new.note <> 'by the trigger')
             execute function again()"""
    )
    pair.run("insert into a select i, 'note ' || i from generate_series(1, 20000) i")
    pair.capture("a")
    assert _stages_of_parts(pair, "update a set note = note || ' changed'") > 2


@pytest.mark.usefixtures("small_parts")
def test_values_of_another_unique_key_that_are_swapped_between_parts(pair: Pair) -> None:
    pair.make("create table a (id int primary key, place int unique, note text)")
    pair.run("insert into a select i, i, 'note ' || i from generate_series(1, 20000) i")
    pair.capture("a")
    swapped = "update a set place = -place; update a set place = 20001 - id"
    assert _stages_of_parts(pair, swapped) == 1


@pytest.mark.usefixtures("small_parts")
def test_a_thread_that_fails_between_parts(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    """What was applied of the table is taken back, and all of it is staged in the usual way."""
    every = StagedParts.all

    def some(parts: StagedParts, look: Callable[[], None] = lambda: None) -> Iterator[Staged]:
        yield next(every(parts, look))
        raise RowsLackingError("lacks changes that could not be staged")

    pair.make("create table a (id int primary key, note text)")
    pair.run("insert into a select i, 'note ' || i from generate_series(1, 20000) i")
    pair.capture("a")
    pair.apply()
    monkeypatch.setattr(StagedParts, "all", some)
    assert _stages_of_parts(pair, _CHANGES) > 2


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
