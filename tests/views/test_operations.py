"""What surrounds a refresh: its history, the lock of a view, views over views, and how fresh they are."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from typing import Any

import pytest

from gdq.consumers.refresh.groups import refresh_groups
from gdq.consumers.refresh.refresher import Refresher
from gdq.errors import GdqError
from gdq.monitor.status import status
from gdq.view.view import create_view, view_changed, view_history
from tests.support.programs import environment, gdq
from tests.support.spark import Shop
from tests.support.views import VIEWED


def rows(shop: Shop, *arguments: str) -> list[dict[str, Any]]:
    done = gdq(*arguments, "--json", dsn=shop.db.dsn)
    assert done.returncode == 0, done.stderr
    found: list[dict[str, Any]] = json.loads(done.stdout)
    return found


@pytest.mark.long
def test_history(viewed: Shop) -> None:
    with Refresher(viewed.db.dsn) as refresher:
        refresher.refresh("v")
        viewed.execute("update orders set n = 3 where id in (5, 6)")
        refresher.refresh("v")
        refresher.refresh("v")
        viewed.execute("alter table v rename to w; create view v as table w")
        with pytest.raises(GdqError):
            refresher.refresh("v", full=True)
    found = rows(viewed, "view-history", "v")
    assert [run["action"] for run in found] == ["failed", "none", "delta", "full"]
    assert [run["rows_changed"] for run in found] == [None, 0, 2, 200]
    assert found[-1]["reason"] == "first load"
    assert [bool(run["error"]) for run in found] == [True, False, False, False]
    assert all(0 < run["seconds"] < 60 and run["started_at"] < run["finished_at"] for run in found)
    assert [run.action for run in view_history(viewed.connection, "v", 2)] == ["failed", "none"]
    assert "delta" in gdq("view-history", "v", "--limit", "3", dsn=viewed.db.dsn).stdout
    unknown = gdq("view-history", "nothing", dsn=viewed.db.dsn)
    assert (unknown.returncode, unknown.stderr.splitlines()[0]) == (1, 'Error: view "nothing" does not exist')


HOLDER = """
import sys
from gdq.consumers.refresh.refresher import Refresher

def at(point):
    if point == "ticked":
        print(refresher.control.info.backend_pid, flush=True)
        sys.stdin.readline()

with Refresher(at=at) as refresher:
    refresher.refresh("v")
