"""Readers of a slot that are killed, servers that crash, slots that are lost or taken, publications altered by hand."""

from __future__ import annotations

import json
import logging
import os
import signal
import subprocess
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any

import psycopg
import pytest
from psycopg import sql

from gdq.consumers.refresh.refresher import Refresher
from gdq.consumers.slot.slot import slot_info
from gdq.consumers.slot.source import SlotSource
from gdq.embedded.server import EmbeddedServer
from gdq.errors import ConnectionLost, GdqError
from gdq.installer.install import install
from gdq.view.view import create_view
from tests.support.programs import gdq, start_gdq
from tests.support.server import Database, chosen_binaries
from tests.support.slot_reader import prepare, reader_of
from tests.support.waiting import SECONDS, until

pytestmark = pytest.mark.server

# A consumer that copies what it reads, and kills itself where the file `die` says so.
HANDLER = """
import os, signal
from pathlib import Path
from gdq.consumers.slot.assembly import Assembly
from gdq.consumers.slot.source import SlotSource

Path("pid").write_text(str(os.getpid()))
point = Path("die").read_text() if Path("die").exists() else ""

def die(*_):
    Path("died").write_text(point)
    os.kill(os.getpid(), signal.SIGKILL)

if point == "streaming":
    take = Assembly.take
    def take_some(self, message):
        if self._block is not None and self._block.rows > 2000:
            die()
        return take(self, message)
    Assembly.take = take_some
elif point == "committed":
    SlotSource.committed = die

def copy(connection, events):
    for event in events:
        connection.execute("insert into copied values (%s, %s)", [event.table, event.new["id"]])
        if point == "handling":
            die()
    if point == "handled":
        die()
"""


def copies(connection: psycopg.Connection[Any]) -> list[int]:
    return [number for (number,) in connection.execute("select id from copied order by id")]


def read(dsn: str, **given: Any) -> list[Any]:
    with SlotSource(dsn, "q", "c", **given) as source:
        return [event.in_json() for batch in source.batches(once=True) for event in batch.events()]


def handler_in(folder: Path, point: str = "") -> None:
    (folder / "slot_handler.py").write_text(HANDLER)
    (folder / "die").write_text(point)


@contextmanager
def reader(dsn: str, folder: Path, *options: str) -> Iterator[subprocess.Popen[str]]:
    """`gdq consume` at work with the handler, until the block ends."""
    process = start_gdq("consume", "q", "c", "slot_handler:copy", "--source", "slot", *options, dsn=dsn, cwd=folder)
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


@pytest.mark.long
def test_killed_in_the_middle_of_a_streamed_transaction(
    db: Database, su: psycopg.Connection[Any], tmp_path: Path
) -> None:
    killed(db, su, tmp_path, ["streaming"])


@pytest.mark.long
@pytest.mark.parametrize("points", [["handling", "handled"], ["committed", "streaming", "committed"]])
def test_killed_before_and_after_the_commit(
    db: Database, su: psycopg.Connection[Any], tmp_path: Path, points: list[str]
) -> None:
    killed(db, su, tmp_path, points)


def killed(db: Database, su: psycopg.Connection[Any], folder: Path, points: list[str]) -> None:
    """Small transactions and large ones, killed at one point after the other: each change is copied once."""
    su.execute(sql.SQL("alter database {} set logical_decoding_work_mem = '64kB'").format(sql.Identifier(db.name)))
    rows = 0
    for point in points:
        with db.connect("su") as other, db.connect("su") as beside:
            low = rows
            beside.execute("insert into item (id) values (%s)", [low + 1])
            other.execute("begin")
            fill = "insert into item (id, name) select i, md5(i::text) from generate_series(%s::int, %s::int) i"
            other.execute(fill, [low + 2, low + 3000])
            other.execute("savepoint s")
            other.execute("update item set n = 1 where id = %s", [low + 1])
            other.execute("rollback to s")
            other.execute(fill, [low + 3001, low + 3100])
            beside.execute("insert into item (id) values (%s)", [low + 3101])
            other.execute("commit")
            rows += 3101
        handler_in(folder, point)
        (folder / "died").unlink(missing_ok=True)
        done = gdq("consume", "q", "c", "slot_handler:copy", "--source", "slot", "--once", dsn=db.su_dsn, cwd=folder)
        assert done.returncode == -signal.SIGKILL, done.stderr
        assert (folder / "died").read_text() == point
    handler_in(folder)
    for _ in range(2):
        done = gdq("consume", "q", "c", "slot_handler:copy", "--source", "slot", "--once", dsn=db.su_dsn, cwd=folder)
        assert (done.returncode, done.stdout) == (0, "")
        assert copies(su) == list(range(1, rows + 1))
    stats = "select stream_txns from pg_stat_replication_slots where slot_name = 'gdq_q_c'"
    assert (su.execute(stats).fetchone() or (0,))[0] > 0


