"""Views of several tables on Spark: whatever happens to the tables, a view equals its query.

GDQ_SPARK_EXAMPLES=<rounds> makes a campaign of it over every shape that Spark covers,
GDQ_VIEW_SEED=<number> another one.
"""

from __future__ import annotations

import json
import os
import random
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from psycopg.conninfo import conninfo_to_dict, make_conninfo

from gdq.cli import main
from gdq.consumers.refresh.refresher import Refresher
from gdq.consumers.refresh.verify import verify_with
from gdq.errors import PlanError
from gdq.plan.spark.keys import SparkKeyPlan
from gdq.plan.spark.plan import SparkPlan
from gdq.view.view import create_view, explain_view
from tests.support.endings import Deaths, Killed
from tests.support.server import Database
from tests.support.spark import QUEUE, SPARK_MARKS, Shop, make_shop
from tests.support.view_churn import fill, transaction
from tests.support.view_grammar import CAPTURE, SCHEMA, SHAPES, TABLES

pytestmark = SPARK_MARKS

EXAMPLES = int(os.environ.get("GDQ_SPARK_EXAMPLES", "0"))
SEED = os.environ.get("GDQ_VIEW_SEED", "1")

# Between them every rule; the campaign takes all shapes.
SOME = {
    "products": """select d.name, p.mood, count(*) as n, sum(f.qty * p.n) as total
                     from fact f join dim d on d.k = f.k join part p on p.k = f.k where f.qty <= p.n
                    group by d.name, p.mood""",
    "left_and_anti": """select i.id, d.name, f.qty from item i left join dim d on d.k = i.k
                          left join fact f on f.grp = d.grp and f.qty > 1
                         where not exists (select from part p where p.k = i.k and p.n = 2)""",
    "union_of_self_join": """select i.id, f.label from item i join fact f on f.k = i.k
                             union select a.id, b.note from item a join item b on b.id = a.k""",
    "max_of_left_join": SHAPES["max_of_left_join"].query,
}
SUMS = """select d.name, count(*) as n, sum(i.amount) as amount, avg(i.amount) as mean
            from item i join dim d on d.k = i.k group by d.name having count(*) > 1"""

# Not joined by Spark: its tasks compute keys, or the session in the source what is signed.
KEYED = (
    "window_sum", "window_of_left_join", "top_of_group", "full_join", "left_join_of_join", "not_in_not_null", "scalar",
    "except", "string_agg", "statistics", "join_of_groups", "total_of_few",
)  # fmt: skip

REFUSED = {
    "select i.id, f.label from item i full join fact f on f.k = i.k": "spark-full-join",
    "select i.id from item i left join (fact f join dim d on d.k = f.k) on f.k = i.k": "spark-outer-join",
    "select i.id from item i left join fact f on f.k = i.k and f.qty > i.grp": "spark-condition",
    "select i.id from item i join fact f on f.price = i.ratio": "spark-key-type",
    "select i.id, f.label from item i join fact f on f.k = i.k where f.label > i.note": "spark-expression",
    "select i.id, s.n from item i join (select k, count(*) as n from fact group by k) s on s.k = i.k": "spark-subquery",
    "select id from item where k not in (select k from fact)": "spark-subquery",
    "select i.k, max(f.qty), (select count(*) from few) as n from item i join fact f on f.k = i.k group by i.k": (
        "spark-subquery"
    ),
    "select k from item except select k from fact": "spark-set-operation",
    "select f.k, string_agg(i.note, ',') as notes from fact f join item i on i.k = f.k group by f.k": "spark-aggregate",
    "select f.tags, max(f.qty) as n from fact f join dim d on d.k = f.k group by f.tags": "spark-group-type",
    "select i.id, unnest(f.tags) as tag from item i join fact f on f.k = i.k": "spark-set-function",
    "select i.id, count(*) over (partition by i.k) as n from item i join fact f on f.k = i.k": "spark-window",
    " cross join ".join(["select w1.id from few w1", *(f"few w{n}" for n in range(2, 10))]): "spark-wide",
}


@dataclass
class Scene:
    """A database with the tables of the grammar, and what happened to them."""

    shop: Shop
    refresher: Refresher
    history: list[str] = field(default_factory=list)

    def run(self, statements: list[str]) -> None:
        self.history += statements
        self.shop.execute("; ".join(statements))

    def view(self, name: str, query: str, **options: Any) -> None:
        plan = create_view(
            self.shop.connection, name, QUEUE, query, f"public.t_{name}", engine="spark", audit_share=1.0, **options
        )
        assert isinstance(plan, SparkPlan | SparkKeyPlan)


@pytest.fixture
def scene(db: Database) -> Iterator[Scene]:
    for shop in make_shop(db, [*SCHEMA, *CAPTURE]):
        with Refresher(db.dsn) as refresher:
            yield Scene(shop, refresher)


def covered(scene: Scene) -> dict[str, str]:
    """The shapes of the grammar that are refreshed from changes, but those with a rule of their own."""
    found = {}
    for name, shape in SHAPES.items():
        if shape.base is None and shape.incremental:
            plan = explain_view(scene.shop.connection, QUEUE, shape.query, engine="spark")
            if isinstance(plan, SparkPlan | SparkKeyPlan):
                found[name] = shape.query
    return found


