"""Refreshes on Spark: the view equals its query, whatever happens in between."""

from __future__ import annotations

import json
import random
import signal
import threading
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psycopg
import pytest
from click.testing import CliRunner
from psycopg.conninfo import conninfo_to_dict, make_conninfo

from gdq.cli import main
from gdq.consumer import consumer_info
from gdq.consumers.refresh.refresher import Refresher
from gdq.consumers.refresh.verify import verify_with
from gdq.consumers.refresh.view_refresh import RefreshPoint
from gdq.errors import DivergedPosition, GdqError, RefreshConflict, StaleBatch
from gdq.view.view import view_info
from tests.support.server import Database
from tests.support.spark import PROJECTION, QUEUE, SPARK_MARKS, SUMS, Shop, change, staging_and_position
from tests.support.waiting import SECONDS, until
from tests.views.test_follow import following, runs

pytestmark = SPARK_MARKS

BAG = "select status, note from orders"
CTES = """with o as (select status, n, amount from orders where n < 9),
               s as (select status, sum(amount) as a from o group by 1)
          select o.status, s.a, count(*) as orders, max(o.n) as n from o join s on s.status = o.status group by 1, 2"""
CTE = "with o as (select id, status, n from orders where n < 9) select status, count(*), sum(n) as n from o group by 1"
FLOATS = "select status, sum(ratio) as ratio, count(*) as rows from orders group by status"
VIEWS = {"projection": PROJECTION, "bag": BAG, "sums": SUMS, "floats": FLOATS, "cte": CTE, "ctes": CTES}
# One that is computed by groups, one that is joined.
SOME = {name: VIEWS[name] for name in ("sums", "ctes")}
SHAPES = [
    pytest.param(2**24, SOME, id="some"),
    pytest.param(2**24, VIEWS, id="driver", marks=pytest.mark.long),
    pytest.param(0, VIEWS, id="staged", marks=pytest.mark.long),
]


@pytest.mark.parametrize(("driver_bytes", "views"), SHAPES)
def test_every_shape_stays_equal(shop: Shop, driver_bytes: int, views: dict[str, str]) -> None:
    shop.capture("orders")
    for name, query in views.items():
        shop.view(name, query)
    with Refresher(shop.db.dsn, driver_bytes=driver_bytes) as refresher:
        first = shop.check(refresher, views)
        assert {result.action for result in first.values()} == {"full"}
        change(shop, 1)
        shop.keep_house()
        results = shop.check(refresher, views)
        # a sum that NaN came into is no sum any more
        full = {name: result.reason for name, result in results.items() if result.action != "delta"}
        assert full == dict.fromkeys(("sums", "ctes"), "NaN or infinity came into or went from a sum")
        # Nothing, or nothing in the end, has changed.
        shop.execute("update orders set note = note")
        shop.execute("begin; delete from orders; rollback")
        assert all(result.rows_changed == 0 for result in shop.check(refresher, views).values())
        assert {result.action for result in shop.check(refresher, views).values()} == {"none"}
        shop.execute("truncate orders")
        shop.execute("insert into orders (id, status) values (1, null)")
        results = shop.check(refresher, views)
        assert {result.reason for result in results.values()} == {"truncate of public.orders"}
    assert staging_and_position(shop) == ["position"]


@pytest.mark.parametrize("query", [BAG, CTES], ids=["joined", "by key"])
def test_nothing_changed_needs_no_spark(shop: Shop, query: str, monkeypatch: pytest.MonkeyPatch) -> None:
    shop.capture("orders")
    shop.view("still", query)
    with Refresher(shop.db.dsn) as refresher:
        refresher.refresh("still")
    # a Refresher of its own, which finds no Spark: it must not look for one
    monkeypatch.setattr("gdq.consumers.spark.session.start_run", None)
    with Refresher(shop.db.dsn) as refresher:
        assert verify_with(refresher, "still").equal
        assert refresher.refresh("still").action == "none"


