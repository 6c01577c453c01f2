"""A view that was refreshed once has functions: CALL gdq.refresh() refreshes it in one transaction, from any client."""

from __future__ import annotations

import json
import random
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from functools import partial

import psycopg
import pytest
from click.testing import CliRunner

from gdq.cli import main
from gdq.consumers.refresh.refresher import Refresher
from gdq.consumers.refresh.view_refresh import RefreshPoint
from gdq.consumers.views.target import Target
from gdq.view.view import create_view, set_view_audit, view_history, view_info
from tests.support.spark import Shop
from tests.support.waiting import until
from tests.views.test_few_changes import KEYED, VIEWS, check, loaded, shop, texts, write

__all__ = ["loaded", "shop"]

pytestmark = pytest.mark.server


@contextmanager
def counted(shop: Shop) -> Iterator[tuple[Refresher, list[RefreshPoint]]]:
    """A refresher, and the points that its refreshes have come to."""
    points: list[RefreshPoint] = []
    with Refresher(shop.db.dsn, at=points.append) as refresher:
        yield refresher, points


def test_few_changes_take_one_transaction(shop: Shop) -> None:
    write(shop, random.Random(1), 40)
    for name in ("v_sums", "v_rows", "v_total"):
        shop.view(name, VIEWS[name], engine="postgres")
        set_view_audit(shop.connection, name, 0)
    with counted(shop) as (refresher, points):
        for name in ("v_sums", "v_rows", "v_total"):
            refresher.refresh(name)
            for step in range(3):
                shop.execute("insert into sale (id, k, amount, n) values (%s, 1, 5, 2)", 200 + step)
                points.clear()
                check(shop, refresher, {name: VIEWS[name]}, ("delta",))
                # a whole refresh exports its snapshot and stages what it computes
                assert points == ["committed", "done"], name
            points.clear()
            check(shop, refresher, {name: VIEWS[name]}, ("none",))
            assert points == []
            shop.execute("delete from sale where id >= 200")
        assert [run.kind for run in view_history(shop.connection, "v_sums", 5)] == [
            "none",
            *["incremental"] * 3,
            "full",
        ]


def position_of(shop: Shop, name: str) -> str:
    ((found,),) = shop.execute("select position from gdq_target.position where view = %s", name)
    return str(found)


def call(shop: Shop, view: str) -> tuple[str, str | None, int, int | None]:
    """CALL gdq.refresh(), as any client can."""
    ((action, reason, rows, delta_rows, _),) = shop.execute("call gdq.refresh(%s)", view)
    return action, reason, rows, delta_rows


# A trigger of the target that waits while somebody else has the lock, without waiting for a lock, which could time out.
GATE = """
create function wait_at_gate() returns trigger language plpgsql as $$
begin
  while not pg_try_advisory_xact_lock(4711) loop
    perform pg_sleep(0.01);
  end loop;
  return null;
end $$"""


def waits(shop: Shop, pid: int) -> bool:
    return bool(shop.execute("select 1 from pg_stat_activity where pid = %s and wait_event = 'PgSleep'", pid))


def is_gone(shop: Shop, pid: int) -> bool:
    return not shop.execute("select 1 from pg_stat_activity where pid = %s", pid)


@contextmanager
def held_call(shop: Shop, view: str) -> Iterator[int]:
    """The process of a call that waits when it has written to the target, until the block ends."""
    shop.execute(f"create trigger gate after insert or delete on {view} execute function wait_at_gate()")
    with (
        shop.db.connect(autocommit=True) as caller,
        ThreadPoolExecutor() as pool,
        shop.db.connect(autocommit=False) as holder,
    ):
        holder.execute("select pg_advisory_xact_lock(4711)")
        pid = caller.info.backend_pid
        ended = pool.submit(caller.execute, "call gdq.refresh(%s)", [view])
        until(lambda: waits(shop, pid) or ended.done())
        assert not ended.done()
        yield pid
        holder.rollback()
        try:
            ended.result()
        except psycopg.OperationalError:
            assert caller.broken
    shop.execute(f"drop trigger gate on {view}")


