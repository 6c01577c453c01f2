"""Views of every shape, refreshed inside PostgreSQL: whatever happens to the tables, a view equals its query.

GDQ_VIEW_EXAMPLES=<rounds for each shape> makes a campaign of it, GDQ_VIEW_SEED=<number> another one.
"""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psycopg
import pytest
from click.testing import CliRunner

from gdq.cli import main
from gdq.consumers.refresh.new_view import create_view as create_called_view
from gdq.consumers.refresh.refresher import Refresher, RefreshResult
from gdq.consumers.refresh.verify import verify_with
from gdq.consumers.views.target import Target
from gdq.errors import PlanError
from gdq.sql_text import quote
from gdq.view.view import create_view, drop_view, explain_view, view_info
from tests.support.programs import environment
from tests.support.server import Database
from tests.support.spark import QUEUE, Shop, make_shop
from tests.support.view_churn import fill, transaction
from tests.support.view_grammar import CAPTURE, REFUSED, SCHEMA, SHAPES, TABLES
from tests.support.view_random import RandomView
from tests.support.waiting import SECONDS

EXAMPLES = int(os.environ.get("GDQ_VIEW_EXAMPLES", "1"))
SEED = os.environ.get("GDQ_VIEW_SEED", "1")
# A shape that has not yet shown what it is there for gets so many times the rounds.
PATIENCE = 10
RANDOM = 8 * EXAMPLES

JSON = 114


@dataclass
class Scene:
    """A database with the tables of the grammar, and what happened to the view that is looked at."""

    shop: Shop
    refresher: Refresher
    history: list[str] = field(default_factory=list)

    def run(self, statements: list[str]) -> None:
        self.history += statements
        self.shop.execute("; ".join(statements))

    def view(self, name: str, query: str, *, called: bool = False) -> str:
        """Make the view and load it; returns the name of its target. `called`: by CALL."""
        target, made = f"public.t_{name}", create_called_view if called else create_view
        plan = made(self.shop.connection, name, QUEUE, query, target, engine="postgres", audit_share=1.0)
        assert plan is not None
        if called:
            assert self.shop.execute("call gdq.refresh(%s)", name)[0][:2] == ("full", "first load")
        else:
            assert self.refresher.refresh(name).action == "full"
        return target

    def drop(self, name: str) -> None:
        connection = self.shop.connection
        (info,) = view_info(connection, name)
        with connection.transaction():
            Target(name, info.source, info.target).drop(connection)
            drop_view(connection, name)

    def differences(self, query: str, target: str) -> tuple[list[Any], list[Any]]:
        """Rows that the target lacks, and rows that it has too many."""
        with self.shop.connection.cursor() as cursor:
            described = cursor.execute(f"select * from ({query}) q limit 0".encode()).description or ()
        columns = ", ".join(quote(c.name) + "::text" * (c.type_code == JSON) for c in described)
        sides = (f"select {columns} from ({query}) q", f"select {columns} from {target}")
        missing, unexpected = (self.shop.execute(f"{a} except all {b}") for a, b in (sides, sides[::-1]))
        return missing, unexpected

    def content(self, target: str) -> object:
        return self.shop.execute(f"select t::text, count(*) from {target} t group by 1 order by 1")


@pytest.fixture(scope="module")
def module_scene(module_db: Database) -> Iterator[Scene]:
    for shop in make_shop(module_db, [*SCHEMA, *CAPTURE]):
        with Refresher(module_db.dsn) as refresher:
            yield Scene(shop, refresher)


@pytest.fixture
def scene(module_scene: Scene) -> Iterator[Scene]:
    """The scene without views; a test fills its tables itself."""
    module_scene.history.clear()
    yield module_scene
    for info in view_info(module_scene.shop.connection):
        module_scene.drop(info.view_name)


@dataclass
class Seen:
    """How often a view has changed, and was refreshed from changes."""

    rounds: int = 0
    changed: int = 0
    deltas: int = 0


def follow(scene: Scene, query: str, target: str, tables: Sequence[str], rng: random.Random) -> Iterator[Seen]:
    """Change the tables, refresh all views in the order of their names, compare; yields after each round."""
    seen = Seen()
    assert scene.differences(query, target) == ([], [])
    while True:
        seen.rounds += 1
        before = scene.content(target)
        scene.history[:] = [f"-- seed {SEED}, round {seen.rounds}"]
        for _ in range(rng.randint(1, 4)):
            scene.run(transaction(rng, tables))
        result = [scene.refresher.refresh(info.view_name) for info in view_info(scene.shop.connection)][-1]
        found = scene.differences(query, target)
        assert found == ([], []), f"{result}\n{query}\nmissing and unexpected: {found}\n" + ";\n".join(scene.history)
        different = scene.content(target) != before
        assert bool(result.rows_changed) >= different
        seen.changed += different
        seen.deltas += result.action == "delta"
        yield seen


