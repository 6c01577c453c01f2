"""Changes that a replica is told to pass over are counted and noted, and the next ones are applied."""

from __future__ import annotations

import json
import re

import pytest

from tests.replica.conftest import Pair
from tests.support.programs import gdq

pytestmark = pytest.mark.server


def test_skip_and_go_on(pair: Pair) -> None:
    to = ("--to", pair.target.su_dsn)
    pair.make("create table item (id int primary key, place int)")
    pair.make("create table other (id int primary key)")
    pair.run("insert into item select i, i from generate_series(1, 3) i")
    pair.capture("item", "other")
    pair.apply()
    pair.there("alter table item add check (place > 0)")
    pair.run("insert into item values (10, -1), (11, 11)", "insert into other values (1)", "truncate other")
    failed = pair.replicate()
    assert failed.returncode == 1
    found = re.search(r"^This is in the changes after tick (\d+) up to tick (\d+)\.$", failed.stderr, re.MULTILINE)
    assert found is not None, failed.stderr
    before, tick = map(int, found.groups())
    pair.run("update item set place = 5 where id = 1", "select gdq.force_tick('shop')")
    skip = ("skip-replica-changes", "shop", "mirror", *to)
    early = gdq(*skip, "--tick", str(before), dsn=pair.source.dsn)
    assert early.stderr.startswith(f'Error: replica "mirror" stands at tick {before}, which is not before')
    wrong = gdq("skip-replica-changes", "shop", "miror", *to, "--tick", "1", dsn=pair.source.dsn)
    assert wrong.stderr.splitlines()[0] == 'Error: the target holds no replica "miror"'
    none = gdq(*skip, "--tick", "1000000", dsn=pair.source.dsn)
    assert none.stderr.startswith("Error: queue shop has no tick 1000000")
    done = gdq(*skip, "--tick", str(tick), "--json", dsn=pair.source.dsn)
    assert done.returncode == 0, done.stderr
    skipped = json.loads(done.stdout)
    assert [(one["table_name"], one["changes"], one["events"]) for one in skipped] == [
        ("public.item", 2, []),
        ("public.other", 1, ["truncate"]),
    ]
    assert {(one["tick_from"], one["tick_to"]) for one in skipped} == {(before, tick)}
    listed = gdq("replica-skips", "mirror", *to, "--json", dsn=pair.source.dsn)
    assert json.loads(listed.stdout) == skipped
    pair.apply()
    assert [row for (row,) in pair.rows(pair.target, "item")] == ["(1,5)", "(2,2)", "(3,3)"]
    [replica] = json.loads(gdq("replicas", *to, "--json", dsn=pair.source.dsn).stdout)
    assert replica["skipped_changes"] == 3
