"""A replication connection: the stream of a logical slot by PostgreSQL's streaming replication protocol."""

from __future__ import annotations

import logging
import re
import select
import struct
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Self

import psycopg
from psycopg import Connection, pq
from psycopg.conninfo import conninfo_to_dict, make_conninfo

from gdq.call import scalar
from gdq.conninfo import resolve_conninfo
from gdq.consumers.slot.slot import publication_name
from gdq.errors import ConnectionLost, GdqError
from gdq.qualified_sql import qualified
from gdq.typed.pgtypes import READ_SETTINGS

log = logging.getLogger(__name__)

# A killed reader holds its slot until the server notices.
REPLICATION_WAIT_SECONDS = 30.0

_FEEDBACK_SECONDS = 10.0
_GOODBYE_SECONDS = 2.0
_PAUSE_SECONDS_MAX = 1.0
_FLUSH_SECONDS = 0.01
_DATA = struct.Struct("!QQq")
_KEEPALIVE = struct.Struct("!QqB")
_STATUS = struct.Struct("!cQQQqB")
_EPOCH_SECONDS = 946_684_800  # 2000-01-01

# Lets the server notice that the reader's machine is gone; the connection string may override it.
_ALIVE = {"tcp_keepalives_idle": "60", "tcp_keepalives_interval": "10", "tcp_keepalives_count": "6"}

_READER = qualified("""
    select pg_catalog.concat_ws(', ', s.active_pid, case when a.application_name <> '' then a.application_name end,
                                'from ' || pg_catalog.host(a.client_addr))
      from pg_catalog.pg_replication_slots s left join pg_catalog.pg_stat_activity a on a.pid = s.active_pid
     where s.slot_name = %s and s.active_pid is not null""")


@dataclass(frozen=True, slots=True)
class ReplicationData:
    """One message of the output plugin; its change is at `lsn`."""

    lsn: int
    data: bytes


@dataclass(frozen=True, slots=True)
class ReplicationKeepalive:
    """The server has sent all that was committed before `lsn`."""

    lsn: int


