"""The kills of a campaign against a replica: its program, its sessions on either side, both servers, the ticker.

Each strikes while a session that was drawn is at work: the one that applies batches, those that stage or apply tables
beside it, those that copy.
"""

from __future__ import annotations

import os
import random
import signal
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import NamedTuple

import psycopg

from tests.campaign.field import kill_server, revive
from tests.campaign.replica_stage import ReplicaStage

_WAIT_SECONDS = 4.0  # for a session of the kind that was drawn
_AT_WORK = """
select pid, substring(application_name from '^gdq:q/mirror/?(.*)$'),
       lower(coalesce(substring(query from '^\\s*(\\w+)'), 'connect'))
  from pg_stat_activity
 where application_name like 'gdq:q/mirror%' and pid <> pg_backend_pid() and state <> 'idle'"""
# What a session is for, by the end of its name.
_ROLES = {"": "batch", "ahead": "stage", "apply": "apply", "copy": "copy"}


class Session(NamedTuple):
    """A session of the replica at work. `role`: what it is for; `statement`: the first word of its last one."""

    side: str
    pid: int
    role: str
    statement: str

    @property
    def step(self) -> str:
        return f"{self.role}, {self.side}"


@dataclass
class Striker:
    """Draws moments and kills; `chance` decides."""

    stage: ReplicaStage
    chance: random.Random

    def strike(self) -> tuple[str, Session | None]:
        """Kill something: what was killed, and the session that was at work then, None if none was to be seen."""
        found = self._moment()
        name, kill = self.chance.choice(STRIKES)
        kill(self.stage, found)
        return name, found

    def _moment(self) -> Session | None:
        """Wait until a session of a kind and side that are drawn is at work; after a while any does."""
        side, role = self.chance.choice(("source", "target")), self.chance.choice(self._roles())
        until, other = time.monotonic() + _WAIT_SECONDS, None
        dsn = self.stage.source_dsn() if side == "source" else self.stage.target_dsn()
        while time.monotonic() < until:
            try:
                with self.stage.connect(dsn) as su:
                    while time.monotonic() < until:
                        rows = su.execute(_AT_WORK.encode()).fetchall()
                        there = [Session(side, pid, _ROLES.get(name, name), word) for pid, name, word in rows]
                        wanted = [one for one in there if one.role == role]
                        if wanted:
                            return self.chance.choice(wanted)
                        other = self.chance.choice(there) if there else other
                        time.sleep(0.002)
            except psycopg.OperationalError:  # the server recovers from the kill before
                time.sleep(0.1)
        return other

    def _roles(self) -> list[str]:
        """The kinds of sessions: a large first copy has nothing but those that copy."""
        return ["copy"] if self.stage.copy_rows else ["batch", "stage", "apply"]


def _kill(stage: ReplicaStage, *names: str) -> None:
    for name in names:
        stage.program(name).signal(signal.SIGKILL)


def _terminate(stage: ReplicaStage, session: Session | None) -> None:
    if session is not None:
        with stage.connect(_dsn(stage, session)) as su:
            su.execute("select pg_terminate_backend(%s)", [session.pid])


def _kill_backend(stage: ReplicaStage, session: Session | None) -> None:
    """The server ends all other sessions then, and recovers."""
    if session is not None:
        with suppress(ProcessLookupError):
            os.kill(session.pid, signal.SIGKILL)
        revive(stage.source if session.side == "source" else stage.target)


def _kill_servers(stage: ReplicaStage, *sides: str) -> None:
    servers = [stage.source if side == "source" else stage.target for side in sides]
    for server in servers:
        kill_server(server)
    for server in servers:
        revive(server)


def _dsn(stage: ReplicaStage, session: Session) -> str:
    return stage.source_dsn() if session.side == "source" else stage.target_dsn()


# The program comes more often, since it does not slow down what comes after it.
STRIKES: tuple[tuple[str, Callable[[ReplicaStage, Session | None], None]], ...] = (
    *[("kill -9 of the program", lambda stage, _: _kill(stage, "replica"))] * 3,
    ("kill -9 of the program and the ticker", lambda stage, _: _kill(stage, "replica", "ticker")),
    ("kill -9 of the ticker", lambda stage, _: _kill(stage, "ticker")),
    *[("the session terminated", _terminate)] * 2,
    *[("kill -9 of the session's backend", _kill_backend)] * 2,
    ("kill -9 of the source's postmaster", lambda stage, _: _kill_servers(stage, "source")),
    ("kill -9 of the target's postmaster", lambda stage, _: _kill_servers(stage, "target")),
    ("kill -9 of both postmasters", lambda stage, _: _kill_servers(stage, "target", "source")),
)
