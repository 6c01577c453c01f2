"""A refresh that finds nothing is one statement, and never overlooks what a whole refresh would see."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import psycopg
import pytest

from gdq.call import call
from gdq.conninfo import conninfo_without_password
from gdq.consumers.refresh.refresher import Refresher, RefreshResult
from gdq.consumers.refresh.view_refresh import PlannedView
from gdq.errors import GdqError
from gdq.view.group import create_group
from gdq.view.view import create_view, drop_view, set_view_audit, set_view_owner, view_history, view_info
from tests.support.server import Database
from tests.support.spark import QUEUE, Shop
from tests.views.test_view_owners import role_named

pytestmark = pytest.mark.server


@dataclass(frozen=True, slots=True)
class Case:
    """Something that happens to table NAME, the ordinary view o_NAME or the target v_NAME, and what is said then."""

    statement: str
    says: str
    query: str = "select id, n from NAME"


CASES = {
    "inserted": Case("insert into NAME values (100, 1)", "delta None"),
    "and_back": Case("insert into NAME values (100, 1); delete from NAME where id = 100", "delta None"),
    "truncated": Case("truncate NAME", "full truncate of"),
    "widened": Case("alter table NAME add column more int", "full ddl of"),
    "renamed": Case("alter table NAME rename to renamed_now", "error"),
    "column": Case("alter table NAME rename n to m", "error"),
    "inherited": Case("create table child () inherits (NAME)", "error"),
    "hidden": Case("alter table NAME enable row level security, force row level security", "error GdqError"),
    "off": Case(
        "insert into gdq.resync (queue_id, relid, kind, reason)"
        " select queue_id, relid, 'disarmed', 'for a test' from gdq.captured_table where relid = 'NAME'::regclass",
        "full resync of",
    ),
    "gone": Case("drop table v_NAME", "full the target table is gone"),
    "emptied": Case("truncate v_NAME", "full the target was changed by another: TRUNCATE"),
    "taken": Case("drop table v_NAME; create table v_NAME (id int, n int)", "error ForeignTarget"),
    "forgotten": Case("delete from gdq_target.position where view = 'v_NAME'", "full first load"),
    "moved": Case(
        "update gdq_target.position set position = regexp_replace(position, '/[0-9a-f-]{36}/([^/]*)$',"
        " '/00000000-0000-0000-0000-000000000000/\\1') where view = 'v_NAME'",
        "error DivergedPosition",
    ),
    "of_another_plan": Case(
        "update gdq_target.position set plan = 'x' || plan where view = 'v_NAME'", "full the plan has changed"
    ),
    "function": Case(
        "create or replace function f_NAME(int) returns int immutable language sql as 'select $1 + 1'",
        "full the plan has changed",
        "select id, f_NAME(n) as n from NAME",
    ),
    "view": Case(
        "create or replace view o_NAME as select id, n + 1 as n from NAME",
        "full a view in its query was replaced",
        "select id, n from o_NAME",
    ),
    "view_column": Case("alter view o_NAME rename n to m", "error", "select id, n from o_NAME"),
    "audit_failed": Case("update gdq.view set diverged = 'a row' where view_name = 'v_NAME'", "full an audit found"),
    # what does not matter to a view
    "other": Case("insert into other values (1)", "at once"),
    "message": Case("select gdq.insert_event('q', 'note', '{}')", "at once"),
    "analyzed": Case("analyze NAME, v_NAME", "at once"),
    "other_function": Case("create function other_of_NAME() returns int language sql as 'select 1'", "at once"),
    "other_view": Case("create view other_NAME as select 1 as x", "at once"),
}


def prepare(shop: Shop, name: str, case: Case, engine: Literal["auto", "postgres"] = "auto") -> str:
    """Make the table of a case, its ordinary view and function; returns the view's name."""
    shop.execute(f"create table {name} (id int primary key, n int)")
    shop.execute(f"insert into {name} select i, i from generate_series(1, 5) i")
    shop.execute(f"create view o_{name} as select id, n from {name}")
    shop.execute(f"create function f_{name}(int) returns int immutable language sql as 'select $1'")
    shop.capture(name)
    query = case.query.replace("NAME", name)
    create_view(shop.connection, f"v_{name}", QUEUE, query, f"public.v_{name}", engine=engine)
    set_view_audit(shop.connection, f"v_{name}", 0)
    return f"v_{name}"