class Replication:
    """The stream of one slot; confirmed changes are not sent again after a restart.

    The session sets its own text formats, whatever the settings of role and database are.
    """

    def __init__(self, dsn: str | None, slot: str, options: Mapping[str, str]) -> None:
        """Connect and start with the output plugin's `options`; psycopg.errors.ObjectInUse if the slot is read."""
        parameters = conninfo_to_dict(resolve_conninfo(dsn))
        # no timeout: a reader that is busy with a batch does not answer
        settings = READ_SETTINGS | {"wal_sender_timeout": "0"}
        parameters["options"] = " ".join([*_given(_ALIVE), str(parameters.get("options") or ""), *_given(settings)])
        parameters.setdefault("fallback_application_name", f"gdq:slot {slot}"[:63])
        parameters |= {"replication": "database", "client_encoding": "UTF8"}
        conninfo = make_conninfo("", **parameters)
        self.slot = slot
        self._confirmed = 0
        self._told_at = time.monotonic()
        self._wire = pq.PGconn.connect(conninfo.encode())
        if self._wire.status != pq.ConnStatus.OK:
            # before the session has begun the server's messages are in its own encoding
            raise psycopg.OperationalError(self._wire.error_message.decode(errors="replace").strip())
        try:
            self._start(options)
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """End the session; if the server answers in time, the slot is free for the next reader at once."""
        try:
            if self._wire.status == pq.ConnStatus.OK:
                self._wire.put_copy_end()
                self._drain(time.monotonic() + _GOODBYE_SECONDS)
        except psycopg.Error:
            pass  # it is over already
        finally:
            self._wire.finish()

    def _drain(self, until: float) -> None:
        """Read the rest that the server sent before it received the end."""
        while time.monotonic() < until:
            waiting = self._wire.flush()
            size, _ = self._wire.get_copy_data(1)
            if size < 0:
                self._wire.get_result()
                return
            if size == 0:
                select.select([self._wire.socket], [self._wire.socket] if waiting else [], [], 0.1)
                self._wire.consume_input()

    def _start(self, options: Mapping[str, str]) -> None:
        listed = ", ".join(f"\"{name}\" '{value.replace(chr(39), chr(39) * 2)}'" for name, value in options.items())
        # 0/0: the server starts at the confirmed position
        command = f'START_REPLICATION SLOT "{self.slot}" LOGICAL 0/0 ({listed})'
        result = self._wire.exec_(command.encode())
        if result.status != pq.ExecStatus.COPY_BOTH:
            raise psycopg.errors.error_from_result(result)

    def fileno(self) -> int:
        """The socket: readable when the server has sent something."""
        return self._wire.socket

    def receive(self, seconds: float) -> ReplicationData | ReplicationKeepalive | None:
        """The next message; None if none arrives within `seconds` (0: return at once).

        ConnectionLost if the connection or the stream is over, other psycopg.Error if the server cannot go on.
        """
        try:
            return self._receive(time.monotonic() + seconds)
        except psycopg.OperationalError as error:
            raise self._lost(error) from error.__cause__

    def _lost(self, error: psycopg.OperationalError) -> psycopg.OperationalError:
        """ConnectionLost if libpq has given the connection up, else the error itself."""
        if self._wire.status == pq.ConnStatus.OK or isinstance(error, ConnectionLost):
            return error
        return ConnectionLost(str(error))

    def _receive(self, until: float) -> ReplicationData | ReplicationKeepalive | None:
        while True:
            size, view = self._wire.get_copy_data(1)
            if size > 0:
                found = self._read(bytes(view))
                if found is not None:
                    return found
                continue
            if size < 0:
                self._ended(size)
            self._tell_in_time()
            wait = until - time.monotonic()
            if not select.select([self._wire.socket], [], [], max(min(wait, _FEEDBACK_SECONDS), 0))[0] and wait <= 0:
                return None
            self._wire.consume_input()

    def confirm(self, lsn: int) -> None:
        """Report to the server that the log before `lsn` is no longer needed."""
        if lsn > self._confirmed:
            self._confirmed = lsn
            self._tell()

    def seen(self, lsn: int) -> None:
        """Like confirm(), for log without changes: reported with the next regular status, not at once."""
        self._confirmed = max(self._confirmed, lsn)

    def _read(self, data: bytes) -> ReplicationData | ReplicationKeepalive | None:
        if data[:1] == b"w":
            lsn, _, _ = _DATA.unpack_from(data, 1)
            return ReplicationData(lsn, data[1 + _DATA.size :])
        if data[:1] != b"k":
            raise GdqError(f"not a message of a replication stream: {data[:20]!r}")
        lsn, _, reply = _KEEPALIVE.unpack_from(data, 1)
        if reply:
            self._tell()
        return ReplicationKeepalive(lsn)

    def _tell_in_time(self) -> None:
        if time.monotonic() - self._told_at >= _FEEDBACK_SECONDS:
            self._tell()

    def _tell(self) -> None:
        lsn, microseconds = self._confirmed, int((time.time() - _EPOCH_SECONDS) * 1_000_000)
        # written, flushed and applied are one here
        try:
            self._wire.put_copy_data(_STATUS.pack(b"r", lsn, lsn, lsn, microseconds, 0))
            while self._wire.flush():
                select.select([], [self._wire.socket], [])
        except psycopg.OperationalError as error:
            raise self._lost(error) from error.__cause__
        self._told_at = time.monotonic()

    def _ended(self, size: int) -> None:
        result = self._wire.get_result()
        if result is not None and result.status == pq.ExecStatus.FATAL_ERROR:
            severity = result.error_field(pq.DiagnosticField.SEVERITY_NONLOCALIZED)
            if severity == b"ERROR":  # the session goes on: the error is about the slot or the publication
                raise psycopg.errors.error_from_result(result)
            raise ConnectionLost(result.error_message.decode(errors="replace").strip())
        if size == -1:
            raise ConnectionLost(f"the server ended the stream of slot {self.slot}")
        raise ConnectionLost(self._wire.error_message.decode(errors="replace").strip())


def _given(settings: Mapping[str, str]) -> list[str]:
    """Settings as options of a session's command line."""
    return [f"-c {name}={value.replace(' ', chr(92) + ' ')}" for name, value in settings.items()]


