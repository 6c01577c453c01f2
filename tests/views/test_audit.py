"""Audits: a refresh compares some rows with the view's query, and finds rows that are wrong."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import psycopg
import pytest

from gdq.consumers.refresh import attempts, audit_rows, audit_sample
from gdq.consumers.refresh.groups import refresh_groups
from gdq.consumers.refresh.refresher import Refresher
from gdq.errors import DivergedView
from gdq.monitor.doctor import doctor
from gdq.view.group import create_group
from gdq.view.view import ViewInfo, create_view, explain_view, set_view_audit, view_history, view_info
from tests.support.programs import gdq
from tests.support.server import Database
from tests.support.spark import QUEUE, Shop, make_shop
from tests.views import test_mutants

VIEWS = {
    "rows": "select id, k, note from item where k > 0",
    "bag": "select note, n from item",
    "sums": "select k, count(*) as rows, sum(n) as n from item group by k",
    "tops": "select k, max(note) as top from item group by k",
    "joined": "select i.id, k.label from item i join kind k on k.id = i.k",
    "padded": "select i.note, k.label from item i left join kind k on k.id = i.k",
    "total": "select count(*) as rows, sum(n) as n from item",
    "set": "select note from item union select label from kind",
    "ranked": "select id, rank() over (partition by k order by n) as place from item",
}
# A row of each view that a change of item 1 does not touch.
PLACES = {
    "rows": "id = 60",
    "bag": "note = 'n60'",
    "sums": "k = 3",
    "tops": "k = 3",
    "joined": "id = 60",
    "padded": "note = 'n60'",
    "total": "true",
    "set": "note = 'n60'",
    "ranked": "id = 59",
}
DAMAGES = {"row_missing": "delete from {0} where {1}", "row_doubled": "insert into {0} select * from {0} where {1}"}


@pytest.fixture
def shop(db: Database) -> Iterator[Shop]:
    yield from make_shop(
        db,
        [
            "create table item (id int primary key, k int, n int, note text)",
            "create table kind (id int primary key, label text)",
            "insert into item select i, i % 7, i % 10, 'n' || i from generate_series(1, 60) i",
            "insert into kind select i, 'l' || i from generate_series(0, 6) i",
            "select gdq.add_table('q', 'item'), gdq.add_table('q', 'kind')",
        ],
    )


@pytest.fixture
def by_keys(monkeypatch: pytest.MonkeyPatch) -> None:
    """No target is so small that it is compared as a whole."""
    monkeypatch.setattr(audit_sample, "_BLOCKS_WHOLE", -1)


def make(shop: Shop, name: str, query: str, share: float | None = 1.0) -> None:
    plan = create_view(shop.connection, name, QUEUE, query, f"public.{name}", engine="postgres", audit_share=share)
    assert plan is not None
    assert plan.settled.reason is None, name
    assert not plan.settled.open_columns


def info(shop: Shop, name: str) -> ViewInfo:
    (found,) = view_info(shop.connection, name)
    return found


def change(shop: Shop, number: int) -> None:
    shop.execute(f"update item set n = n + 1 where id = {number % 60 + 1}")


@pytest.mark.server
@pytest.mark.parametrize("damage", DAMAGES)
@pytest.mark.parametrize("name", VIEWS)
def test_damaged_target_is_found(shop: Shop, name: str, damage: str) -> None:
    make(shop, name, VIEWS[name])
    with Refresher(shop.db.dsn) as refresher:
        refresher.refresh(name)
        shop.execute(DAMAGES[damage].format(name, PLACES[name]))
        if name != "total":  # a change of its row finds at once that the row is gone
            change(shop, 0)
        with pytest.raises(DivergedView) as error:
            refresher.refresh(name)
        assert f"view {name} differs from its query" in str(error.value)
        told = info(shop, name)
        assert told.diverged is not None
        assert told.audits_failed == 1
        run = view_history(shop.connection, name, 1)[0]
        assert (run.action, run.audit, run.audit_reason) == ("failed", "failed", told.diverged)
        assert [(one.severity, one.object) for one in doctor(shop.connection) if one.code == "view_diverged"] == [
            ("error", name)
        ]
        again = refresher.refresh(name)
        assert again.action == "full"
        assert again.reason is not None
        assert "an audit found" in again.reason
        assert shop.differences(name, VIEWS[name]) == (0, 0)
        assert info(shop, name).diverged is None
        assert [one.severity for one in doctor(shop.connection) if one.code == "view_diverged"] == ["warning"]
        change(shop, 1)
        assert refresher.refresh(name).action == "delta"
    assert view_history(shop.connection, name, 1)[0].audit == "passed"


@pytest.mark.usefixtures("by_keys")
@pytest.mark.parametrize("damage", DAMAGES)
@pytest.mark.parametrize("name", [name for name in VIEWS if name != "total"])
def test_damaged_target_is_found_by_keys(shop: Shop, name: str, damage: str) -> None:
    make(shop, name, VIEWS[name])
    set_view_audit(shop.connection, name, 1.0, 100)
    with Refresher(shop.db.dsn) as refresher:
        refresher.refresh(name)
        shop.execute(DAMAGES[damage].format(name, PLACES[name]))
        change(shop, 0)
        found = None
        for number in range(40):
            try:
                refresher.refresh(name)
            except DivergedView as error:
                found = number, str(error)
                break
        assert found is not None
        assert view_history(shop.connection, name, 1)[0].audit_keys


@pytest.mark.usefixtures("by_keys")
@pytest.mark.parametrize(
    ("mutation", "victim"),
    [
        (test_mutants.with_extremes_that_stay, "extremes"),
        (test_mutants.without_sign, "joined"),
        (test_mutants.without_null, "padded"),
        (test_mutants.without_netting, "joined"),
        (test_mutants.with_new_as_old, "without"),
        (test_mutants.with_padded_rows_left_out, "unmatched"),
    ],
    ids=lambda value: value if isinstance(value, str) else value.__name__,
)
def test_fault_of_the_planner_is_found(db: Database, mutation: test_mutants.Mutation, victim: str) -> None:
    query = test_mutants.QUERIES[victim]
    with test_mutants.mutated(mutation), db.connect() as connection, Refresher(db.dsn) as refresher:
        connection.execute("create table l (id int primary key, k int); create table r (id int primary key, k int)")
        connection.execute("select gdq.create_queue('q'); select gdq.add_table('q', 'l'), gdq.add_table('q', 'r')")
        connection.execute("insert into l select i, i from generate_series(1, 5) i; insert into r select * from l")
        create_view(connection, victim, "q", query, f"public.{victim}", engine="postgres", audit_share=1.0)
        refresher.refresh(victim)
        found = False
        for change in test_mutants.CHANGES:
            connection.execute(f"begin; {change}; commit")
            try:
                refresher.refresh(victim)
                wrong = connection.execute(
                    f"(({query}) except all table {victim}) union all (table {victim} except all ({query}))"
                ).fetchall()
            except DivergedView:
                found = True
                break
            if wrong:
                # keys are drawn: further audits find it
                with suppress(DivergedView):
                    for _ in range(40):
                        refresher.refresh(victim)
                found = view_info(connection, victim)[0].diverged is not None
                break
        assert found


def test_without_the_audit_nothing_is_found(shop: Shop, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attempts, "audit_refresh", lambda *_: None)
    make(shop, "rows", VIEWS["rows"])
    with Refresher(shop.db.dsn) as refresher:
        refresher.refresh("rows")
        shop.execute("delete from rows where id = 60")
        change(shop, 0)
        assert refresher.refresh("rows").action == "delta"
    assert shop.differences("rows", VIEWS["rows"]) == (1, 0)


@pytest.mark.server
def test_on_and_bounded_by_default(shop: Shop) -> None:
    make(shop, "sums", VIEWS["sums"], None)
    with Refresher(shop.db.dsn) as refresher:
        refresher.refresh("sums")
        for number in range(60):
            change(shop, number)
            refresher.refresh("sums")
        before = info(shop, "sums")
        change(shop, 60)
        refresher.refresh("sums")
    told = info(shop, "sums")
    due = before.audit_credit >= before.audit_need
    assert told.audits + told.audits_skipped == before.audits + before.audits_skipped + due
    runs = view_history(shop.connection, "sums")
    work = sum(run.work_seconds or 0 for run in runs)
    audits = [run.audit_seconds for run in runs if run.audit_seconds]
    assert audits
    # the first audit has ten milliseconds of its own; the last may have taken longer than was saved
    assert sum(audits[1:]) <= 0.01 + work / 100
    assert told.audits + told.audits_skipped == len(audits)


@pytest.mark.parametrize(("share", "least", "most"), [(0.0, 0, 0), (0.5, 1, 29), (1.0, 30, 30)])
def test_share(shop: Shop, share: float, least: int, most: int) -> None:
    make(shop, "rows", VIEWS["rows"], share)
    with Refresher(shop.db.dsn) as refresher:
        refresher.refresh("rows")
        for _ in range(30):
            refresher.refresh("rows")
    assert least <= info(shop, "rows").audits <= most


def test_too_dear(shop: Shop, monkeypatch: pytest.MonkeyPatch) -> None:
    """What would cost too much is tried with fewer keys, then skipped and counted; the next waits for more time."""
    make(shop, "rows", VIEWS["rows"], None)
    with Refresher(shop.db.dsn) as refresher:
        refresher.refresh("rows")
        monkeypatch.setattr(audit_rows, "_COST_OF_SECOND", 0)
        change(shop, 0)
        assert refresher.refresh("rows").action == "delta"
        told = info(shop, "rows")
        assert (told.audits, told.audits_skipped, told.last_audit) == (0, 1, None)
        assert told.audit_need > 0.03
        run = view_history(shop.connection, "rows", 1)[0]
        assert (run.action, run.audit) == ("delta", "skipped")
        assert run.audit_reason is not None
        assert "cost" in run.audit_reason
        change(shop, 1)
        refresher.refresh("rows")
        assert info(shop, "rows").audits_skipped == 1


def test_stopped_when_it_takes_too_long(shop: Shop) -> None:
    """A function that is slower than the planner thinks: the audit ends, and the refresh does not fail."""
    shop.execute(
        "create function slow(int) returns int language plpgsql immutable cost 1 as"
        " $$ begin perform pg_sleep(case when $1 > 1 then 1 else 0 end); return $1; end $$"
    )
    make(shop, "slow", "select id, slow(k) as k from item where id < 2", None)
    shop.execute("update gdq.view set audit_need = 0.001")
    with Refresher(shop.db.dsn) as refresher:
        refresher.refresh("slow")
        shop.execute("update item set k = 2 where id = 1")
        assert refresher.refresh("slow").action == "delta"
    run = view_history(shop.connection, "slow", 1)[0]
    assert run.audit == "skipped"
    assert run.audit_reason is not None
    assert "too long" in run.audit_reason
    assert run.audit_seconds is not None
    assert run.audit_seconds < 0.5


def test_group_fails_as_a_whole_and_marks_the_view_that_differs(shop: Shop) -> None:
    for name in ("rows", "sums"):
        make(shop, name, VIEWS[name])
    create_group(shop.connection, "both", ["rows", "sums"])
    with Refresher(shop.db.dsn) as refresher:
        (unit,) = refresh_groups(shop.connection, groups=["both"])
        refresher.refresh_group(unit)
        shop.execute("update sums set n = n + 1 where k = 3")
        change(shop, 0)
        with pytest.raises(DivergedView, match="view sums differs"):
            refresher.refresh_group(unit)
        assert [info(shop, name).diverged is None for name in ("rows", "sums")] == [True, False]
        (unit,) = refresh_groups(shop.connection, groups=["both"])
        assert [result.action for result in refresher.refresh_group(unit)] == ["delta", "full"]
    assert shop.differences("rows", VIEWS["rows"]) == shop.differences("sums", VIEWS["sums"]) == (0, 0)


OPEN = {
    "select k, array_agg(n) as ns from item group by k": {1},
    "select k, array_agg(n order by n) as ns from item group by k": set(),
    "select k, string_agg(note, ',' order by id) as notes from item group by k": set(),
    "select k, string_agg(note, ',' order by k) as notes, count(*) as rows from item group by k": {1},
    "select id, row_number() over (partition by k order by n) as place from item": {1},
    "select id, row_number() over (partition by k order by n, id) as place from item": set(),
    "select id, sum(n) over (partition by k order by n rows between 1 preceding and current row) as some from item": {
        1
    },
    "select id, sum(n) over (partition by k order by n) as some from item": set(),
    "select k, sum(x) as x from (select k, n::float8 as x from item) i group by k": set(),
    "select k, round(sum(n::float8)::numeric, 2) as x from item group by k": {1},
    "select k from item group by k having sum(n::float8) > 3": None,
    "select id, note from (select id, note, row_number() over (partition by k order by n) as p from item) i"
    " where p = 1": None,
    "select id, note from (select id, note, row_number() over (partition by k order by n, id) as p from item) i"
    " where p = 1": set(),
    "select distinct on (k) k, id from item order by k, n": None,
    "select distinct on (k) k, id from item order by k, n, id": set(),
    "select n::numeric::text as t, count(*) as rows from item group by n::numeric": None,
    "select n::numeric as t, count(*) as rows from item group by n::numeric": set(),
    "select scale(n::numeric) as s, count(*) as rows from item group by n::numeric": None,
    "select k, scale(max(n::numeric)) as s from item group by k": None,
    "select k, max(n::numeric)::int as n from item group by k": set(),
}


@pytest.mark.server
@pytest.mark.parametrize("query", OPEN)
def test_what_a_query_leaves_open(shop: Shop, query: str) -> None:
    plan = explain_view(shop.connection, QUEUE, query, engine="postgres")
    found = plan.settled
    assert (None if found.reason else set(found.open_columns)) == OPEN[query]


def test_open_column_is_left_out(shop: Shop) -> None:
    query = "select k, array_agg(n) as ns, count(*) as rows from item group by k"
    create_view(shop.connection, "open", QUEUE, query, "public.open", engine="postgres", audit_share=1.0)
    with Refresher(shop.db.dsn) as refresher:
        refresher.refresh("open")
        shop.execute("update open set ns = (select array_agg(n order by n desc) from unnest(ns) n)")
        change(shop, 0)
        assert refresher.refresh("open").action == "delta"
        assert info(shop, "open").audits == 1
        shop.execute("update open set rows = 0 where k = 3")
        with pytest.raises(DivergedView):
            refresher.refresh("open")


@pytest.mark.long
def test_commands(shop: Shop, tmp_path: Path) -> None:
    file = tmp_path / "view.sql"
    file.write_text(VIEWS["rows"])
    create = ("create-view", "rows", "--queue", QUEUE, "--sql", str(file), "--target", "public.rows")
    assert gdq(*create, "--audit", "0.5", "--audit-keys", "7", dsn=shop.db.dsn).returncode == 0
    assert (info(shop, "rows").audit_share, info(shop, "rows").audit_keys) == (0.5, 7)
    for audit, share in (("off", 0.0), ("auto", None), ("1", 1.0)):
        assert gdq("alter-view", "rows", "--audit", audit, dsn=shop.db.dsn).returncode == 0
        assert (info(shop, "rows").audit_share, info(shop, "rows").audit_keys) == (share, 7)
    assert gdq("alter-view", "rows", "--audit-keys", "9", dsn=shop.db.dsn).returncode == 0
    assert (info(shop, "rows").audit_share, info(shop, "rows").audit_keys) == (1.0, 9)
    assert gdq("alter-view", "rows", "--audit", "2", dsn=shop.db.dsn).returncode == 2
    assert gdq("alter-view", "rows", dsn=shop.db.dsn).returncode == 2
    assert gdq("refresh", "rows", dsn=shop.db.dsn).returncode == 0
    shop.execute("delete from rows where id = 60")
    failed = gdq("refresh", "rows", dsn=shop.db.dsn)
    assert failed.returncode == 1
    assert "view rows differs from its query: 1 rows missing" in failed.stderr
    assert "differs from its query: 1 rows missing" in gdq("status", dsn=shop.db.dsn).stdout
    (shown,) = json.loads(gdq("views", "--json", dsn=shop.db.dsn).stdout)
    assert shown["diverged"].startswith("1 rows missing")
    metrics = gdq("metrics", "--once", dsn=shop.db.dsn).stdout
    assert 'gdq_view_diverged{queue="q",view="rows"} 1.0' in metrics
    assert 'gdq_view_audits_failed_total{queue="q",view="rows"} 1.0' in metrics
    assert gdq("refresh", "rows", dsn=shop.db.dsn).returncode == 0
    assert json.loads(gdq("views", "--json", dsn=shop.db.dsn).stdout)[0]["diverged"] is None


def test_bad_numbers(shop: Shop) -> None:
    make(shop, "rows", VIEWS["rows"])
    for share, keys in ((1.5, 10), (-0.1, 10), (0.5, 0), (0.5, 100_000)):
        with pytest.raises(psycopg.errors.CheckViolation):
            set_view_audit(shop.connection, "rows", share, keys)
    with pytest.raises(psycopg.errors.UndefinedObject):
        set_view_audit(shop.connection, "no", 1.0)
