"""What takes long and has no peer: batches under a held snapshot, many captured tables, many events; in own lines."""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass

from bench.packages import BenchError
from bench.results import Results
from gdq.embedded.files import cache_folder

PART = "alone"


@dataclass(frozen=True, slots=True)
class Program:
    """A benchmark of its own with what it is told, and what it shows.

    `needs_gb`: left out where the disk of the servers' data has less free.
    """

    what: str
    module: str
    arguments: tuple[str, ...]
    needs_gb: int = 0


SIZES: dict[str, tuple[Program, ...]] = {
    "tiny": (),
    "quick": (),
    "usual": (),
    "long": (
        Program("10,000 batches under a snapshot that is held open", "bench.long_snapshot", ("10000",)),
        Program("1 captured table", "bench.many_tables", ("1",)),
        Program("10 captured tables", "bench.many_tables", ("10",)),
        Program("100 captured tables", "bench.many_tables", ("100",)),
        Program("1,000 captured tables", "bench.many_tables", ("1000",)),
        Program("10^5 events in one transaction", "bench.large_transaction", ("--rows=100000",)),
        Program("10^6 events in one transaction", "bench.large_transaction", ("--rows=1000000",)),
        Program("10^7 events in one transaction", "bench.large_transaction", ("--rows=10000000",)),
        # half an hour more
        Program(
            "10^8 events in one transaction, read as Arrow",
            "bench.large_transaction",
            ("--rows=100000000", "--arrow-only"),
            needs_gb=80,
        ),
    ),
}
_MISSED = 3


def run(programs: tuple[Program, ...], results: Results, progress: Callable[[str], None]) -> None:
    """Run the programs whose lines `results` does not hold yet. BenchError when one fails.

    Those that need more of the disk than is free are left out, and told in the run's `left`.
    """
    left: list[str] = []
    for program in programs:
        if results.has(PART, program.what, program.module, 1):
            continue
        free = shutil.disk_usage(cache_folder()).free // 2**30
        if free < program.needs_gb:
            needed = f"{program.needs_gb} GB are needed on the disk of the servers' data"
            left.append(f"{program.what}: {needed}, {free} were free")
            continue
        command = [sys.executable, "-m", program.module, *program.arguments]
        done = subprocess.run(command, check=False, capture_output=True, text=True)
        if done.returncode not in {0, _MISSED}:
            said = (done.stderr.strip() or "no output").splitlines()[-1]
            raise BenchError(f"{program.module} failed with exit code {done.returncode}: {said}")
        # without the bar of its progress
        lines = [line for line in done.stdout.strip().splitlines() if "\u2501" not in line]
        values = {"lines": lines, "missed": done.returncode == _MISSED}
        results.add(PART, program.what, program.module, 1, values)
        progress(program.what)
    if programs:
        results.tell(left=left)
