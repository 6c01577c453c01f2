"""Spark with the jars of a lake format, in a process of its own: the suite's session is without them."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pyspark
import pytest

from tests.support.waiting import SECONDS, until

JARS = {
    "delta": ("io.delta:delta-spark_4.1_2.13:4.3.1", "io.delta:delta-storage:4.3.1"),
    "iceberg": ("org.apache.iceberg:iceberg-spark-runtime-4.1_2.13:1.11.0", "org.xerial:sqlite-jdbc:3.50.3.0"),
}
_REPOSITORY = Path.home() / ".m2" / "repository"

# Reads a line for each refresh, {"view": name, "die": point or null}, and answers with one.
_JOB = """
import json, os, signal, sys, traceback
from gdq.consumers.spark import session as spark_session
from gdq.consumers.refresh.refresher import Refresher

spark_session._SETTINGS["spark.master"] = sys.argv[2]
die = None

def at(point):
    if point == die:
        os.killpg(0, signal.SIGKILL)

with Refresher(sys.argv[1], at=at) as refresher:
    for line in sys.stdin:
        order = json.loads(line)
        die = order["die"]
        try:
            result = refresher.refresh(order["view"])
            told = {"action": result.action, "reason": result.reason, "rows": result.rows_changed, "error": None}
        except Exception as error:
            traceback.print_exc()
            told = {"action": "failed", "reason": None, "rows": 0, "error": f"{error}"}
        print(json.dumps(told), flush=True)
"""


def jars(*kinds: str) -> list[Path]:
    """The jars of some formats, fetched by Maven where they are not there yet; the test is skipped without them."""
    if not pyspark.__version__.startswith("4.1."):
        pytest.skip(f"the jars are those for Spark 4.1, this is {pyspark.__version__}")
    return [jar(artifact) for kind in kinds for artifact in JARS.get(kind, ())]


def jar(artifact: str) -> Path:
    """One jar, `group:name:version` or `group:name:version:jar:classifier`, fetched by Maven; else a skip."""
    group, name, version, *classifier = artifact.split(":")
    path = _REPOSITORY.joinpath(*group.split("."), name, version, f"{'-'.join([name, version, *classifier[1:]])}.jar")
    if path.exists():
        return path
    if shutil.which("mvn") is None:
        pytest.skip(f"{artifact} is not in ~/.m2, and there is no Maven to fetch it")
    command = ["mvn", "-q", "-B", "dependency:get", f"-Dartifact={artifact}", "-Dtransitive=false"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=SECONDS)
    if done.returncode or not path.exists():
        pytest.skip(f"Maven cannot fetch {artifact}")
    return path


class Job:
    """The process; it and what it has started form a group."""

    def __init__(self, process: subprocess.Popen[str], log: Path) -> None:
        self.process = process
        self.log = log

    def send(self, view: str, die: str | None = None) -> None:
        self.begin(view=view, die=die)

    def order(self, **order: object) -> dict[str, Any]:
        """Have a job of the caller's do something, and wait for its answer."""
        self.begin(**order)
        return self.answer()

    def begin(self, **order: object) -> None:
        """As order(), without the answer."""
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps(order) + "\n")
        self.process.stdin.flush()

    def answer(self) -> dict[str, Any]:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        assert line, self.log.read_text()[-3000:]
        told: dict[str, Any] = json.loads(line)
        return told

    def refresh(self, view: str) -> dict[str, Any]:
        """One refresh that succeeds."""
        self.send(view)
        told = self.answer()
        assert told["error"] is None, (told, self.log.read_text()[-6000:])
        return told

    def kill_when(self, due: Callable[[], bool]) -> None:
        """Kill it as soon as something is due."""
        until(lambda: self.process.poll() is not None or due(), pause=0)
        assert self.process.poll() is None, self.log.read_text()[-3000:]
        self.kill()

    def kill_workers(self, number: int) -> int:
        """Kill so many of Spark's Python processes that run tasks, one after another; how many there were."""
        deadline = time.monotonic() + SECONDS
        killed: set[int] = set()
        while len(killed) < number and time.monotonic() < deadline:
            daemons = [pid for pid in _below(self.process.pid) if b"pyspark.daemon" in _command(pid)]
            workers = {pid for daemon in daemons for pid in _below(daemon)} - killed
            for pid in sorted(workers)[:1]:
                os.kill(pid, signal.SIGKILL)
                killed.add(pid)
        return len(killed)

    def kill(self) -> None:
        """End all of it at once; also what is left when the process has ended itself."""
        if self.process.poll() is None:
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()


def _below(pid: int) -> list[int]:
    """The processes that a process has started, and those that they have; any of them may end meanwhile."""
    found = []
    with suppress(OSError):
        for path in list(Path(f"/proc/{pid}/task").glob("*/children")):
            with suppress(OSError):
                for child in map(int, path.read_text().split()):
                    found += [child, *_below(child)]
    return found


def _command(pid: int) -> bytes:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return b""


@contextmanager
def spark_job(dsn: str, paths: list[Path], master: str = "local[2]", text: str = _JOB) -> Iterator[Job]:
    """A process that refreshes views, or what `text` does, with these jars."""
    environment = os.environ | {
        "PYSPARK_SUBMIT_ARGS": " ".join([*(["--jars", ",".join(map(str, paths))] if paths else []), "pyspark-shell"]),
        "PYTHONPATH": os.pathsep.join(sys.path),
    }
    with tempfile.TemporaryDirectory(prefix="gdq-spark-") as folder:
        log = Path(folder) / "log"
        with log.open("wb") as errors:
            process = subprocess.Popen(
                [sys.executable, "-c", text, dsn, master],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                text=True,
                env=environment,
                cwd=folder,
                start_new_session=True,
            )
            job = Job(process, log)
            try:
                yield job
            finally:
                job.kill()
                assert process.stdin is not None
                assert process.stdout is not None
                process.stdin.close()
                process.stdout.close()