def test_a_call_that_dies_leaves_nothing(loaded: tuple[Shop, Refresher]) -> None:
    shop, refresher = loaded
    write(shop, random.Random(11))
    shop.execute(GATE)
    for name in ("v_sums", "v_rows"):
        shop.execute("insert into kind values (%s, 'more', 1)", 100)
        shop.execute("insert into sale (id, k, amount, n, ok) values (100, 100, 1, 2, true)")
        before = texts(shop, f"select * from {name}"), position_of(shop, name)
        with held_call(shop, name) as pid:
            shop.execute("select pg_terminate_backend(%s)", pid)
            until(partial(is_gone, shop, pid))
        assert (texts(shop, f"select * from {name}"), position_of(shop, name)) == before
        assert call(shop, name)[0] == "delta"
        assert texts(shop, f"select * from {name}") == texts(shop, VIEWS[name])
        shop.execute("delete from sale where id = 100; delete from kind where k = 100")
    check(shop, refresher)


def test_changes_during_a_call_belong_to_the_next(loaded: tuple[Shop, Refresher]) -> None:
    shop, _ = loaded
    draw = random.Random(12)
    shop.execute(GATE)
    for name in ("v_sums", "v_rows", "v_self"):
        for _ in range(2):
            write(shop, draw)
            shop.execute("insert into sale (id, k, n, ok) values (100, 1, 2, true)")
            query = f'select q::text from ({VIEWS[name]}) as q order by q::text collate "C"'
            with held_call(shop, name):
                expected = shop.execute(query)
                write(shop, draw)
                shop.execute("delete from sale where id = 100")
                shop.keep_house()
            assert texts(shop, f"select * from {name}") == expected, name
        assert call(shop, name)[0] == "delta"
        assert texts(shop, f"select * from {name}") == texts(shop, VIEWS[name]), name


def test_a_call_takes_no_python(loaded: tuple[Shop, Refresher]) -> None:
    shop, _ = loaded
    draw = random.Random(14)
    for _ in range(8):
        write(shop, draw)
        for name, query in VIEWS.items():
            if name == "v_loose":  # of numbers that are equal any spelling may be shown
                continue
            assert call(shop, name)[:2] in (("delta", None), ("none", None)), name
            assert texts(shop, f"select * from {name}") == texts(shop, query), name
        if draw.random() < 0.5:
            shop.keep_house()
    run = view_history(shop.connection, "v_rows", 1)[0]
    assert run.kind in ("incremental", "none")
    assert run.work_seconds is not None


def test_what_no_change_shows_is_loaded_in_full(viewed: Shop) -> None:
    view = small_view(viewed)
    with Refresher(viewed.db.dsn) as refresher:
        refresher.refresh(view)
    told = {
        "truncate t; insert into t values (1, 1)": "the log rows do not show every change",
        "insert into t select i, i from generate_series(1000, 110000) i": "many changes",
        "truncate v_t": "the target is not as the last refresh left it",
        "delete from v_t where id = 1; update t set n = 7 where id = 1": "the target lacks rows that went",
    }
    for statement, reason in told.items():
        viewed.execute(statement)
        assert call(viewed, view)[:2] == ("full", reason)
        assert viewed.differences(view, "select id, n from t") == (0, 0)
        assert view_history(viewed.connection, view, 1)[0].reason == reason
        assert call(viewed, view) == ("none", None, 0, 0)
    # a refresher that keeps the view goes on from what the calls have done
    with Refresher(viewed.db.dsn) as refresher:
        viewed.execute("insert into t values (5, 5)")
        assert refresher.refresh(view).action == "delta"


def test_a_call_follows_many_changes(loaded: tuple[Shop, Refresher]) -> None:
    shop, _ = loaded
    many = """insert into sale (id, k, amount, n, note, ok)
              select i, i %% 6, i / 7.0, i %% 50, 'note ' || i, i %% 3 = 0 from generate_series(%s::int, %s) i"""
    for step, name in enumerate(("v_sums", "v_rows", "v_total", "v_nulls", "v_bag", "v_union")):
        for rows in (400, 3000, 6000):
            begin = 1000 + 100_000 * step
            shop.execute("delete from sale where id >= 1000")
            shop.execute(many, begin, begin + rows)
            action, reason, _, _ = call(shop, name)
            assert (action, reason) == ("delta", None), (name, rows)
            assert texts(shop, f"select * from {name}") == texts(shop, VIEWS[name]), (name, rows)