@pytest.mark.long
def test_view_of_an_older_version_is_loaded_in_full_once(shop: Shop) -> None:
    """Stored as the user wrote it, names without a schema, without the option `planner`."""
    shop.execute("create schema own; alter table orders set schema own; set search_path = own, public")
    shop.capture("own.orders")
    query = "select status, count(*), sum(n) as n from orders group by status"
    kept = "select current_setting('search_path'), current_setting('timezone'), current_setting('datestyle')"
    ((path, zone, style),) = shop.execute(kept)
    options = {"search_path": path, "timezone": zone, "datestyle": style, "source": str(uuid.uuid4())}
    arguments = ("old", QUEUE, query, '"public"."old"', json.dumps(options))
    shop.execute("select gdq.create_view(%s, %s, %s, %s, array['own.orders'::regclass], %s)", *arguments)
    shop.execute("reset search_path")
    (info,) = view_info(shop.connection, "old")
    assert (info.engine, info.definition) == ("spark", query)
    with Refresher(shop.db.dsn) as refresher:
        assert refresher.refresh("old").reason == "first load"
        shop.execute("update gdq_target.position set plan = 'of the older version'")
        shop.execute("update own.orders set status = 'changed' where id % 7 = 1")
        assert refresher.refresh("old").reason == "the plan has changed"
        shop.execute("update own.orders set n = n + 1, status = null where id % 11 = 2")
        assert refresher.refresh("old").action == "delta"
        assert verify_with(refresher, "old").equal
    assert shop.differences("old", query.replace("orders", "own.orders")) == (0, 0)
    explained = CliRunner().invoke(main, ["explain-view", "old", "--dsn", shop.db.dsn])
    assert (explained.exit_code, "way: joins" in explained.stdout) == (0, True)


@pytest.mark.long
def test_pk_modes(shop: Shop) -> None:
    shop.execute("create table narrow (like orders including all)")
    shop.execute("insert into narrow select * from orders")
    shop.capture("orders", mode="pk", include=["status", "amount", "n", "ratio"])
    shop.capture("narrow", mode="pk")
    views = {
        "recomputed": "select id, status, note, amount from orders where n <> 3",
        "grouped": """select status, n, count(*), sum(amount) as s, avg(ratio) as r
                        from orders where n < 9 group by status, n""",
        "by_key": "select id, upper(note) as note, n from narrow where n > 2",
    }
    for name, query in views.items():
        shop.view(name, query)
    with Refresher(shop.db.dsn) as refresher:
        shop.check(refresher, views)
        change(shop, 1)
        shop.execute("update narrow set id = id + 1000, n = n + 1 where mod(id, 3) = 0")
        shop.execute("delete from narrow where mod(id, 7) = 0")
        results = shop.check(refresher, views)
        assert {result.action for result in results.values()} == {"delta"}
        # What a group does not read leaves it alone.
        shop.execute("update orders set note = 'other'")
        assert refresher.refresh("grouped").rows_changed == 0


@contextmanager
def writers(shop: Shop, count: int) -> Iterator[list[int]]:
    """Threads that change orders in transactions of their own until the block ends; how many each has committed."""
    stop = threading.Event()
    done = [0] * count

    def write(number: int) -> None:
        rng = random.Random(number)
        with shop.db.connect() as connection:
            while not stop.is_set():
                own = rng.randrange(100) * count + number
                status = rng.choice(["a", "b", "c", None])
                with connection.transaction(force_rollback=rng.random() < 0.1):
                    connection.execute("update orders set status = %s, n = mod(n + 1, 10) where id = %s", [status, own])
                    with connection.transaction(force_rollback=rng.random() < 0.2):
                        connection.execute("delete from orders where id = %s", [own + 100 * count])
                    connection.execute(
                        """insert into orders (id, status, amount, ratio, n) values (%s, %s, 1.25, 0.5, 4)
                           on conflict (id) do update set amount = orders.amount + 1""",
                        [own + 200 * count, status],
                    )
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


