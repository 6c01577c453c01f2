"""Faults of programs: killed, ended, stopped for a while."""

from __future__ import annotations

import signal
import time

from tests.campaign.field import Field, fault


def _kill(field: Field, *prefixes: str) -> str | None:
    names = field.running(*prefixes)
    if not names:
        return None
    name = field.rng.choice(names)
    return name if field.supervisor.programs[name].signal(signal.SIGKILL) else None


@fault("kill -9 of the ticker")
def kill_ticker(field: Field) -> str | None:
    return _kill(field, "ticker")


@fault("kill -9 of the consumer in the same database")
def kill_same(field: Field) -> str | None:
    return _kill(field, "same")


@fault("kill -9 of the consumer elsewhere")
def kill_far(field: Field) -> str | None:
    return _kill(field, "far")


@fault("kill -9 of a member")
def kill_member(field: Field) -> str | None:
    return _kill(field, "member")


@fault("kill -9 of the slot's reader")
def kill_slot(field: Field) -> str | None:
    return _kill(field, "slot")


@fault("kill -9 of the mirror")
def kill_mirror(field: Field) -> str | None:
    return _kill(field, "mirror")


@fault("kill -9 of a refresher")
def kill_refresher(field: Field) -> str | None:
    return _kill(field, "follow", "lake")


@fault("kill -9 of a writer")
def kill_writer(field: Field) -> str | None:
    return _kill(field, "writer")


@fault("kill -9 of PgBouncer")
def kill_pooler(field: Field) -> str | None:
    return _kill(field, "pgbouncer")


@fault("kill -9 of all programs at once")
def kill_all(field: Field) -> str | None:
    for name in field.running(""):
        field.supervisor.programs[name].signal(signal.SIGKILL)
    return "all"


@fault("SIGTERM of a program")
def terminate(field: Field) -> str | None:
    name = field.rng.choice([name for name in field.running("") if name != "pgbouncer"])
    field.supervisor.programs[name].signal(signal.SIGTERM)
    return name


@fault("SIGSTOP of a program")
def stop(field: Field) -> str | None:
    """Longer than the members' dead-after, so that the batch of a member is taken over."""
    name = field.rng.choice([name for name in field.running("") if not name.startswith("writer")])
    program = field.supervisor.programs[name]
    pid = program.pid
    program.signal(signal.SIGSTOP)
    field.last(7, 9)
    if program.pid == pid:
        program.signal(signal.SIGCONT)
    return name


@fault("SIGSTOP of a member, taken over")
def stop_member(field: Field) -> str | None:
    name = field.rng.choice(field.running("member"))
    program = field.supervisor.programs[name]
    program.signal(signal.SIGSTOP)
    time.sleep(8)
    program.signal(signal.SIGCONT)
    return name
