"""What the faults of a campaign work on."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import Any

import psycopg

from gdq.embedded.server import EmbeddedServer
from gdq.errors import EmbeddedError
from tests.campaign.recovery import Recovery
from tests.campaign.stage import Stage
from tests.campaign.supervisor import Supervisor

_START_SECONDS = 120.0


@dataclass
class Field:
    """The stage, the programs, the dice and the beats."""

    stage: Stage
    supervisor: Supervisor
    rng: Random
    recovery: Recovery
    opened: ExitStack
    skipped: dict[str, str] = field(default_factory=dict)

    def connect(self, user: str = "postgres", **more: Any) -> psycopg.Connection[Any]:
        """A direct connection to the source, tried until it is there."""
        deadline = time.monotonic() + _START_SECONDS
        while True:
            try:
                return self.stage.connect(user, **more)
            except psycopg.OperationalError:
                if time.monotonic() > deadline:
                    raise
                time.sleep(0.2)

    @contextmanager
    def connected(self, user: str = "postgres") -> Iterator[psycopg.Connection[Any]]:
        with self.connect(user) as connection:
            yield connection

    def running(self, *prefixes: str) -> list[str]:
        """Names of programs, sorted."""
        return sorted(name for name in self.supervisor.programs if name.startswith(prefixes))

    def last(self, low: float, high: float) -> None:
        """Let a fault last for a while."""
        time.sleep(self.rng.uniform(low, high))

    def backends(self, condition: str = "true") -> list[int]:
        """Process ids of the backends that serve gdq's programs."""
        query = f"""select pid from pg_stat_activity where backend_type = 'client backend' and usename = 'gdq_owner'
                     and {condition} order by backend_start"""
        with self.connected() as su:
            return [pid for (pid,) in su.execute(query.encode())]


Strike = Callable[[Field], str | None]


@dataclass(frozen=True)
class Fault:
    """A kind of fault. `strike` makes it, lasts, heals it, and says what it did; None: not possible just now."""

    kind: str
    strike: Strike


FAULTS: list[Fault] = []


def fault(kind: str) -> Callable[[Strike], Strike]:
    """Register a function as a kind of fault."""

    def register(strike: Strike) -> Strike:
        FAULTS.append(Fault(kind, strike))
        return strike

    return register


def postmaster(server: EmbeddedServer) -> int | None:
    """The process id of a running server."""
    try:
        pid = int((server.data / "postmaster.pid").read_text().split()[0])
        # a dead one stays a zombie where nobody waits for it
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (OSError, ValueError, IndexError):
        return None
    return None if state == "Z" else pid


def kill_server(server: EmbeddedServer) -> None:
    """Kill the server's first process; the others notice and end."""
    pid = postmaster(server)
    if pid is not None:
        os.kill(pid, signal.SIGKILL)


def revive(server: EmbeddedServer) -> None:
    """Start a server that ended in any way, as systemd would; nothing for one that runs."""
    deadline = time.monotonic() + _START_SECONDS
    while True:
        if postmaster(server) is not None:
            with suppress(psycopg.OperationalError), psycopg.connect(server.conninfo(), connect_timeout=5):
                return
            time.sleep(0.5)
        else:
            Path(server.data / "postmaster.pid").unlink(missing_ok=True)
            server.crash()
            with suppress(EmbeddedError):
                server.start()
                return
            time.sleep(1)
        if time.monotonic() > deadline:
            raise AssertionError(f"the server did not start: {server.log.read_text()[-2000:]}")
