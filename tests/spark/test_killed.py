"""Refreshes on Spark that are ended, cut off or killed: the target has the old rows or the new ones."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from typing import get_args

import psycopg
import pytest

from gdq.consumers.refresh.refresher import Refresher
from gdq.consumers.refresh.view_refresh import RefreshPoint
from tests.support.endings import Deaths, Killed
from tests.support.spark import PROJECTION, SPARK_MARKS, STAGES, SUMS, Shop, change, staging_and_position

pytestmark = SPARK_MARKS


@pytest.mark.parametrize("driver_bytes", STAGES)
def test_ended_at_any_point(shop: Shop, driver_bytes: int) -> None:
    shop.capture("orders")
    views = {"projection": PROJECTION, "sums": SUMS}
    for name, query in views.items():
        shop.view(name, query)
    deaths = Deaths()

    with Refresher(shop.db.dsn, driver_bytes=driver_bytes, at=deaths) as refresher:
        for number, point in enumerate(get_args(RefreshPoint)):
            name = list(views)[number % 2]
            deaths.append(point)
            with pytest.raises(Killed):
                refresher.refresh(name)
            change(shop, number + 1)
            shop.keep_house()
        shop.check(refresher, views)
    assert staging_and_position(shop) == ["position"]
    failed = shop.execute("select count(*) from gdq.view_run where action = 'failed'")
    assert failed == [(len(get_args(RefreshPoint)),)]


@pytest.mark.parametrize(
    "point",
    [pytest.param("exported", marks=pytest.mark.long), pytest.param("staged", marks=pytest.mark.long), "applied"],
)
def test_connections_cut_off(shop: Shop, point: RefreshPoint) -> None:
    shop.capture("orders")
    shop.view("sums", SUMS)
    armed = [True]

    def cut(at: RefreshPoint) -> None:
        if at == point and armed:
            armed.clear()
            with shop.db.connect("su") as su:
                su.execute(
                    "select pg_terminate_backend(pid) from pg_stat_activity"
                    " where datname = current_database() and application_name like 'gdq:%'"
                )

    with Refresher(shop.db.dsn, at=cut) as refresher, pytest.raises(psycopg.OperationalError):
        refresher.refresh("sums")
    change(shop, 1)
    with Refresher(shop.db.dsn) as refresher:
        shop.check(refresher, {"sums": SUMS})


VICTIM = """
import sys
from gdq.consumers.refresh.refresher import Refresher

def at(point):
    print(point, flush=True)
    if point == "applied":
        sys.stdin.readline()

with Refresher(driver_bytes=0, at=at) as refresher:
    refresher.refresh("sums")
"""


@pytest.mark.long
def test_process_killed_before_the_target_commits(shop: Shop) -> None:
    shop.capture("orders")
    shop.view("sums", SUMS)
    environment = os.environ | {"GDQ_DSN": shop.db.dsn}
    with Refresher(shop.db.dsn, driver_bytes=0) as refresher:
        refresher.refresh("sums")
        before = shop.execute("select * from sums order by status")
        change(shop, 1)
        with subprocess.Popen(
            [sys.executable, "-c", VICTIM],
            env=environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            start_new_session=True,
        ) as victim:
            assert victim.stdout is not None
            assert "applied\n" in iter(victim.stdout.readline, "")
            os.killpg(victim.pid, signal.SIGKILL)
        assert len(staging_and_position(shop)) == 2
        assert shop.execute("select * from sums order by status") == before
        shop.check(refresher, {"sums": SUMS})
    assert staging_and_position(shop) == ["position"]
