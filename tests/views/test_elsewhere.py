"""Views of every kind whose target is in another PostgreSQL: exactly the rows of their query, whatever is killed."""

from __future__ import annotations

import json
import random
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from typing import get_args

import psycopg
import pytest
from click.testing import CliRunner

from gdq.cli import main
from gdq.conninfo import conninfo_without_password
from gdq.consumers.refresh import audit_sample
from gdq.consumers.refresh.refresher import Refresher
from gdq.consumers.refresh.verify import verify_with
from gdq.consumers.refresh.view_refresh import RefreshPoint
from gdq.consumers.views.computation import Computation
from gdq.consumers.views.difference import Difference
from gdq.consumers.views.target import Target
from gdq.errors import DivergedView, RefreshConflict, StaleBatch
from gdq.typed.pgtypes import READ_SETTINGS
from gdq.view.table_schema import apply_view_settings
from gdq.view.view import create_view, drop_view, view_history, view_info
from tests.support.endings import Deaths, Killed
from tests.support.programs import environment, gdq
from tests.support.server import Database
from tests.support.spark import QUEUE, Shop, make_shop
from tests.support.view_churn import fill, transaction
from tests.support.view_grammar import CAPTURE, SCHEMA, SHAPES, TABLES

# What each does when its tables change: rows come and go by sign, by key, or all of them.
RULES = {
    "bag": "signed",
    "join_three": "signed",
    "except_all": "signed",
    "left_join": "replace",
    "not_exists": "replace",
    "group_by_enum": "replace",
    "group_by_char": "replace",
    "sums": "replace",
    "total": "full",
}
ROUNDS = 3

pytestmark = pytest.mark.server


@dataclass(frozen=True, slots=True)
class Places:
    """The source, the database of the targets and how a view names that."""

    shop: Shop
    far: psycopg.Connection[tuple[object, ...]]
    far_dsn: str

    def view(self, name: str, query: str) -> None:
        self.shop.view(name, query, engine="postgres", target_dsn=self.far_dsn, audit_share=1.0)

    def rows(self, name: str) -> list[tuple[object, ...]]:
        """The target's rows, each as PostgreSQL writes it and how often."""
        return self.far.execute(f"select t::text, count(*) from {name} t group by 1 order by 1").fetchall()

    def expected(self, query: str) -> list[tuple[object, ...]]:
        return self.shop.execute(f"select q::text, count(*) from ({query}) q group by 1 order by 1")

    def position(self, name: str) -> object:
        return self.far.execute("select position from gdq_target.position where view = %s", [name]).fetchone()


@pytest.fixture(scope="module")
def module_places(module_db: Database, module_empty_db: Database) -> Iterator[Places]:
    with conninfo_without_password(module_empty_db.dsn) as dsn, module_empty_db.connect() as far:
        for shop in make_shop(module_db, [*SCHEMA, *CAPTURE]):
            yield Places(shop, far, dsn)


@pytest.fixture
def places(module_places: Places) -> Iterator[Places]:
    """Filled tables, without views."""
    module_places.shop.execute("; ".join(fill(random.Random(1))))
    yield module_places
    for info in view_info(module_places.shop.connection):
        with module_places.far.transaction():
            Target(info.view_name, info.source, info.target).drop(module_places.far)
        drop_view(module_places.shop.connection, info.view_name)


def churn(places: Places, rng: random.Random) -> None:
    for _ in range(3):
        places.shop.execute("; ".join(transaction(rng, TABLES)))


def test_equal_to_the_query(places: Places) -> None:
    """Also while writers go on during the refresh; nothing of gdq is needed there."""
    for name in RULES:
        places.view(name, SHAPES[name].query)
    rng = random.Random(2)

    def at(point: RefreshPoint) -> None:
        if point in ("exported", "staged"):
            places.shop.execute("; ".join(transaction(rng, TABLES)))

    with Refresher(places.shop.db.dsn, at=at) as busy, Refresher(places.shop.db.dsn) as refresher:
        for _ in range(ROUNDS):
            churn(places, rng)
            for name in RULES:
                found = verify_with(busy, name)
                assert found.equal, found
            results = {name: refresher.refresh(name) for name in RULES}
            for name, result in results.items():
                assert places.rows(name) == places.expected(SHAPES[name].query), result
        for name, rule in RULES.items():
            actions = {run.action for run in view_history(places.shop.connection, name)}
            assert ("delta" in actions) == (rule != "full"), name
        assert [refresher.refresh(name).action for name in RULES] == ["none"] * len(RULES)
    assert places.far.execute("select to_regnamespace('gdq')").fetchone() == (None,)
    assert places.far.execute("select count(*) from pg_class where relname like 'gdq_state%'").fetchone() == (0,)


