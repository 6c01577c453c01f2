"""A new view has functions: CALL gdq.refresh() works at once, without a `gdq refresh` before it."""

from __future__ import annotations

from pathlib import Path

import psycopg
import pytest
from click.testing import CliRunner

import gdq
from gdq.cli import main
from gdq.consumers.refresh.refresher import Refresher
from gdq.consumers.views.target import Target
from gdq.view.view import drop_view, set_view_audit, view_history, view_info
from tests.support.spark import Shop
from tests.views.test_compiled_view import call

pytestmark = pytest.mark.server

FUNCTIONS = "select count(*) from pg_proc where pronamespace = to_regnamespace('gdq_target')"
VIEWS = {
    "n_rows": "select id, n, note from t where n > 0",
    "n_sums": "select n % 3 as part, count(*) as rows, sum(n) as n, max(n) as most from t group by n % 3",
    "n_first": "select id, n from t order by n desc, id limit 3",
    "n_key": "select distinct note from t",
    "n_full": "select n % 3 as part, cardinality(all_of(id)) as rows from t group by n % 3",
}


@pytest.fixture
def small(viewed: Shop) -> Shop:
    viewed.execute("create table t (id int primary key, n int, note text)")
    viewed.execute("insert into t select i, i, 'note ' || i % 4 from generate_series(1, 20) i")
    viewed.execute("create aggregate all_of (int) (sfunc = array_append, stype = int[], initcond = '{}')")
    viewed.capture("t")
    return viewed


def create(shop: Shop, name: str, query: str = VIEWS["n_rows"], schema: str = "public") -> None:
    assert gdq.create_view(shop.connection, name, "q", query, f"{schema}.{name}") is not None
    set_view_audit(shop.connection, name, 0)


def check(shop: Shop, name: str, query: str = VIEWS["n_rows"]) -> None:
    assert shop.differences(name, query) == (0, 0), name


@pytest.mark.parametrize("name", VIEWS)
def test_the_first_call_loads(small: Shop, name: str) -> None:
    query = VIEWS[name]
    create(small, name, query)
    # before it is loaded a view is missing, not empty
    assert small.execute("select to_regclass(%s)", name) == [(None,)]
    assert small.execute("select * from gdq_target.position") == []
    assert call(small, name)[:2] == ("full", "first load")
    check(small, name, query)
    assert call(small, name)[0] == "none"
    for _ in range(3):
        small.execute(
            "update t set n = n + 7 where id % 4 = 1; delete from t where id = 3; insert into t values (3, 9)"
        )
        action, reason, *_ = call(small, name)
        assert action == ("full" if name == "n_full" else "delta"), reason
        check(small, name, query)
    with Refresher(small.db.dsn) as refresher:
        small.execute("update t set note = 'other', n = n + 1 where id = 4")
        result = refresher.refresh(name)
        assert (result.action, result.reason) == (action, None if action == "delta" else result.reason)
    check(small, name, query)
    assert [run.reason for run in view_history(small.connection, name)][-1] == "first load"


def test_call_and_refresh_make_the_same_target(small: Shop) -> None:
    described = """
        select a.attname, format_type(a.atttypid, a.atttypmod), obj_description(c.oid) like 'gdq: target of view %%',
               array(select replace(pg_get_indexdef(i.indexrelid), c.relname, 'v') || obj_description(i.indexrelid)
                       from pg_index i where i.indrelid = c.oid),
               array(select pg_get_constraintdef(k.oid) from pg_constraint k where k.conrelid = c.oid)
          from pg_class c join pg_attribute a on a.attrelid = c.oid and a.attnum > 0
         where c.relname = %s order by a.attnum"""
    indexed = "select split_part(pg_get_indexdef(indexrelid), ' USING ', 2) from pg_index where indrelid = %s::regclass"
    for name, query in VIEWS.items():
        create(small, f"{name}_a", query)
        create(small, f"{name}_b", query)
        call(small, f"{name}_a")
        with Refresher(small.db.dsn) as refresher:
            refresher.refresh(f"{name}_b")
        states = []
        for view in (f"{name}_a", f"{name}_b"):
            (info,) = view_info(small.connection, view)
            state = Target(view, info.source, info.target).state
            found = small.execute("select to_regclass(%s)::text", state)[0][0]
            states.append([found and small.execute(indexed, found), small.execute(described, str(found)[8:])])
            states[-1].append([row[:3] for row in small.execute(described, view)])
            states[-1].append(small.execute(indexed, view))
        assert states[0] == states[1], name


