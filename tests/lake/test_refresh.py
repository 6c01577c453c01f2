"""Views whose target is a lake table: exactly the rows of their query, whatever is killed and whoever interferes."""

from __future__ import annotations

import random
import signal
import subprocess
import sys

import pytest

from gdq.consumers.refresh.refresher import Refresher
from gdq.consumers.refresh.verify import verify_with
from gdq.consumers.refresh.view_refresh import RefreshPoint
from gdq.view.view import view_history
from tests.support.lake import Lakes
from tests.support.view_churn import transaction
from tests.support.view_grammar import SHAPES, TABLES

# Rows that come and go by sign (bags with NULLs and copies, keys that text tells apart), by key, or all of them.
VIEWS = {
    "bag": "signed",
    "group_by_numeric": "replace",
    "left_join": "replace",
    "sums_of_bag": "replace",
    "total": "full",
}
ROUNDS = 2
BAG = SHAPES["bag"].query
_MORE = "insert into fact select k, grp, label, qty + 1, price from fact limit 3; delete from fact where qty = 2"


def test_equal_to_the_query(lakes: Lakes) -> None:
    """Also while writers go on during the refresh; verify-view finds what the rows themselves show."""
    for name in VIEWS:
        lakes.view(name, SHAPES[name].query)
    rng = random.Random(2)
    actions: dict[str, set[str]] = {name: set() for name in VIEWS}

    def at(point: RefreshPoint) -> None:
        if point in ("exported", "staged"):
            lakes.shop.execute("; ".join(transaction(rng, TABLES)))

    with Refresher(lakes.shop.db.dsn, at=at) as busy, Refresher(lakes.shop.db.dsn) as refresher:
        for _ in range(ROUNDS):
            for name in VIEWS:
                assert verify_with(busy, name).equal
            for name in VIEWS:
                actions[name].add(refresher.refresh(name).action)
                assert lakes.equal(name, SHAPES[name].query)
        assert {name for name in VIEWS if "delta" in actions[name]} == {
            n for n, rule in VIEWS.items() if rule != "full"
        }
        assert {refresher.refresh(name).action for name in VIEWS} == {"none"}
    for name, rule in VIEWS.items():
        *later, first = view_history(lakes.shop.connection, name)
        assert first.reason == "first load"
        assert rule == "full" or {run.reason for run in later} == {None}


_KILLED = """
import os, signal, sys
from gdq.consumers.refresh.refresher import Refresher

def at(point):
    if point == "committed":
        os.kill(os.getpid(), signal.SIGKILL)

Refresher(sys.argv[1], at=at).refresh(sys.argv[2])
"""


@pytest.mark.long
def test_killed(lakes: Lakes) -> None:
    """Between the commit and the queue's position: nothing is done twice."""
    lakes.view("bag", BAG)
    with Refresher(lakes.shop.db.dsn) as refresher:
        refresher.refresh("bag")
        lakes.shop.execute(_MORE)
        command = [sys.executable, "-c", _KILLED, lakes.shop.db.dsn, "bag"]
        killed = subprocess.run(command, capture_output=True, text=True, check=False)
        assert killed.returncode == -signal.SIGKILL, killed.stderr
        assert lakes.equal("bag", BAG)
        assert refresher.refresh("bag").action == "none"
        assert lakes.equal("bag", BAG)


def test_killed_in_the_commit(lakes: Lakes, monkeypatch: pytest.MonkeyPatch) -> None:
    """Files that are written and not committed count for nobody."""
    from gdq.consumers.lake import data_files as lake_rows

    class Killed(BaseException):
        pass

    lakes.view("bag", BAG)
    healthy = lake_rows.DataFileWriter._finish

    def finish(self: lake_rows.DataFileWriter) -> None:
        healthy(self)
        monkeypatch.setattr(lake_rows, "remove_data_files", lambda *_: None)
        raise Killed

    with Refresher(lakes.shop.db.dsn) as refresher:
        refresher.refresh("bag")
        before = lakes.rows("bag")
        lakes.shop.execute(_MORE)
        with monkeypatch.context() as patch:
            patch.setattr(lake_rows.DataFileWriter, "_finish", finish)
            with pytest.raises(Killed):
                refresher.refresh("bag")
        assert lakes.rows("bag") == before
        assert refresher.refresh("bag").action == "delta"
        assert lakes.equal("bag", BAG)