def content(scene: Scene, name: str) -> object:
    return scene.shop.execute(f"select t::text, count(*) from t_{name} t group by 1 order by 1")


@pytest.mark.long
def test_views_follow_whatever_happens(scene: Scene) -> None:
    rng = random.Random(f"{SEED} spark")
    scene.run(fill(rng))
    strict = SOME | {name: SHAPES[name].query for name in KEYED}
    views = strict | (covered(scene) if EXAMPLES else {})
    for name, query in views.items():
        scene.view(name, query)
        assert verify_with(scene.refresher, name).equal, name
    changed = dict.fromkeys(views, 0)
    rounds = 0
    while rounds < max(EXAMPLES, 1) or not all(changed.values()):
        rounds += 1
        assert rounds < 20 + EXAMPLES, f"never changed: {[name for name in views if not changed[name]]}"
        for _ in range(rng.randint(1, 4) if EXAMPLES else 6):
            scene.run(transaction(rng, TABLES))
        if rounds == 1:  # rows that lose what they were joined with
            scene.run(["delete from dim", "delete from fact where grp = 2"])
        waiting = [name for name in views if rounds <= EXAMPLES or not changed[name]]
        for name in waiting:
            before = content(scene, name)
            found = verify_with(scene.refresher, name)
            ((action, reason),) = scene.shop.execute("select last_action, last_reason from gdq.view_info(%s)", name)
            # a full load would hide changes that took away rows which were not there
            assert "changed by another" not in str(reason), f"{views[name]}\n" + ";\n".join(scene.history)
            assert found.equal, f"{found} seed {SEED} round {rounds}\n{views[name]}\n" + ";\n".join(scene.history)
            # of the others some hang on one value, so that a change is mostly a full load
            counts = action == "delta" or name not in strict
            changed[name] += counts and content(scene, name) != before


def test_not_joined_by_spark(scene: Scene) -> None:
    for query, code in REFUSED.items():
        plan = explain_view(scene.shop.connection, QUEUE, query, engine="spark")
        assert isinstance(plan, SparkKeyPlan), query
        assert plan.refused.endswith(f"[{code}]"), query


def test_refused(scene: Scene) -> None:
    with pytest.raises(PlanError) as error:
        explain_view(scene.shop.connection, QUEUE, "select d.extra from item i join dim d on d.k = i.k", engine="spark")
    assert error.value.code == "pk-columns-missing"


@pytest.mark.long
def test_staged_in_another_database_and_killed(scene: Scene, empty_db: Database, tmp_path: Path) -> None:
    parameters: dict[str, Any] = dict(conninfo_to_dict(empty_db.dsn))
    passfile = tmp_path / "pgpass"
    passfile.touch(mode=0o600)
    passfile.write_text(f"*:*:*:*:{parameters.pop('password')}\n")
    dsn = make_conninfo("", **{**parameters, "passfile": str(passfile)})
    scene.run(fill(random.Random(f"{SEED} elsewhere")))
    scene.run(["insert into item (id, k, amount) select i, i % 8, i from generate_series(100, 130) i"])
    views = {
        "far": "select d.name, count(*) as n, sum(i.k) as k from item i join dim d on d.k = i.k group by d.name",
        "placed": "select i.k, i.id, rank() over (partition by i.k order by i.amount desc, i.id) as place from item i",
    }
    for name, query in views.items():
        scene.view(name, query, target_dsn=dsn)
    deaths = Deaths()

    with Refresher(scene.shop.db.dsn, driver_bytes=0, at=deaths) as refresher:
        for name in views:
            assert refresher.refresh(name).action == "full"
        scene.run(["update item set k = k + 1, amount = amount + 1 where k < 4", "delete from dim where k = 2"])
        for name in views:
            deaths.append("applied")
            with pytest.raises(Killed):
                refresher.refresh(name)
        scene.run(["update item set k = 5 where k = 3", "insert into dim values (2, 1, 'new')"])
        for name in views:
            assert verify_with(refresher, name).equal
            (info,) = scene.shop.execute("select last_action, rows_changed from gdq.view_info(%s)", name)
            assert info[0] == "delta"
            assert info[1] > 0
    with empty_db.connect() as output:
        tables = output.execute("select relname from pg_class where relnamespace = 'gdq_target'::regnamespace")
        assert [name for (name,) in tables if "stage" in name] == []


def test_explained(scene: Scene, tmp_path: Path) -> None:
    file = tmp_path / "view.sql"
    file.write_text(SUMS)
    command = ["explain-view", "--queue", QUEUE, "--sql", str(file), "--engine", "spark", "--dsn", scene.shop.db.dsn]
    shown = CliRunner().invoke(main, command)
    assert shown.exit_code == 0, shown.output
    assert "way: joins" in shown.stdout
    assert "strategy: state" in shown.stdout
    plan = json.loads(CliRunner().invoke(main, [*command, "--json"]).stdout)
    assert [step["engine"] for step in plan["statements"]] == ["postgres", "postgres", "spark", "postgres"]
    # without being asked for, views of several tables stay where they are refreshed faster
    assert not isinstance(explain_view(scene.shop.connection, QUEUE, SHAPES["join_three"].query), SparkPlan)
