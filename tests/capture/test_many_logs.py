"""Maintenance of many busy logs takes one look at all of them, not one for each segment that it empties."""

from __future__ import annotations

import pytest

from gdq.ticker import maintain_all
from tests.support.events import Tap

pytestmark = pytest.mark.server

TABLES = 12


def test_all_logs_are_looked_at_once(tap: Tap) -> None:
    for number in range(TABLES):
        tap.write(f"create table t{number} (id int primary key)")
        tap.add(f"shop.t{number}")
        tap.write(f"insert into t{number} values (1)")
    assert len(tap.events()) == TABLES
    with tap.db.connect("su") as su:
        su.execute(f'alter database "{tap.db.name}" set track_functions = pl'.encode())
    with tap.db.connect() as owner:
        owner.execute("update gdq.queue set rotation_period = '1 microsecond'")
        steps = 0
        while owner.execute("select gdq.maintain()").fetchone() == (True,):
            steps += 1
        assert owner.execute("select * from gdq.idle_segments()").fetchall() == []
        owner.execute("select pg_stat_force_next_flush()")
        looks = "select calls from pg_stat_user_functions where funcname = 'rotate_logs'"
        (calls,) = owner.execute(looks).fetchone() or (0,)
    assert steps > TABLES
    assert calls < TABLES / 2


def test_maintenance_ends_after_the_step_in_which_it_is_asked_to(tap: Tap) -> None:
    """A ticker that is told to stop does not empty thousands of logs before."""
    for number in range(3):
        tap.write(f"create table t{number} (id int primary key)")
        tap.add(f"shop.t{number}")
        tap.write(f"insert into t{number} values (1)")
    assert len(tap.events()) == 3
    full = "select count(*) from gdq.log_segment s where pg_relation_size(s.segment) > 0"
    with tap.db.connect() as owner:
        owner.execute("update gdq.queue set rotation_period = '1 microsecond'")
        asked = 0

        def stop() -> bool:
            nonlocal asked
            asked += 1
            return True

        assert maintain_all(owner, stop=stop) is True
        assert asked == 1
        assert owner.execute(full).fetchone() != (0,)
        assert maintain_all(owner) is False
        assert owner.execute(full).fetchone() == (0,)


@pytest.mark.parametrize("hint", ["current", "old", "strange", "empty", "unknown"])
def test_what_was_found_is_only_a_hint(tap: Tap, hint: str) -> None:
    """A session may set it to anything."""
    tap.write("create table t (id int primary key)")
    tap.add("shop.t")
    tap.write("insert into t values (1)")
    assert len(tap.events()) == 1
    (segment,) = tap.owner.execute(
        "select s.segment::oid::text from gdq.log_segment s where pg_relation_size(s.segment) > 0"
    ).fetchone() or ("",)
    now = "floor(extract(epoch from now()))::text || ':'"
    text = {
        "current": f"{now} || '{segment},{segment}'",
        "old": f"'1:{segment}'",
        "strange": "'x; drop table shop.t'",
        "empty": now,
        "unknown": f"{now} || '1,2'",
    }[hint]
    tap.owner.execute(f"select set_config('gdq.found_segments', {text}, false)".encode())
    assert tap.owner.execute("select gdq.empty_found()").fetchone() == (False,)
    assert tap.owner.execute(f"select pg_relation_size({segment}) > 0".encode()).fetchone() == (True,)
