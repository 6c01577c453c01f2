"""A switch that is killed at any step takes nothing from the application, and the next run brings it to its end."""

from __future__ import annotations

import signal
import subprocess
import sys

import psycopg
import pytest

from gdq.consumers.switchover.switch import SwitchOptions, switch_steps
from tests.support.programs import environment
from tests.support.waiting import until
from tests.switchover.conftest import Pair

pytestmark = pytest.mark.server

# The library's steps, as the command runs them, until the one where it is killed.
_KILLED = """
import os, signal, sys
from gdq.consumers.switchover.switch import SwitchOptions, switch_steps
for step in switch_steps(None, sys.argv[1], "shop", "mirror", SwitchOptions()):
    if step == sys.argv[2]:
        os.kill(os.getpid(), signal.SIGKILL)
"""

BEFORE = ("caught up", "checked", "writers wait", "drained", "reverse registered")
AFTER = ("switched", "opened")


def killed_at(pair: Pair, step: str, *, back: bool = False) -> None:
    """Switch in a program of its own that is killed once a step is done."""
    here, there = (pair.new, pair.old) if back else (pair.old, pair.new)
    command = [sys.executable, "-c", _KILLED, there.su_dsn, step]
    done = subprocess.run(command, env=environment(here.su_dsn), capture_output=True, text=True, check=False)
    assert done.returncode == -signal.SIGKILL, done.stderr
    for place in (here, there):
        until(lambda: pair.rows(place, _SESSIONS) == [(0,)], "the end of the killed program's sessions")  # noqa: B023


_SESSIONS = """
select count(*) from pg_stat_activity
 where datname = current_database() and application_name like 'gdq%' and pid <> pg_backend_pid()"""


def test_killed_at_each_step(pair: Pair) -> None:
    pair.open_shop()
    pair.done("switchover", "--prepare")
    insert = "insert into orders (n) values (1)"
    for step in BEFORE:
        killed_at(pair, step)
        pair.run(pair.old, insert)
        with pytest.raises(psycopg.errors.ReadOnlySqlTransaction):
            pair.run(pair.new, insert)
    for back in (False, True):
        here, there = (pair.new, pair.old) if back else (pair.old, pair.new)
        killed_at(pair, "switched", back=back)
        for place in (here, there):
            with pytest.raises(psycopg.errors.ReadOnlySqlTransaction):
                pair.run(place, insert)
        # the other direction is not begun, and preparing does not undo it
        assert "a switch in the other direction is half done" in pair.gdq("switchover", *_back(not back)).stderr
        for task in ("--prepare", "--end"):
            assert "a switch is half done" in pair.gdq("switchover", task, back=back).stderr
        pair.done("switchover", *_back(back))
        pair.run(there, insert)
        with pytest.raises(psycopg.errors.ReadOnlySqlTransaction):
            pair.run(here, insert)
        pair.done("replicate", back=not back)
        query = "select o::text from orders o order by 1"
        assert pair.rows(pair.old, query) == pair.rows(pair.new, query)
    killed_at(pair, "opened")
    pair.run(pair.new, insert)
    pair.done("switchover")
    consumers = "select consumer_name from gdq.consumer_info('shop')"
    assert (pair.rows(pair.old, consumers), pair.rows(pair.new, consumers)) == ([], [("mirror",)])
    assert pair.rows(pair.new, "select count(*), count(distinct id) from orders") == [(100 + 5 + 3, 100 + 5 + 3)]


def test_writers_wait_no_longer_than_allowed(pair: Pair) -> None:
    """A program that stops between two steps, or is cut off from the network, loses its locks by the server's clock."""
    pair.open_shop()
    pair.done("switchover", "--prepare")
    steps = switch_steps(pair.old.su_dsn, pair.new.su_dsn, "shop", "mirror", SwitchOptions(max_pause_seconds=0.5))
    while next(steps) != "writers wait":
        pass
    pair.run(pair.old, "insert into orders (n) values (1)")  # it waits, and goes on
    with pytest.raises(Exception, match="the session that kept writers waiting is gone"):
        for _ in steps:
            pass
    pair.run(pair.old, "insert into orders (n) values (2)")
    pair.done("switchover")
    assert pair.rows(pair.new, "select count(*) from orders") == [(102,)]


def _back(back: bool) -> list[str]:
    return ["--back"] if back else []
