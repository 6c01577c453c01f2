"""Who keeps logs from switching and from being emptied, and transactions that do not end."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import psycopg
import pytest

from gdq.monitor.doctor import PATIENCE, Finding, doctor
from tests.support.events import Tap, drain
from tests.support.schedules import Stage
from tests.support.server import Database

NOW = timedelta(0)


@pytest.fixture
def full(stage: Stage) -> Stage:
    """All three segments of the log of `acct` hold rows, and the one that is written has outgrown its size."""
    stage.owner.execute("update gdq.queue set rotation_bytes = 1")
    for _ in range(3):
        stage.insert()
        stage.owner.execute("select gdq.rotate_logs()")
    return stage


@pytest.fixture
def shop(tap: Tap) -> Tap:
    tap.write("create table item (id int primary key, name text)", "create table other (id int)")
    tap.add("shop.item")
    return tap


def found(connection: psycopg.Connection[Any], code: str, patience: timedelta = NOW) -> list[Finding]:
    return [finding for finding in doctor(connection, patience=patience) if finding.code == code]


def blocked(stage: Stage) -> Finding:
    """Why the log of `acct` cannot switch."""
    [finding] = found(stage.owner, "rotation_blocked", PATIENCE)
    assert (finding.severity, finding.object) == ("warning", "public.acct")
    return finding


@contextmanager
def monitor(db: Database) -> Iterator[None]:
    """The owner of gdq sees the state of all sessions."""
    with db.connect("su") as su:
        su.execute("grant pg_monitor to gdq_owner")
        try:
            yield
        finally:
            su.execute("revoke pg_monitor from gdq_owner")


def test_log_that_waits_for_its_consumers(full: Stage) -> None:
    assert "rows from after the last tick" in blocked(full).cause
    full.tick()
    full.owner.execute("select gdq.register_consumer('q', 'new')")
    assert blocked(full).cause.endswith("its next segment is kept for consumer c")
    full.owner.execute("select gdq.pause('q', 'c')")
    assert blocked(full).cause.endswith("its next segment is kept for consumer c, which is paused")
    full.owner.execute("select gdq.resume('q', 'c')")
    full.consume()
    full.owner.execute("update gdq.queue set retention = '1 hour'")
    finding = blocked(full)
    assert finding.cause.endswith("its next segment is kept for the retention of 01:00:00")
    assert "gdq set-queue" in finding.cure
    full.owner.execute("update gdq.queue set retention = '0'")
    assert blocked(full).cause.endswith("its next segment is read by all, and nobody empties it")
    full.maintain()
    assert found(full.owner, "rotation_blocked", PATIENCE) == []


def test_log_that_waits_for_a_transaction(full: Stage) -> None:
    segments = full.value("select array_agg(segment::text) from gdq.filled_logs(1) where not written")
    reader = full.session("reporter")
    reader.execute("begin; select txid_current()")
    for segment in segments:
        reader.execute(f"lock table {segment} in access share mode".encode())
    full.tick()
    full.consume()
    finding = blocked(full)
    assert f"held by pid {reader.info.backend_pid} (user gdq_owner, application reporter, idle in tr" in finding.cause
    assert finding.cure.endswith(f"select pg_terminate_backend({reader.info.backend_pid})")
    cut = found(full.owner, "truncation_blocked")
    assert sorted(finding.object for finding in cut) == sorted(segments)
    assert {finding.cure for finding in cut} == {finding.cure}
    assert found(full.owner, "truncation_blocked", PATIENCE) == []
    reader.execute("prepare transaction 'half done'")
    findings = found(full.owner, "rotation_blocked")
    full.owner.execute("rollback prepared 'half done'")
    [finding] = findings
    assert "held by prepared transaction 'half done' of user gdq_owner" in finding.cause
    assert finding.cure.endswith("ROLLBACK PREPARED 'half done', or COMMIT PREPARED")
    full.maintain()
    assert found(full.owner, "truncation_blocked") == []


def test_event_log_that_cannot_switch(full: Stage) -> None:
    for _ in range(3):
        full.owner.execute("select gdq.insert_event('q', 'm', 'x')")
        full.owner.execute("select gdq.rotate_logs()")
    full.tick()
    objects = [(finding.object, finding.cause[-10:]) for finding in found(full.owner, "rotation_blocked")]
    assert objects == [("public.acct", "consumer c"), ("queue q", "consumer c")]


def test_segment_that_is_not_read_yet_is_not_blocked(full: Stage) -> None:
    log = full.value("select min(segment::text) from gdq.filled_logs(1) where not written")
    full.tick()
    reader = full.session()
    reader.execute(f"begin; lock table {log} in access share mode".encode())
    assert found(full.owner, "truncation_blocked") == []
    full.consume()
    assert [finding.object for finding in found(full.owner, "truncation_blocked")] == [log]
    reader.execute("rollback")
    assert found(full.owner, "truncation_blocked") == []


def test_log_of_a_table_that_is_gone(shop: Tap) -> None:
    """What was written last is never written again, so it has to be emptied too."""
    shop.write("insert into item values (1, 'a')")
    (log,) = shop.owner.execute("select segment::text from gdq.filled_logs(1) where written").fetchone() or ("",)
    with shop.db.connect(autocommit=False) as reader:
        reader.execute(f"lock table {log} in access share mode".encode())
        drain(shop.db)
        assert found(shop.owner, "truncation_blocked") == []
        shop.write("drop table item")
        drain(shop.db)
        assert [finding.object for finding in found(shop.owner, "truncation_blocked")] == [log]


def test_transaction_that_keeps_the_positions_of_a_queue(stage: Stage) -> None:
    registering = stage.session("clerk")
    registering.execute("begin; select gdq.register_consumer('q', 'late')")
    [finding] = found(stage.owner, "truncation_blocked")
    assert finding.object == "q"
    assert f"pid {registering.info.backend_pid} (user gdq_owner, application clerk" in finding.cause
    registering.execute("rollback")
    assert found(stage.owner, "truncation_blocked") == []


def test_reader_that_keeps_the_control_tables(stage: Stage) -> None:
    reader = stage.session("refresher")
    reader.execute("begin isolation level repeatable read; lock table gdq.pin in access share mode")
    assert found(stage.owner, "truncation_blocked") == []
    stage.owner.execute(
        "insert into gdq.tick (queue_id, snapshot, event_seq, refresh)"
        " select 1, pg_current_snapshot(), 0, true from generate_series(1, 50000)"
    )
    [finding] = found(stage.owner, "truncation_blocked")
    assert (finding.object, "gdq.tick holds" in finding.cause) == ("gdq.pin", True)
    assert f"pid {reader.info.backend_pid} (user gdq_owner, application refresher" in finding.cause


def test_ticker_that_hangs_and_queue_that_is_paused(stage: Stage) -> None:
    stage.owner.execute("update gdq.tick set created_at = created_at - interval '1 hour'")
    stage.insert()
    ticker = stage.session("stuck ticker")
    ticker.execute("begin; select gdq.force_tick('q')")
    [finding] = found(stage.owner, "ticker_silent")
    assert f"pid {ticker.info.backend_pid} (user gdq_owner, application stuck ticker" in finding.cause
    ticker.execute("rollback")
    [finding] = found(stage.owner, "ticker_silent")
    assert finding.cure.startswith("Start gdq ticker")
    stage.owner.execute("select gdq.pause('q')")
    assert found(stage.owner, "ticker_silent") == []


def test_writers_that_do_not_end(shop: Tap) -> None:
    with shop.db.connect("app", autocommit=False, application_name="import") as writer:
        writer.execute("insert into item values (2, 'b')")
        shop.write("insert into item values (3, 'c')")
        shop.owner.execute("select gdq.force_tick('q')")
        assert found(shop.owner, "long_writer", PATIENCE) == []
        [finding] = found(shop.owner, "long_writer")
        assert (finding.severity, finding.object) == ("warning", f"pid {writer.info.backend_pid}")
        assert f"pid {writer.info.backend_pid} (user app, application import" in finding.cause
        assert found(shop.owner, "long_transaction") == []
        writer.execute("prepare transaction 'left behind'")
    early, late = (found(shop.owner, "prepared_transaction", patience) for patience in (PATIENCE, NOW))
    shop.app.execute("rollback prepared 'left behind'")  # before anything fails: it would hold up other tests
    assert early == []
    [finding] = late
    assert "its changes reach nobody" in finding.cause
    assert finding.cure == "COMMIT PREPARED 'left behind' or ROLLBACK PREPARED 'left behind'"
    assert found(shop.owner, "prepared_transaction") == []


def test_transaction_that_has_written_elsewhere(shop: Tap) -> None:
    """The server hides when it began; the tick that met it tells."""
    with shop.db.connect("app", autocommit=False) as writer:
        writer.execute("insert into other values (1)")
        assert found(shop.owner, "long_transaction") == []
        shop.write("insert into item values (1, 'a')")
        shop.owner.execute("select gdq.force_tick('q')")
        [finding] = found(shop.owner, "long_transaction")
        assert (finding.severity, finding.object) == ("note", f"pid {writer.info.backend_pid}")
        assert "has written, though not to captured tables" in finding.cause
        assert finding.cure.endswith(f"select pg_terminate_backend({writer.info.backend_pid})")
        with monitor(shop.db):
            assert "idle in transaction" in found(shop.owner, "long_transaction")[0].cause
            assert found(shop.owner, "long_transaction", PATIENCE) == []
    assert found(shop.owner, "long_transaction") == []


@pytest.mark.server
def test_old_snapshot_from_before_a_rotation(stage: Stage) -> None:
    old = stage.session("report")
    old.execute("begin isolation level repeatable read; select 1")
    stage.insert()
    assert stage.value("select gdq.rotate_logs()") == 1
    [finding] = found(stage.owner, "long_transaction")
    assert finding.object == f"pid {old.info.backend_pid}"
    assert "user gdq_owner, application report, idle in transaction" in finding.cause
    assert "keeps an old snapshot, from before 1 logs were switched" in finding.cause
    assert found(stage.owner, "long_transaction", PATIENCE) == []
    stage.insert(old)
    [finding] = found(stage.owner, "long_writer")
    assert finding.object == f"pid {old.info.backend_pid}"
    assert found(stage.owner, "long_transaction") == []


def test_old_snapshot_whose_age_is_hidden(shop: Tap) -> None:
    """A tick that found over what the snapshot shows as open was taken after it."""
    with shop.db.connect("app", autocommit=False) as old:
        old.execute("set transaction isolation level repeatable read")
        old.execute("select 1")
        assert found(shop.owner, "long_transaction") == []
        shop.write("insert into item values (1, 'a')")
        shop.owner.execute("select gdq.force_tick('q')")
        [finding] = found(shop.owner, "long_transaction")
        assert finding.object == f"pid {old.info.backend_pid}"
        assert re.search("in a transaction for at least [0-9]+ s", finding.cause)
        assert "keeps an old snapshot" in finding.cause
        assert found(shop.owner, "long_transaction", PATIENCE) == []
