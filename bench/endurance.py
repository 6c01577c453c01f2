"""Endurance of the queue beside a slot: a consumer that is stopped, and a snapshot that is held, for ten minutes each.

Each on a server of its own, where both paths see the same work from one writer.
"""

from __future__ import annotations

from collections.abc import Callable

from psycopg.conninfo import make_conninfo

from bench import catch_up, held_snapshot, packages
from bench.catch_up import NO_ROUND, PART
from bench.latency import PATHS
from bench.results import Results
from bench.steady import Work
from gdq.embedded.files import PostgresBinaries

# Nothing where a run has no ten minutes.
SIZES: dict[str, Work | None] = {
    "tiny": Work(seconds=2, rate=100, rounds=1),
    "quick": None,
    "usual": None,
    "long": Work(seconds=600, rate=500, rounds=3),
}
CASES: dict[str, Callable[[str, Work, Results, Callable[[str], None]], None]] = {
    catch_up.CASE: catch_up.run,
    held_snapshot.CASE: held_snapshot.run,
}


def run(binaries: PostgresBinaries, work: Work | None, results: Results, progress: Callable[[str], None]) -> None:
    """Measure the cases that `results` does not hold whole. BenchError when events are missing or a process fails."""
    if work is None:
        return
    for case, measure in CASES.items():
        if all(results.has(PART, case, path, NO_ROUND) for path in PATHS):
            continue
        with packages.start(binaries) as server:
            measure(make_conninfo(server.conninfo(), host=str(server.socket_folder)), work, results, progress)
