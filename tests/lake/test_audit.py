"""Audits of lake tables: a refresh that lost a change is found after its commit."""

from __future__ import annotations

import pytest

from gdq.consumers.refresh import audit_sample
from gdq.consumers.refresh.refresher import Refresher
from gdq.consumers.refresh.verify import verify_with
from gdq.consumers.views.computation import Computation
from gdq.consumers.views.difference import Difference
from gdq.errors import DivergedView
from gdq.view.view import view_history, view_info
from tests.support.lake import Lakes

QUERIES = {
    "rows": "select id, k, amount, note from item where k > 1",
    "bag": "select label, qty, price from fact",
    "sums": "select k, count(*) as rows, sum(qty) as qty from fact group by k",
    "floats": "select k, sum(ratio) as total from item group by k",
    "moods": "select mood, count(*) as n from dim group by mood",
}
CHANGE = (
    "update item set k = 5, amount = 3.5, ratio = 77 where id = (select min(id) from item);"
    " insert into fact (k, label, qty, price) values (77, 'new', 4, 1.50);"
    " insert into dim values (99, 1, 'x', 'y', 'sad')"
)


@pytest.mark.parametrize("whole", [True, False])
@pytest.mark.parametrize("name", QUERIES)
def test_lost_change_is_found(lakes: Lakes, monkeypatch: pytest.MonkeyPatch, name: str, whole: bool) -> None:
    if not whole:
        monkeypatch.setattr(audit_sample, "_BLOCKS_WHOLE", -1)
    lakes.view(name, QUERIES[name])
    lakes.shop.execute(f"select gdq.set_view_audit('{name}', 1, 300)")
    with Refresher(lakes.shop.db.dsn) as refresher:
        refresher.refresh(name)
        lakes.shop.execute(CHANGE)
        assert refresher.refresh(name).action == "delta"
        run = view_history(lakes.shop.connection, name, 1)[0]
        assert run.audit == "passed", run.audit_reason
        assert run.audit_keys
        with monkeypatch.context() as patch:
            patch.setattr(Computation, "difference", lambda *_: Difference("none"))
            lakes.shop.execute("update item set ratio = 78 where ratio = 77; delete from item where k = 5")
            lakes.shop.execute("delete from fact where k = 77; delete from dim where k = 99")
            found = False
            for _ in range(30):
                try:
                    refresher.refresh(name)
                except DivergedView:
                    found = True
                    break
            assert found
        assert view_info(lakes.shop.connection, name)[0].diverged is not None
        assert refresher.refresh(name).action == "full"
        assert view_info(lakes.shop.connection, name)[0].diverged is None
        assert verify_with(refresher, name).equal
