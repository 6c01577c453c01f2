"""`gdq compare`: queue and slot beside each other on the user's own tables."""

from __future__ import annotations

import dataclasses
import json
import math
from pathlib import Path

import click

from gdq.cli.base import Failure, Stop, dsn_option, json_object_option, session, table_names, talk
from gdq.cli.progress import shown
from gdq.consumers.compare import attach, run, table
from gdq.consumers.compare.page import page
from gdq.consumers.compare.recommend import recommend


@click.command()
@click.option("--tables", metavar="T1,T2", help="The tables to put both paths on.")
@click.option(
    "--seconds",
    type=click.FloatRange(min=1),
    default=60,
    show_default=True,
    metavar="N",
    help="How long to measure, while the application works.",
)
@click.option(
    "--report",
    type=click.Path(dir_okay=False, writable=True, path_type=Path),
    metavar="FILE.html",
    help="Write a page.",
)
@click.option("--replica-identity-full", is_flag=True, help="Have the slot send old rows: set, and restored after.")
@click.option("--clean-up", is_flag=True, help="Only remove what a run that was killed has left.")
@json_object_option
@dsn_option
def compare(
    tables: str | None,
    seconds: float,
    report: Path | None,
    *,
    replica_identity_full: bool,
    clean_up: bool,
    as_json: bool,
    dsn: str | None,
) -> None:
    """Put a queue and a slot on tables for a while, measure both on the work that runs, and say which to take.

    It writes nothing to the tables; the application works as ever, with triggers on them. All is removed at the end,
    whatever happens. Needs wal_level logical and a role that may make publications, slots and queues: docs/compare.md.

    \b
    Example: gdq compare --tables public.orders,public.customer --seconds 120 --report compare.html
    """
    if clean_up:
        if tables is not None or report is not None or replica_identity_full or as_json:
            raise click.UsageError("--clean-up only removes what was left, and takes no other option but --dsn")
        _clean_up(dsn)
        return
    names = table_names(tables)
    if not names:
        raise click.UsageError("name the tables: --tables T1,T2")
    if not math.isfinite(seconds):
        raise click.BadParameter(f"{seconds} is no number of seconds", param_hint="--seconds")
    if report is not None and not report.absolute().parent.is_dir():
        raise click.BadParameter(f"no folder {report.absolute().parent}", param_hint="--report")
    stop = Stop()
    with shown(as_json=as_json) as told:
        figures = run.compare(
            dsn,
            names,
            seconds,
            replica_identity_full=replica_identity_full,
            stop=stop,
            tell=lambda phase, doing: told(phase, doing, 0),
        )
    found = recommend(figures)
    if as_json:
        click.echo(json.dumps(dataclasses.asdict(figures) | {"recommendation": dataclasses.asdict(found)}, indent=1))
    else:
        click.echo(table.text(figures, found.text, [f"{reason.side}: {reason.text}" for reason in found.reasons]))
    if report is not None:
        try:
            report.write_text(page(figures, found), encoding="utf-8")
        except OSError as error:
            raise Failure(f"the page cannot be written to {report}: {error.strerror}") from error
        talk(f"wrote {report}")


def _clean_up(dsn: str | None) -> None:
    with session(dsn, autocommit=True) as connection:
        attach.lock(connection)
        found = run.tidy(connection)
    talk(f"removed {', '.join(found)}" if found else "already gone: no run has left anything")
