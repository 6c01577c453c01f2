"""`gdq compare`: runs a queue and a slot side by side on the user's own tables."""

from __future__ import annotations

import json
from pathlib import Path

import click

from gdq.cli import base
from gdq.cli.progress import shown_progress
from gdq.cli.terminal import printable
from gdq.consumers.compare import attach
from gdq.consumers.compare.figure_text import figures_text
from gdq.consumers.compare.figures import Figures
from gdq.consumers.compare.page import compare_page
from gdq.consumers.compare.recommend import recommend
from gdq.consumers.compare.run import remove_leftovers, run_compare
from gdq.errors import GdqError


@click.command()
@click.option("--tables", metavar="T1,T2", help="The tables to put both paths on.")
@click.option(
    "--seconds",
    type=base.Seconds(1),
    default=60,
    show_default=True,
    metavar="N",
    help="How long to measure, while the application works.",
)
@click.option(
    "--report",
    type=click.Path(dir_okay=False, writable=True, path_type=Path),
    metavar="FILE.html",
    help="Also write the result as a page.",
)
@click.option("--replica-identity-full", is_flag=True, help="Let the slot send old rows; restored afterwards.")
@click.option("--clean-up", is_flag=True, help="Only remove the remains of a killed run.")
@base.json_object_option
@base.dsn_option
def compare_command(
    tables: str | None,
    seconds: float,
    report: Path | None,
    *,
    replica_identity_full: bool,
    clean_up: bool,
    as_json: bool,
    dsn: str | None,
) -> None:
    """Measure a queue and a slot on tables under their running load, and recommend one.

    It writes nothing to the tables; the application goes on, with triggers on its tables. Everything is removed at the
    end. Needs wal_level logical and a role that may create publications, slots and queues: gdq docs compare.

    \b
    Example: gdq compare --tables public.orders,public.customer --seconds 120 --report compare.html
    """
    if clean_up:
        if tables is not None or report is not None or replica_identity_full or as_json:
            raise click.UsageError("--clean-up takes no other option but --dsn")
        _clean_up(dsn)
        return
    names = base.split_table_names(tables)
    if not names:
        raise click.UsageError("name the tables: --tables T1,T2")
    if report is not None and not report.absolute().parent.is_dir():
        raise click.BadParameter(f"no folder {report.absolute().parent}", param_hint="--report")
    figures = _measure(dsn, names, seconds, replica_identity_full=replica_identity_full, as_json=as_json)
    found = recommend(figures)
    if as_json:
        click.echo(json.dumps({"recommendation": found.as_json(), **figures.as_json()}, indent=1))
    else:
        click.echo(printable(figures_text(figures, found), lines=True))
    if report is not None:
        try:
            report.write_text(compare_page(figures, found), encoding="utf-8")
        except OSError as error:
            raise base.CommandFailure(f"the page cannot be written to {report}: {error.strerror}") from error
        base.talk(f"wrote {report}")


def _measure(
    dsn: str | None, names: list[str], seconds: float, *, replica_identity_full: bool, as_json: bool
) -> Figures:
    """The figures of a run; Interrupted if a signal came before its end."""
    stop = base.StopSignals()
    stop.at_hand = False
    with shown_progress(as_json=as_json, logged=False) as told:

        def tell(phase: str, doing: str) -> None:
            stop.at_hand = True  # it is connected, and what it makes is to be removed
            if told is not None:
                told(phase, doing, 0, None)

        try:
            return run_compare(dsn, names, seconds, replica_identity_full=replica_identity_full, stop=stop, tell=tell)
        except GdqError as error:
            if stop():
                raise base.Interrupted(str(error)) from error
            raise


def _clean_up(dsn: str | None) -> None:
    with base.command_session(dsn, autocommit=True) as connection:
        attach.lock_attach(connection)
        found = remove_leftovers(connection)
    base.talk(f"removed {', '.join(found)}" if found else "already gone: no run has left anything")