def ticks(shop: Shop) -> int:
    ((found,),) = shop.execute("select count(*) from gdq.tick where refresh")
    return int(found)


def refreshed(shop: Shop, refresher: Refresher, view: str) -> str:
    """The action and the reason of a refresh or the name of its error; "at once" if it took one statement."""
    before, runs = ticks(shop), len(view_history(shop.connection, view))
    try:
        result: RefreshResult = refresher.refresh(view)
    except (GdqError, psycopg.Error) as error:
        return f"error {type(error).__name__}"
    assert len(view_history(shop.connection, view)) == runs + 1
    if ticks(shop) == before:
        assert (result.action, result.kind, result.rows_changed) == ("none", "none", 0)
        return "at once"
    return f"{result.action} {result.reason}"


def test_what_a_whole_refresh_sees_is_not_overlooked(viewed: Shop) -> None:
    viewed.execute("create table other (id int)")
    viewed.capture("other")
    with Refresher(viewed.db.dsn) as refresher:
        for name, case in CASES.items():
            view = prepare(viewed, f"t_{name}", case)
            assert refreshed(viewed, refresher, view) == "full first load"
            assert refreshed(viewed, refresher, view) == "at once"
            viewed.execute(case.statement.replace("NAME", f"t_{name}"))
            found = refreshed(viewed, refresher, view)
            assert found.startswith(case.says), (name, found)
            if found.startswith("error"):
                with Refresher(viewed.db.dsn) as new:  # knows nothing of the view
                    assert refreshed(viewed, new, view) == found
            elif name != "off":
                assert refreshed(viewed, refresher, view) == "at once", name


def called(shop: Shop, view: str) -> str | None:
    """The action of a CALL that loads nothing; None where it leaves the view to a whole refresh, or refuses it."""
    try:
        ((action, *_),) = shop.execute("call gdq.refresh(%s, false)", view)
    except psycopg.Error:
        return None
    return None if action is None else str(action)


def test_a_call_overlooks_nothing(viewed: Shop) -> None:
    viewed.execute("create table other (id int)")
    viewed.capture("other")
    expected = {"delta None": "delta", "at once": "none"}
    with Refresher(viewed.db.dsn) as refresher:
        for name, case in CASES.items():
            view = prepare(viewed, f"t_{name}", case, "postgres")
            refresher.refresh(view)
            assert called(viewed, view) == "none", name
            viewed.execute(case.statement.replace("NAME", f"t_{name}"))
            assert called(viewed, view) == expected.get(case.says), name


def test_a_call_runs_no_function_of_another(viewed: Shop) -> None:
    view = prepare(viewed, "t", Case("", ""), "postgres")
    with Refresher(viewed.db.dsn) as refresher:
        refresher.refresh(view)
    functions = viewed.execute(
        "select oid::regprocedure::text, proowner::regrole::text from pg_proc"
        " where pronamespace = 'gdq_target'::regnamespace"
    )
    assert len(functions) == 3
    with role_named(viewed.db, "other", "", "t") as role, viewed.db.connect("su") as su:
        for function, owner in functions:
            su.execute(f'alter function {function} owner to "{role}"')
            assert called(viewed, view) is None, function
            su.execute(f"alter function {function} owner to {owner}")
            assert called(viewed, view) == "none"