@pytest.mark.long
def test_exact_under_load_with_rotation(shop: Shop) -> None:
    shop.capture("orders")
    for name, query in VIEWS.items():
        shop.view(name, query)
    with Refresher(shop.db.dsn) as refresher:
        with writers(shop, 3) as done:
            for _ in range(2):
                for name in VIEWS:
                    found = verify_with(refresher, name)
                    assert found.equal, found
                    shop.keep_house()
        assert min(done) > 10
        shop.check(refresher, VIEWS)


@pytest.mark.long
def test_view_that_max_bytes_cut_off_loads_in_full(shop: Shop) -> None:
    shop.capture("orders")
    shop.view("sums", SUMS)
    with Refresher(shop.db.dsn) as refresher:
        refresher.refresh("sums")
        change(shop, 1)
        shop.keep_house()
        shop.execute("select gdq.force_tick('q')")
        shop.execute("select gdq.set_queue('q', max_bytes => 1)")
        shop.keep_house()
        assert [info.resync for info in consumer_info(shop.connection)] == [["public.orders"]]
        shop.execute("select gdq.set_queue('q', max_bytes => 0)")
        change(shop, 2)
        result = shop.check(refresher, {"sums": SUMS})["sums"]
        assert (result.action, result.reason) == ("full", "the changes since the target's position are gone")
        assert [info.resync for info in consumer_info(shop.connection)] == [None]
        shop.execute("update orders set n = mod(n + 1, 10), amount = 2 where mod(id, 5) = 1 and amount <> 'NaN'")
        assert shop.check(refresher, {"sums": SUMS})["sums"].action == "delta"


@pytest.mark.long
def test_overtaken_refresh_changes_nothing(shop: Shop) -> None:
    shop.capture("orders")
    shop.view("sums", SUMS)
    other = Refresher(shop.db.dsn)
    points: list[RefreshPoint] = []

    def overtake(point: RefreshPoint) -> None:
        points.append(point)
        if points.count("staged") == 1 and point == "staged":
            with pytest.raises(psycopg.errors.LockNotAvailable, match=f"by pid {refresher.control.info.backend_pid}"):
                other.refresh("sums")
            refresher.control.execute("select pg_advisory_unlock_all()")  # fenced off all the same
            other.refresh("sums")

    with other, Refresher(shop.db.dsn, at=overtake) as refresher:
        with pytest.raises((RefreshConflict, StaleBatch)):
            refresher.refresh("sums")
        shop.check(refresher, {"sums": SUMS})


@pytest.mark.long
def test_target_that_somebody_changed_is_loaded_afresh(shop: Shop) -> None:
    shop.capture("orders")
    shop.view("bag", BAG)
    with Refresher(shop.db.dsn) as refresher:
        refresher.refresh("bag")
        shop.execute("delete from bag")
        shop.execute("delete from orders where n = 1")
        result = refresher.refresh("bag")
        assert result.action == "full"
        assert "changed by another" in str(result.reason)
        assert shop.differences("bag", BAG) == (0, 0)
        shop.execute("drop table bag")
        assert refresher.refresh("bag").reason == "the target table is gone"


@pytest.mark.long
def test_unknown_position_is_loaded_afresh(shop: Shop) -> None:
    shop.capture("orders")
    shop.view("bag", BAG)
    with Refresher(shop.db.dsn) as refresher:
        refresher.refresh("bag")
        shop.execute(
            "update gdq_target.position set position = regexp_replace(position, '(/[0-9]+/)[0-9a-f]{8}', '\\100000000')"
        )
        with pytest.raises(DivergedPosition, match="view bag: diverged") as error:
            refresher.refresh("bag")
        assert "gdq refresh --full bag" in str(error.value.hint)
        assert refresher.refresh("bag", full=True).action == "full"
        shop.execute("update gdq_target.position set position = 'queue/7/5f0c/700:700:'")
        assert "not a position" in str(refresher.refresh("bag").reason)
        shop.execute("alter table orders alter n type bigint")
        result = refresher.refresh("bag")
        assert (result.action, shop.differences("bag", BAG)) == ("full", (0, 0))


