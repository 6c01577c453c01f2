"""Values of subqueries that a view's function keeps: they are read again only where changes may have reached them."""

from __future__ import annotations

import random
from collections.abc import Iterator

import pytest

from gdq.consumers.refresh.refresher import Refresher
from gdq.consumers.views import compiled_steps
from gdq.plan.steps import NO_NUMBER
from gdq.view.view import set_view_audit, view_history
from tests.support.server import Database
from tests.support.spark import Shop, make_shop

pytestmark = pytest.mark.server

ROWS = 3000
VIEWS = {
    # another table's value; an extreme of sums of the view's own table; two values, one of which is often NULL
    "above": "select a.id, a.n from account a where a.n > (select avg(r.v) from rate r where r.v > 10)",
    "best": """select o.id, s.total from owner o join (select owner, sum(n) as total from account group by owner) s
                 on s.owner = o.id
                where s.total = (select max(q.total)
                                   from (select owner, sum(n) as total from account group by owner) q)""",
    # groups inside the query, of which some show nothing, and one is of NULL
    "grouped": """select o.id, s.n, s.total, s.price from owner o
                    join (select owner, count(*) as n, sum(n) as total, avg(price) as price from account
                           where n > 1 group by owner having count(*) > 1 or sum(n) > 20) s on s.owner = o.id""",
    "between": """select a.owner, count(*) as n, sum(a.n) as total from account a
                   where a.n >= (select min(r.v) from rate r) or a.n < (select max(r.v) from rate r where r.v < 0)
                   group by a.owner""",
}


@pytest.fixture
def shop(db: Database) -> Iterator[Shop]:
    statements = [
        "create table owner (id int primary key)",
        "create table account (id int primary key, owner int, n int, price numeric(9, 2))",
        "create table rate (id int primary key, v numeric)",
        "insert into owner select i from generate_series(1, 300) i",
        f"insert into account select i, 1 + i % 300, i % 40, i % 7 from generate_series(1, {ROWS}) i",
        f"insert into rate select i, i % 37 from generate_series(1, {ROWS}) i",
        "create index on account (owner)",
        "analyze",
    ]
    for shop in make_shop(db, statements):
        for table in ("owner", "account", "rate"):
            shop.capture(table)
        with Refresher(db.dsn) as refresher:
            for name, query in VIEWS.items():
                shop.view(name, query, engine="postgres")
                set_view_audit(shop.connection, name, 0)
                refresher.refresh(name)
        yield shop


def call(shop: Shop, name: str, change: str) -> tuple[str, int]:
    """What a CALL did after a change, and how many rows it read; the view equals its query then."""
    shop.execute(change)
    ((action, reason, *_),) = shop.execute("call gdq.refresh(%s)", name)
    assert shop.differences(name, VIEWS[name]) == (0, 0), (change, reason)
    assert reason is None or "value of a subquery" in reason
    return action, int(view_history(shop.connection, name, 1)[0].rows_read or 0)


def test_a_value_is_read_once(shop: Shop) -> None:
    first, second = (call(shop, "above", f"update account set n = n + 9 where id = {n}") for n in (5, 6))
    assert (first[0], second[0]) == ("delta", "delta")
    assert first[1] >= ROWS > 100 > second[1]
    # the average changes, and the view with it
    assert call(shop, "above", "insert into rate values (10001, 1000000)")[0] == "full"
    assert call(shop, "above", "update account set n = 2000 where id = 7")[0] == "delta"
    # it was read again after the load
    assert call(shop, "above", "update account set n = 2001 where id = 7")[1] < 100


def test_what_the_view_shows_of_a_value_is_not_read_from_tables(shop: Shop) -> None:
    call(shop, "best", "insert into account values (10001, 7, 500)")
    action, read = call(shop, "best", "update account set n = n + 1 where id = 4")
    assert (action, read < 100) == ("delta", True)
    # a full load keeps no value, and the view has no row that shows it
    call(shop, "best", "delete from owner")
    assert call(shop, "best", "update account set n = n + 1000 where id = 9")[0] == "full"
    action, read = call(shop, "best", "update account set n = n + 1 where id = 4")
    assert (action, read > ROWS) == ("delta", True)
    call(shop, "best", "insert into owner values (10)")


def test_groups_are_read_once(shop: Shop) -> None:
    action, read = call(shop, "grouped", "update account set n = n + 1 where id = 4")
    # the owners, and the ten accounts of one once
    assert (action, read < 300 + 20) == ("delta", True)
    # a group comes, goes, and is NULL
    for change in (
        "insert into account values (10001, 1000, 9, 1), (10002, null, 9, 1); insert into owner values (1000)",
        "update account set owner = null where id in (5, 6)",
        "update account set n = 30, price = null where owner = 1000",
        "delete from account where owner = 1000 or owner = 17",
        "update account set price = 'NaN' where id = 7",
        "update account set n = n + 1 where owner = (select owner from account where id = 7)",
        "update account set price = 4 where id = 7",
    ):
        shop.execute(change)
        ((action, reason, *_),) = shop.execute("call gdq.refresh('grouped')")
        assert shop.differences("grouped", VIEWS["grouped"]) == (0, 0), change
        came = "'NaN'" in change or reason == NO_NUMBER
        assert action == ("full" if came else "delta"), (change, reason)


def test_an_extreme_is_followed(shop: Shop) -> None:
    call(shop, "best", "insert into account values (10001, 7, 500)")
    assert call(shop, "best", "update account set n = n + 1 where id = 4")[0] == "delta"
    action, read = call(shop, "best", "update account set n = n - 1 where id in (4, 5)")
    assert action == "delta"
    assert read < 500
    # the greatest sum went, another came, and equal ones
    assert call(shop, "best", "delete from account where id = 10001")[0] == "full"
    call(shop, "best", "insert into account values (10001, 7, 500), (10002, 8, 500)")
    assert call(shop, "best", "update account set n = n where owner = 7")[0] in ("delta", "none")


def churn(shop: Shop, rounds: int) -> set[str]:
    """What calls did to the views after random changes, also to NULL and back."""
    draw, actions = random.Random(3), set()
    for _ in range(rounds):
        number = draw.randint(1, 12)
        change = draw.choice(
            (
                f"update account set n = {draw.randint(0, 600)} where id = {number}",
                f"update account set owner = {number} where id = {draw.randint(1, 99)}",
                f"update account set price = {number} / 4.0 where owner = {number}",
                f"delete from account where id = {number}",
                f"insert into account values ({number}, {number}, {number}) on conflict do nothing",
                f"update rate set v = {draw.choice(('0', '5', '36', '-4', 'null'))} where id = {number}",
                f"begin; update rate set v = 3 where id = 1; update account set n = 8 where id = {number}; commit",
                "delete from rate where v < 0",
            )
        )
        for name in VIEWS:
            actions.add(call(shop, name, change)[0])
            change = "select"
    return actions


def test_values_under_random_changes(shop: Shop) -> None:
    assert {"delta", "full"} <= churn(shop, 60)


def test_an_extreme_that_is_not_followed_is_caught(shop: Shop, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiled_steps, "extreme_after", lambda _kind, held, *_: held)
    with Refresher(shop.db.dsn) as refresher:
        # DDL makes the view's functions anew
        shop.execute("alter table account add column more int")
        refresher.refresh("best")
    call(shop, "best", "update account set n = n + 1 where id = 4")
    with pytest.raises(AssertionError):
        call(shop, "best", "insert into account values (10001, 7, 5000)")
