"""Views of every kind whose target is in another PostgreSQL: exactly the rows of their query, whatever is killed."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass

import psycopg
import pytest

from gdq.consumers.leader import without_password
from gdq.consumers.refresh import Point, Refresher
from gdq.consumers.verify import verify_view
from gdq.view import drop_view, view_info
from tests.fix_server import Database
from tests.fix_spark import Shop, make_shop
from tests.view_churn import fill, transaction
from tests.view_grammar import CAPTURE, SCHEMA, SHAPES, TABLES

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
ROUNDS = 4

pytestmark = pytest.mark.server


@dataclass(frozen=True, slots=True)
class Places:
    """The source, the database of the targets and how a view names that."""

    shop: Shop
    far: psycopg.Connection[tuple[object, ...]]
    far_dsn: str

    def view(self, name: str, query: str) -> None:
        self.shop.view(name, query, engine="postgres", target_dsn=self.far_dsn)

    def rows(self, name: str) -> list[tuple[object, ...]]:
        """The target's rows, each as PostgreSQL writes it and how often."""
        return self.far.execute(f"select t::text, count(*) from {name} t group by 1 order by 1").fetchall()

    def expected(self, query: str) -> list[tuple[object, ...]]:
        return self.shop.execute(f"select q::text, count(*) from ({query}) q group by 1 order by 1")

    def position(self, name: str) -> object:
        return self.far.execute("select position from gdq_target.position where view = %s", [name]).fetchone()


@pytest.fixture(scope="module")
def module_places(module_db: Database, module_empty_db: Database) -> Iterator[Places]:
    with without_password(module_empty_db.dsn) as dsn, module_empty_db.connect() as far:
        for shop in make_shop(module_db, [*SCHEMA, *CAPTURE]):
            yield Places(shop, far, dsn)


@pytest.fixture
def places(module_places: Places) -> Iterator[Places]:
    """Filled tables, without views."""
    module_places.shop.execute("; ".join(fill(random.Random(1))))
    yield module_places
    for info in view_info(module_places.shop.connection):
        drop_view(module_places.shop.connection, info.view_name)
        module_places.far.execute(f"drop table if exists {info.target}".encode())


def churn(places: Places, rng: random.Random) -> None:
    for _ in range(3):
        places.shop.execute("; ".join(transaction(rng, TABLES)))


def test_equal_to_the_query(places: Places) -> None:
    """Also while writers go on during the refresh; nothing of gdq is needed there."""
    for name in RULES:
        places.view(name, SHAPES[name].query)
    rng = random.Random(2)
    actions: dict[str, list[str]] = {name: [] for name in RULES}

    def at(point: Point) -> None:
        if point in ("exported", "staged"):
            places.shop.execute("; ".join(transaction(rng, TABLES)))

    with Refresher(places.shop.db.dsn, at=at) as busy, Refresher(places.shop.db.dsn) as refresher:
        for _ in range(ROUNDS):
            churn(places, rng)
            for name in RULES:
                found = verify_view(busy, name)
                assert found.equal, found
            results = {name: refresher.refresh(name) for name in RULES}
            for name, result in results.items():
                actions[name].append(result.action)
                assert places.rows(name) == places.expected(SHAPES[name].query), result
        assert {name for name in RULES if "delta" in actions[name]} == {
            n for n, rule in RULES.items() if rule != "full"
        }
        assert [refresher.refresh(name).action for name in RULES] == ["none"] * len(RULES)
    assert places.far.execute("select to_regnamespace('gdq')").fetchone() == (None,)
    assert places.far.execute("select count(*) from pg_class where relname like 'gdq_state%'").fetchone() == (0,)
