"""CALL gdq.refresh_group() refreshes the views of a stored group together, from any client."""

from __future__ import annotations

import psycopg
import pytest

from gdq.consumers.refresh.groups import refresh_groups
from gdq.consumers.refresh.refresher import Refresher
from gdq.consumers.refresh.view_refresh import RefreshPoint
from gdq.view.group import create_group
from gdq.view.view import create_view, set_view_audit, view_history
from tests.support.spark import Shop
from tests.views.test_compiled_view import call, small_view

pytestmark = pytest.mark.server


def test_a_stored_group_is_refreshed_by_a_call(viewed: Shop) -> None:
    view = small_view(viewed)
    create_view(viewed.connection, "v_n", "q", "select sum(n) as n from t", "public.v_n", engine="postgres")
    create_group(viewed.connection, "both", [view, "v_n"])
    with Refresher(viewed.db.dsn) as refresher:
        for group in refresh_groups(viewed.connection, groups=["both"]):
            refresher.refresh_group(group)
    with pytest.raises(psycopg.errors.ObjectNotInPrerequisiteState, match="with its group only"):
        call(viewed, view)
    for _ in range(3):
        viewed.execute("update t set n = n + 1 where id < 4")
        ((rows, results),) = viewed.execute("call gdq.refresh_group('both')")
        assert (rows, [(one["view_name"], one["rows_changed"]) for one in results]) == (8, [("v_n", 2), (view, 6)])
        assert viewed.execute("select sum(n) from v_t") == viewed.execute("select n from v_n")
        assert viewed.differences(view, "select id, n from t") == (0, 0)
    ((positions,),) = viewed.execute("select count(distinct position) from gdq_target.position")
    assert positions == 2  # two ticks of one snapshot
    assert viewed.execute("select count(distinct split_part(position, '/', 5)) from gdq_target.position") == [(1,)]
    assert viewed.execute("call gdq.refresh_group('both')")[0][0] == 0
    assert {run.group_name for run in view_history(viewed.connection, view, 3)} == {"both"}


def test_a_process_refreshes_a_stored_group_by_a_call(viewed: Shop) -> None:
    view, points = small_view(viewed), list[RefreshPoint]()
    create_view(viewed.connection, "v_n", "q", "select sum(n) as n from t", "public.v_n", engine="postgres")
    create_view(viewed.connection, "v_max", "q", "select max(n) as n from t", "public.v_max", engine="postgres")
    create_group(viewed.connection, "both", [view, "v_n"])
    create_group(viewed.connection, "keyed", ["v_max"])
    for name in ("v_n", "v_max"):
        set_view_audit(viewed.connection, name, 0)
    both, keyed = (refresh_groups(viewed.connection, groups=[name])[0] for name in ("both", "keyed"))
    with Refresher(viewed.db.dsn, at=points.append) as refresher:
        refresher.refresh_group(both)
        refresher.refresh_group(keyed)
        for number in (10, 11):
            viewed.execute("update t set n = n + 10 where id = 1")
            points.clear()
            assert [(done.action, done.rows_changed) for done in refresher.refresh_group(both)] == [("delta", 2)] * 2
            assert points == ["committed", "done"]
            assert viewed.execute("select sum(n) from v_t") == viewed.execute("select n from v_n")
            assert [done.action for done in refresher.refresh_group(keyed)] == ["delta"], number
        # one view of the two needs a load: nothing of the other stays
        viewed.execute("update t set n = n + 1 where id < 3; delete from v_t where id = 2")
        assert {done.action for done in refresher.refresh_group(both)} == {"full", "delta"}
        assert viewed.differences(view, "select id, n from t") == (0, 0)
        assert viewed.execute("select sum(n) from v_t") == viewed.execute("select n from v_n")