def test_a_commit_that_was_under_way_when_its_reader_was_killed(db: Database, su: psycopg.Connection[Any]) -> None:
    """The next reader begins before that commit; it must not apply the same again."""
    su.execute("insert into item (id) values (1)")
    with SlotSource(db.su_dsn, "q", "c") as first:
        stream = first.batches(once=True)
        batch = next(stream)
        su.execute("select pg_terminate_backend(%s)", [reader_of(su)])
        with SlotSource(db.su_dsn, "q", "c") as second:
            later = second.batches(once=True)
            again = next(later)
            assert [event.key for event in again.events()] == [{"id": 1}]
            with suppress(ConnectionLost):
                batch.commit()
            with pytest.raises(GdqError, match="another has moved it"):
                again.commit()
            with pytest.raises(GdqError, match="another has moved it"):
                next(later)
    assert read(db.su_dsn) == []


def test_a_reader_that_waited_begins_where_the_other_has_ended(db: Database, su: psycopg.Connection[Any]) -> None:
    """What the first commits while the second waits for the slot is not read again."""
    su.execute("insert into item (id) values (1)")

    class Mute(SlotSource):
        """Is gone before the server is told."""

        def committed(self, transactions: Any) -> None:
            pass

    first = Mute(db.su_dsn, "q", "c")
    stream = first.batches(once=True)
    batch = next(stream)

    def finish(_seconds: float) -> bool:
        if not batch.finished:
            batch.commit()
            first.__exit__(None, None, None)
        return False

    assert read(db.su_dsn, wait_seconds=30, pause=finish) == []
    assert batch.finished


