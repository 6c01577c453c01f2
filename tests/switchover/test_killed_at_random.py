"""A switch whose program, sessions or servers are killed at random moments, under writers, loses and invents nothing.

    GDQ_SWITCHOVER_KILLS=100 GDQ_SWITCHOVER_SEED=7 python -m pytest -s --pg 18 tests/switchover/test_killed_at_random.py

prints what was killed, by the last step that was done.
"""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import suppress

import pytest

from gdq.embedded.server import EmbeddedServer
from tests.campaign.field import kill_server, revive
from tests.support.programs import environment
from tests.support.server import Database
from tests.support.waiting import SECONDS, until
from tests.switchover.conftest import Pair
from tests.switchover.test_upgrade import Writers, open_entries

pytestmark = [pytest.mark.server, pytest.mark.long]

_PROGRAM = """
import sys
from gdq.consumers.switchover.switch import SwitchOptions, switch_steps
for step in switch_steps(None, sys.argv[1], "shop", "mirror", SwitchOptions(wait_seconds=600, max_pause_seconds=600)):
    print(step, flush=True)
"""
_STEPS = ("start", "caught up", "checked", "writers wait", "drained", "reverse registered", "switched", "opened")
_KINDS = ("program", "program", "program", "session", "session", "backend", "postmaster")
_SESSIONS = "select pid from pg_stat_activity where application_name like 'gdq%' and pid <> pg_backend_pid()"
_PAUSE_SECONDS = 0.05  # longest time between a step and the kill


@pytest.fixture
def servers(empty_db: Database) -> Iterator[Pair]:
    """Two databases, each of a server of its own that may be killed."""
    settings: dict[str, str | float | bool] = {"full_page_writes": True}
    binaries = empty_db.server.binaries
    with (
        EmbeddedServer(binaries=binaries, settings=settings, in_memory=True) as one,
        EmbeddedServer(binaries=binaries, settings=settings, in_memory=True) as other,
    ):
        pair = Pair(Database(one, "postgres"), Database(other, "postgres"))
        for place in (pair.old, pair.new):
            pair.run_su(place, "create role gdq_owner login", "create role app login")
        yield pair


def test_killed_at_random(servers: Pair) -> None:
    pair, back = servers, False
    kills = int(os.environ.get("GDQ_SWITCHOVER_KILLS", "12"))
    chance = random.Random(int(os.environ.get("GDQ_SWITCHOVER_SEED", "1")))
    open_entries(pair)
    pair.done("replicate")
    pair.done("switchover", "--prepare")
    struck: Counter[tuple[str, str]] = Counter()
    turns: list[Writers] = []
    while sum(struck.values()) < kills:
        writers = Writers(pair, cut_off=True)
        writers.at = pair.new if back else pair.old
        with writers:
            until(lambda: len(writers.acknowledged) > 20, "writers at work")  # noqa: B023
            _turn(pair, back, chance, struck, kills)
            written, place = len(writers.acknowledged), pair.old if back else pair.new
            until(lambda: writers.at is place and len(writers.acknowledged) > written + 20, "writers there")  # noqa: B023
        assert writers.errors == []
        turns.append(writers)
        back = not back
        pair.done("replicate", back=back)
        _nothing_lost(pair, turns)
    for name, step in sorted(struck):
        print(f"{struck[name, step]:4} {name} after step {step}")
    print(f"{sum(struck.values())} kills, {len(turns)} switches")


def _turn(pair: Pair, back: bool, chance: random.Random, struck: Counter[tuple[str, str]], kills: int) -> None:
    """Try to switch until one attempt comes to its end."""
    here, there = (pair.new, pair.old) if back else (pair.old, pair.new)
    command, deadline = [sys.executable, "-c", _PROGRAM, there.su_dsn], time.monotonic() + SECONDS
    while True:
        running = subprocess.Popen(
            command, env=environment(here.su_dsn), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )
        assert running.stdout is not None
        if sum(struck.values()) < kills:
            step, done = chance.choice(_STEPS), "start"
            while done != step and (line := running.stdout.readline()):
                done = line.strip()
            if done == step:
                time.sleep(chance.uniform(0, _PAUSE_SECONDS))
                name = _strike(pair, chance, running)
                if name is not None:
                    struck[name, step] += 1
        _, told = running.communicate(timeout=SECONDS)
        if running.returncode == 0:
            return
        assert time.monotonic() < deadline, told


def _strike(pair: Pair, chance: random.Random, running: subprocess.Popen[str]) -> str | None:
    """Kill something: what it was, None if it was not there any more."""
    kind, side = chance.choice(_KINDS), chance.choice(("old", "new"))
    place = pair.old if side == "old" else pair.new
    if kind == "program":
        if running.poll() is not None:
            return None
        running.kill()
        return "kill -9 of the program"
    if kind == "postmaster":
        kill_server(place.server)
        revive(place.server)
        return f"kill -9 of the {side} server's postmaster"
    pids = [pid for (pid,) in pair.rows(place, _SESSIONS)]
    if not pids:
        return None
    if kind == "session":
        pair.rows(place, f"select pg_terminate_backend({chance.choice(pids)})")
        return f"session in the {side} server terminated"
    with suppress(ProcessLookupError):
        os.kill(chance.choice(pids), signal.SIGKILL)
    revive(place.server)
    return f"kill -9 of a backend in the {side} server"


def _nothing_lost(pair: Pair, turns: list[Writers]) -> None:
    """Both sides are equal; every acknowledged row is there, none twice, none but those and rows in doubt."""
    for table in ("entry", "total"):
        query = f"select t::text from {table} t order by 1"
        assert pair.rows(pair.old, query) == pair.rows(pair.new, query), table
    query = "select writer, number, count(*) from entry group by 1, 2"
    there = Counter({(writer, number): count for writer, number, count in pair.rows(pair.new, query)})
    acknowledged = Counter(row for one in turns for row in one.acknowledged)
    doubtful = Counter(row for one in turns for row in one.doubtful)
    assert acknowledged - there == Counter()
    assert there - acknowledged - doubtful == Counter()
    assert pair.rows(pair.new, "select sum(n) from total") == [(there.total(),)]