POINTS = get_args(RefreshPoint)


@pytest.mark.parametrize(
    ("name", "full", "points"),
    [
        ("bag", False, POINTS),
        ("left_join", False, ("applied", "committed")),
        ("left_join", True, ("staged", "applied")),
    ],
)
def test_killed_at_every_point(places: Places, name: str, full: bool, points: tuple[RefreshPoint, ...]) -> None:
    """Nothing is applied twice, nothing is lost: the target is where it was or at the new snapshot."""
    query, rng = SHAPES[name].query, random.Random(f"{name} {full}")
    deaths = Deaths()

    places.view(name, query)
    with Refresher(places.shop.db.dsn, at=deaths) as refresher:
        refresher.refresh(name)
        for point in points:
            before, position = places.rows(name), places.position(name)
            places.shop.execute(
                "update item set k = 1 where id < 9; insert into fact (k, label) values (1, 'x'), (1, 'x')"
            )
            deaths.append(point)
            with pytest.raises(Killed):
                refresher.refresh(name, full=full)
            if point in ("committed", "done"):
                assert places.rows(name) == places.expected(query) != before
            else:
                assert (places.rows(name), places.position(name)) == (before, position)
            churn(places, rng)
            places.shop.keep_house()
            result = refresher.refresh(name)
            assert places.rows(name) == places.expected(query), (point, result)
            assert result.action != "full", result


VICTIM = """
import sys
from gdq.consumers.refresh.refresher import Refresher

def at(point):
    if point == "applied":
        print(point, flush=True)
        sys.stdin.readline()

with Refresher(at=at) as refresher:
    refresher.refresh("left_join")
"""


def test_process_killed_before_the_target_commits(places: Places) -> None:
    query = SHAPES["left_join"].query
    places.view("left_join", query)
    with Refresher(places.shop.db.dsn) as refresher:
        refresher.refresh("left_join")
        before, position = places.rows("left_join"), places.position("left_join")
        places.shop.execute("update fact set label = label || 'x', k = 1; update item set k = 1 where k > 4")
        with subprocess.Popen(
            [sys.executable, "-c", VICTIM],
            env=environment(places.shop.db.dsn),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        ) as victim:
            assert victim.stdout is not None
            assert victim.stdout.readline() == "applied\n"
            victim.send_signal(signal.SIGKILL)
        assert (places.rows("left_join"), places.position("left_join")) == (before, position)
        assert refresher.refresh("left_join").action == "delta"
        assert places.rows("left_join") == places.expected(query) != before


def test_overtaken_refresh_changes_nothing(places: Places) -> None:
    """By one that has fenced it off, and by one that has moved the position all the same."""
    query = SHAPES["bag"].query
    places.view("bag", query)
    armed: list[RefreshPoint] = []

    def overtake(point: RefreshPoint) -> None:
        if armed and armed[0] == point:
            armed.clear()
            refresher.control.execute("select pg_advisory_unlock_all()")
            other.refresh("bag")

    with Refresher(places.shop.db.dsn) as other, Refresher(places.shop.db.dsn, at=overtake) as refresher:
        refresher.refresh("bag")
        for point in ("exported", "staged", "ticked"):
            armed.append(point)
            places.shop.execute("insert into fact (k) values (1), (1)")
            with pytest.raises((RefreshConflict, StaleBatch)):
                refresher.refresh("bag")
            assert places.rows("bag") == places.expected(query)
        assert refresher.refresh("bag").action == "none"