@pytest.mark.parametrize("name", SHAPES)
def test_shape(scene: Scene, name: str) -> None:
    shape = SHAPES[name]
    rng = random.Random(f"{SEED} {name}")
    scene.run(fill(rng))
    query = shape.query
    if shape.base is not None:
        base = scene.view("base", SHAPES[shape.base].query)
        scene.shop.capture(base)
        query = query.replace("target", base)
    target = scene.view(name, query)
    for seen in follow(scene, query, target, shape.tables, rng):
        enough = seen.changed and (seen.deltas or not shape.incremental)
        if seen.rounds >= EXAMPLES * (1 if enough else PATIENCE):
            break
    assert seen.changed, "the view has never changed"
    assert seen.deltas or not shape.incremental, "never refreshed from changes"


@pytest.mark.server
def test_random_queries(scene: Scene) -> None:
    deltas = 0
    for number in range(RANDOM):
        rng = random.Random(f"{SEED} random {number}")
        scene.run(fill(rng))
        name = f"random_{number}"
        query = RandomView(rng).query()
        target = scene.view(name, query)
        for seen in follow(scene, query, target, TABLES, rng):
            if seen.rounds == 2:
                break
        deltas += bool(seen.deltas)
        scene.drop(name)
    assert deltas > RANDOM / 2


SOME = {
    "sums": SHAPES["sums"].query,
    "join_pk_mode": SHAPES["join_pk_mode"].query,
    "left_join_key_hidden": SHAPES["left_join_key_hidden"].query,
    "not_exists": SHAPES["not_exists"].query,
    "min_max": SHAPES["min_max"].query,
    "top_of_group": SHAPES["top_of_group"].query,
    "except_all": SHAPES["except_all"].query,
    "join_three": SHAPES["join_three"].query,
}
# A writer that meets another one gives way (a row that it wants may have gone to another partition).
_LOST = (
    psycopg.errors.LockNotAvailable,
    psycopg.errors.DeadlockDetected,
    psycopg.errors.UniqueViolation,
    psycopg.errors.SerializationFailure,
)


@contextmanager
def writers(database: Database, count: int) -> Iterator[list[int]]:
    """Threads that run random transactions until the block ends; how many each has ended."""
    stop = threading.Event()
    done = [0] * count

    def write(number: int) -> None:
        rng = random.Random(f"{SEED} writer {number}")
        with database.connect() as connection:
            connection.execute("set lock_timeout = '20ms'")
            while not stop.is_set():
                try:
                    for statement in transaction(rng, TABLES):
                        connection.execute(statement.encode())
                except _LOST:
                    connection.execute("rollback")
                done[number] += 1

    threads = [threading.Thread(target=write, args=(number,)) for number in range(count)]
    for thread in threads:
        thread.start()
    try:
        yield done
    finally:
        stop.set()
        for thread in threads:
            thread.join()