def test_keys_extremes_and_first_rows_follow_by_calls(shop: Shop) -> None:
    draw = random.Random(15)
    write(shop, draw, 40)
    with Refresher(shop.db.dsn) as refresher:
        for name, query in KEYED.items():
            shop.view(name, query, engine="postgres")
            refresher.refresh(name)
            write(shop, draw)
            shop.execute("insert into kind values (50, 'new', 9) on conflict (k) do update set rate = kind.rate + 1")
            for _ in range(3):
                assert call(shop, name)[0] in ("delta", "none"), name
                assert texts(shop, f"select * from {name}") == texts(shop, query), name
                write(shop, draw)
            # and a process goes on from the state that calls leave
            refresher.refresh(name)
            assert texts(shop, f"select * from {name}") == texts(shop, query), name


def test_what_the_planner_cannot_read_is_loaded_in_full(shop: Shop) -> None:
    shop.execute("create aggregate all_of (int) (sfunc = array_append, stype = int[], initcond = '{}')")
    query = "select k, cardinality(all_of(id)) as n from sale group by k"
    write(shop, random.Random(2), 20)
    shop.view("v_all", query, engine="postgres")
    with Refresher(shop.db.dsn) as refresher:
        refresher.refresh("v_all")
        write(shop, random.Random(3))
        action, reason, *_ = call(shop, "v_all")
    assert (action, reason) == ("full", "changes of this view are not compiled")
    assert texts(shop, "select * from v_all") == texts(shop, query)


@pytest.mark.long
def test_calls_beside_each_other_and_beside_processes(loaded: tuple[Shop, Refresher]) -> None:
    """A call fails only while another refresh of its view is at work, and no failure leaves anything."""
    shop, _ = loaded
    names, draw, ended = ["v_sums", "v_rows", "v_bag"], random.Random(16), threading.Event()

    def calls(seed: int) -> None:
        chosen = random.Random(seed)
        with shop.db.connect(autocommit=True) as caller:
            while not ended.is_set():
                with suppress(psycopg.errors.LockNotAvailable, psycopg.errors.SerializationFailure):
                    caller.execute("call gdq.refresh(%s)", [chosen.choice(names)])

    def refreshes() -> None:
        with Refresher(shop.db.dsn) as refresher:
            while not ended.is_set():
                with suppress(psycopg.errors.LockNotAvailable):
                    refresher.refresh(random.Random().choice(names))

    with ThreadPoolExecutor() as pool:
        workers = [pool.submit(calls, 1), pool.submit(calls, 2), pool.submit(refreshes)]
        for _ in range(60):
            write(shop, draw)
            shop.keep_house()
        ended.set()
        for worker in workers:
            worker.result()
    for name in names:
        call(shop, name)
        assert texts(shop, f"select * from {name}") == texts(shop, VIEWS[name]), name


def test_what_a_call_refuses(viewed: Shop) -> None:
    view = small_view(viewed)
    with pytest.raises(psycopg.errors.ObjectNotInPrerequisiteState, match="has no functions") as caught:
        call(viewed, view)
    assert caught.value.diag.message_hint is not None
    assert "gdq refresh v_t" in caught.value.diag.message_hint
    with pytest.raises(psycopg.errors.UndefinedObject, match='view "other" does not exist'):
        call(viewed, "other")
    with Refresher(viewed.db.dsn) as refresher:
        refresher.refresh(view)
        with viewed.connection.transaction(), pytest.raises(psycopg.errors.InvalidTransactionTermination):
            viewed.execute("call gdq.refresh('v_t')")
        viewed.execute("alter table t alter n type bigint")
        viewed.execute("insert into t values (77, 7)")
        with pytest.raises(psycopg.errors.ObjectNotInPrerequisiteState, match="has changed since") as caught:
            call(viewed, view)
        assert caught.value.diag.message_hint == "gdq refresh v_t looks again."
        assert refresher.refresh(view).action == "full"
        assert call(viewed, view) == ("none", None, 0, 0)
        with viewed.db.connect(autocommit=False) as other:
            other.execute("select gdq.lock_view('v_t', true)")
            viewed.execute("insert into t values (78, 7)")
            with pytest.raises(psycopg.errors.LockNotAvailable, match="is being refreshed by pid"):
                call(viewed, view)
        viewed.execute("select gdq.pause('q')")
        with pytest.raises(psycopg.errors.ObjectNotInPrerequisiteState, match="is paused"):
            call(viewed, view)
        viewed.execute("select gdq.resume('q')")
        # the log still has a row of the old type
        assert call(viewed, view)[:2] == ("full", "changes of this view are not compiled")
        assert viewed.differences(view, "select id, n from t") == (0, 0)


