"""A replica that is paused applies nothing, says so, and goes on where it was."""

from __future__ import annotations

import json
import threading
from typing import Any

import pytest

from tests.replica.conftest import Pair
from tests.support.programs import gdq, start_gdq
from tests.support.waiting import until

pytestmark = pytest.mark.server


def listed(pair: Pair) -> dict[str, Any]:
    [one] = json.loads(gdq("replicas", "--to", pair.target.su_dsn, "--json", dsn=pair.source.dsn).stdout)
    found: dict[str, Any] = one
    return found


def test_pause_and_resume(pair: Pair) -> None:
    pair.make("create table item (id int primary key)")
    pair.capture("item")
    pair.apply()
    assert listed(pair)["state"] == "stopped"
    pair.run("select gdq.pause('shop', 'mirror')")
    refused = pair.replicate()
    assert refused.returncode == 1
    assert refused.stderr.splitlines() == ['Error: replica "mirror" is paused', "Hint: gdq resume shop mirror"]
    pair.run("select gdq.resume('shop', 'mirror')")
    told: list[str] = []
    with start_gdq(
        "replicate", "shop", "mirror", "--to", pair.target.su_dsn, "--follow", dsn=pair.source.dsn
    ) as follower:
        reader = threading.Thread(target=lambda: told.extend(follower.stderr or ()))
        reader.start()
        try:
            pair.run("insert into item values (1)")
            until(lambda: pair.rows(pair.target, "item"), "the row in the target")
            assert listed(pair)["state"] == "running"
            pair.run("select gdq.pause('shop', 'mirror')")
            until(lambda: "replica mirror is paused: gdq resume shop mirror\n" in told, "the pause told")
            stood = listed(pair)["tick"]
            pair.run("insert into item values (2)", "select gdq.force_tick('shop')")
            found = listed(pair)
            assert (found["state"], found["tick"], found["unread_events"]) == ("paused", stood, 1)
            assert len(pair.rows(pair.target, "item")) == 1
            pair.run("select gdq.resume('shop', 'mirror')")
            until(lambda: len(pair.rows(pair.target, "item")) == 2, "the second row")
            until(lambda: "replica mirror is resumed\n" in told, "the end of the pause told")
        finally:
            follower.terminate()
            reader.join()
    assert follower.returncode == 0, told
