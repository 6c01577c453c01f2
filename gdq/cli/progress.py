"""Progress of refreshes and copies on stderr: lines on a terminal, else a line of the log every ten seconds."""

from __future__ import annotations

import logging
import sys
import threading
import time
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import click

if TYPE_CHECKING:
    from collections.abc import Callable

    from rich.progress import Progress, TaskID

    _Told = Callable[[str, str, int, int | None], None]

log = logging.getLogger(__name__)

# At most this many views are shown; the oldest is removed first.
_SHOWN = 8

_LOG_SECONDS = 10.0

# A rate is known after this many seconds in which rows came.
_RATE_SECONDS = 1.0


def shown_progress(*, as_json: bool, logged: bool = True, what: str = "view") -> AbstractContextManager[_Told | None]:
    """The progress function of a Refresher. None with --quiet, and with JSON on a terminal, where both would mix.

    `logged`: where stderr is no terminal, lines of the log say the same; `what` stands there before the name.
    """
    context = click.get_current_context(silent=True)
    if context is not None and context.find_root().params.get("quiet"):
        return nullcontext()
    if not sys.stderr.isatty():
        return LoggedProgress(what=what) if logged else nullcontext()
    return nullcontext() if as_json else _Screen()


@dataclass(slots=True)
class RowCount:
    """What one view's refresh is at: its phase, and the rows of the phase beside those expected."""

    phase: str
    started: float
    rows: int = 0
    expected: int | None = None
    _first: tuple[float, int] | None = field(default=None, init=False)

    def told(self, phase: str, rows: int, expected: int | None, now: float) -> None:
        """Note what a Refresher tells. A phase that begins again begins at no rows."""
        if phase != self.phase or rows == 0:
            self.phase, self.rows, self._first = phase, 0, None
        # a statement that is tried again counts anew: the share must not go down
        self.rows, self.expected = max(self.rows, rows), expected
        if rows and self._first is None:
            self._first = (now, rows)

    def text(self, now: float) -> str:
        """The phase, the rows, and what is expected; an estimate that turned out too low is left out."""
        if not self.rows:
            wanted = f", about {self.expected:,} rows expected" if self.expected else ""
            return f"{self.phase}{wanted}"
        rate = self._rate(now)
        speed = "" if rate is None else f", {rate:,.0f} rows/s"
        if not self.expected or self.rows >= self.expected:
            return f"{self.phase} {self.rows:,} rows{speed}"
        share = f"about {100 * self.rows // self.expected} %"
        left = "" if rate is None else f", about {seconds_text((self.expected - self.rows) / rate)} left"
        return f"{self.phase} {self.rows:,} of about {self.expected:,} rows, {share}{speed}{left}"

    def _rate(self, now: float) -> float | None:
        """Rows in a second since the first ones; None before it is known."""
        if self._first is None:
            return None
        began, before = self._first
        if self.rows == before or now - began < _RATE_SECONDS:
            return None
        return (self.rows - before) / (now - began)


def seconds_text(seconds: float) -> str:
    """A time such as 40 s, 3 min or 2.5 h."""
    if seconds < 100:
        return f"{max(1, round(seconds))} s"
    return f"{round(seconds / 60)} min" if seconds < 6000 else f"{seconds / 3600:.1f} h"


class LoggedProgress(AbstractContextManager["_Told"]):
    """Lines of the log: one every ten seconds (`every`) while a refresh is at work."""

    def __init__(self, every: float = _LOG_SECONDS, *, what: str = "view") -> None:
        self._every, self._what = every, what
        self._ended = threading.Event()
        self._lock = threading.Lock()
        self._now: tuple[str, RowCount] | None = None

    def __enter__(self) -> _Told:
        threading.Thread(target=self._log, name="gdq progress", daemon=True).start()
        return self._tell

    def __exit__(self, *_: object) -> None:
        self._ended.set()

    def done(self) -> None:
        """Note that no refresh is at work."""
        with self._lock:
            self._now = None

    def _tell(self, view: str, phase: str, rows: int, expected: int | None) -> None:
        now = time.monotonic()
        with self._lock:
            if self._now is None or self._now[0] != view:
                self._now = (view, RowCount(phase, now))
            self._now[1].told(phase, rows, expected, now)

    def _log(self) -> None:
        while not self._ended.wait(self._every):
            with self._lock:
                if self._now is None:
                    continue
                (view, count), now = self._now, time.monotonic()
                text = f"{self._what} {view}: {count.text(now)}, after {seconds_text(now - count.started)}"
            log.info(text)


class _Screen(AbstractContextManager["_Told"]):
    """Lines below the cursor, removed after the block."""

    def __init__(self) -> None:
        from rich.console import Console  # noqa: PLC0415
        from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn  # noqa: PLC0415

        name = TextColumn("{task.description}", markup=False)
        columns = (SpinnerColumn(), name, TextColumn("{task.fields[doing]}"), TimeElapsedColumn())
        self._progress: Progress = Progress(*columns, console=Console(stderr=True), transient=True)
        self._tasks: dict[str, tuple[TaskID, RowCount]] = {}
        self._last: str | None = None

    def __enter__(self) -> _Told:
        self._progress.start()
        return self._tell

    def __exit__(self, *_: object) -> None:
        self._progress.stop()

    def _tell(self, view: str, phase: str, rows: int, expected: int | None) -> None:
        now = time.monotonic()
        if view != self._last:
            self._begin(view, RowCount(phase, now))
        task, count = self._tasks[view]
        count.told(phase, rows, expected, now)
        self._progress.update(task, doing=count.text(now))

    def _begin(self, view: str, count: RowCount) -> None:
        if self._last is not None:
            self._progress.stop_task(self._tasks[self._last][0])
        if view in self._tasks:  # the refresh started again
            self._progress.remove_task(self._tasks.pop(view)[0])
        if len(self._tasks) == _SHOWN:
            self._progress.remove_task(self._tasks.pop(next(iter(self._tasks)))[0])
        self._tasks[view] = (self._progress.add_task(view, total=None, doing=count.phase), count)
        self._last = view