def test_a_call_acts_as_the_owner_alone(viewed: Shop) -> None:
    view = small_view(viewed)
    with Refresher(viewed.db.dsn) as refresher:
        refresher.refresh(view)
    role = f"caller_{viewed.db.name}"
    with viewed.db.connect("su") as su:
        su.execute(f"create role {role} in role gdq_admin; grant all on schema gdq_target to {role}")
        try:
            viewed.execute("insert into t values (77, 7)")
            su.execute(f"set role {role}")
            with pytest.raises(psycopg.errors.InsufficientPrivilege, match="is refreshed with the rights of"):
                su.execute("call gdq.refresh('v_t')")
            su.execute("reset role")
            # another's table in the target's place would run his triggers with the owner's rights
            su.execute(f"alter table v_t owner to {role}; grant all on v_t to public")
            with pytest.raises(psycopg.errors.InsufficientPrivilege, match="v_t of caller"):
                call(viewed, view)
        finally:
            su.execute("reset role")
            su.execute(f"drop owned by {role} cascade; drop role {role}")


def test_the_functions_are_shown(viewed: Shop) -> None:
    view = small_view(viewed)
    explain = ("explain-view", view, "--functions", "--dsn", viewed.db.dsn)
    refused = CliRunner().invoke(main, explain)
    assert refused.exit_code == 1
    assert "view v_t has no functions that refresh it\nHint: gdq refresh v_t makes them" in refused.stderr
    with Refresher(viewed.db.dsn) as refresher:
        refresher.refresh(view)
    shown = CliRunner().invoke(main, explain)
    assert shown.exit_code == 0
    assert shown.stdout.count("CREATE OR REPLACE FUNCTION gdq_target.") == 3
    with viewed.connection.transaction(force_rollback=True):
        viewed.execute(shown.stdout.replace("%", "%%"))
    assert len(json.loads(CliRunner().invoke(main, (*explain, "--json")).stdout)["functions"]) == 3


def test_a_dropped_view_leaves_no_function(viewed: Shop) -> None:
    view = small_view(viewed)
    with Refresher(viewed.db.dsn) as refresher:
        refresher.refresh(view)
    named = "select count(*) from pg_proc where pronamespace = 'gdq_target'::regnamespace"
    assert viewed.execute(named) == [(3,)]
    (info,) = view_info(viewed.connection, view)
    Target(view, info.source, info.target).drop(viewed.connection)
    assert viewed.execute(named) == [(0,)]


@pytest.mark.long
def test_processes_take_turns_at_random(loaded: tuple[Shop, Refresher]) -> None:
    shop, refresher = loaded
    draw = random.Random(13)
    with Refresher(shop.db.dsn) as other:
        for _ in range(16):
            write(shop, draw, 2)
            check(shop, draw.choice((refresher, refresher, other)))
            if draw.random() < 0.2:
                shop.keep_house()


def small_view(shop: Shop) -> str:
    """A view of a small table t; returns its name."""
    shop.execute("create table t (id int primary key, n int); insert into t select i, i from generate_series(1, 5) i")
    shop.capture("t")
    create_view(shop.connection, "v_t", "q", "select id, n from t", "public.v_t", engine="postgres")
    set_view_audit(shop.connection, "v_t", 0)
    return "v_t"


def test_two_processes_take_turns(viewed: Shop) -> None:
    view = small_view(viewed)
    with Refresher(viewed.db.dsn) as one, Refresher(viewed.db.dsn) as other:
        one.refresh(view)
        for number in range(10, 16):
            viewed.execute(
                "insert into t values (%s, 1); update t set n = n + 1 where id = 2".replace("%s", str(number))
            )
            for refresher, action in (
                ((one, "delta"), (other, "none")) if number % 2 else ((other, "delta"), (one, "none"))
            ):
                result = refresher.refresh(view)
                assert (result.action, result.reason) == (action, None), number
            assert viewed.differences(view, "select id, n from t") == (0, 0)


def test_a_transaction_that_was_open_at_the_last_refresh(viewed: Shop) -> None:
    view = small_view(viewed)
    with Refresher(viewed.db.dsn) as refresher, viewed.db.connect(autocommit=False) as late:
        refresher.refresh(view)
        for number in (81, 82, 83):
            late.execute("insert into t values (%s, 1)", [number])
            viewed.execute("update t set n = n + 1 where id < 5")
            assert refresher.refresh(view).rows_changed == 8
            late.commit()
            result = refresher.refresh(view)
            assert (result.action, result.rows_changed) == ("delta", 1)
            assert viewed.differences(view, "select id, n from t") == (0, 0)