def test_a_call_asks_for_more_than_the_logs(viewed: Shop) -> None:
    view = prepare(viewed, "t", Case("", ""), "postgres")
    with Refresher(viewed.db.dsn) as refresher:
        refresher.refresh(view)
    assert called(viewed, view) == "none"
    cut = """insert into gdq.subscription_resync (subscription_id, relid, kind, reason, snapshot)
             select subscription_id, 't'::regclass, '{}', 'max_bytes', pg_current_snapshot() from gdq.subscription
               join gdq.consumer using (consumer_id) where consumer_name = 'view:v_t'"""
    for change, back in (
        (cut.format("cut"), cut.format("copied")),
        ("select gdq.pause('q')", "select gdq.resume('q')"),
        ("revoke select on t from current_user", "grant select on t to current_user"),
        ("update gdq.view set audit_share = 1", "update gdq.view set audit_share = 0"),
        ("update gdq.era set written_by = '3'", "update gdq.era set written_by = pg_current_xact_id()::xid"),
        (
            "insert into gdq.member (subscription_id, member_name) select subscription_id, 'm' from gdq.subscription",
            "delete from gdq.member",
        ),
    ):
        viewed.execute(change)
        assert called(viewed, view) is None, change
        viewed.execute(back)
    # DDL that failed to be recorded is looked for before a call looks at the logs
    viewed.execute("select nextval('gdq.alarm')")
    called(viewed, view)
    settled = "select settled = last_value from gdq.alarm_check, gdq.alarm order by check_id desc limit 1"
    assert viewed.execute(settled) == [(True,)]


@pytest.mark.long
@pytest.mark.parametrize("case", ["function", "view"])
def test_what_was_kept_is_compared(viewed: Shop, case: str) -> None:
    """A whole refresh that took the plan of the last one unseen would find nothing to do."""
    with pytest.MonkeyPatch.context() as patch, Refresher(viewed.db.dsn) as refresher:
        patch.setattr(PlannedView, "holds", lambda *_: True)
        view = prepare(viewed, "t", CASES[case])
        assert refreshed(viewed, refresher, view) == "full first load"
        viewed.execute(CASES[case].statement.replace("NAME", "t"))
        assert not refreshed(viewed, refresher, view).startswith(CASES[case].says)


def test_at_once_is_the_same_as_a_whole_refresh(viewed: Shop) -> None:
    view = prepare(viewed, "t", Case("", ""))
    with Refresher(viewed.db.dsn) as refresher:
        refresher.refresh(view)
        with Refresher(viewed.db.dsn) as other:
            whole = other.refresh(view)  # a new process knows nothing yet
        at_once = refresher.refresh(view)
        assert refreshed(viewed, refresher, view) == "at once"
    assert (whole.action, whole.reason, whole.kind, whole.delta_rows, whole.rows_read) == (
        *(at_once.action, at_once.reason, at_once.kind),
        *(at_once.delta_rows, at_once.rows_read),
    )
    newest, *_, oldest = view_history(viewed.connection, view)
    assert (newest.action, newest.kind, newest.rows_changed, newest.error) == ("none", "none", 0, None)
    assert oldest.action == "full"
    (info,) = view_info(viewed.connection, view)
    assert info.last_refresh == newest.finished_at
    assert info.last_action == "none"


def test_a_change_that_commits_late(viewed: Shop) -> None:
    view = prepare(viewed, "t", Case("", ""))
    with Refresher(viewed.db.dsn) as refresher, viewed.db.connect(autocommit=False) as late:
        late.execute("update t set n = 7 where id = 1")
        viewed.execute("insert into t values (100, 1)")
        assert refreshed(viewed, refresher, view) == "full first load"
        assert refreshed(viewed, refresher, view) == "at once"
        late.commit()
        assert refreshed(viewed, refresher, view) == "delta None"
        assert viewed.differences(view, "select id, n from t") == (0, 0)


