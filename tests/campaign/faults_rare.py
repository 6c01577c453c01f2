"""Faults that come once or need more than a signal: promotion of a standby, steps of the clock."""

from __future__ import annotations

import time
from contextlib import suppress

import psycopg

from gdq.consumers.slot.slot import drop_slot
from gdq.embedded.files import find_binaries, make_cache_folder
from gdq.embedded.server import EmbeddedServer
from gdq.errors import EmbeddedError
from tests.campaign.field import Field, fault, kill_server
from tests.campaign.stage import ClockServer

_WAIT_SECONDS = 180.0


@fault("step of the server's clock")
def clock(field: Field) -> str | None:
    """Hours back, or forth to the true time; from then on the clock stays there.

    Never ahead of the true time: with libfaketime the timeouts of a server that is ahead come as much too late.
    """
    path = field.stage.clock
    if path is None:
        field.skipped["steps of the clock"] = "no libfaketime: GDQ_FAKETIME=.../libfaketime.so.1 names one"
        return None
    hours = field.rng.choice([-3.0, -1.0, -0.5, -0.1, 0.0, 0.0])
    path.write_text(f"{hours * 3600:+.0f}s\n")
    field.last(3, 5)
    return f"{hours:+} h from the true time"


def promote(field: Field) -> str:
    """Give the source a synchronous standby, kill the source's server, promote the standby.

    A slot does not exist on a standby. So before that its reader has caught up with app.item, which the writers leave
    alone until the slot is dropped; what it must have is kept in seen.slot_audit.
    """
    stage = field.stage
    standby = _standby_of(stage.primary)
    field.opened.callback(standby.stop)
    with field.connected() as su:
        su.execute("alter system set synchronous_standby_names = 'walreceiver'")
        su.execute("select pg_reload_conf()")
        _await(su, "select exists (select from pg_stat_replication where sync_state = 'sync')")
        _end_slot(field, su)
    kill_server(stage.primary)
    deadline = time.monotonic() + _WAIT_SECONDS
    with psycopg.connect(standby.conninfo(), autocommit=True) as su:
        su.execute("select pg_promote()")
        _await(su, "select not pg_is_in_recovery()")
    while time.monotonic() < deadline and not _ended(stage.primary):
        time.sleep(0.2)
    (stage.primary.data / "postmaster.pid").unlink(missing_ok=True)
    stage.primary.crash()
    # its folder stays until the end: PgBouncer's configuration is there
    field.opened.callback(stage.primary.stop)
    stage.primary = standby
    stage.disk.there = False
    stage.front.upstream = stage.app.upstream = standby.port
    return "synchronous standby"


def _standby_of(primary: EmbeddedServer) -> EmbeddedServer:
    """A streaming standby, started from a base backup."""
    standby = ClockServer(binaries=primary.binaries, settings=primary.settings)
    make_cache_folder(standby.folder.parent)
    standby.account.run("mkdir", standby.folder)
    standby.account.write(standby.folder / "password", primary.password)
    try:
        backup = primary.binaries.program("pg_basebackup")
    except EmbeddedError:
        backup = find_binaries(18).program("pg_basebackup")
    mapped = []
    with psycopg.connect(primary.conninfo(), autocommit=True) as su:
        for (place,) in su.execute(
            "select pg_tablespace_location(oid) from pg_tablespace where spcname = 'campaign'"
        ).fetchall():
            mapped.append(f"--tablespace-mapping={place}={standby.folder / 'tables'}")
    options = ["-R", "-c", "fast", "-X", "stream", *mapped]
    standby.account.run(backup, "-D", standby.data, *options, "-d", primary.conninfo())
    return standby.start()


def _end_slot(field: Field, su: psycopg.Connection[tuple[object, ...]]) -> None:
    if "slot" not in field.supervisor.programs:
        return
    barrier = field.stage.folder / "no_item"
    barrier.touch()
    try:
        row = su.execute("select pg_snapshot_xmax(pg_current_snapshot())::text").fetchone()
        assert row
        time.sleep(2)
        # what began before has ended, prepared transactions too
        _await(su, f"select pg_snapshot_xmin(pg_current_snapshot()) >= '{row[0]}'::xid8")
        beat = field.recovery.beat("the slot catches up")
        if not field.recovery.wait(beat, _WAIT_SECONDS, {"slot"}):
            raise AssertionError("the slot's reader did not catch up")
        su.execute("create table seen.slot_audit as select * from app.audit where tbl = 'item'")
        field.supervisor.end("slot")
        field.recovery.forget("slot")
        deadline = time.monotonic() + _WAIT_SECONDS
        while True:
            with suppress(psycopg.errors.ObjectInUse):
                drop_slot(su, "q", "slot")
                break
            if time.monotonic() > deadline:
                raise AssertionError("the slot stays in use")
            time.sleep(0.5)
    finally:
        barrier.unlink()


def _await(su: psycopg.Connection[tuple[object, ...]], query: str) -> None:
    deadline = time.monotonic() + _WAIT_SECONDS
    while su.execute(query.encode()).fetchone() != (True,):
        if time.monotonic() > deadline:
            raise AssertionError(f"waited in vain for: {query}")
        time.sleep(0.2)


def _ended(server: EmbeddedServer) -> bool:
    try:
        psycopg.connect(server.conninfo(), connect_timeout=2).close()
    except psycopg.OperationalError:
        return True
    return False