def lsn_text(lsn: int) -> str:
    """An LSN as PostgreSQL writes it, such as 1/5A3C0."""
    return f"{lsn >> 32:X}/{lsn & 0xFFFFFFFF:X}"


def lsn_number(text: str) -> int:
    """The number of an LSN that PostgreSQL wrote."""
    high, _, low = text.partition("/")
    return (int(high, 16) << 32) + int(low, 16)


def committed_lsn(connection: Connection[Any]) -> int:
    """The LSN up to which the log holds all that is committed now, and which a slot sends.

    The server sends only flushed log: commits with synchronous_commit off are flushed after 3 wal_writer_delay.
    """
    query = "select extract(epoch from 3 * pg_catalog.current_setting('wal_writer_delay')::interval)::float8"
    end = scalar(connection, qualified("select pg_catalog.pg_current_wal_insert_lsn()::text"))
    until = time.monotonic() + scalar(connection, qualified(query))
    flushed = qualified("select pg_catalog.pg_current_wal_flush_lsn() >= %s::pg_catalog.pg_lsn")
    while not scalar(connection, flushed, end) and time.monotonic() < until:
        time.sleep(_FLUSH_SECONDS)
    return lsn_number(scalar(connection, qualified("select pg_catalog.pg_current_wal_flush_lsn()::text")))


def open_replication(
    connection: Connection[Any],
    dsn: str,
    slot: str,
    queue: str,
    *,
    messages: bool = True,
    wait_seconds: float = REPLICATION_WAIT_SECONDS,
    pause: Callable[[float], bool] | None = None,
) -> Replication:
    """Start the stream of a slot of the queue's publication.

    `messages`: also send those of pg_logical_emit_message(). `connection` serves to query the catalog. While another
    process reads the slot, retry for `wait_seconds` or until `pause(seconds)`, which sleeps, returns True; then
    GdqError names that process. Errors of refuse_synchronous(); other errors as for Replication.
    """
    refuse_synchronous(connection, slot)
    query = qualified("select two_phase from pg_catalog.pg_replication_slots where slot_name = %s")
    two_phase = connection.execute(query, [slot]).fetchone()
    options = {"proto_version": "4" if connection.info.server_version >= 160000 else "3"}
    options |= {"publication_names": f'"{publication_name(queue)}"', "streaming": "on"}
    options |= {"messages": "true"} if messages else {}
    options |= {"two_phase": "on"} if two_phase and two_phase[0] else {}
    started, delay = time.monotonic(), 0.05
    while True:
        try:
            return Replication(dsn, slot, options)
        except psycopg.errors.ObjectInUse as error:
            row = connection.execute(_READER, [slot]).fetchone()
            reader = f"process {row[0]}" if row else "another process"
            waited = time.monotonic() - started
            if waited >= wait_seconds or (pause or _sleep)(min(delay, wait_seconds - waited)):
                raise GdqError(
                    f"slot {slot} is read by {reader}: waited {waited:.0f} s for it",
                    hint="A slot has one reader. End that one; if its program is gone, pg_terminate_backend() ends it.",
                ) from error
            if delay < 0.1:
                log.warning("slot %s is read by %s: waiting for up to %.0f s", slot, reader, wait_seconds)
        delay = min(delay * 2, _PAUSE_SECONDS_MAX)


def refuse_synchronous(connection: Connection[Any], slot: str) -> None:
    """GdqError if the reader of a slot would count as a synchronous standby, by `*` in synchronous_standby_names.

    Every COMMIT of the server would wait for the reader: those of the application, and the reader's own.
    """
    row = connection.execute("show synchronous_standby_names").fetchone()
    # ANY 2 (a, b): only the names are asked for
    names = re.split(r"[(),]", str(row and row[0]))
    if any(name.strip() in ("*", '"*"') for name in names):
        raise GdqError(
            f"synchronous_standby_names has *: the server takes the reader of slot {slot} for a synchronous standby,"
            " and each COMMIT would wait for it",
            hint="Name the standbys in synchronous_standby_names.",
        )


def _sleep(seconds: float) -> bool:
    time.sleep(seconds)
    return False
