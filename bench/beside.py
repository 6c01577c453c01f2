"""`python -m bench.beside CHECKOUT`: latency and small batches of this gdq and of another state of it, in turns.

CHECKOUT is a folder with that state, such as one of `git worktree add`. Each round runs the benchmarks of either folder
once, in the order of the rounds before turned round, so that what slows the machine slows both.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any

import click
from rich import box
from rich.console import Console
from rich.table import Table

HERE = Path(__file__).resolve().parent.parent
TICK_MS = 10
RATES = (10, 100, 1000)

Figures = dict[str, float]


def small_batch(found: Mapping[str, float]) -> Figures:
    """The server's processor time in what `bench.small_batch --json` prints; steps are not the same in all states."""
    names = {"all statements": "tick and batch, server, ms", "Consumer, one batch": "by a Consumer, server, ms"}
    return {name: found[step] for step, name in names.items()}


def latency(found: Sequence[Mapping[str, Any]]) -> Figures:
    """The percentiles in what `bench.latency --json` prints."""
    return {f"{run['rate']}/s, {percentile}, ms": run[percentile] for run in found for percentile in ("p50", "p99")}


def measure(folder: Path, seconds: float, rounds: int) -> Figures:
    """One round of a state of gdq. click.ClickException if a benchmark of it fails."""
    rates = [argument for rate in RATES for argument in ("--rate", str(rate))]
    return small_batch(_run(folder, "small_batch", "--rounds", str(rounds))) | latency(
        _run(folder, "latency", *rates, "--tick", str(TICK_MS), "--seconds", str(seconds))
    )


def _run(folder: Path, name: str, *arguments: str) -> Any:
    done = subprocess.run(
        [sys.executable, "-m", f"bench.{name}", *arguments, "--json"],
        cwd=folder,
        env=os.environ | {"PYTHONPATH": str(folder)},
        capture_output=True,
        text=True,
        check=False,
    )
    try:
        return json.loads(done.stdout)  # latency's exit code tells of a goal that is missed
    except ValueError:
        last = (done.stderr.strip() or "it printed nothing").splitlines()[-1]
        raise click.ClickException(f"bench.{name} of {folder} failed: {last}") from None


def compare(here: Sequence[Figures], there: Sequence[Figures]) -> dict[str, tuple[float, float, float]]:
    """The medians of each figure over all rounds, here and there, and their ratio."""
    medians = {name: (median(one[name] for one in here), median(one[name] for one in there)) for name in here[0]}
    return {name: (ours, theirs, ours / theirs) for name, (ours, theirs) in medians.items()}


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@click.argument("checkout", type=click.Path(exists=True, file_okay=False, path_type=Path))
@click.option(
    "--rounds", type=click.IntRange(1), default=5, show_default=True, help="How often each state is measured."
)
@click.option("--seconds", type=float, default=5, show_default=True, help="Length of one run of latency.")
@click.option("--batches", type=click.IntRange(1), default=500, show_default=True, help="Small batches a round.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON instead of a table.")
def main(checkout: Path, rounds: int, seconds: float, batches: int, as_json: bool) -> None:
    """Measure this gdq beside the one in the folder CHECKOUT, with ticks of 10 ms at 10, 100 and 1000 changes a second.

    Read the ratios: times depend on the machine, which should have nothing else to do.
    """
    if not (checkout / "bench" / "small_batch.py").exists():
        raise click.ClickException(f"{checkout} has no bench/small_batch.py: name a checkout of gdq")
    here: list[Figures] = []
    there: list[Figures] = []
    for number in range(rounds):
        turn = [(HERE, here), (checkout.resolve(), there)]
        for folder, figures in turn if number % 2 == 0 else reversed(turn):
            figures.append(measure(folder, seconds, batches))
        print(f"round {number + 1} of {rounds}, load {os.getloadavg()[0]:.1f}", file=sys.stderr, flush=True)
    compared = compare(here, there)
    if as_json:
        print(json.dumps(compared, indent=2))
        return
    table = Table(box=box.SIMPLE_HEAD, title="medians over all rounds", title_justify="left")
    for name in ("", "here", "there", "ratio"):
        table.add_column(name, justify="right" if name else "left")
    for name, values in compared.items():
        table.add_row(name, *(f"{value:.2f}" for value in values))
    Console().print(table)


if __name__ == "__main__":
    main(prog_name="python -m bench.beside")