def test_exact_while_writers_go_on(scene: Scene) -> None:
    scene.run(fill(random.Random(SEED)))
    targets = {name: scene.view(name, query) for name, query in SOME.items()}
    actions: set[str] = set()
    with writers(scene.shop.db, 3) as done:
        for _ in range(max(2, EXAMPLES // 2)):
            for name in SOME:
                found = verify_with(scene.refresher, name)
                assert found.equal, found
                actions.add(str(view_info(scene.shop.connection, name)[0].last_action))
                scene.shop.keep_house()
    assert min(done) > 10
    assert "delta" in actions
    for name, target in targets.items():
        scene.refresher.refresh(name)
        assert scene.differences(SOME[name], target) == ([], [])


def test_nothing_to_do(scene: Scene) -> None:
    scene.run(fill(random.Random(SEED)))
    for name, query in SOME.items():
        scene.view(name, query)

    def refreshed() -> list[RefreshResult]:
        return [scene.refresher.refresh(name) for name in SOME]

    assert {result.action for result in refreshed()} == {"none"}
    # Nothing, in the end, has changed.
    scene.run(
        ["begin", "update item set k = k + 1", "update item set k = k - 1", "update fact set qty = qty", "commit"]
    )
    scene.run(["begin", "delete from item", "delete from fact", "rollback"])
    before = [scene.content(f"t_{name}") for name in SOME]
    assert all(result.rows_changed == 0 for result in refreshed() if result.action == "delta")
    assert [scene.content(f"t_{name}") for name in SOME] == before
    scene.run(["truncate fact"])
    results = {result.view_name: result for result in refreshed()}
    assert (results["join_three"].action, results["join_three"].reason) == ("full", "truncate of public.fact")
    assert results["sums"].action == "none"
    assert scene.shop.execute("select count(*) from t_join_three") == [(0,)]


def test_subquery_outside_of_the_rows_changes_alone(scene: Scene) -> None:
    queries = {
        "having": "select k, max(qty) as top from fact group by k having max(qty) > (select max(v) from few)",
        "total": "select string_agg(label, '') as s from fact having count(*) > (select count(*) from item)",
        "limit": "select id from item order by (select f.v from few f where f.id = item.k), id limit 3",
        "grouped": "select count(*) as n from item group by (select f.v from few f where f.id = k) order by 1 limit 99",
        "on": "select distinct on (grp) grp, id from item order by grp, (select max(v) from few where few.id = k), id",
    }
    scene.run(fill(random.Random(SEED)))
    targets = {name: scene.view(name, query) for name, query in queries.items()}
    for change in ("insert into few values (9, 100)", "delete from few", "delete from item where id < 12"):
        scene.run([change])
        for name, query in queries.items():
            scene.refresher.refresh(name)
            assert scene.differences(query, targets[name]) == ([], []), (name, change)


def test_extremes_are_shown_as_they_are_now(scene: Scene) -> None:
    """Equal values that are written otherwise: min is the one that is there."""
    scene.run(["create table lasted (id int primary key, d interval)", "insert into lasted values (1, '24:00:00')"])
    scene.shop.capture("lasted")
    target = scene.view("shortest", "select min(d)::text as min from lasted")
    scene.run(["update lasted set d = '1 day'"])
    assert scene.refresher.refresh("shortest").action == "delta"
    assert scene.content(target) == [('("1 day")', 1)]


@pytest.mark.server
def test_explained_without_a_trace(scene: Scene) -> None:
    for name, query in SOME.items():
        plan = explain_view(scene.shop.connection, QUEUE, query, engine="postgres")
        assert plan.strategy in ("state", "incremental"), name
        assert f"strategy: {plan.strategy}" in str(plan)
    assert view_info(scene.shop.connection) == []


@pytest.mark.server
def test_collation_that_takes_different_values_for_equal(scene: Scene) -> None:
    try:
        scene.shop.execute("create collation fold (provider = icu, locale = 'und-u-ks-level2', deterministic = false)")
    except psycopg.errors.FeatureNotSupported:
        pytest.skip("this PostgreSQL has no ICU")
    scene.shop.execute("create table tag (id int primary key, word text collate fold)")
    scene.shop.capture("tag")
    scene.shop.execute("insert into tag values (1, 'a'), (2, 'A'), (3, 'b')")
    query = "select word, count(*) as n, max(id) as last from tag group by word"
    target = scene.view("folded", query)
    scene.shop.execute("delete from tag where id = 1; update tag set word = 'B' where id = 2")
    result = scene.refresher.refresh("folded")
    assert (result.action, "[collation]" in str(result.reason)) == ("full", True)
    assert scene.shop.execute(f"select upper(word), n, last from {target}") == [("B", 2, 3)]


@pytest.mark.parametrize("query", REFUSED)
def test_refused(scene: Scene, query: str) -> None:
    with pytest.raises(PlanError) as error:
        create_view(scene.shop.connection, "refused", QUEUE, query, "public.t_refused", engine="postgres")
    assert error.value.code == REFUSED[query]
    assert view_info(scene.shop.connection) == []


PROGRAM = """
import sys
from gdq.cli import main
main(sys.argv[1:], standalone_mode=False)
loaded = [name for name in ("pyspark", "pyarrow") if name in sys.modules]
assert not loaded, loaded
"""


def test_commands_without_spark(scene: Scene, tmp_path: Path) -> None:
    scene.run(fill(random.Random(SEED)))
    query = SHAPES["left_join"].query
    file = tmp_path / "view.sql"
    file.write_text(query + ";\n")

    def gdq(*arguments: str) -> Any:
        return CliRunner().invoke(main, [*arguments, "--dsn", scene.shop.db.dsn])

    create = ("create-view", "cli", "--queue", QUEUE, "--sql", str(file), "--target", "public.t_cli")
    done = gdq(*create, "--engine", "postgres")
    assert done.exit_code == 0, done.output
    assert json.loads(gdq("explain-view", "cli", "--json").stdout)["strategy"]
    command = [sys.executable, "-c", PROGRAM, "refresh", "cli"]
    for _ in range(2):
        subprocess.run(command, env=environment(scene.shop.db.dsn), check=True, capture_output=True, timeout=SECONDS)
        assert scene.differences(query, "t_cli") == ([], [])
        scene.run(["update fact set k = 3 where k = 2", "delete from item where k = 3", "update item set k = null"])
    assert view_info(scene.shop.connection, "cli")[0].last_action == "delta"
    assert gdq("verify-view", "cli").exit_code == 0
    scene.shop.execute("delete from t_cli where ctid = (select min(ctid) from t_cli)")
    wrong = gdq("verify-view", "cli")
    assert (wrong.exit_code, "differs" in wrong.stderr) == (3, True)
    assert gdq("refresh", "--full", "cli").exit_code == 0
    assert gdq("verify-view", "cli").exit_code == 0
    assert gdq("drop-view", "cli").exit_code == 0
