"""A refresh on Spark that Ctrl-C ends leaves no staging table and nothing at work."""

from __future__ import annotations

import os
import signal
import threading

import pytest

from gdq.consumers.refresh.refresher import Refresher
from tests.support.endings import Interrupts
from tests.support.spark import SPARK_MARKS, Shop, staging_and_position
from tests.support.waiting import until

pytestmark = SPARK_MARKS

BAG = "select status, note from orders"


@pytest.mark.long
def test_interrupted_when_all_is_staged(shop: Shop) -> None:
    """No staging table is left, no session is at work, and the same Refresher goes on."""
    shop.capture("orders")
    shop.view("bag", BAG)

    interrupts = Interrupts()
    with Refresher(shop.db.dsn, driver_bytes=0, progress=interrupts) as refresher:
        refresher.refresh("bag")
        shop.execute("update orders set note = 'late' where id < 100")
        interrupts.append("writing")
        with pytest.raises(KeyboardInterrupt):
            refresher.refresh("bag")
        assert staging_and_position(shop) == ["position"]
        busy = "select query from pg_stat_activity where application_name ~ '^gdq' and state <> 'idle'"
        with shop.db.connect("su") as su:
            assert su.execute(busy).fetchall() == []
        assert refresher.refresh("bag").action == "delta"
    assert shop.differences("bag", BAG) == (0, 0)


@pytest.mark.long
def test_signal_while_tasks_read(shop: Shop) -> None:
    """Ctrl-C while Spark's tasks wait for the server: it ends, and what they had begun ends by itself."""
    shop.execute(
        "create function slow(n int) returns int language plpgsql immutable as"
        " 'begin if n < 0 then perform pg_advisory_xact_lock_shared(7); end if; return n; end'"
    )
    query = "select id, slow(n) as n from orders"
    shop.capture("orders")
    shop.view("v", query, engine="spark")

    def interrupt() -> None:
        with shop.db.connect() as watcher:
            until(lambda: bool(watcher.execute("select from pg_locks where not granted").rowcount))
        os.kill(os.getpid(), signal.SIGINT)

    with Refresher(shop.db.dsn) as refresher:
        refresher.refresh("v")
        shop.execute("update orders set n = -1 where id = 1")
        with shop.db.connect() as holder:
            holder.execute("select pg_advisory_lock(7)")
            thread = threading.Thread(target=interrupt)
            thread.start()
            with pytest.raises(KeyboardInterrupt):
                refresher.refresh("v")
            thread.join()
        assert staging_and_position(shop) == ["position"]
        assert refresher.refresh("v").action == "delta"
    assert shop.differences("v", query) == (0, 0)
