"""The command that shows queues, consumers, views and slots on a live screen: top."""

from __future__ import annotations

import os
import shutil
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

import click
from psycopg import Connection

from gdq.cli.base import CommandFailure, Seconds, command_failure, connect_checked, dsn_option
from gdq.cli.screen import Screen
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
    if not once and os.environ.get("TERM", "dumb") == "dumb":
        raise click.UsageError("TERM names no terminal that can be drawn on: set TERM, or give --once")
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
    try:
        with Screen() as screen:
            threading.Thread(target=watcher.watch, args=(screen.wake,), daemon=True).start()
            _show(screen, watcher, interval)
    except OSError as error:
        raise CommandFailure(f"the terminal is gone: {error.strerror}") from error


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

    def watch(self, seen: Callable[[], None]) -> None:
        """Look again and again, and call `seen` each time; after an error, whatever it is, with a new connection."""
        while True:
            time.sleep(self._interval)
            try:
                self.look()
            except Exception as error:
                self.trouble = command_failure(error).message.rpartition("FATAL: ")[2].strip()
                if self._connection is not None:
                    self._connection.close()
                    self._connection = None
            seen()

    def status(self) -> str:
        """What to say about the server: nothing while it answers."""
        away = time.monotonic() - self.seen_at
        if self.trouble is not None:
            return f"trying again for {away:.0f} s: {self.trouble}"
        return f"no answer for {away:.0f} s" if away > self._interval + _SILENCE else ""


def _show(screen: Screen, watcher: _Watcher, interval: float) -> None:
    """Draw the screen at every look, every second and at every new size, until q is pressed."""
    while True:
        state = watcher.status() or f"{time.strftime('%H:%M:%S')}  every {interval:g} s  q quits"
        screen.draw(frame_lines(watcher.seen, *screen.size(), state))
        if set(screen.wait(1)) & set(b"qQ"):
            return
