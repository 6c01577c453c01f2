"""`python -m bench`: gdq beside its peers, one run. Exit code 3 when gdq misses what is required of it."""

from __future__ import annotations

import os
import platform
import sys
import time
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import click
import psycopg
from psycopg.conninfo import make_conninfo

from bench import capture, endurance, latency, long_parts, packages, reading, spark_reader
from bench.report import goals, page, plots
from bench.results import Results
from gdq.errors import EmbeddedError, GdqError

MISSED = 3
SIZES = ("tiny", "quick", "usual", "long")


def results_path(size: str) -> Path:
    """Where results are kept unless a file is named."""
    cache = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(cache) / "gdq" / f"bench-{size}.jsonl"


def measure(size: str, results: Results, progress: Callable[[str], None], *, get_peers: bool) -> None:
    """Measure what is missing in `results`, on servers of its own. `get_peers`: install those that are missing."""
    binaries, missing = packages.provide_peers(progress, install=get_peers)
    missing |= spark_reader.missing()
    results.tell(**machine(binaries.version), missing=missing)
    parts: tuple[Callable[[packages.Place], None], ...] = (
        lambda place: capture.run(place, capture.SIZES[size], results, progress),
        lambda place: reading.run(place, reading.SIZES[size], results, progress),
        lambda place: latency.run(place, latency.SIZES[size], results, progress),
    )
    for part in parts:
        with packages.start(binaries) as server:
            # The socket: a loopback connection would add its own share to one-row transactions.
            conninfo = make_conninfo(server.conninfo(), host=str(server.socket_folder))
            part(packages.Place(binaries, conninfo, frozenset(missing)))
    endurance.run(binaries, endurance.SIZES[size], results, progress)
    long_parts.run(long_parts.SIZES[size], results, progress)


def machine(server: str) -> dict[str, Any]:
    """What is named in the page beside the figures."""
    lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    models = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    model = next(models, platform.machine())
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    return {
        "date": f"{datetime.now(UTC):%Y-%m-%d}",
        "machine": f"{os.cpu_count()} processors {model}, {memory:.0f} GB",
        "system": platform.platform(),
        "server": f"PostgreSQL {server}",
        "settings": " ".join(f"{name}={value}" for name, value in packages.SETTINGS.items()),
        "load at the start": round(os.getloadavg()[0], 1),
    }


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@click.option("--quick", "size", flag_value="quick", help="Two minutes: fewer rows and rounds.")
@click.option("--long", "size", flag_value="long", help="Under two hours; goes on where it was stopped.")
@click.option("--tiny", "size", flag_value="tiny", help="Whether it works at all: the figures mean nothing.")
@click.option("--json", "file", type=click.Path(dir_okay=False, path_type=Path), help="Keep results in this file.")
@click.option("--fresh", is_flag=True, help="Forget the results that the file holds.")
@click.option("--write", type=click.Path(dir_okay=False, path_type=Path), help="Write the page of the results here.")
@click.option("--only-write", is_flag=True, help="Measure nothing.")
@click.option("--no-install", is_flag=True, help="Leave out peers whose packages are missing.")
def main(size: str | None, file: Path | None, write: Path | None, **flags: bool) -> None:
    """Measure gdq beside PgQ, Slony and a logical slot: a quarter of an hour, unless --quick or --long.

    Results are kept as JSON lines: a run that was stopped goes on from them, one that came to its end is forgotten by
    the next. Times depend on the machine: read them as ratios. Exit code 3 when gdq misses what is required.
    """
    size = size or "usual"
    path = file or results_path(size)
    started = time.monotonic()

    def progress(line: str) -> None:
        _progress(f"{time.monotonic() - started:.0f} s: {line}")

    try:
        if flags["fresh"]:
            path.unlink(missing_ok=True)
        results = Results.read(path, size)
        if not flags["only_write"]:
            if results.about.get("done"):
                path.unlink()
                results = Results.read(path, size)
            command = "python -m bench" + ("" if size == "usual" else f" --{size}")
            results.tell(size=size, command=command)
            measure(size, results, progress, get_peers=not flags["no_install"])
            results.tell(done=True)
    except KeyboardInterrupt:
        _progress(f"stopped; the same command goes on from {path}")
        sys.exit(130)
    except (packages.BenchError, EmbeddedError, GdqError, psycopg.Error) as error:
        raise click.ClickException(str(error).strip().splitlines()[0]) from error
    if write is None:
        print(page(results))
    else:
        drawn = {f"{write.stem}-{name}.svg": text for name, text in plots(results).items()}
        for name, text in drawn.items():
            (write.parent / name).write_text(text, encoding="utf-8")
        write.write_text(page(results, list(drawn)), encoding="utf-8")
    _progress(f"results: {path}")
    if any(goal.verdict == "MISSED" for goal in goals(results)):
        sys.exit(MISSED)


def _progress(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


if __name__ == "__main__":
    main(prog_name="python -m bench")
