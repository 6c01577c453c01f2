"""Views of several tables on Spark: what looks the same to a plan and is not, and what Spark leaves running."""

from __future__ import annotations

from collections.abc import Iterator
from threading import Thread
from typing import TYPE_CHECKING

import pytest

from gdq.consumers.refresh.refresher import Refresher
from gdq.consumers.spark.jobs import own_jobs
from gdq.plan.spark.keys import SparkKeyPlan
from gdq.view.view import explain_view
from tests.support.server import Database
from tests.support.spark import QUEUE, SPARK_MARKS, Shop, make_shop

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

pytestmark = SPARK_MARKS

TABLES = ("x", "y", "z", "m", "p")

# One view of many: each part is led astray in its own way.
PARTS = {
    "pairs": """select 'anti'::text as part, x.id, y.id as other from x cross join y
                 where not exists (select from z where z.k = x.k and z.b = y.b)
                union all select 'left', x.id + coalesce(z.id, 0), y.id from x cross join y
                  left join z on z.k = x.k and z.b = y.b
                union all select 'chain', x.id, y.id from x join m m1 on m1.a = x.m join m m2 on m2.a = m1.b
                  join y on y.m = m2.b left join z on z.k = x.k and z.b = y.b
                union all select 'case', x.id, case when x.k = 1 then x.id when y.b > 7 then y.m else y.id end
                  from x join y on y.m = x.m""",
    "kept": """select x.k, max(p.price) as price, min(p.took) as took, count(distinct p.price) as prices, max(p.r) as r
                 from x join p on p.k = x.k group by x.k""",
    "differ": "select distinct x.k, p.price, p.took from x join p on p.k = x.k",
    "groups": "select p.price, count(*) as n, sum(x.id) as total from x join p on p.k = x.k group by p.price",
}

PADDED_KEYS = (
    "select x.id, w.id as w from x left join y on y.m = x.m left join p w on w.k = coalesce(y.b, 0)",
    "select x.id, w.id as w from x left join y on y.m = x.m left join p w on w.k = case when y.b is null then 0 end",
    "select x.id from x left join y on y.m = x.m where coalesce(y.b, 0) in (select p.k from p)",
)


@pytest.fixture
def shop(db: Database) -> Iterator[Shop]:
    statements = [
        "create table x (id int primary key, k int, m int)",
        "create table y (id int primary key, b int, m int)",
        "create table z (id int primary key, k int, b int)",
        "create table m (a int primary key, b int)",
        "create table p (id int primary key, k int, price numeric, took interval, r float8)",
        "insert into x values (1, 1, 1), (2, 2, 2), (3, null, 1)",
        "insert into y values (1, 8, 3), (2, 9, 3), (3, 8, 1)",
        "insert into z values (1, 1, 8)",
        "insert into m values (1, 2), (2, 3), (3, 4)",
        "insert into p values (1, 1, 1.0, '1 day', 0), (2, 2, 2.0, '24:00', '-0'), (3, 2, 3, '2 days', -1)",
        *(f"select gdq.add_table('{QUEUE}', '{table}')" for table in TABLES),
    ]
    yield from make_shop(db, statements)


@pytest.mark.long
def test_views_are_their_queries_to_the_letter(shop: Shop) -> None:
    """Each step changes one table alone, so that all else must be found by its keys; texts count, not values."""
    with Refresher(shop.db.dsn) as refresher:
        for name, query in PARTS.items():
            shop.view(name, query, engine="spark")
            refresher.refresh(name)
        steps = {
            "insert into y values (4, 7, 3), (5, 8, 1)": ["pairs"],
            "insert into x values (4, 2, 1); delete from x where id = 1": ["pairs"],
            "insert into z values (2, 2, 7); delete from z where id = 1": ["pairs"],
            # what is written anew is equal to what was there
            """update p set price = 1.00, took = '24:00:00', r = '-0' where id = 1;
               insert into x values (5, 1, null);
               update p set price = 2, took = '1 day', r = 0 where id = 2""": ["kept", "differ", "groups"],
        }
        for step, views in steps.items():
            shop.execute(step)
            for name in views:
                result = refresher.refresh(name)
                assert result.action == "delta", (name, result.reason)
                found = shop.execute(f"select t::text from {name} as t order by 1")
                assert found == shop.execute(f"select q::text from ({PARTS[name]}) as q order by 1"), (name, step)


@pytest.mark.long
def test_spellings_side_by_side_are_one_group(shop: Shop) -> None:
    shop.execute("update p set k = 2, price = 2.000 where id = 1; update p set price = 2.00 where id = 3")
    names = ["kept", "groups"]
    with Refresher(shop.db.dsn) as refresher:
        for name in names:
            shop.view(name, PARTS[name], engine="spark")
        shop.check(refresher, {name: PARTS[name] for name in names})
        shop.execute("insert into x values (6, 2, null)")
        results = shop.check(refresher, {name: PARTS[name] for name in names})
    # which spelling a group shows does not change with the order of its rows: the target would not hold what goes
    assert {result.action for result in results.values()} == {"delta"}


def test_keys_that_padded_rows_would_have_are_not_joined(shop: Shop) -> None:
    for query in PADDED_KEYS:
        plan = explain_view(shop.connection, QUEUE, query, engine="spark")
        assert isinstance(plan, SparkKeyPlan), query
        assert "spark-condition" in plan.refused, query


def test_no_task_outlives_its_refresh(spark: SparkSession) -> None:
    """A stage that an empty table makes needless runs on after the result is there, if Spark did not begin with it."""
    tracker, bus = spark.sparkContext.statusTracker(), spark.sparkContext._jsc.sc().listenerBus()
    slow = "select id, reflect('java.lang.Thread', 'sleep', 100L + id * 0) as s from range(0, 24, 1, 6)"
    none = "select id from range(0, 4, 1, 1) where id + rand(1) * 0 > 9"
    joined = f"select /*+ merge(a, b) */ b.id from ({none}) b join ({slow}) a on a.id = b.id and a.s is null"
    for _ in range(50):
        with own_jobs(spark):
            assert spark.sql(joined).toArrow().num_rows == 0
            bus.waitUntilEmpty()
            ran_on = bool(tracker.getActiveJobsIds())
        assert not tracker.getActiveJobsIds()
        assert spark.sparkContext.getLocalProperty("spark.jobGroup.id") is None
        if ran_on:
            break
    else:
        pytest.fail("no stage ran on")


def test_refreshes_in_threads_take_turns(spark: SparkSession) -> None:
    """Temporary views and settings of a session are one refresh's at a time."""
    order: list[str] = []

    def other() -> None:
        with own_jobs(spark):
            order.append("second")

    def fails() -> None:
        with own_jobs(spark):
            thread.start()
            thread.join(0.3)
            with own_jobs(spark):
                order.append("first")
            raise ZeroDivisionError

    thread = Thread(target=other)
    with pytest.raises(ZeroDivisionError):
        fails()
    thread.join(60)
    assert order == ["first", "second"]
