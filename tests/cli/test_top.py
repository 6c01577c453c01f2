"""`gdq top`: frames in a pipe, and the live screen on a pseudo-terminal."""

from __future__ import annotations

import fcntl
import os
import pty
import re
import select
import signal
import struct
import subprocess
import sys
import termios
import time
from datetime import timedelta
from typing import Any, Self

import pytest
from rich.cells import cell_len

from gdq.cli.top_frame import Look, frame_lines
from gdq.consumer import ConsumerInfo
from gdq.monitor.doctor import Finding
from tests.support.programs import environment, gdq
from tests.support.server import Database
from tests.support.waiting import SECONDS

# By what the screen is entered, and by what it is left.
ENTER, LEAVE = "\x1b[?1049h", "\x1b[?1049l"


class Screen:
    """`gdq top` on a terminal of its own."""

    def __init__(self, dsn: str, *options: str, columns: int = 80, rows: int = 24) -> None:
        self._terminal, inner = pty.openpty()
        self.resize(columns, rows)
        self.process = subprocess.Popen(
            [sys.executable, "-m", "gdq", "top", "--interval", "0.1", *options],
            env=environment(dsn) | {"TERM": "xterm"},
            stdin=inner,
            stdout=inner,
            stderr=inner,
            start_new_session=True,
            preexec_fn=lambda: fcntl.ioctl(0, termios.TIOCSCTTY, 0),  # noqa: PLW1509 (no threads here)
        )
        os.close(inner)
        self.text = ""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.process.kill()
        self.process.wait()
        os.close(self._terminal)

    def resize(self, columns: int, rows: int) -> None:
        fcntl.ioctl(self._terminal, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))

    def press(self, key: str) -> None:
        os.write(self._terminal, key.encode())

    def frame(self) -> list[str]:
        """The last whole frame."""
        whole = self.text.split("\x1b[J")[-2:-1]
        lines = "".join(whole).rpartition("\x1b[H")[2].split("\r\n")
        return [re.sub(r"\x1b\[[01]?[mK]", "", line) for line in lines]

    def until(self, pattern: str) -> list[str]:
        """Read until a whole frame has the pattern."""
        deadline = time.monotonic() + SECONDS
        while not re.search(pattern, "\n".join(self.frame())):
            assert time.monotonic() < deadline, self.text[-3000:]
            assert self._read(), f"it ended: {self.text[-3000:]}"
        return self.frame()

    def end(self) -> int:
        """Read to the end; the exit code."""
        while self._read():
            pass
        return self.process.wait(SECONDS)

    def _read(self) -> bool:
        ready, _, _ = select.select([self._terminal], [], [], SECONDS)
        assert ready, self.text[-3000:]
        try:
            found = os.read(self._terminal, 65536)
        except OSError:  # the other end was closed
            return False
        self.text += found.decode()
        return bool(found)


@pytest.fixture
def shop(db: Database) -> Database:
    with db.connect() as owner:
        owner.execute("create table orders (id int primary key)")
        owner.execute("select gdq.create_queue('q')")
        owner.execute("select gdq.register_consumer('q', 'mirror')")
        owner.execute("select gdq.add_table('q', 'orders')")
        owner.execute("insert into orders values (1), (2)")
        owner.execute("select gdq.force_tick('q')")
    return db


def test_one_frame_in_a_pipe(shop: Database) -> None:
    done = gdq("top", "--once", dsn=shop.dsn)
    assert (done.returncode, done.stderr) == (0, "")
    lines = done.stdout.splitlines()
    assert lines[0] == "gdq top"
    assert lines[1].startswith("doctor: ")
    assert [line.split()[0] for line in lines[3:5]] == ["QUEUE", "q"]
    heading, row = (line.split() for line in lines[6:8])
    assert heading == ["CONSUMER", "queue", "lag", "unread", "bytes", "state"]
    assert (row[:2], row[-1]) == (["mirror", "q"], "idle")
    assert all(len(line) <= 80 for line in lines)
    assert "\x1b" not in done.stdout


def test_without_a_terminal_once_is_needed(shop: Database) -> None:
    done = gdq("top", dsn=shop.dsn)
    assert done.returncode == 2
    assert "give --once" in done.stderr


