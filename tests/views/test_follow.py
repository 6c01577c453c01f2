"""`gdq refresh --follow` as a process of its own: what wakes it, what does not, and how it ends."""

from __future__ import annotations

import json
import signal
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from gdq.consumers.refresh import follow
from gdq.consumers.refresh.refresher import Refresher
from tests.support.programs import gdq, start_gdq
from tests.support.spark import Shop
from tests.support.waiting import SECONDS, until

QUERY = "select id, n from orders where n > 4"
SUMS = "select status, count(*) as rows, sum(n) as n from orders group by status"


@pytest.fixture
def viewed(shop: Shop) -> Shop:
    """Two views inside PostgreSQL, one of them over a table of its own."""
    shop.execute("select gdq.set_queue('q', ticker_max_lag => '50 ms', ticker_idle_period => '200 ms')")
    shop.capture("orders")
    shop.execute("create table quiet (id int primary key)")
    shop.capture("quiet")
    shop.view("v", QUERY, engine="postgres")
    shop.view("still", "select id from quiet", engine="postgres")
    return shop


@contextmanager
def following(shop: Shop, *arguments: str) -> Iterator[subprocess.Popen[str]]:
    with start_gdq("refresh", "--follow", *arguments, "--interval", "0.1", dsn=shop.db.dsn) as process:
        try:
            yield process
        finally:
            if process.poll() is None:
                process.kill()


def runs(shop: Shop, view: str) -> list[str]:
    return [action for (action,) in shop.execute(f"select action from gdq.view_history('{view}') order by started_at")]


def ended(process: subprocess.Popen[str]) -> tuple[str, str]:
    process.send_signal(signal.SIGTERM)
    out, err = process.communicate(timeout=SECONDS)
    assert process.returncode == 0, err
    return out, err


def test_changes_arrive_and_a_view_without_any_is_left_alone(viewed: Shop) -> None:
    """Nobody else ticks; the ticks of refreshes, of the idle queue and of other tables wake no view."""
    with following(viewed, "--json") as process:
        until(lambda: runs(viewed, "v") == runs(viewed, "still") == ["full"])
        for seed in range(3):
            viewed.execute(f"update orders set n = n + 1 where mod(id, 3) = {seed}")
            until(lambda: viewed.differences("v", QUERY) == (0, 0) and None not in runs(viewed, "v"))
        seen = runs(viewed, "v")
        (before,) = viewed.execute("select max(tick_id) from gdq.tick where not refresh")
        until(lambda: viewed.execute("select max(tick_id) - 4 from gdq.tick where not refresh") > [before])
        assert runs(viewed, "v") == seen
        assert set(seen[1:]) == {"delta"}
        assert runs(viewed, "still") == ["full"]
        viewed.execute("insert into quiet values (1)")
        until(lambda: runs(viewed, "still") == ["full", "delta"])
        assert runs(viewed, "v") == seen
        out, err = ended(process)
    assert err == ""
    told = [json.loads(line) for line in out.splitlines()]
    assert [row["action"] for row in told if row["view_name"] == "still"] == ["full", "delta"]
    assert [row["action"] for row in told if row["view_name"] == "v"] == seen
    assert viewed.execute("select count(*) from gdq.view_run where finished_at is null") == [(0,)]
    assert viewed.execute("select count(*) from pg_locks where locktype = 'advisory'") == [(0,)]


@pytest.mark.long
def test_failing_view_stops_no_other_and_is_tried_again(viewed: Shop) -> None:
    viewed.execute("delete from orders where n = 0")
    viewed.view("shares", "select id, 100 / n as share from orders", engine="postgres")
    with following(viewed) as process:
        until(lambda: runs(viewed, "shares") == ["full"])
        viewed.execute("insert into orders (id, n) values (-1, 0)")
        until(lambda: runs(viewed, "shares").count("failed") == 2)
        viewed.execute("insert into orders (id, n) values (-2, 7)")
        until(lambda: viewed.differences("v", QUERY) == (0, 0))
        viewed.execute("update orders set n = 5 where id = -1")
        until(lambda: runs(viewed, "shares")[-1] in {"full", "delta"})
        tries = runs(viewed, "shares").count("failed")
        out, err = ended(process)
    assert viewed.differences("shares", "select id, 100 / n as share from orders") == (0, 0)
    assert err.splitlines() == ["Error: view shares: division by zero"] * tries
    assert tries < 10
    assert "v: delta, 1 rows changed in " in out


def test_view_without_changes_moves_on_now_and_then(viewed: Shop, monkeypatch: pytest.MonkeyPatch) -> None:
    """Else its position would hold logs."""
    told: list[tuple[str, str]] = []
    monkeypatch.setattr(follow, "IDLE_SECONDS", 0)
    with Refresher(viewed.db.dsn) as refresher:
        follower = follow.Follower(
            refresher,
            ["still"],
            interval=0.05,
            report=lambda result: told.append((result.view_name, result.action)),
            failed=lambda name, error: pytest.fail(f"{name}: {error}"),
        )
        follower.run(lambda: len(told) == 3)
    assert told == [("still", "full"), ("still", "none"), ("still", "none")]


@pytest.mark.long
def test_lost_connection_new_views_and_names(viewed: Shop) -> None:
    named: Any = gdq("refresh", "--follow", "v", "nothing", dsn=viewed.db.dsn)
    assert (named.returncode, named.stderr.splitlines()[0]) == (1, 'Error: view "nothing" does not exist')
    assert gdq("refresh", "--follow", "--full", dsn=viewed.db.dsn).returncode == 2
    with following(viewed) as process, following(viewed, "still") as other:
        until(lambda: "full" in runs(viewed, "v"))
        with viewed.db.connect("su") as su:
            su.execute("select pg_terminate_backend(pid) from pg_stat_activity where application_name ~ '^gdq:refresh'")
        viewed.view("later", SUMS, engine="postgres")
        until(lambda: "full" in runs(viewed, "later"))
        viewed.execute("update orders set n = 5")
        for name, query in (("v", QUERY), ("later", SUMS)):
            until(lambda name=name, query=query: viewed.differences(name, query) == (0, 0))  # type: ignore[misc]
        assert "connection lost" in ended(process)[1]
        assert "v:" not in ended(other)[0]