def test_positions_move_so_that_logs_are_dropped(viewed: Shop) -> None:
    view = prepare(viewed, "t", Case("", ""))
    with Refresher(viewed.db.dsn) as refresher:
        refresher.refresh(view)
        viewed.execute("insert into t values (100, 1)")
        refresher.refresh(view)
        before = call(viewed.connection, "position", QUEUE, f"view:{view}")
        viewed.keep_house()
        assert refreshed(viewed, refresher, view) == "at once"
        assert call(viewed.connection, "position", QUEUE, f"view:{view}") == before
        viewed.execute("update gdq.tick set created_at = created_at - interval '1 minute'")
        assert refreshed(viewed, refresher, view) == "none None"
        assert call(viewed.connection, "position", QUEUE, f"view:{view}") != before
        viewed.keep_house()
        assert refreshed(viewed, refresher, view) == "at once"
        viewed.execute("insert into t values (101, 1)")
        assert refreshed(viewed, refresher, view) == "delta None"


def test_calls_move_positions_so_that_logs_are_dropped(viewed: Shop) -> None:
    """A call does it itself: it neither loads an unchanged view in full nor leaves it to a whole refresh."""
    view = prepare(viewed, "t", Case("", ""), "postgres")
    with Refresher(viewed.db.dsn) as refresher:
        refresher.refresh(view)
    assert called(viewed, view) == "none"
    before = call(viewed.connection, "position", QUEUE, f"view:{view}")
    for load in (True, False):
        viewed.execute("update gdq.tick set created_at = created_at - interval '1 minute'")
        assert viewed.execute(f"call gdq.refresh(%s, {load})", view) == [("none", None, 0, 0, "none")]
        after = call(viewed.connection, "position", QUEUE, f"view:{view}")
        assert after != before
        assert viewed.execute("select position from gdq_target.position where view = %s", view) == [(after,)]
        before = after
    assert [run.action for run in view_history(viewed.connection, view)] == ["none", "none", "none", "full"]
    viewed.keep_house()
    assert called(viewed, view) == "none"
    viewed.execute("insert into t values (101, 1)")
    assert (called(viewed, view), viewed.differences(view, "select id, n from t")) == ("delta", (0, 0))


def test_changes_that_were_dropped(viewed: Shop) -> None:
    view = prepare(viewed, "t", Case("", ""))
    with Refresher(viewed.db.dsn) as refresher:
        refresher.refresh(view)
        assert refreshed(viewed, refresher, view) == "at once"
        viewed.execute(
            "insert into gdq.subscription_resync (subscription_id, relid, kind, reason, snapshot)"
            " select subscription_id, 't'::regclass, 'cut', 'max_bytes', pg_current_snapshot() from gdq.subscription"
            " join gdq.consumer using (consumer_id) where consumer_name = 'view:' || %s",
            view,
        )
        assert refreshed(viewed, refresher, view) != "at once"


def test_the_queue_is_asked(viewed: Shop) -> None:
    view = prepare(viewed, "t", Case("", ""))
    with Refresher(viewed.db.dsn) as refresher:
        refresher.refresh(view)
        assert refreshed(viewed, refresher, view) == "at once"
        call(viewed.connection, "pause", QUEUE)
        assert refreshed(viewed, refresher, view) == "error ObjectNotInPrerequisiteState"
        call(viewed.connection, "resume", QUEUE)
        assert refreshed(viewed, refresher, view) == "none None"
        with viewed.db.connect(autocommit=False) as other:
            call(other, "lock_view", view, True)
            assert refreshed(viewed, refresher, view) == "error LockNotAvailable"
        # as in a database that was restored from a dump
        viewed.execute("update gdq.era set written_by = '3'")
        assert refreshed(viewed, refresher, view) == "error EraEnded"


def test_audits_that_are_due(viewed: Shop) -> None:
    view = prepare(viewed, "t", Case("", ""))
    with Refresher(viewed.db.dsn) as refresher:
        refresher.refresh(view)
        set_view_audit(viewed.connection, view, 1)
        for _ in range(2):
            assert refreshed(viewed, refresher, view) == "none None"
            assert view_history(viewed.connection, view)[0].audit == "passed"
        viewed.execute("update gdq.view set audit_share = null, audit_credit = 10")
        assert refreshed(viewed, refresher, view) == "none None"
        viewed.execute("update gdq.view set audit_credit = 0")
        assert refreshed(viewed, refresher, view) == "at once"


