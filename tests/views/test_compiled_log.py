"""What a call reads of the logs, and what it asks of the queue before that."""

from __future__ import annotations

import pytest

from gdq.consumers.refresh.refresher import Refresher
from tests.support.spark import Shop
from tests.views.test_compiled_view import call, shop, small_view

__all__ = ["shop"]

pytestmark = pytest.mark.server


def test_changes_in_one_segment_of_a_log_and_in_several(viewed: Shop) -> None:
    view = small_view(viewed)
    with Refresher(viewed.db.dsn) as refresher:
        refresher.refresh(view)
    found: set[tuple[int, ...]] = set()
    with viewed.db.connect("su") as su:
        su.execute("update gdq.queue set rotation_period = '1 us'")
        ((look,),) = su.execute("select look from gdq.compiled_view join gdq.view using (view_id)").fetchall()
        looked = f"select {look}(split_part(position, '/', 5)::pg_snapshot) from gdq_target.position"
        for number in range(24):
            if number % 2:
                viewed.execute("insert into t values (%s, 1)", 10 + number)
            if number % 4 == 3:
                su.execute("select gdq.maintain()")  # what follows is in the next segment
            if number % 3 or number % 2 == 0:
                viewed.execute("update t set n = n + 1 where id <= 3")
            ((segments,),) = su.execute(looked.encode()).fetchall()
            found.add(tuple(sorted(segments)))
            assert call(viewed, view)[:2] == ("delta", None), number
            assert viewed.differences(view, "select id, n from t") == (0, 0)
            su.execute("select gdq.maintain()")
    assert len({segments for segments in found if len(segments) == 1}) >= 3
    assert {1, 2} <= {len(segments) for segments in found}


def test_a_call_settles_an_alarm(viewed: Shop) -> None:
    view = small_view(viewed)
    with Refresher(viewed.db.dsn) as refresher:
        refresher.refresh(view)
    with viewed.db.connect("su") as su:
        ((alarm,),) = su.execute("select nextval('gdq.alarm')").fetchall()
        assert call(viewed, view)[0] == "none"
        settled = "select settled from gdq.alarm_check order by check_id desc limit 1"
        assert su.execute(settled).fetchone() == (alarm,)
