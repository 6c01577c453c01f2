"""The terminal's other screen: entered, drawn, and left such that the terminal is as it was before."""

from __future__ import annotations

import contextlib
import os
import select
import signal
import sys
import termios
import tty
from collections.abc import Sequence
from types import FrameType, TracebackType
from typing import Any, Self

# The other screen, without cursor and without wrapping; and back.
_ENTER = "\x1b[?1049h\x1b[?25l\x1b[?7l"
_LEAVE = "\x1b[?7h\x1b[?25h\x1b[?1049l"

# Around a frame: a terminal that knows them shows the frame as a whole, others pass over them.
_BEGIN, _END = "\x1b[?2026h", "\x1b[?2026l"

# For a terminal that knows no size of its own, as a serial line.
_COLUMNS, _ROWS = 80, 24

# The signals that end the program, and their exit codes; Ctrl-C is a KeyboardInterrupt.
_EXIT_CODES = {signal.SIGINT: None, signal.SIGTERM: 0, signal.SIGHUP: 129, signal.SIGQUIT: 131}


class Screen:
    """The other screen of the terminal at stdout, with keys of stdin that arrive at once and unseen.

    It is left at the end of the block, whatever signal ends it, and for as long as Ctrl-Z stops the program.
    """

    def __init__(self) -> None:
        self._out = sys.stdout.fileno()
        self._keys = [sys.stdin.fileno()] if sys.stdin.isatty() else []
        self._modes = [termios.tcgetattr(keys) for keys in self._keys]
        self._reader, self._writer = os.pipe()
        os.set_blocking(self._writer, False)
        self._ends = self._stops = self._goes_on = False
        self._handlers: dict[signal.Signals, Any] = {}

    def __enter__(self) -> Self:
        for number in _EXIT_CODES:
            if signal.getsignal(number) != signal.SIG_IGN:  # nohup's
                self._handlers[number] = signal.signal(number, self._end)
        for number in (signal.SIGTSTP, signal.SIGCONT, signal.SIGWINCH):
            self._handlers[number] = signal.signal(number, self._note)
        try:
            self._show()
        except BaseException:
            self._hide()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._ends = True  # from now on no signal interrupts
        self._hide()
        for number, handler in self._handlers.items():
            signal.signal(number, handler)

    def wake(self) -> None:
        """End wait(), from any thread."""
        with contextlib.suppress(BlockingIOError):
            os.write(self._writer, b"!")

    def wait(self, seconds: float) -> bytes:
        """Wait until the time is over, wake() is called, a key is pressed or the size changes; the keys pressed."""
        ready, _, _ = select.select([self._reader, *self._keys], [], [], seconds)
        if self._reader in ready:
            os.read(self._reader, 1024)
        if self._stops:
            self._stop()
        if self._goes_on:
            self._goes_on = False
            self._show()
            return b""  # a key that was ready before may be the shell's by now, and a read would wait
        for keys in self._keys:
            if keys in ready:
                if pressed := os.read(keys, 1024):
                    return pressed
                self._keys = []
        return b""

    def size(self) -> tuple[int, int]:
        """The columns and rows of the terminal, whatever COLUMNS and LINES say."""
        columns, rows = os.get_terminal_size(self._out)
        return columns or _COLUMNS, rows or _ROWS

    def draw(self, lines: Sequence[tuple[str, bool]]) -> None:
        """Put (text, bold) lines that fit the screen on it."""
        # each line is cleared first: after a text as wide as the screen the cursor is still on its last letter
        texts = ["\x1b[2K" + (f"\x1b[1m{text}\x1b[0m" if bold else text) for text, bold in lines]
        if len(lines) < self.size()[1]:
            texts.append("\x1b[J")
        self._write(_BEGIN + "\x1b[H" + "\r\n".join(texts) + _END)

    def _write(self, text: str) -> None:
        # not by sys.stdout, whose buffer a signal may find half written
        rest = text.encode(sys.stdout.encoding, "replace")
        while rest:
            rest = rest[os.write(self._out, rest) :]

    def _show(self) -> None:
        for keys in self._keys:
            tty.setcbreak(keys, termios.TCSADRAIN)  # keys that are pressed already are kept
        self._write(_ENTER)

    def _hide(self) -> None:
        with contextlib.suppress(OSError, termios.error):  # the terminal may be gone
            self._write(_LEAVE)
            for keys, modes in zip(self._keys, self._modes, strict=False):
                termios.tcsetattr(keys, termios.TCSADRAIN, modes)

    def _stop(self) -> None:
        """Leave the screen and stop, as without the handler; from here it goes on at `fg`."""
        self._stops = False
        self._hide()
        signal.signal(signal.SIGTSTP, signal.SIG_DFL)
        signal.raise_signal(signal.SIGTSTP)
        signal.signal(signal.SIGTSTP, self._note)
        self._goes_on = True  # also where nobody could stop the program, and so nobody sends SIGCONT

    def _end(self, number: int, _frame: FrameType | None) -> None:
        if self._ends:
            return
        self._ends = True
        if number == signal.SIGINT:
            raise KeyboardInterrupt
        sys.exit(_EXIT_CODES[signal.Signals(number)])

    def _note(self, number: int, _frame: FrameType | None) -> None:
        self._stops = self._stops or number == signal.SIGTSTP
        self._goes_on = self._goes_on or number == signal.SIGCONT
        self.wake()
