"""`gdq top`: frames in a pipe, and the live screen on a pseudo-terminal."""

from __future__ import annotations

import fcntl
import os
import pty
import re
import select
import shlex
import signal
import struct
import subprocess
import sys
import termios
import time
from collections.abc import Sequence
from dataclasses import fields
from datetime import timedelta
from typing import Any, Self

import pytest
from rich.cells import cell_len

from gdq.cli.top_frame import Look, frame_lines
from gdq.consumer import ConsumerInfo
from gdq.consumers.slot.slot import SlotInfo
from gdq.monitor.doctor import Finding
from gdq.queue import QueueInfo
from tests.support.programs import environment, gdq
from tests.support.server import Database
from tests.support.waiting import SECONDS

# By what the screen is entered, and by what it is left.
ENTER, LEAVE = "\x1b[?1049h", "\x1b[?1049l"


# What is around a frame, of which a terminal shows nothing.
FRAME_END = "\x1b[?2026l"
TOP = [sys.executable, "-m", "gdq", "top", "--interval", "0.1"]


class Screen:
    """`gdq top`, or a program that runs it, on a terminal of its own."""

    def __init__(
        self, dsn: str, *, program: Sequence[str] = TOP, columns: int = 80, rows: int = 24, **env: str
    ) -> None:
        self._terminal, inner = pty.openpty()
        self.resize(columns, rows)
        self.process = subprocess.Popen(
            program,
            env=environment(dsn) | {"TERM": "xterm"} | env,
            stdin=inner,
            stdout=inner,
            stderr=inner,
            start_new_session=True,
            preexec_fn=_take_terminal,  # noqa: PLW1509 (no threads here)
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
        self._shown = Shown(columns or 80, rows or 24)

    def press(self, key: str) -> None:
        os.write(self._terminal, key.encode())

    def foreground(self) -> int:
        """The process whose terminal it is at present."""
        return os.tcgetpgrp(self._terminal)

    def modes(self) -> list[Any]:
        """How the terminal takes keys."""
        return termios.tcgetattr(self._terminal)

    def until(self, pattern: str) -> list[str]:
        """Read until a whole frame has the pattern."""
        deadline = time.monotonic() + SECONDS
        while not re.search(pattern, "\n".join(self._shown.lines())):
            assert time.monotonic() < deadline, self._shown.lines()
            assert self._read(), f"it ended: {self.text[-3000:]}"
        return self._shown.lines()

    def until_said(self, pattern: str, times: int = 1) -> None:
        """Read until the pattern has come so often."""
        while len(re.findall(pattern, self.text)) < times:
            assert self._read(), f"it ended: {self.text[-3000:]}"

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
        before = self.text.rfind(FRAME_END)
        self.text += found.decode()
        self._shown.write(self.text[max(before, 0) : max(self.text.rfind(FRAME_END), 0)])
        return bool(found)


def _take_terminal() -> None:
    """Make stdin the process's own terminal, whose keys end it even where the tests run in the background."""
    fcntl.ioctl(0, termios.TIOCSCTTY, 0)
    for number in (signal.SIGINT, signal.SIGQUIT, signal.SIGHUP):
        signal.signal(number, signal.SIG_DFL)


class Shown:
    """What a terminal shows that does not wrap: as in xterm the cursor stays on the last letter of a full line."""

    def __init__(self, columns: int, rows: int) -> None:
        self._columns = columns
        self._cells = [[" "] * columns for _ in range(rows)]
        self._row = self._column = 0

    def lines(self) -> list[str]:
        return "\n".join("".join(row).rstrip() for row in self._cells).rstrip().split("\n")

    def write(self, text: str) -> None:
        for token in re.findall(r"\x1b\[[?\d;]*[A-Za-z]|[^\x1b]", text):
            row = self._cells[min(self._row, len(self._cells) - 1)]
            match token:
                case "\r":
                    self._column = 0
                case "\n":
                    self._row += 1
                case "\x1b[H":
                    self._row = self._column = 0
                case "\x1b[K" | "\x1b[J":
                    row[self._column :] = [" "] * (self._columns - self._column)
                    for below in self._cells[self._row + 1 :] if token == "\x1b[J" else []:
                        below[:] = [" "] * self._columns
                case "\x1b[2K":
                    row[:] = [" "] * self._columns
                case _ if token[0] != "\x1b":
                    wide = cell_len(token)
                    row[self._column : self._column + wide] = [token, *[""] * (wide - 1)]
                    self._column = min(self._column + wide, self._columns - 1)


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


@pytest.mark.parametrize(
    ("ending", "code"),
    [
        pytest.param("\x03", 130, id="Ctrl-C"),
        pytest.param("\x1c", 131, id="Ctrl-\\", marks=pytest.mark.long),
        pytest.param(signal.SIGTERM, 0, id="SIGTERM", marks=pytest.mark.long),
        pytest.param(signal.SIGHUP, 129, id="SIGHUP"),
    ],
)
def test_ended(shop: Database, ending: str | signal.Signals, code: int) -> None:
    with Screen(shop.dsn) as screen:
        before = screen.modes()
        screen.until("mirror")
        assert screen.modes() != before
        if isinstance(ending, str):
            screen.press(ending)
        else:
            screen.process.send_signal(ending)
        assert screen.end() == code
        assert screen.modes() == before
        said = screen.text.partition(LEAVE)[2]
        assert said == ("Error: interrupted\r\n" if code == 130 else "")


@pytest.mark.parametrize(
    "stop",
    [pytest.param("\x1a", id="Ctrl-Z"), pytest.param(signal.SIGSTOP, id="SIGSTOP", marks=pytest.mark.long)],
)
def test_stopped_and_gone_on_with(shop: Database, stop: str | signal.Signals) -> None:
    """While the program stands still the terminal is a shell's; `fg` shows the screen again."""
    with Screen(shop.dsn, program=["sh", "-i"], PS1="shell: ", ENV="") as screen:
        screen.press(f"{shlex.join(TOP)}\n")
        screen.until("mirror")
        if isinstance(stop, str):
            screen.press(stop)
            screen.until_said(re.escape(LEAVE))
            screen.until_said("shell: ", 2)
            screen.press("stty -a; echo that was $((40 + 2))\n")
            screen.until_said("that was 42")
            assert re.search(r"(?<!-)\bicanon\b.*\s(?<!-)echo\b", screen.text.rpartition(LEAVE)[2], re.DOTALL)
        else:
            os.kill(screen.foreground(), stop)
            screen.until_said("shell: ", 2)
        entered = screen.text.count(ENTER)
        screen.press("fg\n")
        screen.until_said(re.escape(ENTER), entered + 1)
        left = screen.text.count(LEAVE)
        screen.press("q")
        screen.until_said(re.escape(LEAVE), left + 1)
        assert screen.text.rindex(LEAVE) > screen.text.rindex(ENTER)
        screen.press("exit\n")
        assert screen.end() == 0


@pytest.mark.parametrize(
    ("columns", "rows"),
    [(20, 5), (0, 0), *(pytest.param(*size, marks=pytest.mark.long) for size in ((30, 8), (300, 100), (1, 1)))],
)
def test_sizes(shop: Database, columns: int, rows: int) -> None:
    """A frame fits a screen of any size, up to its last column; without a size it is taken for a common one."""
    with Screen(shop.dsn, columns=columns, rows=rows) as screen:
        screen.until("…|^g$" if 0 < columns < 80 else "mirror +q .*idle")
        if 0 < columns < 80:
            assert max(cell_len(line) for line in screen.until("")) == columns
        screen.resize(100, 30)
        screen.until("mirror +q .*idle")
        screen.press("q")
        assert screen.end() == 0


def test_no_screen_on_a_dumb_terminal(shop: Database) -> None:
    with Screen(shop.dsn, TERM="dumb") as screen:
        assert screen.end() == 2
        assert "set TERM, or give --once" in screen.text
        assert "\x1b" not in screen.text


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
        "pace": None,
    }  # fmt: skip
    return ConsumerInfo(**given | values)