@pytest.mark.long
def test_row_that_cannot_be_computed_any_more(shop: Shop) -> None:
    query = "select id, 100 / n as share from orders where n <> 0"
    shop.execute("delete from orders where n = 0")
    shop.capture("orders")
    shop.view("shares", query.replace(" where n <> 0", ""))
    with Refresher(shop.db.dsn) as refresher:
        refresher.refresh("shares")
        shop.execute("insert into orders (id, n) values (-1, 0)")
        with pytest.raises(GdqError, match="division by zero"):
            refresher.refresh("shares")
        shop.execute("update orders set n = 5 where id = -1")
        result = refresher.refresh("shares")
        assert "cannot be computed" in str(result.reason)
        assert shop.differences("shares", query) == (0, 0)


@pytest.mark.long
def test_target_in_another_database(shop: Shop, empty_db: Database, tmp_path: Path) -> None:
    parameters: dict[str, Any] = dict(conninfo_to_dict(empty_db.dsn))
    passfile = tmp_path / "pgpass"
    passfile.touch(mode=0o600)
    passfile.write_text(f"*:*:*:*:{parameters.pop('password')}\n")
    dsn = make_conninfo("", **{**parameters, "passfile": str(passfile)})
    shop.execute("create type mood as enum ('sad', 'glad')")
    shop.execute("alter table orders add mood mood default 'glad'")
    shop.capture("orders")
    query = "select id, mood, amount from orders"
    shop.view("far", query, target_dsn=dsn)
    with Refresher(shop.db.dsn, driver_bytes=0) as refresher:
        refresher.refresh("far")
        change(shop, 1)
        assert refresher.refresh("far").action == "delta"
        assert verify_with(refresher, "far").equal
    with empty_db.connect() as connection:
        rows = connection.execute("select id, mood, amount from far order by id").fetchall()
        assert connection.execute("select to_regnamespace('gdq')").fetchone() == (None,)
    assert repr(rows) == repr(shop.execute("select id, mood::text, amount from orders order by id"))


@pytest.mark.long
def test_commands(shop: Shop) -> None:
    shop.capture("orders")
    shop.view("sums", SUMS)
    runner = CliRunner()
    assert runner.invoke(main, ["refresh", "--dsn", shop.db.dsn]).exit_code == 0
    shop.execute("begin; update orders set n = n + 1; commit")
    assert runner.invoke(main, ["verify-view", "sums", "--dsn", shop.db.dsn]).exit_code == 0
    shop.execute("update sums set count = count + 1 where status = 's1'")
    wrong = runner.invoke(main, ["verify-view", "sums", "--dsn", shop.db.dsn])
    assert wrong.exit_code == 3
    assert "differs" in wrong.stderr
    assert runner.invoke(main, ["refresh", "--full", "sums", "--dsn", shop.db.dsn]).exit_code == 0
    assert runner.invoke(main, ["verify-view", "sums", "--dsn", shop.db.dsn]).exit_code == 0
    assert runner.invoke(main, ["refresh", "nothing", "--dsn", shop.db.dsn]).exit_code == 1
    (held,) = shop.execute(f"select unread_events from gdq.consumer_info('{QUEUE}')")
    assert held == (0,)


@pytest.mark.long
def test_following_ends_well_by_ctrl_c(shop: Shop) -> None:
    """Spark would take the signal for itself."""
    shop.capture("orders")
    shop.view("sums", SUMS)
    with following(shop) as process:
        until(lambda: runs(shop, "sums") == ["full"])
        shop.execute("update orders set n = mod(n + 1, 10), amount = 2 where mod(id, 5) = 1")
        until(lambda: runs(shop, "sums")[-1] == "delta")
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=SECONDS)
    assert (process.returncode, "Error" in err, out.count("sums: ")) == (0, False, len(runs(shop, "sums")))
    assert shop.differences("sums", SUMS) == (0, 0)
