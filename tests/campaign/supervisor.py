"""A supervisor that only restarts what exits, as systemd does with Restart=always and RestartSec=1."""

from __future__ import annotations

import os
import signal
import subprocess
import threading
import time
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

RESTART_SECONDS = 1.0
_STOP_SECONDS = 60.0
_MEMORY_SECONDS = 2.0


class Program:
    """One program that is to run all the time. `exits`: exit codes of its ends that nobody asked for."""

    def __init__(self, name: str, command: Sequence[str], env: dict[str, str], log: Path) -> None:
        self.name = name
        self.command = list(command)
        self.env = env
        self.log = log
        self.process: subprocess.Popen[bytes] | None = None
        self.exits: Counter[int] = Counter()
        self.memory_bytes = 0
        self._restart_at = 0.0

    @property
    def pid(self) -> int | None:
        """The process id while the program runs."""
        return self.process.pid if self.process is not None and self.process.poll() is None else None

    def signal(self, number: int) -> bool:
        """Send a signal; False if the program does not run just now."""
        pid = self.pid
        if pid is None:
            return False
        with suppress(ProcessLookupError):
            os.kill(pid, number)
            return True
        return False

    def start(self) -> None:
        with self.log.open("ab") as log:
            log.write(f"--- start at {time.strftime('%H:%M:%S')}\n".encode())
            log.flush()
            self.process = subprocess.Popen(
                self.command, env=self.env, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True
            )

    def look(self) -> None:
        """Restart the program a second after its end."""
        now = time.monotonic()
        if self.process is None:
            if now >= self._restart_at:
                self.start()
        elif (code := self.process.poll()) is not None:
            self.exits[code] += 1
            self.process = None
            self._restart_at = now + RESTART_SECONDS

    def measure(self) -> None:
        pid = self.pid
        if pid is not None:
            with suppress(OSError):
                pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
                self.memory_bytes = max(self.memory_bytes, pages * os.sysconf("SC_PAGE_SIZE"))


class Supervisor:
    """Keeps programs running from start() to stop()."""

    def __init__(self, folder: Path, env: dict[str, str]) -> None:
        self.programs: dict[str, Program] = {}
        self.stubborn: list[str] = []
        self._folder = folder
        self._env = env
        self._lock = threading.Lock()
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run, name="supervisor", daemon=True)

    def add(self, name: str, command: Sequence[str], **env: str) -> Program:
        program = Program(name, command, self._env | env, self._folder / f"{name}.log")
        with self._lock:
            self.programs[name] = program
        return program

    def start(self) -> None:
        self._thread.start()

    def end(self, *names: str) -> None:
        """End programs for good by SIGTERM; those that do not end in time are killed and listed in `stubborn`."""
        with self._lock:
            ended = [self.programs.pop(name) for name in names if name in self.programs]
        for program in ended:
            program.signal(signal.SIGCONT)
            program.signal(signal.SIGTERM)
        deadline = time.monotonic() + _STOP_SECONDS
        for program in ended:
            if program.process is None:
                continue
            try:
                program.process.wait(max(deadline - time.monotonic(), 0.1))
            except subprocess.TimeoutExpired:
                self.stubborn.append(program.name)
                program.process.kill()
                program.process.wait()

    def stop(self) -> None:
        self._over.set()
        if self._thread.is_alive():
            self._thread.join()
        self.end(*list(self.programs))

    def _run(self) -> None:
        measured = 0.0
        while not self._over.wait(0.1):
            with self._lock:
                for program in self.programs.values():
                    program.look()
                if time.monotonic() - measured > _MEMORY_SECONDS:
                    measured = time.monotonic()
                    for program in self.programs.values():
                        program.measure()