def test_the_slowest_are_shown_where_not_all_fit() -> None:
    look = Look([], [consumer(number, lag=number * 10) for number in range(100)], [], [], [])
    lines = [text for text, _ in frame_lines(look, 80, 24, "now")]
    assert len(lines) <= 24
    shown = [line.split()[0] for line in lines if line.startswith("c")]
    assert len(shown) > 15
    # by orders of magnitude: from 640 s on all are alike
    assert shown == [f"c{number}" for number in range(64, 64 + len(shown))]
    assert lines[-1] == f"and {100 - len(shown)} more"
    assert len(frame_lines(look, 80, None, "now")) == 104


def queue(number: int, **values: Any) -> QueueInfo:
    given: dict[str, Any] = {field.name: None for field in fields(QueueInfo)}
    given |= {"queue_name": f"q{number:02}", "tick_age": timedelta(hours=25), "events_per_second": 12345.6}
    given |= {"log_bytes": 10**9, "tables": 100, "tables_resync": 0, "consumers": 4, "paused": False}
    return QueueInfo(**given | values)


@pytest.mark.parametrize("height", [24, 10])
@pytest.mark.parametrize("width", [80, 60])
@pytest.mark.parametrize("letter", ["n", "漢"])
def test_many_queues_and_consumers(width: int, height: int, letter: str) -> None:
    """What is to be mended stands first, and its state is read whole, however long the names are."""
    name = letter * (63 if letter == "n" else 21)
    queues = [queue(number) for number in range(60)]
    queues[40] = queue(40, queue_name=name, paused=True, tables_resync=12)
    held = [consumer(n, lag=100_000.0 - n, queue_name=name, consumer_name=name + "x") for n in range(200)]
    held[150] = consumer(150, lag=0, queue_name=name, consumer_name=name, dead_letters=1234)
    finding = Finding("error", "ticker_silent", "q59", 'queue "q59" has had no tick for 2 h', "cure", fixable=False)
    lines = [text for text, _ in frame_lines(Look(queues, held, [], [], [finding]), width, height, "now")]
    assert len(lines) <= height
    assert all(cell_len(line) <= width for line in lines), lines
    headings = {line.split()[0]: number for number, line in enumerate(lines) if line.startswith(("QUEUE", "CONSUMER"))}
    assert list(headings) == ["QUEUE", "CONSUMER"], lines
    assert lines[headings["QUEUE"] + 1].endswith("  paused, resync 12")
    assert lines[headings["CONSUMER"] + 1].endswith("  dead 1,234")
    for number in headings.values():
        assert re.match(f"{letter}+…{letter}+ ", lines[number + 1])
        assert " lag " in lines[number]
    if height == 24:
        assert lines[headings["QUEUE"] + 2].startswith("q59")
        assert lines[headings["QUEUE"] + 2].endswith("  no ticks")
        assert [line for line in lines if line.startswith("and ")] == ["and 52 more", "and 192 more"]


def test_parts_that_do_not_fit_are_the_last_ones() -> None:
    given: dict[str, Any] = {field.name: None for field in fields(SlotInfo)}
    slots = [SlotInfo(**given | {"slot_name": f"s{n}"}) for n in range(5)]
    look = Look([queue(n) for n in range(5)], [consumer(n, lag=0) for n in range(5)], [], slots, [])
    headings = [text.split()[0] for text, bold in frame_lines(look, 80, 10, "now") if bold]
    assert headings == ["gdq", "QUEUE", "CONSUMER"]


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
