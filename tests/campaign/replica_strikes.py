"""The kills of a campaign against a replica: its program, its sessions on either side, both servers, the ticker."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from contextlib import suppress

from gdq.embedded.server import EmbeddedServer
from tests.campaign.field import kill_server, revive
from tests.campaign.replica_stage import ReplicaStage

_SESSIONS = "select pid from pg_stat_activity where application_name like 'gdq:q/mirror%' and pid <> pg_backend_pid()"


def _kill(stage: ReplicaStage, *names: str) -> None:
    for name in names:
        stage.program(name).signal(signal.SIGKILL)


def _terminate(stage: ReplicaStage, dsn: str) -> None:
    with stage.connect(dsn) as su:
        su.execute(_SESSIONS.replace("select pid", "select pg_terminate_backend(pid)").encode())


def _kill_backend(stage: ReplicaStage, server: EmbeddedServer, dsn: str) -> None:
    """The server ends all other sessions then, and recovers."""
    with stage.connect(dsn) as su:
        pids = [pid for (pid,) in su.execute(_SESSIONS.encode())]
    if pids:
        with suppress(ProcessLookupError):
            os.kill(max(pids), signal.SIGKILL)
    revive(server)


def _kill_server(server: EmbeddedServer) -> None:
    kill_server(server)
    revive(server)


def _kill_both(stage: ReplicaStage) -> None:
    kill_server(stage.target)
    kill_server(stage.source)
    revive(stage.source)
    revive(stage.target)


# The program comes more often, since it does not slow down what comes after it.
STRIKES: tuple[tuple[str, Callable[[ReplicaStage], None]], ...] = (
    *[("kill -9 of the replica", lambda stage: _kill(stage, "replica"))] * 4,
    ("kill -9 of the replica and the ticker", lambda stage: _kill(stage, "replica", "ticker")),
    ("sessions in the source terminated", lambda stage: _terminate(stage, stage.source_dsn())),
    ("sessions in the target terminated", lambda stage: _terminate(stage, stage.target_dsn())),
    ("kill -9 of a backend in the source", lambda stage: _kill_backend(stage, stage.source, stage.source_dsn())),
    ("kill -9 of a backend in the target", lambda stage: _kill_backend(stage, stage.target, stage.target_dsn())),
    ("kill -9 of the source's postmaster", lambda stage: _kill_server(stage.source)),
    ("kill -9 of the target's postmaster", lambda stage: _kill_server(stage.target)),
    ("kill -9 of both postmasters", _kill_both),
)