def test_a_refresh_goes_before_a_call_as_well(small: Shop) -> None:
    create(small, "n_sums", VIEWS["n_sums"])
    with Refresher(small.db.dsn) as refresher:
        assert refresher.refresh("n_sums").reason == "first load"
        small.execute("insert into t values (77, 7)")
        assert call(small, "n_sums")[0] == "delta"
        small.execute("insert into t values (78, 7)")
        assert refresher.refresh("n_sums").action == "delta"
    check(small, "n_sums", VIEWS["n_sums"])


def test_the_command_makes_the_functions(small: Shop, tmp_path: Path) -> None:
    (tmp_path / "v.sql").write_text(VIEWS["n_sums"])
    made = ("create-view", "n_sums", "--sql", str(tmp_path / "v.sql"), "--target", "public.n_sums", "-d", small.db.dsn)
    done = CliRunner().invoke(main, made)
    assert (done.exit_code, done.stderr) == (0, "created view n_sums: incremental\n")
    assert call(small, "n_sums")[:2] == ("full", "first load")
    check(small, "n_sums", VIEWS["n_sums"])
    assert CliRunner().invoke(main, made).stderr == "already there: view n_sums\n"


def test_nothing_else_is_loaded_than_the_views_own(small: Shop) -> None:
    create(small, "n_rows")
    small.execute("create table n_rows (id int); insert into n_rows values (7)")
    with pytest.raises(psycopg.errors.DuplicateTable, match="exists and is not the target of view"):
        call(small, "n_rows")
    assert small.execute("select * from n_rows") == [(7,)]
    small.execute("drop table n_rows")
    assert call(small, "n_rows")[:2] == ("full", "first load")
    # also one that somebody has put in its place, and none
    small.execute("drop table n_rows; create table n_rows as select id, n, note from t where false")
    with pytest.raises(psycopg.errors.DuplicateTable):
        call(small, "n_rows")
    small.execute("drop table n_rows")
    assert call(small, "n_rows")[:2] == ("full", "the target table is gone")
    check(small, "n_rows")


def test_a_position_of_another_view_of_the_name_stays(small: Shop) -> None:
    create(small, "n_rows")
    call(small, "n_rows")
    drop_view(small.connection, "n_rows")
    small.execute("alter table n_rows rename to n_old")
    before = small.execute("select * from gdq_target.position")
    create(small, "n_rows")
    with pytest.raises(psycopg.errors.DuplicateObject, match='a view "n_rows" of another origin'):
        call(small, "n_rows")
    assert small.execute("select * from gdq_target.position") == before
    assert small.execute("select to_regclass('n_rows')") == [(None,)]
    small.execute("delete from gdq_target.position")
    assert call(small, "n_rows")[0] == "full"


def test_a_failed_first_call_leaves_nothing(small: Shop) -> None:
    create(small, "n_cast", "select id, note::int as number from t")
    with pytest.raises(psycopg.errors.InvalidTextRepresentation):
        call(small, "n_cast")
    assert small.execute("select to_regclass('n_cast')") == [(None,)]
    assert small.execute("select * from gdq_target.position") == []
    small.execute("update t set note = '1'")
    assert call(small, "n_cast")[:2] == ("full", "first load")
    check(small, "n_cast", "select id, 1 as number from t")


def test_without_a_load_nothing_is_made(small: Shop) -> None:
    create(small, "n_rows")
    ((action, *_),) = small.execute("call gdq.refresh('n_rows', false)")
    assert action is None
    assert small.execute("select to_regclass('n_rows')") == [(None,)]