def test_second_reader(
    db: Database, su: psycopg.Connection[Any], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Refused after a while with the first one's process; it reads on when the first is gone, killed or not."""
    handler_in(tmp_path)
    with reader(db.su_dsn, tmp_path) as process:
        until(lambda: reader_of(su))
        pid = reader_of(su)
        done = gdq("consume", "q", "c", "--source", "slot", "--once", "--slot-wait", "0.2", dsn=db.su_dsn)
        assert done.returncode == 1
        message, hint = done.stderr.splitlines()[-2:]
        assert message.startswith(
            f"Error: slot gdq_q_c is read by process {pid}, gdq:q/c, from 127.0.0.1: waited 0 s for it"
        )
        assert hint.startswith("Hint: A slot has one reader.")
        refused = gdq("drop-slot", "q", "c", dsn=db.su_dsn)
        assert (refused.returncode, refused.stderr.splitlines()[0]) == (
            1,
            f'Error: replication slot "gdq_q_c" is active for PID {pid}',
        )
        assert [(one.slot_name, one.active, one.publication) for one in slot_info(su)] == [("gdq_q_c", True, "gdq_q")]
        su.execute("insert into item (id) values (1)")
        until(lambda: copies(su) == [1])
        # stopped it is killed while another waits
        os.kill(process.pid, signal.SIGSTOP)
        with caplog.at_level(logging.WARNING, "gdq"):
            found = read(db.su_dsn, wait_seconds=SECONDS, pause=partial(kill, process))
        assert found == []
        assert f"slot gdq_q_c is read by process {pid}" in caplog.text


def kill(process: subprocess.Popen[str], seconds: float) -> bool:
    process.kill()
    time.sleep(seconds)
    return False


def test_refresh_waits_for_the_slot(db: Database, su: psycopg.Connection[Any]) -> None:
    with db.connect() as owner:
        owner.execute("select gdq.create_queue('q')")
        su.execute("alter table item owner to gdq_owner")
        owner.execute("select gdq.add_table('q', 'item')")
    create_view(su, "c", "q", "select id, name from item", "public.out_c", engine="postgres")
    with SlotSource(db.su_dsn, "q", "c") as first, Refresher(db.su_dsn, slot_wait_seconds=0.1) as refresher:
        with pytest.raises(GdqError, match=f"slot gdq_q_c is read by process {reader_of(su)}"):
            refresher.refresh("c", slot=True)
        first._replication.close()
        assert refresher.refresh("c", slot=True).action == "full"
        su.execute("insert into item (id) values (1)")
        assert refresher.refresh("c", slot=True).action == "delta"
    said = gdq("refresh", "c", "--source", "slot", "--slot-wait", "0", dsn=db.su_dsn)
    assert said.returncode == 0
    su.execute("select gdq.drop_view('c')")


def test_stream_that_the_server_ends_is_a_lost_connection(db: Database, su: psycopg.Connection[Any]) -> None:
    """While it waits, and while it tells what it has."""
    with SlotSource(db.su_dsn, "q", "c") as source:
        su.execute("select pg_terminate_backend(%s)", [reader_of(su)])
        with pytest.raises(ConnectionLost):
            list(source.batches(timeout=SECONDS))
    su.execute("insert into item (id) values (1)")
    with SlotSource(db.su_dsn, "q", "c") as source:
        stream = source.batches()
        batch = next(stream)
        su.execute("select pg_terminate_backend(%s)", [reader_of(su)])
        until(lambda: reader_of(su) is None)
        with pytest.raises(ConnectionLost):
            next(stream)
        assert batch.finished
    assert read(db.su_dsn) == []


@pytest.mark.long
def test_command_goes_on_after_its_stream_was_ended(db: Database, su: psycopg.Connection[Any], tmp_path: Path) -> None:
    handler_in(tmp_path)
    with reader(db.su_dsn, tmp_path) as process:
        until(lambda: reader_of(su))
        pid = reader_of(su)
        su.execute("select pg_terminate_backend(%s)", [pid])
        until(lambda: reader_of(su) not in (None, pid))
        su.execute("insert into item (id) values (1)")
        until(lambda: copies(su) == [1])
        process.send_signal(signal.SIGTERM)
        assert "connection lost" in process.communicate(timeout=SECONDS)[1]
        assert process.returncode == 0


def test_positions_are_on_disk_before_the_server_is_told(db: Database, su: psycopg.Connection[Any]) -> None:
    """Else a crash takes the rows and the position, and the slot does not have the changes any more."""
    su.execute(sql.SQL("alter database {} set synchronous_commit = off").format(sql.Identifier(db.name)))
    su.execute("insert into item (id) values (1)")
    with SlotSource(db.su_dsn, "q", "c") as source:
        for batch in source.batches(once=True):
            assert source.connection.execute("show synchronous_commit").fetchone() == ("off",)
            source.move(batch.lsn)
            assert source.connection.execute("show synchronous_commit").fetchone() == ("local",)
            source.stored = batch.lsn
        assert source.connection.execute("show synchronous_commit").fetchone() == ("off",)


def test_message_behind_a_commit_is_no_part_of_it(db: Database, su: psycopg.Connection[Any]) -> None:
    """A message outside of transactions has a position of its own, which is the end of its record."""
    with db.connect("su") as other:
        other.execute("insert into item (id) values (1)")
        query = "select pg_logical_emit_message(false, 'note', 'behind') - '0/0'"
        (end,) = other.execute(query).fetchone() or (0,)
    with SlotSource(db.su_dsn, "q", "c", max_events=1) as source:
        batches = [(list(batch.events()), batch.lsn) for batch in source.batches(once=True)]
    assert [[event.op for event in events] for events, _ in batches] == [["insert"], ["message"]]
    assert batches[1][1] == end
    assert read(db.su_dsn) == []


@pytest.mark.long
def test_lost_slot(db: Database, su: psycopg.Connection[Any], tmp_path: Path) -> None:
    """Said in a line, by a reader that was at work as well; dropped and made anew it is read again."""
    handler_in(tmp_path)
    with reader(db.su_dsn, tmp_path) as process:
        until(lambda: reader_of(su))
        os.kill(process.pid, signal.SIGSTOP)
        lose(su)
        os.kill(process.pid, signal.SIGCONT)
        said = process.communicate(timeout=SECONDS)[1]
        assert (process.returncode, "slot gdq_q_c is lost" in said) == (3, True)
    done = gdq("consume", "q", "c", "--source", "slot", "--once", dsn=db.su_dsn)
    assert done.returncode == 3
    error, hint = done.stderr.splitlines()
    assert error == "Error: slot gdq_q_c is lost (wal_removed): the server has removed log that was not read"
    assert hint.startswith("Hint: Drop it with gdq drop-slot, make it anew with gdq create-slot and load the tables.")
    (listed,) = json.loads(gdq("slots", "--json", dsn=db.su_dsn).stdout)
    assert (listed["lost"], listed["active"], listed["retained_bytes"]) == (True, False, None)
    assert gdq("drop-slot", "q", "c", dsn=db.su_dsn).returncode == 0
    assert slot_info(su) == su.execute("select from pg_publication").fetchall() == []
    assert gdq("create-slot", "q", "c", "public.item", dsn=db.su_dsn).returncode == 0
    su.execute("insert into item (id) values (1)")
    assert [event.key for event in read(db.su_dsn)] == [{"id": 1}]


def lose(su: psycopg.Connection[Any]) -> None:
    """Have the server remove log that the slot needs."""
    su.execute("alter system set max_slot_wal_keep_size = '1MB'")
    su.execute("select pg_reload_conf()")
    try:
        until(partial(is_lost, su))
    finally:
        su.execute("alter system reset max_slot_wal_keep_size")
        su.execute("select pg_reload_conf()")


def is_lost(su: psycopg.Connection[Any]) -> bool:
    su.execute("select pg_logical_emit_message(false, 'x', 'x')")
    su.execute("select pg_switch_wal()")
    su.execute("checkpoint")
    return slot_info(su)[0].lost


@pytest.mark.long
def test_server_crashes_while_a_transaction_is_streamed(pytestconfig: pytest.Config, tmp_path: Path) -> None:
    """A reader goes on by itself; what was not committed is gone, what was comes once."""
    settings: dict[str, str | float | bool] = {"wal_level": "logical", "logical_decoding_work_mem": "64kB"}
    fill = "insert into item (id, name) select i, md5(i::text) from generate_series(%s::int, %s::int) i"
    handler_in(tmp_path)
    with EmbeddedServer(binaries=chosen_binaries(pytestconfig.getoption("--pg")), settings=settings) as server:
        install(server.conninfo())
        with psycopg.connect(server.conninfo(), autocommit=True) as su:
            prepare(su)
        with reader(server.conninfo(), tmp_path) as process:
            with closing(connected(server)) as su, closing(psycopg.connect(server.conninfo())) as other:
                su.execute("insert into item (id) values (1)")
                until(lambda: copies(su) == [1])
                other.execute(fill, [2, 5000])
                until(partial(streamed, su))
                su.execute("insert into item (id) values (5001)")
                server.crash()
            server.start()
            with closing(connected(server)) as su:
                until(lambda: copies(su) == [1, 5001])
                su.execute(fill, [2, 5000])
                server.crash()
            server.start()
            with closing(connected(server)) as su:
                until(lambda: len(copies(su)) >= 5001)
                assert copies(su) == list(range(1, 5002))
                process.send_signal(signal.SIGTERM)
                assert "connected again" in process.communicate(timeout=SECONDS)[1]
                assert process.returncode == 0
                until(lambda: reader_of(su) is None)
                assert read(server.conninfo()) == []


def connected(server: EmbeddedServer) -> psycopg.Connection[Any]:
    return psycopg.connect(server.conninfo(), autocommit=True)


def streamed(su: psycopg.Connection[Any]) -> bool:
    found = su.execute("select stream_bytes from pg_stat_replication_slots where slot_name = 'gdq_q_c'").fetchone()
    return bool(found and found[0])
