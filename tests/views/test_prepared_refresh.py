"""A view that a process has refreshed before is refreshed again in one transaction, by prepared statements."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager, suppress

import pytest

from gdq.consumers.refresh.refresher import Refresher
from gdq.consumers.refresh.view_refresh import RefreshPoint
from gdq.view.view import create_view, set_view_audit, view_history
from tests.support.spark import Shop
from tests.views.test_few_changes import VIEWS, check, loaded, shop, texts, write

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
                assert points == ["begun", "applied", "committed", "done"], name
            points.clear()
            check(shop, refresher, {name: VIEWS[name]}, ("none",))
            assert points == []
            shop.execute("delete from sale where id >= 200")
        assert [run.kind for run in view_history(shop.connection, "v_sums", 5)] == [
            "none",
            *["incremental"] * 3,
            "full",
        ]


@pytest.mark.parametrize("point", ["begun", "applied"])
def test_a_refresh_that_dies_leaves_nothing(loaded: tuple[Shop, Refresher], point: RefreshPoint) -> None:
    shop, refresher = loaded
    draw = random.Random(11)
    write(shop, draw)
    check(shop, refresher)

    def die(at: RefreshPoint) -> None:
        if at == point and armed:
            raise KeyboardInterrupt

    armed: list[bool] = []
    with Refresher(shop.db.dsn, at=die) as dying:
        for name in VIEWS:
            dying.refresh(name)
        write(shop, draw)
        before = {name: (texts(shop, f"select * from {name}"), position_of(shop, name)) for name in VIEWS}
        armed.append(True)
        for name in VIEWS:
            with suppress(KeyboardInterrupt):
                dying.refresh(name)
                assert dying.refresh(name).action == "none"
                continue
            assert (texts(shop, f"select * from {name}"), position_of(shop, name)) == before[name]
    check(shop, refresher)


def position_of(shop: Shop, name: str) -> str:
    ((found,),) = shop.execute("select position from gdq_target.position where view = %s", name)
    return str(found)


def test_changes_during_a_refresh_belong_to_the_next(loaded: tuple[Shop, Refresher]) -> None:
    shop, _ = loaded
    draw = random.Random(12)

    def interfere(at: RefreshPoint) -> None:
        if at == "begun":
            write(shop, draw)
            shop.keep_house()

    with Refresher(shop.db.dsn, at=interfere) as busy, Refresher(shop.db.dsn) as quiet:
        for name, query in VIEWS.items():
            busy.refresh(name)
            for _ in range(3):
                write(shop, draw)
                assert busy.refresh(name).action == "delta"
            check(shop, quiet, {name: query}, ("delta", "none"))


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