def test_values_too_long_for_an_index(small: Shop) -> None:
    small.execute("update t set note = (select string_agg(md5(i::text), '') from generate_series(1, 1000) i)")
    for name in ("n_rows", "n_key"):
        create(small, name, VIEWS[name])
        assert call(small, name)[:2] == ("full", "first load")
        check(small, name, VIEWS[name])


def test_a_dropped_view_leaves_no_function(small: Shop) -> None:
    create(small, "n_rows")
    assert small.execute(FUNCTIONS) == [(3,)]
    drop_view(small.connection, "n_rows")
    assert small.execute(FUNCTIONS) == [(0,)]
    create(small, "n_rows")
    assert call(small, "n_rows")[0] == "full"


def test_a_view_is_created_where_no_function_can_be_made(small: Shop) -> None:
    role = f"maker_{small.db.name}"
    with small.db.connect("su") as su:
        su.execute(f"create role {role} in role gdq_admin; grant select on t to {role}")
        try:
            su.execute(f"set role {role}")
            # the schema gdq_target would need CREATE on the database
            assert gdq.create_view(su, "n_rows", "q", VIEWS["n_rows"], "public.n_rows") is not None
            with pytest.raises(psycopg.errors.ObjectNotInPrerequisiteState, match="has no functions"):
                su.execute("call gdq.refresh('n_rows')")
            assert su.execute("select to_regnamespace('gdq_target')").fetchone() == (None,)
        finally:
            su.execute("reset role")
            su.execute("select gdq.drop_view('n_rows')")
            su.execute(f"drop owned by {role} cascade; drop role {role}")


def test_an_upgrade_makes_the_functions_anew(small: Shop) -> None:
    for name in ("n_rows", "n_sums"):
        create(small, name, VIEWS[name])
    call(small, "n_sums")
    small.execute("comment on schema gdq is 'as an older gdq left it'")
    small.execute("delete from gdq.compiled_view")  # as a revision does when it changes what functions are
    small.execute("insert into t values (50, 5)")
    done = CliRunner().invoke(main, ["install", "-d", small.db.dsn])
    assert done.exit_code == 0, done.output
    assert call(small, "n_rows")[:2] == ("full", "first load")
    assert call(small, "n_sums")[0] == "delta"
    for name in ("n_rows", "n_sums"):
        check(small, name, VIEWS[name])


def test_a_new_group_is_refreshed_by_a_call(small: Shop) -> None:
    for name in ("n_rows", "n_sums"):
        create(small, name, VIEWS[name])
    gdq.create_group(small.connection, "both", ["n_rows", "n_sums"])
    for action in ("full", "none", "delta"):
        ((_, results),) = small.execute("call gdq.refresh_group('both')")
        assert [one["action"] for one in results] == [action] * 2
        for name in ("n_rows", "n_sums"):
            check(small, name, VIEWS[name])
        if action == "none":
            small.execute("update t set n = n + 1 where id < 5")


def test_a_new_owner_gets_functions_of_his_own(small: Shop) -> None:
    create(small, "n_rows")
    call(small, "n_rows")
    role = f"owner_{small.db.name}"
    with small.db.connect("su") as su:
        su.execute(f"create role {role} in role gdq_admin; grant select on t to {role}")
        try:
            su.execute(f"alter table n_rows owner to {role}")
            gdq.set_view_owner(su, "n_rows", role)
            assert small.execute(FUNCTIONS) == [(0,)]
            su.execute(f"set role {role}")
            with pytest.raises(psycopg.errors.ObjectNotInPrerequisiteState, match="has no functions"):
                su.execute("call gdq.refresh('n_rows')")
            assert gdq.compile_view(su, "n_rows")
            assert small.execute(FUNCTIONS) == [(3,)]
        finally:
            su.execute("reset role")
            su.execute(f"drop owned by {role} cascade; drop role {role}")