def test_connections_cut_off(places: Places) -> None:
    query = SHAPES["left_join"].query
    places.view("left_join", query)
    armed: list[RefreshPoint] = []

    def cut(at: RefreshPoint) -> None:
        if at in armed:
            armed.clear()
            for database in (places.shop.connection, places.far):
                database.execute(
                    "select pg_terminate_backend(pid) from pg_stat_activity"
                    " where datname = current_database() and application_name like 'gdq:%'"
                )

    with Refresher(places.shop.db.dsn, at=cut) as refresher:
        refresher.refresh("left_join")
        places.shop.execute("update item set k = 2")
        armed.append("applied")
        with pytest.raises(psycopg.OperationalError):
            refresher.refresh("left_join")
    with Refresher(places.shop.db.dsn) as refresher:
        assert refresher.refresh("left_join").action == "delta"
    assert places.rows("left_join") == places.expected(query)


@pytest.mark.long
def test_target_that_somebody_changed_is_told_and_mended(places: Places) -> None:
    query = SHAPES["bag"].query
    places.view("bag", query)
    with Refresher(places.shop.db.dsn) as refresher:
        refresher.refresh("bag")
        places.far.execute("delete from bag where ctid = (select min(ctid) from bag)")
        found = verify_with(refresher, "bag")
        assert (found.equal, found.missing, found.unexpected) == (False, 1, 0)
        wrong = gdq("verify-view", "bag", dsn=places.shop.db.dsn)
        assert (wrong.returncode, "differs" in wrong.stderr) == (3, True)
        places.shop.execute("delete from fact")
        result = refresher.refresh("bag")
        assert (result.action, "changed by another" in str(result.reason)) == ("full", True)
        assert places.rows("bag") == []


@pytest.mark.parametrize("whole", [True, False])
@pytest.mark.parametrize("name", ["bag", "sums", "min_max", "left_join_key_hidden"])
def test_lost_change_is_found_by_an_audit(
    places: Places, monkeypatch: pytest.MonkeyPatch, name: str, whole: bool
) -> None:
    if not whole:
        monkeypatch.setattr(audit_sample, "_BLOCKS_WHOLE", -1)
    places.view(name, SHAPES[name].query)
    places.shop.execute(f"select gdq.set_view_audit('{name}', 1, 300)")
    with Refresher(places.shop.db.dsn) as refresher:
        refresher.refresh(name)
        places.shop.execute("update fact set qty = 5 where qty = 4; update item set note = 'b' where note = 'a'")
        assert refresher.refresh(name).action == "delta"
        with monkeypatch.context() as patch:
            patch.setattr(Computation, "difference", lambda *_: Difference("none"))
            places.shop.execute(
                "update fact set qty = qty + 7, grp = 3 where k > 2; update item set note = 'zz', k = 2"
            )
            found = False
            for _ in range(30):
                with suppress(DivergedView):
                    refresher.refresh(name)
                    continue
                found = True
                break
            assert found
        assert refresher.refresh(name).action == "full"
        assert verify_with(refresher, name).equal


def test_types_of_the_source_are_text_there(places: Places) -> None:
    """Equal values of a type that only the source has may differ in text: rows are not looked for by them."""
    shop = places.shop
    shop.execute(
        "create type span as range (subtype = numeric); create domain price as numeric(9, 2);"
        " create table offer (id int primary key, s span, c regclass, p price)"
    )
    shop.capture("offer")
    shop.execute(
        "insert into offer values (1, '[1.0,2]', 'item', 1), (2, '[1.00,2]', 'fact', 2), (3, '[3,4]', null, null)"
    )
    queries = {
        "spans": "select s, count(*) as n from offer group by s",
        "tables": "select c, max(id) as m from offer group by c",
        "prices": "select p, max(id) as m from offer group by p",
    }
    for name, query in queries.items():
        places.view(name, query)
    # names of tables come with their schema, whatever the session's search_path
    queries["tables"] = "select 'public.' || c as c, max(id) as m from offer group by c"
    with Refresher(shop.db.dsn) as refresher:
        for change in (
            "select 1",
            "delete from offer where id = 2",
            "insert into offer values (5, '[1.000,2]', 'dim', 1), (6, null, null, 2)",
            "update offer set s = '[3.0,4]', c = 'fact' where id in (1, 3)",
            "delete from offer where id > 4",
        ):
            shop.execute(change)
            for name in queries:
                refresher.refresh(name)
            found = places.far.execute("select s::numrange, n from spans order by 1, 2").fetchall()
            assert found == shop.execute("select s::text::numrange, count(*) from offer group by 1 order by 1, 2")
            for name in ("tables", "prices"):
                assert places.rows(name) == places.expected(queries[name])
        assert {view_info(shop.connection, name)[0].last_action for name in ("tables", "prices")} == {"delta"}
    (kinds,) = places.far.execute(
        """select array_agg(format_type(atttypid, atttypmod) order by attname) from pg_attribute
            where attname in ('s', 'c', 'p') and attrelid = any ('{spans,tables,prices}'::regclass[])"""
    )
    assert kinds == (["text", "numeric(9,2)", "text"],)