def test_numbers_change_and_q_ends(shop: Database) -> None:
    with Screen(shop.dsn) as screen, shop.connect() as owner:
        lines = screen.until(r"mirror +q ")
        assert ENTER in screen.text
        assert len(lines) <= 24
        assert max(map(cell_len, lines)) <= 80, lines
        owner.execute("select gdq.pause('q', 'mirror')")
        owner.execute("select gdq.register_consumer('q', E'evil\\x1b[31m\nname')")
        lines = screen.until(r"mirror .*paused")
        lines = screen.until("evil")
        assert r"evil\x1b[31m\x0aname" in "\n".join(lines), lines
        screen.press("x")
        screen.press("q")
        assert screen.end() == 0
        assert screen.text.rstrip().endswith(LEAVE)
        assert "\x1b[31m" not in screen.text


def test_interrupted(shop: Database) -> None:
    with Screen(shop.dsn) as screen:
        screen.until("mirror")
        screen.press("\x03")
        assert screen.end() == 130
        assert LEAVE in screen.text
        assert "Error: interrupted" in screen.text.partition(LEAVE)[2]
    with Screen(shop.dsn) as screen:
        screen.until("mirror")
        screen.process.send_signal(signal.SIGTERM)
        assert screen.end() == 0
        assert LEAVE in screen.text


def test_narrow_screens_cut(shop: Database) -> None:
    with Screen(shop.dsn, columns=30, rows=8) as screen:
        lines = screen.until("…")
        assert len(lines) <= 8
        assert max(map(cell_len, lines)) <= 30, lines
        screen.resize(100, 30)
        screen.until("mirror +q .*idle")


def test_the_server_goes_and_comes_back(shop: Database) -> None:
    """Sessions are ended and no new ones allowed: one line tells, and the numbers stay."""
    with Screen(shop.dsn) as screen, shop.connect("su") as su:
        screen.until("mirror")
        su.execute(f"revoke connect on database {shop.name} from public, gdq_owner".encode())
        su.execute(f"alter database {shop.name} owner to postgres".encode())
        su.execute(
            "select pg_terminate_backend(pid) from pg_stat_activity"
            " where datname = %s and application_name = 'gdq top'",
            [shop.name],
        )
        lines = screen.until("trying again for .*permission denied")
        assert any("mirror" in line for line in lines)
        su.execute(f"alter database {shop.name} owner to gdq_owner".encode())
        su.execute(f"grant connect on database {shop.name} to gdq_owner".encode())
        screen.until("q quits")
        screen.press("q")
        assert screen.end() == 0


def test_no_server() -> None:
    done = gdq("top", "--once", dsn="host=127.0.0.1 port=1 user=x")
    assert done.returncode == 1
    assert done.stderr.startswith("Error: ")
    assert len(done.stdout) == 0


def consumer(number: int, lag: float, **values: Any) -> ConsumerInfo:
    given: dict[str, Any] = {
        "queue_name": "q", "consumer_name": f"c{number}", "lag": timedelta(seconds=lag), "unread_events": number,
        "unread_bytes": 0, "last_seen": None, "batch_age": None, "last_tick": None, "retries": 0, "dead_letters": 0,
        "resync": None, "reason": None, "tables": None, "skip_origin": None, "owner_role": "o", "paused": False,
    }  # fmt: skip
    return ConsumerInfo(**given | values)


def test_the_slowest_are_shown_where_not_all_fit() -> None:
    look = Look([], [consumer(number, lag=number * 10) for number in range(100)], [], [], [])
    lines = [text for text, _ in frame_lines(look, 80, 24, "now")]
    assert len(lines) <= 24
    shown = [line.split()[0] for line in lines if line.startswith("c")]
    assert shown == [f"c{number}" for number in range(100 - len(shown), 100)]
    assert lines[-1] == f"and {100 - len(shown)} more"
    assert len(frame_lines(look, 80, None, "now")) == 104


def test_wide_letters_and_states() -> None:
    name = "漢字" * 20
    held = consumer(1, 0, consumer_name=name, paused=True, resync=["a", "b"], dead_letters=3, retries=2000)
    finding = Finding("error", "code", "o", "it is\x07 broken", "cure", fixable=False)
    lines = [text for text, _ in frame_lines(Look([], [held], [], [], [finding] * 2), 80, 24, "now")]
    assert lines[1] == r"doctor: 2 errors: it is\x07 broken"
    assert all(cell_len(line) <= 80 for line in lines)
    assert "paused, resync 2, dead 3" in lines[-1]
    for width in range(1, 90):
        assert all(cell_len(text) <= width for text, _ in frame_lines(Look([], [held], [], [], []), width, 5, "now"))
