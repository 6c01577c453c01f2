"""Refreshes of all shapes of views run nobody's code, and all their SQL is sent under a pinned path or with schemas."""

from __future__ import annotations

import random
from collections.abc import Iterator

import pytest
from psycopg import sql

from gdq.consumers.refresh.refresher import Refresher
from gdq.consumers.refresh.verify import verify_with
from gdq.view.view import create_view
from tests.support.qualified import watched_statements
from tests.support.server import Database
from tests.support.spark import QUEUE, Shop, make_shop
from tests.support.traps import set_better_traps, set_traps, sprung
from tests.support.view_churn import fill, transaction
from tests.support.view_grammar import CAPTURE, SCHEMA, SHAPES, TABLES

ALONE = {name: shape for name, shape in SHAPES.items() if shape.base is None}
ROUNDS = 2

# All shapes take a minute; each run of the short tests takes every fourth.
PARTS = [pytest.param(part, marks=[pytest.mark.long] if part else []) for part in range(4)]


@pytest.fixture
def scene(db: Database) -> Iterator[Shop]:
    """The tables of the grammar, and traps wherever a name without a schema could be looked up."""
    for shop in make_shop(db, [*SCHEMA, *CAPTURE]):
        for statement in fill(random.Random(1)):
            shop.execute(statement)
        yield shop


def trap(db: Database) -> None:
    """Traps in a schema before pg_catalog in everybody's path, and in that of the tables."""
    set_traps(db)
    set_better_traps(db)
    with db.connect("su") as su:
        path = "alter database {} set search_path = evil, public, pg_catalog"
        su.execute(sql.SQL(path).format(sql.Identifier(db.name)))


@pytest.mark.long
@pytest.mark.server
@pytest.mark.parametrize("part", PARTS)
def test_refreshes_of_all_shapes(scene: Shop, part: int) -> None:
    """Each shape is made, loaded, refreshed from changes and verified between traps, with all statements looked at."""
    rng = random.Random(2)
    shapes = dict([*ALONE.items()][part :: len(PARTS)])
    for name, shape in shapes.items():
        assert create_view(scene.connection, name, QUEUE, shape.query, f"public.t_{name}", engine="postgres")
    scene.execute("set search_path = pg_catalog, public")
    trap(scene.db)
    with Refresher(scene.db.dsn) as refresher, watched_statements() as sent:
        for _ in range(ROUNDS + 1):
            for name in shapes:
                refresher.refresh(name)
            for statement in transaction(rng, TABLES):
                scene.execute(statement)
        differing = [name for name in shapes if not verify_with(refresher, name).equal]
    assert sprung(scene.db) == []
    assert differing == []
    assert sent.seen > 20 * len(shapes)
    assert sent.loose == {}
