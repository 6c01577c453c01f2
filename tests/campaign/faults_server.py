"""Faults of the server: backends and servers that die, locks, limits."""

from __future__ import annotations

import os
import signal
import time
from contextlib import ExitStack, suppress

import psycopg

from tests.campaign.field import Field, fault, kill_server, revive
from tests.campaign.writers import delete, insert

_BURST_ROWS = 30_000
_GAP_SECONDS = 12.0


@fault("kill -9 of a backend")
def kill_backend(field: Field) -> str | None:
    pids = field.backends()
    if not pids:
        return None
    pid = field.rng.choice(pids)
    with suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)
    revive(field.stage.primary)
    return "one of gdq's"


@fault("backends terminated")
def terminate(field: Field) -> str:
    some = "true" if field.rng.random() < 0.5 else "pid % 2 = 0"
    with field.connected() as su:
        query = f"select count(pg_terminate_backend(pid)) from pg_stat_activity where usename = 'gdq_owner' and {some}"
        row = su.execute(query.encode()).fetchone()
    return f"{row and row[0]} sessions"


@fault("immediate restart of the server")
def crash(field: Field) -> str:
    field.stage.primary.crash()
    field.last(0, 2)
    revive(field.stage.primary)
    return "primary"


@fault("orderly restart of the server")
def restart(field: Field) -> str:
    with suppress(Exception):
        field.stage.primary.restart()
    revive(field.stage.primary)
    return "primary"


@fault("kill -9 of the postmaster")
def kill_postmaster(field: Field) -> str:
    kill_server(field.stage.primary)
    field.last(0, 2)
    revive(field.stage.primary)
    return "primary"


@fault("immediate restart of the target's server")
def crash_target(field: Field) -> str:
    field.stage.target.crash()
    field.last(0, 3)
    revive(field.stage.target)
    return "target"


@fault("SIGSTOP of backends")
def stop_backend(field: Field) -> str | None:
    pids = field.backends()
    stopped = field.rng.sample(pids, min(2, len(pids)))
    for pid in stopped:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGSTOP)
    field.last(2, 5)
    for pid in stopped:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGCONT)
    return f"{len(stopped)} of gdq's"


@fault("disk full under the tables")
def disk_full(field: Field) -> str | None:
    return _fill(field, "tables")


@fault("disk full under the write-ahead log")
def wal_full(field: Field) -> str | None:
    return _fill(field, "wal")


def _fill(field: Field, name: str) -> str | None:
    disk = field.stage.disk
    if not disk.there:
        field.skipped["disk full"] = "no right to mount, or the server was promoted elsewhere"
        return None
    disk.fill(name)
    try:
        field.last(4, 7)
    finally:
        disk.free(name)
    revive(field.stage.primary)
    return name


@fault("timeouts by ALTER ROLE")
def timeouts(field: Field) -> str:
    values = {
        "statement_timeout": "30ms",
        "lock_timeout": "10ms",
        "idle_in_transaction_session_timeout": "50ms",
        "idle_session_timeout": "500ms",
    }
    with field.connected() as su:
        if su.info.server_version >= 170000:
            values["transaction_timeout"] = "100ms"
        for name, value in values.items():
            su.execute(f"alter role gdq_owner set {name} = '{value}'".encode())
        su.execute("select pg_terminate_backend(pid) from pg_stat_activity where usename = 'gdq_owner'")
    field.last(5, 8)
    with field.connected() as su:
        for name in values:
            su.execute(f"alter role gdq_owner reset {name}".encode())
    return ", ".join(values)


@fault("role without login")
def no_login(field: Field) -> str:
    with field.connected() as su:
        su.execute("alter role gdq_owner nologin")
        su.execute("select pg_terminate_backend(pid) from pg_stat_activity where usename = 'gdq_owner'")
    field.last(2, 5)
    with field.connected() as su:
        su.execute("alter role gdq_owner login")
    return "gdq_owner"


@fault("no free connections")
def exhausted(field: Field) -> str:
    with ExitStack() as opened:
        count = 0
        with suppress(psycopg.OperationalError):
            while True:
                opened.enter_context(field.stage.connect("app"))
                count += 1
        field.stage.front.cut()
        field.last(2, 4)
    return f"{count} held"


@fault("foreign locks")
def locks(field: Field) -> str:
    table = field.rng.choice(["app.acct", "app.part", "gdq.subscription", "gdq.queue"])
    with field.connected() as su:
        su.execute("set lock_timeout = '10s'")
        with suppress(psycopg.errors.LockNotAvailable, psycopg.errors.DeadlockDetected), su.transaction():
            su.execute(f"lock table {table} in access exclusive mode".encode())
            field.last(2, 4)
    return table


@fault("VACUUM FULL of gdq's tables")
def vacuum(field: Field) -> str:
    query = """select format('%I.%I', n.nspname, c.relname) from pg_class c join pg_namespace n on n.oid = relnamespace
                where n.nspname in ('gdq', 'gdq_log') and c.relkind = 'r' order by 1"""
    with field.connected() as su:
        su.execute("set lock_timeout = '3s'")
        names = [name for (name,) in su.execute(query.encode())]
        chosen = field.rng.sample(names, min(12, len(names)))
        for name in chosen:
            with suppress(psycopg.errors.LockNotAvailable, psycopg.errors.DeadlockDetected):
                su.execute(f"vacuum full {name}".encode())
    return f"{len(chosen)} tables"


@fault("a transaction that stays open")
def long_transaction(field: Field) -> str:
    """A snapshot and a change that are kept over rotations."""
    key = 8 * 10**9 + field.rng.randint(1, 10**8)
    with field.connected("app") as app:
        app.execute("begin isolation level repeatable read")
        app.execute(insert("acct", key, key).encode())
        field.last(5, 8)
        app.execute(insert("part", key, key).encode())
        app.execute("commit")
    return "repeatable read"


@fault("max_bytes passed")
def max_bytes(field: Field) -> str | None:
    """The mirror and a view stand still while the logs grow: both lose changes and load their tables anew."""
    stopped = [field.supervisor.programs[name] for name in ("mirror", "follow") if name in field.supervisor.programs]
    first = 7 * 10**9 + field.rng.randint(1, 10**8) * 6
    for program in stopped:
        program.signal(signal.SIGSTOP)
    try:
        with field.connected("gdq_owner") as owner, field.connected("app") as app:
            owner.execute("select gdq.set_queue('small', max_bytes => 4194304)")
            deadline = time.monotonic() + _GAP_SECONDS
            while True:
                app.execute(insert("part", first, first + _BURST_ROWS - 1).encode())
                app.execute(delete("part", first, first + _BURST_ROWS - 1).encode())
                first += _BURST_ROWS
                time.sleep(3)
                query = "select resync is not null from gdq.consumer_info('small') where consumer_name = 'mirror'"
                found = owner.execute(query.encode()).fetchone()
                if (found and found[0]) or time.monotonic() > deadline:
                    break
            owner.execute("select gdq.set_queue('small', max_bytes => 33554432)")
    finally:
        for program in stopped:
            program.signal(signal.SIGCONT)
    return "cut off" if found and found[0] else "not cut off"
