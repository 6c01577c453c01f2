"""What a refresh of a view costs beside what else brings it up to date: the 22 queries of TPC-H, on both engines.

    python -m bench.views [--scale 0.5] [--churn 0.001 ...] [--rounds 3] [--engines postgres,spark] [QUERY...]
    python -m bench.views --write docs/benchmarks-views.md

Each round changes a share of the lines (a third each inserted with their orders, updated, and deleted with their
orders), then refreshes each view in every way, one after the other: from changes inside PostgreSQL, REFRESH
MATERIALIZED VIEW, the same CONCURRENTLY, from changes on Spark, in full on Spark. Every result goes to a file at
once: a run that was stopped goes on from there.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Iterable, Sequence
from itertools import groupby
from pathlib import Path
from typing import Any

import click
import psycopg
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from bench.views_data import ENGINES, Key, OtherSettings, Results, expected, machine
from bench.views_report import page, show
from bench.views_run import OutOfTime, ViewsRun
from gdq.embedded.files import find_binaries
from gdq.embedded.server import EmbeddedServer
from tests.support import tpch

SETTINGS: dict[str, str | float | bool] = {
    "shared_buffers": "2GB",
    "max_wal_size": "8GB",
    "synchronous_commit": False,
    "work_mem": "64MB",
    "random_page_cost": 1.1,  # all is in memory
}
CHURNS = (0.0001, 0.001, 0.01, 0.1)


def results_path(scale: float) -> Path:
    """Where results are kept unless a file is named."""
    cache = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(cache) / "gdq" / f"bench-views-{scale:g}.json"


def measure(results: Results, wanted: Sequence[Key], minutes: float, console: Console) -> None:
    """Measure what is missing, with a progress bar; ends early, with what there is, at Ctrl-C and after `minutes`."""
    started = time.monotonic()
    results.about |= machine() | {"settings": " ".join(f"{name}={value}" for name, value in SETTINGS.items())}
    missing = [key for key in wanted if key not in results.samples]
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with (
        EmbeddedServer(binaries=find_binaries(18), settings=SETTINGS) as server,
        Progress(*columns, TimeRemainingColumn(), console=console) as progress,
    ):
        with psycopg.connect(server.conninfo()) as connection:
            results.about["PostgreSQL"] = f"{connection.info.parameter_status('server_version')}"
        task = progress.add_task("", total=len(missing))

        def told(text: str, done: int) -> None:
            progress.update(task, advance=done, description=text or None)
            if "changing" in text and not console.is_terminal:
                console.print(f"{time.monotonic() - started:.0f} s: {text}", highlight=False)

        run = ViewsRun(server, results, wanted, started + minutes * 60, told)
        try:
            run.measure()
        except OutOfTime:
            console.print(f"{minutes:g} minutes are over")
        except KeyboardInterrupt:
            console.print("stopped")
        finally:
            results.about["minutes"] = round(results.about.get("minutes", 0) + (time.monotonic() - started) / 60, 1)
            results.write()


def not_measured(missing: Iterable[Key]) -> list[str]:
    """What is missing, in words."""
    named = []
    ways = sorted({(key.round, key.churn, key.method, key.view) for key in missing})
    for (number, churn, method), keys in groupby(ways, key=lambda way: way[:3]):
        views = sorted((key[3] for key in keys), key=lambda view: int(view[1:]))
        share = f" at {churn:.2%}" if churn else ""
        named.append(f"round {number}, {method}{share}: {' '.join(views)}")
    return named


def _split(_context: click.Context, parameter: click.Parameter, value: str) -> tuple[str, ...]:
    names = tuple(name.strip() for name in value.split(",") if name.strip())
    known = list(ENGINES) if parameter.name == "engines" else [*tpch.QUERIES, "all", "none"]
    for name in names:
        if name not in known:
            raise click.BadParameter(f"{name}: choose from {', '.join(known)}")
    if parameter.name != "spark_queries" or names == ("none",):
        return () if names == ("none",) else names
    return tuple(tpch.QUERIES) if "all" in names else names


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@click.argument("query", nargs=-1, type=click.Choice(list(tpch.QUERIES)))
@click.option("--scale", type=float, default=0.5, show_default=True, help="TPC-H's scale factor.")
@click.option(
    "--churn", type=click.FloatRange(0, 0.1, min_open=True), multiple=True, default=CHURNS, show_default=True,
    help="Share of the lines that change; may be given more than once.",
)  # fmt: skip
@click.option("--rounds", type=click.IntRange(1, 8), default=3, show_default=True, help="Rounds of changes.")
@click.option("--engines", default="postgres,spark", show_default=True, callback=_split, help="Which to measure.")
@click.option("--spark-queries", default="all", show_default=True, callback=_split, help="Views to measure on Spark.")
@click.option("--minutes", type=float, default=600.0, help="Stop after so long, between two measurements.")
@click.option("--json", "file", type=click.Path(dir_okay=False, path_type=Path), help="Keep results in this file.")
@click.option("--fresh", is_flag=True, help="Forget the results that the file holds.")
@click.option("--write", type=click.Path(dir_okay=False, path_type=Path), help="Only write the page, from the results.")
def main(query: tuple[str, ...], scale: float, churn: tuple[float, ...], **options: Any) -> None:
    """Measure refreshes of the TPC-H queries. Exit code 1 when rows differ, 3 when something is not measured yet."""
    path = options["file"] or results_path(scale)
    if options["fresh"]:
        path.unlink(missing_ok=True)
    try:
        results = Results.read(path, scale if options["write"] is None or options["file"] is None else None)
    except OtherSettings as error:
        raise click.ClickException(f"{error}: name another file, or give --fresh") from error
    console = Console(stderr=True)
    if options["write"] is None:
        results.forget_failures()
        views = query or tuple(tpch.QUERIES)
        spark = [view for view in views if view in options["spark_queries"]]
        wanted = list(dict.fromkeys(expected(views, options["engines"], spark, churn, options["rounds"])))
        results.about["wanted"] = sorted({*map(tuple, results.about.get("wanted", [])), *map(tuple, wanted)})
        measure(results, wanted, options["minutes"], console)
    missing = [key for key in (Key(*one) for one in results.about.pop("wanted", [])) if key not in results.samples]
    if options["write"] is not None:
        options["write"].write_text(page(results, not_measured(missing)), encoding="utf-8")
        return
    wide = Console()
    show(results, wide if wide.is_terminal else Console(width=180), len(missing))
    for line in not_measured(missing):
        console.print(f"not measured: {line}", highlight=False, soft_wrap=True)
    console.print(f"results: {path}", highlight=False, soft_wrap=True)
    if any(sample.equal is False for sample in results.samples.values()):
        sys.exit(1)
    sys.exit(3 if missing else 0)


if __name__ == "__main__":
    main(prog_name="python -m bench.views")