def test_text_of_another_encoding(places: Places, module_empty_db: Database) -> None:
    latin = f"{module_empty_db.name}_latin"
    with module_empty_db.connect("su") as su:
        su.execute(f"create database {latin} encoding 'LATIN1' locale 'C' template template0 owner gdq_owner".encode())
    try:
        with conninfo_without_password(Database(module_empty_db.server, latin).dsn) as dsn:
            query = "select k, max(label) as last from fact group by k"
            create_view(
                places.shop.connection, "latin", QUEUE, query, "public.latin", engine="postgres", target_dsn=dsn
            )
            with Refresher(places.shop.db.dsn) as refresher, psycopg.connect(dsn, client_encoding="utf8") as far:
                for label in ("é", "ü"):
                    places.shop.execute("update fact set label = %s", label)
                    assert verify_with(refresher, "latin").equal
                    assert far.execute("select distinct last, octet_length(last) from latin").fetchall() == [(label, 1)]
                    far.rollback()
                places.shop.execute("update fact set label = '€'")
                with pytest.raises(psycopg.errors.UntranslatableCharacter):
                    refresher.refresh("latin")
                assert far.execute("select distinct last from latin").fetchall() == [("ü",)]
            drop_view(places.shop.connection, "latin")
    finally:
        with module_empty_db.connect("su") as su:
            su.execute(f"drop database {latin} with (force)".encode())


def test_explained(places: Places) -> None:
    query = SHAPES["sums"].query
    explain = ("explain-view", "--queue", QUEUE, "--sql", "-", "--engine", "postgres", "--dsn", places.shop.db.dsn)
    here = CliRunner().invoke(main, [*explain, "--json"], input=query)
    there = CliRunner().invoke(main, [*explain, "--json", "--elsewhere"], input=query)
    places.view("sums", query)
    made = CliRunner().invoke(main, ["explain-view", "sums", "--json", "--dsn", places.shop.db.dsn])
    assert json.loads(made.stdout) == json.loads(there.stdout)
    found = [
        (plan["strategy"], plan["elsewhere"], plan["tables"][0]["rule"])
        for plan in map(json.loads, (here.stdout, there.stdout))
    ]
    assert found == [("state", False, "state"), ("incremental", True, "replace")]
    assert "copied there" in CliRunner().invoke(main, [*explain, "--elsewhere"], input=query).stdout
    total = CliRunner().invoke(main, [*explain, "--elsewhere"], input=SHAPES["total"].query)
    assert (total.exit_code, "[no-group-by]" in total.stdout) == (3, True)


def test_computed_at_the_snapshot_of_the_leader(places: Places, monkeypatch: pytest.MonkeyPatch) -> None:
    """Read at a later one, rows that are in the next delta too would be there already."""
    query = SHAPES["left_join"].query
    places.view("left_join", query)

    def begin(self: Computation) -> None:
        apply_view_settings(self.connection, READ_SETTINGS | self.task.view.settings)

    def at(point: RefreshPoint) -> None:
        if point == "exported":
            places.shop.execute("update item set note = coalesce(note, '') || 'x', k = 1")

    with Refresher(places.shop.db.dsn, at=at) as refresher:
        refresher.refresh("left_join")
        assert verify_with(refresher, "left_join").equal
        monkeypatch.setattr(Computation, "begin", begin)
        assert not verify_with(refresher, "left_join").equal