"""


def test_second_refresh_is_refused_and_a_killed_one_blocks_nobody(viewed: Shop) -> None:
    viewed.view("other", "select status, count(*) from orders group by status", engine="postgres")
    with subprocess.Popen(
        [sys.executable, "-c", HOLDER],
        env=environment(viewed.db.dsn),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as holder:
        assert holder.stdout
        pid = holder.stdout.readline().strip()
        refused = gdq("refresh", "v", "other", "--json", dsn=viewed.db.dsn)
        assert refused.returncode == 1
        assert refused.stderr.splitlines()[0] == f'Error: view "v" is being refreshed by pid {pid}'
        assert [row["view_name"] for row in json.loads(refused.stdout)] == ["other"]
        assert [run.finished_at for run in view_history(viewed.connection, "v")] == [None]
        holder.send_signal(signal.SIGKILL)
    while viewed.execute(f"select 1 from pg_stat_activity where pid = {pid}"):
        pass
    with Refresher(viewed.db.dsn) as refresher:
        assert refresher.refresh("v").action == "full"
        assert refresher.refresh("v").action == "none"
        with Refresher(viewed.db.dsn) as second:
            assert second.refresh("v").action == "none"
    assert viewed.differences("v", VIEWED) == (0, 0)


def test_target_that_somebody_changed_is_loaded_in_full(viewed: Shop) -> None:
    """Missing are rows that should go: of a target with a key, of a bag, and among the counts kept for groups."""
    views = {
        "v": VIEWED,
        "bag": "select status, n from orders",
        "sums": "select status, count(*) as rows, sum(n) as n, avg(n) as mean from orders group by status",
    }
    for name in ("bag", "sums"):
        viewed.view(name, views[name], engine="postgres")
    with Refresher(viewed.db.dsn) as refresher:
        viewed.check(refresher, views)
        ((state,),) = viewed.execute("select oid::regclass::text from pg_class where relname ~ '^gdq_state_.{12}$'")
        viewed.execute(f"delete from v where id = 5; update {state} set n = 3; delete from bag where status = 's0'")
        viewed.execute("delete from orders where id < 100")
        results = viewed.check(refresher, views)
    assert {result.action for result in results.values()} == {"full"}
    reasons = [str(result.reason).removeprefix("the target was changed by another: ") for result in results.values()]
    assert reasons[:2] == [
        '"public"."v" held 49 of the 50 rows that went',
        '"public"."bag" held 80 of the 99 rows that went',
    ]
    assert reasons[2].endswith("counts fewer rows than the delta takes away")


def test_change_of_a_transaction_that_was_open_at_the_last_refresh(viewed: Shop) -> None:
    with Refresher(viewed.db.dsn) as refresher, viewed.db.connect(autocommit=False) as late:
        late.execute("update orders set n = 7 where id = 10")
        viewed.execute("insert into orders values (401, 'x', 8)")
        assert view_changed(viewed.connection, "v")
        assert refresher.refresh("v").action == "full"
        assert not view_changed(viewed.connection, "v")
        late.commit()
        assert view_changed(viewed.connection, "v")
        assert refresher.refresh("v").rows_changed == 1
        assert not view_changed(viewed.connection, "v")
        viewed.execute("select gdq.insert_event('q', 'note', '{}')")
        assert not view_changed(viewed.connection, "v")
        viewed.execute("truncate orders")
        assert view_changed(viewed.connection, "v")


def test_status_says_how_fresh_views_are(viewed: Shop) -> None:
    (view,) = status(viewed.connection).views
    assert (view.queue_name, view.view_name, view.age, view.last_action) == ("q", "v", None, None)
    with Refresher(viewed.db.dsn) as refresher:
        refresher.refresh("v")
        viewed.execute("update gdq.view_run set started_at = started_at - interval '1 hour'")
        (view,) = status(viewed.connection).views
        assert view.age
        assert (view.age.total_seconds() // 3600, view.last_action, view.rows_changed) == (1, "full", 200)
        viewed.execute("alter table v rename to w; create view v as table w")
        with pytest.raises(GdqError):
            refresher.refresh("v")
    done = gdq("status", "--json", dsn=viewed.db.dsn)
    (seen,) = json.loads(done.stdout)["views"]
    assert (seen["age_seconds"] // 3600, seen["last_action"], seen["rows_changed"]) == (1, "failed", None)
    assert seen["error"]
    lines = gdq("status", "q", dsn=viewed.db.dsn).stdout.splitlines()
    assert next(line for line in lines if "last action" in line).split()[:2] == ["queue", "view"]
    assert next(line for line in lines if " failed " in line).split()[:4] == ["q", "v", "1", "h"]


@pytest.mark.long
def test_view_over_the_target_of_another(viewed: Shop) -> None:
    """Made in the wrong order of names, over a target that is captured."""
    with Refresher(viewed.db.dsn) as refresher:
        refresher.refresh("v")
    viewed.capture("v")
    query = "select n, count(*) as rows from v group by n"
    create_view(viewed.connection, "a", "q", query, "public.a", engine="postgres")
    with Refresher(viewed.db.dsn) as refresher:
        refresher.refresh("a")
    viewed.capture("a")
    create_view(viewed.connection, "Z", "q", "select sum(rows) as rows from a", 'public."Z"', engine="postgres")
    assert [unit.names for unit in refresh_groups(viewed.connection)] == [["v"], ["a"], ["Z"]]
    for change in ("select 1", "update orders set n = 9 - n", "delete from orders where id < 100", "truncate orders"):
        viewed.execute(change)
        assert [row["view_name"] for row in rows(viewed, "refresh")] == ["v", "a", "Z"]
        assert viewed.differences("a", query) == (0, 0)
        assert viewed.execute('select coalesce(rows, 0) from "Z"') == viewed.execute("select count(*) from v")


def test_log_kept_for_another_consumer_is_not_read(viewed: Shop) -> None:
    viewed.execute("select gdq.register_consumer('q', 'slow')")
    with Refresher(viewed.db.dsn) as refresher:

        def scans() -> object:
            refresher.connection("target", refresher.dsn).execute("select pg_stat_force_next_flush()")
            query = "select pg_stat_get_numscans(s) from gdq.log_segments('q', array['orders'::regclass]) s order by s"
            return viewed.execute(query)

        refresher.refresh("v")
        for _ in range(20):
            viewed.execute("update orders set n = n + 1")
        refresher.refresh("v")
        viewed.execute("update orders set n = 9 where id = 1")
        before = scans()
        assert refresher.refresh("v").rows_changed == 2
        assert scans() == before
