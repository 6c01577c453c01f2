"""The command that shows gdq at work: `gdq demo`."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager

import click

from gdq.cli import base
from gdq.cli.terminal import printable
from gdq.consumers.demo.story import Demo, wrong
from gdq.embedded.files import MAJORS


@click.command()
@click.option(
    "--scale",
    type=click.FloatRange(0.001, 10),
    default=0.25,
    show_default=True,
    help="TPC-H's scale factor: 1 has 6 million lines.",
)
@click.option(
    "--rounds",
    type=click.IntRange(1, 100),
    default=3,
    show_default=True,
    help="Refreshes of a view; Spark makes half as many.",
)
@click.option(
    "--pg",
    type=click.Choice([str(major) for major in MAJORS]),
    default=str(max(MAJORS)),
    show_default=True,
    help="The major version of PostgreSQL.",
)
@click.option("--no-spark", is_flag=True, help="Leave out the step that needs Spark and Java.")
def demo_command(scale: float, rounds: int, pg: str, *, no_spark: bool) -> None:
    """Show gdq at work in a minute and a half, on a PostgreSQL server of its own that is removed afterwards.

    Changes as events; a view refreshed inside PostgreSQL, beside REFRESH MATERIALIZED VIEW; the same by Spark into a
    Delta table, beside a full recompute. Writers go on meanwhile, and each result is compared with its query. Exit code
    3 if one differs. It needs pip install 'gdq[demo,spark,lake]', without Spark 'gdq[demo]'.
    """

    def say(text: str) -> None:
        click.echo(printable(text, lines=True))

    with _interruptible():
        steps = Demo(int(pg), scale, rounds, not no_spark, say).run()
    if found := wrong(steps):
        raise base.FoundWanting(f"not as it must be: {', '.join(found)}")


@contextmanager
def _interruptible() -> Iterator[None]:
    """Make the first Ctrl-C or SIGTERM a KeyboardInterrupt, whatever error it brings about; later ones do nothing.

    Spark's own errors would hide it, and a second signal would cut off the removal of what was started.
    """
    interrupted = False

    def interrupt(*_: object) -> None:
        nonlocal interrupted
        if not interrupted:
            interrupted = True
            raise KeyboardInterrupt

    before = {number: signal.signal(number, interrupt) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    except Exception as error:
        if interrupted:
            raise KeyboardInterrupt from error
        raise
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
