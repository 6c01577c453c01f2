"""Commands for views: registering, listing, explaining and dropping them."""

from __future__ import annotations

import json
from typing import IO

import click

from gdq.cli.base import Wanting, dsn_option, fields, json_object_option, json_option, list_rows, session, talk
from gdq.consumers.lake.open import open_lake
from gdq.consumers.slot.slot import slot_of_view
from gdq.consumers.views.target import Target
from gdq.errors import PlanError
from gdq.queue import check_tables
from gdq.view import view
from gdq.view.view import EngineChoice, ViewInfo

_VIEW_COLUMNS = (
    "view_name",
    "queue_name",
    "group_name",
    "tables",
    "target",
    "last_refresh",
    "last_action",
    "last_reason",
    "rows_changed",
    "error",
)


engine_option = click.option(
    "--engine",
    type=click.Choice(["auto", "spark", "postgres"]),
    default="auto",
    show_default=True,
    help="What refreshes the view; auto: postgres.",
)


@click.command("create-view")
@click.argument("name")
@click.option("--queue", required=True, metavar="QUEUE", help="The queue that captures the view's tables.")
@click.option("--sql", "file", required=True, type=click.File(), help="File with the view's SELECT; - for stdin.")
@click.option(
    "--target",
    required=True,
    metavar="TARGET",
    help="The table that refreshes fill: SCHEMA.TABLE, or delta:, parquet: or iceberg: and a place.",
)
@click.option("--target-dsn", metavar="CONNINFO", help="Database of the target, without a password; default: this one.")
@engine_option
@dsn_option
def create_view(
    *,
    name: str,
    queue: str,
    file: IO[str],
    target: str,
    target_dsn: str | None,
    engine: EngineChoice,
    dsn: str | None,
) -> None:
    """Register a materialized view that is refreshed from a queue."""
    # the checks write temporary objects, after which a transaction can take no tick
    with session(dsn, autocommit=True) as connection:
        check_tables(connection, queue)
        plan = view.create_view(connection, name, queue, file.read(), target, target_dsn=target_dsn, engine=engine)
    talk(f"already there: view {name}" if plan is None else f"created view {name}: {plan.strategy}")


@click.command()
@dsn_option
@json_option
def views(dsn: str | None, as_json: bool) -> None:
    """List views and how their last refresh went."""
    list_rows(dsn, view.view_info, columns=_VIEW_COLUMNS, as_json=as_json)


@click.command("view-history")
@click.argument("name")
@click.option("--limit", type=click.IntRange(min=1), default=20, show_default=True, help="At most this many refreshes.")
@dsn_option
@json_option
def view_history(name: str, limit: int, dsn: str | None, as_json: bool) -> None:
    """List the refreshes of a view, newest first."""
    list_rows(dsn, view.view_history, name, limit, columns=fields(view.ViewRun), as_json=as_json)


@click.command("drop-view")
@click.argument("name")
@click.option("--keep-target", is_flag=True, help="Leave the target table and its rows.")
@dsn_option
def drop_view(name: str, keep_target: bool, dsn: str | None) -> None:
    """Forget a view, and drop its target. Its slot stays, if it has one, and is named."""
    with session(dsn) as connection:
        known = {info.view_name: info for info in view.view_info(connection)}
        if name not in known:
            talk(f"already gone: view {name}")
            return
        if not keep_target:
            _drop_target(known[name], dsn)
        view.drop_view(connection, name)
        slot = slot_of_view(connection, known[name].queue_name, name)
    talk(f"dropped view {name}")
    if slot is not None:
        drop = f"gdq drop-slot {known[name].queue_name} {name}"
        talk(f"slot {slot} is still there and keeps the write-ahead log: drop it with {drop}")


def _drop_target(info: ViewInfo, dsn: str | None) -> None:
    if info.lake is not None:
        open_lake(info.lake, info.view_name, info.source).drop()
        return
    with session(info.target_dsn or dsn) as connection:
        Target(info.view_name, info.source, info.target).drop(connection)


@click.command("explain-view")
@click.argument("name", required=False)
@click.option("--queue", metavar="QUEUE", help="With --sql: the queue that captures its tables.")
@click.option("--sql", "file", type=click.File(), help="File with a SELECT to explain instead of a view; - for stdin.")
@click.option(
    "--elsewhere",
    is_flag=True,
    help="With --sql: for a target in another database; for a lake table with --engine postgres.",
)
@engine_option
@dsn_option
@json_object_option
def explain_view(
    *,
    name: str | None,
    queue: str | None,
    file: IO[str] | None,
    elsewhere: bool,
    engine: EngineChoice,
    dsn: str | None,
    as_json: bool,
) -> None:
    """Show how a view is refreshed and why; exit code 3 when it cannot be refreshed from changes."""
    if (name is None) == (file is None) or (file is None) != (queue is None):
        raise click.UsageError("give the NAME of a view, or --queue and --sql")
    if elsewhere and file is None:
        raise click.UsageError("--elsewhere goes with --sql")
    with session(dsn) as connection:
        try:
            if file is not None:
                plan = view.explain_view(connection, str(queue), file.read(), engine=engine, elsewhere=elsewhere)
            else:
                (info,) = view.view_info(connection, name)
                plan = view.load_plan(connection, view.with_canonical_sql(connection, info))
        except PlanError as error:
            if as_json:
                click.echo(json.dumps({"strategy": None, "code": error.code, "reason": str(error)}))
            raise Wanting(str(error), error.detail, error.hint) from error
    click.echo(json.dumps(plan.as_dict(), indent=1) if as_json else str(plan))
    if plan.strategy == "full":
        raise Wanting("the view is loaded in full at every refresh that finds changes", None, None)
