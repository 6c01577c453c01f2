"""What bench.spool, bench.mirror and bench.relay share: one file of results, and the page that is made from it."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeVar

import click
import psycopg

from bench.__main__ import machine
from bench.lake_report import page
from bench.packages import BenchError
from bench.replica_stage import SETTINGS
from bench.results import Results
from gdq.embedded.files import find_binaries
from gdq.errors import EmbeddedError, GdqError

Tell = Callable[[str], None]
Measure = Callable[[Results, Tell], None]
_T = TypeVar("_T")

_OPTIONS = (
    click.option("--quick", is_flag=True, help="Little work, one round."),
    click.option("--rounds", type=click.IntRange(1), help="Of all measurements. Default: 3, or 1 with --quick."),
    click.option("--json", "file", type=click.Path(dir_okay=False, path_type=Path), help="Keep results in this file."),
    click.option("--fresh", is_flag=True, help="Forget these results, not those of the other benchmarks of the page."),
    click.option("--write", type=click.Path(dir_okay=False, path_type=Path), help="Write the page of all here."),
    click.option("--only-write", is_flag=True, help="Measure nothing."),
)


def lake_options(command: Callable[..., None]) -> Callable[..., None]:
    """The options that the three commands share."""
    for option in reversed(_OPTIONS):
        command = option(command)
    return command


def rounds_of(options: dict[str, Any]) -> int:
    """The number of rounds that the options ask for."""
    return int(options["rounds"] or (1 if options["quick"] else 3))


def run(part: str, size: str, measure: Measure, options: dict[str, Any]) -> None:
    """Measure what is missing of one part, and give the page of all."""
    path = options["file"] or _default_path()
    started = time.monotonic()

    def tell(line: str) -> None:
        print(f"{time.monotonic() - started:.0f} s: {line}", file=sys.stderr, flush=True)

    try:
        if options["fresh"]:
            _forget(path, part)
        results = Results.read(path, None)
        if not options["only_write"]:
            if results.about.get(part) not in {None, size}:
                raise BenchError(f"{path} holds a run of {results.about[part]}: name another file, or give --fresh")
            settings = " ".join(f"{name}={value}" for name, value in SETTINGS.items())
            results.tell(**machine(find_binaries(18).version) | {"settings": settings, part: size})
            measure(results, tell)
    except KeyboardInterrupt:
        tell(f"stopped; the same command goes on from {path}")
        sys.exit(130)
    except (BenchError, EmbeddedError, GdqError, psycopg.Error) as error:
        raise click.ClickException(str(error).strip().splitlines()[0]) from error
    if options["write"] is None:
        print(page(results))
    else:
        options["write"].write_text(page(results), encoding="utf-8")
    tell(f"results: {path}")


def in_turns(ways: Sequence[_T], number: int) -> list[_T]:
    """The ways, another one first in each round."""
    first = number % len(ways)
    return [*ways[first:], *ways[:first]]


def _forget(path: Path, part: str) -> None:
    """Remove the results of a part from a file."""
    known = Results.read(path, None)
    path.unlink(missing_ok=True)
    kept = Results(path, "")
    kept.tell(**{name: value for name, value in known.about.items() if name != part})
    for (one, case, who, number), values in known.samples.items():
        if one != part:
            kept.add(one, case, who, number, values)


def _default_path() -> Path:
    cache = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(cache) / "gdq" / "bench-lake.jsonl"
