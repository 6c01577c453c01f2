"""The commands that may load Apache Spark: refresh, verify-view."""

from __future__ import annotations

import dataclasses
import signal
import sys
from typing import Any

import click
from psycopg import Connection

from gdq.cli import base
from gdq.cli.listing import Shape, listing_options, print_rows
from gdq.cli.progress import LoggedProgress, shown_progress
from gdq.cli.terminal import printable
from gdq.consumers.refresh.follow import Follower
from gdq.consumers.refresh.groups import refresh_groups
from gdq.consumers.refresh.refresher import Refresher, RefreshResult
from gdq.consumers.refresh.verify import VerifyResult
from gdq.consumers.refresh.verify import verify_with as verify
from gdq.json_text import json_text
from gdq.ticker import reconnecting

_RESULT_COLUMNS = ("view_name", "group_name", "action", "reason", "delta_rows", "rows_changed", "seconds")
_INTERRUPTED = "interrupted: the refresh at hand was rolled back"


@click.command()
@click.argument("view", nargs=-1)
@click.option("--full", is_flag=True, help="Reload all rows instead of applying the changes.")
@click.option("--group", "groups", multiple=True, metavar="NAME", help="The views of this stored group.")
@click.option("--together", is_flag=True, help="Refresh the named views together, as if they were a group.")
@click.option("--follow", is_flag=True, help="Refresh again after every change, until SIGTERM or Ctrl-C.")
@click.option(
    "--source",
    type=click.Choice(["queue", "slot"]),
    default="queue",
    show_default=True,
    help="slot: read the changes from each view's logical slot (gdq create-slot QUEUE VIEW TABLES).",
)
@base.slot_wait_option
@click.option(
    "--interval",
    type=base.Seconds(),
    default=1.0,
    show_default=True,
    metavar="SECONDS",
    help="With --follow: refresh a view at most once in this time.",
)
@listing_options
@base.dsn_option
def refresh_command(
    *,
    view: tuple[str, ...],
    full: bool,
    groups: tuple[str, ...],
    together: bool,
    follow: bool,
    source: str,
    slot_wait: float,
    interval: float,
    shape: Shape,
    dsn: str | None,
) -> None:
    """Bring views up to the present: all views without VIEW and --group. A view over another's target comes after it.

    The views of a group are refreshed at one snapshot in one transaction, also if only one of them is named.
    --follow prints one line, or with --json one object, for each refresh.
    """
    if together and (follow or groups or not view):
        raise click.UsageError("--together needs the names of views, without --group and --follow")
    if source == "slot" and not (view or groups):
        raise click.UsageError("--source slot needs the names of views, or --group: each view has its own slot")
    if follow:
        if full:
            raise click.UsageError("--follow applies changes: leave --full out")
        _follow(view, groups, interval, dsn, slot=source == "slot", slot_wait=slot_wait, as_json=shape == "json")
        return
    results: list[RefreshResult] = []
    failed = interrupted = False
    terminate = signal.signal(signal.SIGTERM, signal.default_int_handler)  # cancels the server's statement too
    try:
        with (
            shown_progress(as_json=shape == "json") as progress,
            Refresher(dsn, progress=progress, slot_wait_seconds=slot_wait) as refresher,
        ):
            if together:
                results += refresher.refresh_together(view, full=view if full else (), slot=source == "slot")
            else:
                failed = _refresh(refresher, view, groups, results, full=full, slot=source == "slot")
    except KeyboardInterrupt:
        interrupted = True
    finally:
        signal.signal(signal.SIGTERM, terminate)
    print_rows(results, RefreshResult, _RESULT_COLUMNS, shape)
    if interrupted:
        raise base.Interrupted(_INTERRUPTED)
    if failed:
        sys.exit(1)


def _refresh(
    refresher: Refresher,
    names: tuple[str, ...],
    groups: tuple[str, ...],
    results: list[RefreshResult],
    *,
    full: bool,
    slot: bool,
) -> bool:
    """Refresh the groups in turn and add to `results`; True if one failed. A failure does not stop the others."""
    failed = False
    for unit in refresh_groups(refresher.control, names, groups):
        # --full loads only the named views in full; the others of the group apply their changes
        afresh = [name for name in unit.names if name in names or unit.group_name in groups or not (names or groups)]
        try:
            results += refresher.refresh_group(unit, full=afresh if full else (), slot=slot)
        except base.EXPECTED_ERRORS as error:
            base.command_failure(error).show()
            failed = True
    return failed


def _follow(
    names: tuple[str, ...],
    groups: tuple[str, ...],
    interval: float,
    dsn: str | None,
    *,
    slot: bool,
    slot_wait: float,
    as_json: bool,
) -> None:
    progress = LoggedProgress()

    def report(result: RefreshResult) -> None:
        progress.done()
        if as_json:
            click.echo(json_text(dataclasses.asdict(result)))
        else:
            why = f" ({result.reason})" if result.reason else ""
            done = f"{result.rows_changed} rows changed in {result.seconds:.2f} s"
            click.echo(printable(f"{result.view_name}: {result.action}{why}, {done}"))

    def failed(what: str, error: Exception) -> None:
        progress.done()
        told = base.command_failure(error)
        base.CommandFailure(f"{what}: {told.message}", told.detail, told.hint).show()

    def work(connection: Connection[Any]) -> None:
        with Refresher(connection, progress=tell, slot_wait_seconds=slot_wait) as refresher:
            follower = Follower(
                refresher, names, groups=groups, interval=interval, slot=slot, report=report, failed=failed
            )
            try:
                follower.run(stop)
            finally:
                progress.done()

    stop = base.StopSignals()
    try:
        with progress as tell:
            reconnecting(lambda: stop.connect(dsn, "gdq:refresh"), work, stop.sleep)
    except KeyboardInterrupt:
        raise base.Interrupted(_INTERRUPTED) from None


@click.command("verify-view")
@click.argument("name")
@listing_options
@base.dsn_option
def verify_view_command(name: str, shape: Shape, dsn: str | None) -> None:
    """Refresh a view and compare it with its query at the same snapshot. Exit code 3 if they differ."""
    with Refresher(dsn) as refresher:
        result = verify(refresher, name)
    print_rows([result], VerifyResult, ("view_name", "rows", "missing", "unexpected"), shape)
    if not result.equal:
        hint = f"gdq refresh --full {name} reloads it."
        raise base.FoundWanting(f"view {name} differs from its query", hint=hint)
