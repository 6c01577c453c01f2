"""Views of every shape, refreshed by CALL alone, some from the first load on: a view equals its query.

GDQ_VIEW_EXAMPLES and GDQ_VIEW_SEED: as in test_shapes.
"""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest

from gdq.consumers.views.few_statement import FEW
from gdq.view.view import set_view_audit
from tests.support.view_churn import fill, transaction
from tests.support.view_grammar import SHAPES, TABLES
from tests.support.view_random import RandomView
from tests.views.test_shapes import EXAMPLES, PATIENCE, SEED, SOME, Scene, module_scene, scene

__all__ = ["module_scene", "scene"]

pytestmark = pytest.mark.server

ROUNDS = 6 * EXAMPLES
RANDOM = 4 * EXAMPLES

# Their changes reach the target, but the values that their rows are found by are arrays, or of another query.
IN_FULL = {"distinct_jsonb", "scalar_in_having"}


def called(scene: Scene, query: str, tables: Sequence[str], rng: random.Random, rounds: int = ROUNDS) -> list[str]:
    """What calls did to a new view of the query, each after some changes."""
    target = scene.view("view", query, called=rng.random() < 0.5)
    set_view_audit(scene.shop.connection, "view", 0)
    if rng.random() < 0.5:
        scene.refresher.refresh("view")
    actions = []
    for _ in range(rounds):
        scene.history.clear()
        for _ in range(rng.randint(1, 3)):
            scene.run(transaction(rng, tables))
        ((action, reason, *_),) = scene.shop.execute("call gdq.refresh('view')")
        assert scene.differences(query, target) == ([], []), (action, reason, query, *scene.history)
        actions.append(action)
    scene.drop("view")
    return actions


@pytest.mark.long
@pytest.mark.parametrize("name", [name for name, shape in SHAPES.items() if shape.base is None])
def test_shape(scene: Scene, name: str) -> None:
    shape, rng = SHAPES[name], random.Random(f"{SEED} {name} call")
    scene.run(fill(rng))
    followed = shape.incremental and name not in IN_FULL
    # most changes may move the value of a subquery, an average, which takes a full load
    turns = (called(scene, shape.query, shape.tables, rng) for _ in range(PATIENCE if followed else 1))
    assert any("delta" in actions for actions in turns) or not followed


@pytest.mark.parametrize("name", SOME)
def test_some_shapes(scene: Scene, name: str) -> None:
    shape, rng = SHAPES[name], random.Random(f"{SEED} {name} some")
    scene.run(fill(rng))
    assert "delta" in called(scene, shape.query, shape.tables, rng)


@pytest.mark.long
def test_random_queries(scene: Scene) -> None:
    for number in range(RANDOM):
        rng = random.Random(f"{SEED} random {number} call")
        scene.run(fill(rng))
        called(scene, RandomView(rng).query(), TABLES, rng, 3)


@pytest.mark.parametrize("name", SOME)
def test_many_changes(scene: Scene, name: str) -> None:
    """More than a plan for few can take, and as many keys."""
    query, most = SOME[name], 3 * FEW
    scene.run(fill(random.Random(SEED)))
    target = scene.view("view", query)
    set_view_audit(scene.shop.connection, "view", 0)
    scene.refresher.refresh("view")
    numbers = f"generate_series(1000, {1000 + most}) i"
    changes = [
        f"insert into item select i, i % 7, i, i, i % 2 = 0, i, 'a' from {numbers}",
        f"insert into fact select i, i % 5, 'b' || i, i, i from {numbers}",
        f"insert into dim select i, i % 5, 'c' || i from {numbers}",
        f"insert into part select i, i % 3, i, i, 'd' from {numbers}",
        "update item set amount = amount + 1 where id >= 1000",
        "update fact set qty = qty + 1 where k >= 1000",
        "delete from item where id > 1000 and id % 2 = 0",
        "delete from fact where k % 3 = 0",
    ]
    for change in changes:
        scene.run([change])
        ((action, reason, *_),) = scene.shop.execute("call gdq.refresh('view')")
        assert action in ("delta", "none"), (change, reason)
        assert scene.differences(query, target) == ([], []), change


def test_changes_of_any_tables_of_a_wide_join(scene: Scene) -> None:
    """There is no statement for each set of so many tables; none is passed over."""
    names = "abcdefgh"
    for name in names:
        scene.run([f"create table wide_{name} (id int primary key, v int)"])
        scene.run([f"insert into wide_{name} select i, i from generate_series(1, 9) i"])
        scene.shop.capture(f"wide_{name}")
    listed = ", ".join(f"sum({name}.v) as {name}" for name in names)
    joined = " join ".join([f"wide_{names[0]} as a", *(f"wide_{name} as {name} using (id)" for name in names[1:])])
    query = f"select id % 3 as part, {listed} from {joined} group by id % 3"
    target = scene.view("wide", query)
    set_view_audit(scene.shop.connection, "wide", 0)
    draw, actions = random.Random(4), []
    for size in (1, 2, 2, 3, 5, 8):
        scene.run([f"update wide_{name} set v = v + 10 where id <= 4" for name in draw.sample(names, size)])
        ((action, *_),) = scene.shop.execute("call gdq.refresh('wide')")
        assert scene.differences(query, target) == ([], []), size
        actions.append(action)
    assert actions[:3] == ["delta"] * 3


def test_values_of_any_type(scene: Scene) -> None:
    """Some types are arrays by another name."""
    for statement in (
        "create domain several as int[]",
        "create type pair as (a int[], b text)",
        """create table of_types (id int, o oidvector, i int2vector, d several, c pair, r int4range, m int4multirange,
                                  b box, f float8, j json, t text[], n name, e mood, v bit varying)""",
    ):
        scene.run([statement])
    scene.shop.capture("of_types")
    values = """'1 2 3', '4 5', '{1,2}', '("{1,2}","a,b")', '[1,5)', '{[1,2),[5,6)}', '(1,1),(0,0)', 0.1, '{"a":  1}',
                '{x,NULL}', 'name', 'sad', '101'"""
    query = "select * from of_types where id > 0"
    target = scene.view("typed", query)
    set_view_audit(scene.shop.connection, "typed", 0)
    for change in (
        f"insert into of_types values (1, {values}), (2, {values}), (2, {values}), (0, {values})",
        "insert into of_types (id) values (3), (3)",
        "update of_types set o = '7', d = '{}', c = null, f = '-0' where id = 2",
        "delete from of_types where id = 3",
    ):
        scene.run([change])
        ((action, reason, *_),) = scene.shop.execute("call gdq.refresh('typed')")
        assert action == "delta", reason
        rows = (scene.shop.execute(f"select q::text from ({text}) q order by 1") for text in (query, f"table {target}"))
        assert len({str(row) for row in rows}) == 1, change
