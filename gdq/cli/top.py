"""The command that shows queues, consumers, views and slots on a live screen: top."""

from __future__ import annotations

import contextlib
import os
import select
import shutil
import signal
import sys
import termios
import threading
import time
import tty
from collections.abc import Iterator
from typing import Any

import click
from psycopg import Connection

from gdq.cli.base import EXPECTED_ERRORS, Seconds, command_failure, connect_checked, dsn_option
from gdq.cli.top_frame import Look, frame_lines
from gdq.consumer import consumer_info
from gdq.consumers.slot.slot import slot_info
from gdq.monitor.doctor import Finding, doctor
from gdq.queue import queue_info
from gdq.view.view import view_info

# Seconds between two calls of doctor, which takes longer than all else.
_DOCTOR_SECONDS = 10.0

# Seconds without an answer of the server after which the screen says so.
_SILENCE = 5.0

# The other screen, without cursor and without wrapping; and back.
_ENTER = "\x1b[?1049h\x1b[?25l\x1b[?7l"
_LEAVE = "\x1b[?7h\x1b[?25h\x1b[?1049l"


@click.command()
@click.option("--once", is_flag=True, help="Print one frame and end; needs no terminal.")
@click.option(
    "--interval", type=Seconds(0.1), default=2.0, show_default=True, metavar="SECONDS", help="Time between two looks."
)
@dsn_option
def top_command(once: bool, interval: float, dsn: str | None) -> None:
    """Show queues, consumers, views, slots and what doctor finds on one screen, until q is pressed.

    While the server is away the screen keeps the last numbers, says so, and gdq goes on trying.
    """
    if not (once or sys.stdout.isatty()):
        raise click.UsageError("stdout is no terminal: give --once, or use gdq status --watch")
    connection = connect_checked(dsn, "gdq top")
    watcher = _Watcher(connection, dsn, interval)
    try:
        watcher.look()
    except BaseException:
        connection.close()
        raise
    if once:
        connection.close()
        for line, _ in frame_lines(watcher.seen, shutil.get_terminal_size().columns, None, ""):
            click.echo(line)
        return
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    threading.Thread(target=watcher.watch, daemon=True).start()
    with _screen():
        _show(watcher, interval)


class _Watcher:
    """Reads the database in a thread of its own, so that keys work while the server does not answer."""

    def __init__(self, connection: Connection[Any], dsn: str | None, interval: float) -> None:
        self._connection: Connection[Any] | None = connection
        self._dsn = dsn
        self._interval = interval
        self._doctor_at = float("-inf")
        self._findings: list[Finding] = []
        self.seen = Look([], [], [], [], [])
        self.seen_at = time.monotonic()
        self.trouble: str | None = None
        self.reader, self._writer = os.pipe()

    def look(self) -> None:
        """Look at the database once; an error is the caller's."""
        if self._connection is None:
            self._connection = connect_checked(self._dsn, "gdq top")
        found = self._connection
        if time.monotonic() - self._doctor_at >= _DOCTOR_SECONDS:
            self._findings = doctor(found)
            self._doctor_at = time.monotonic()
        self.seen = Look(queue_info(found), consumer_info(found), view_info(found), slot_info(found), self._findings)
        self.seen_at = time.monotonic()
        self.trouble = None

    def watch(self) -> None:
        """Look again and again; after an error with a new connection."""
        while True:
            time.sleep(self._interval)
            try:
                self.look()
            except EXPECTED_ERRORS as error:
                self.trouble = command_failure(error).message.rpartition("FATAL: ")[2].strip()
                if self._connection is not None:
                    self._connection.close()
                    self._connection = None
            os.write(self._writer, b"!")

    def status(self) -> str:
        """What to say about the server: nothing while it answers."""
        away = time.monotonic() - self.seen_at
        if self.trouble is not None:
            return f"trying again for {away:.0f} s: {self.trouble}"
        return f"no answer for {away:.0f} s" if away > self._interval + _SILENCE else ""


def _show(watcher: _Watcher, interval: float) -> None:
    """Draw the screen at every look, every second and at every new size, until q is pressed."""
    keys = [sys.stdin.fileno()] if sys.stdin.isatty() else []
    while True:
        columns, rows = os.get_terminal_size(sys.stdout.fileno())  # shutil's would believe COLUMNS
        state = watcher.status() or f"{time.strftime('%H:%M:%S')}  every {interval:g} s  q quits"
        _draw(frame_lines(watcher.seen, columns, rows, state))
        ready, _, _ = select.select([watcher.reader, *keys], [], [], 1)
        if watcher.reader in ready:
            os.read(watcher.reader, 1024)
        if keys and keys[0] in ready:
            pressed = os.read(keys[0], 1024)
            if not pressed:
                keys = []
            elif set(pressed) & set(b"qQ"):
                return


def _draw(lines: list[tuple[str, bool]]) -> None:
    """Put (text, bold) lines on the screen, in one write so that it does not flicker."""
    texts = (f"\x1b[1m{text}\x1b[0m" if bold else text for text, bold in lines)
    sys.stdout.write("\x1b[H" + "\n".join(text + "\x1b[K" for text in texts) + "\x1b[J")
    sys.stdout.flush()


@contextlib.contextmanager
def _screen() -> Iterator[None]:
    """The terminal's other screen, with keys that arrive at once and unseen; at the end the terminal is as before."""
    before = termios.tcgetattr(sys.stdin) if sys.stdin.isatty() else None
    try:
        if before is not None:
            tty.setcbreak(sys.stdin)
        sys.stdout.write(_ENTER)
        yield
    finally:
        sys.stdout.write(_LEAVE)
        sys.stdout.flush()
        if before is not None:
            termios.tcsetattr(sys.stdin, termios.TCSADRAIN, before)