def test_a_view_of_the_same_name(viewed: Shop) -> None:
    view = prepare(viewed, "t", Case("", ""))
    with Refresher(viewed.db.dsn) as refresher:
        refresher.refresh(view)
        assert refreshed(viewed, refresher, view) == "at once"
        drop_view(viewed.connection, view)
        viewed.execute("drop table v_t")
        create_view(viewed.connection, view, QUEUE, "select id, n from t where n > 2", f"public.{view}")
        assert refreshed(viewed, refresher, view).startswith("error")  # the old one's position
        viewed.execute("delete from gdq_target.position")
        assert refreshed(viewed, refresher, view) == "full first load"
        drop_view(viewed.connection, view)
        with pytest.raises(psycopg.errors.UndefinedObject):
            refresher.refresh(view)


def test_rights_are_asked_each_time(viewed: Shop) -> None:
    view = prepare(viewed, "t", Case("", ""))
    with role_named(viewed.db, "owner", "", "t") as role, viewed.db.connect("su") as su:
        su.execute(f'grant "{role}" to gdq_owner; grant gdq_consumer to "{role}"')
        set_view_owner(viewed.connection, view, role)
        with Refresher(viewed.db.dsn) as refresher:
            refresher.refresh(view)
            assert refreshed(viewed, refresher, view) == "at once"
            su.execute(f'revoke "{role}" from gdq_owner')
            assert refreshed(viewed, refresher, view) in ("error GdqError", "error InsufficientPrivilege")
            su.execute(f'grant "{role}" to gdq_owner')
            assert refreshed(viewed, refresher, view) in ("none None", "at once")
            su.execute(f'revoke select on t from "{role}"')
            assert refreshed(viewed, refresher, view) == "error InsufficientPrivilege"


def test_a_group_is_refreshed_as_one(viewed: Shop) -> None:
    views = [prepare(viewed, name, Case("", "")) for name in ("a", "b")]
    create_group(viewed.connection, "g", views)
    with Refresher(viewed.db.dsn) as refresher:

        def actions() -> list[str]:
            before = ticks(viewed)
            results = refresher.refresh_together(views, group="g")
            return [result.action for result in results] + (["at once"] if ticks(viewed) == before else [])

        assert actions() == ["full", "full"]
        assert actions() == ["none", "none", "at once"]
        runs = view_history(viewed.connection, "v_b")
        assert [run.group_name for run in runs] == ["g", "g"]
        viewed.execute("insert into a values (100, 1)")
        assert actions() == ["delta", "none"]
        assert actions() == ["none", "none", "at once"]
        with pytest.raises(GdqError, match="with group g only"):
            refresher.refresh("v_a")


def test_target_in_another_database(viewed: Shop, empty_db: Database) -> None:
    viewed.execute("create table t (id int primary key, n int); insert into t values (1, 1)")
    viewed.capture("t")
    with (
        empty_db.connect("su") as su,
        conninfo_without_password(empty_db.dsn) as far,
        Refresher(viewed.db.dsn) as refresher,
    ):
        su.execute("grant create on schema public to gdq_owner")
        create_view(viewed.connection, "far", QUEUE, "select id, n from t", "public.far", target_dsn=far)
        set_view_audit(viewed.connection, "far", 0)
        assert refreshed(viewed, refresher, "far") == "full first load"
        assert refreshed(viewed, refresher, "far") == "at once"
        viewed.execute("insert into t values (2, 2)")
        assert refreshed(viewed, refresher, "far") == "delta None"
        assert refreshed(viewed, refresher, "far") == "at once"
        su.execute("truncate far")
        assert refreshed(viewed, refresher, "far").startswith("full the target was changed by another")
