"""Commands for views: create, list, explain and drop them."""

from __future__ import annotations

import json
import math
from contextlib import nullcontext, suppress
from dataclasses import asdict, dataclass
from typing import IO, Any

import click
from psycopg import Connection

from gdq.cli import base
from gdq.cli.listing import Shape, list_rows, listing_options
from gdq.cli.queue_command import only_queue
from gdq.cli.terminal import printable
from gdq.conninfo import connect, target_conninfo
from gdq.consumers.lake.open import open_lake
from gdq.consumers.refresh.new_view import create_view
from gdq.consumers.slot.slot import slot_of_view
from gdq.consumers.views.target import Target
from gdq.errors import ForeignTarget, GdqError, PlanError
from gdq.queue import check_tables
from gdq.sql_text import pinned
from gdq.view import view
from gdq.view.current_query import with_canonical_sql
from gdq.view.view import EngineChoice, ViewInfo

_VIEW_COLUMNS = (
    "view_name", "queue_name", "group_name", "target", "age", "last_action", "rows_changed", "error", "diverged",
)  # fmt: skip
_RUN_COLUMNS = ("started_at", "action", "reason", "delta_rows", "rows_changed", "seconds", "audit", "error")

_engine_option = click.option(
    "--engine",
    type=click.Choice(["auto", "spark", "postgres"]),
    default="auto",
    show_default=True,
    help="The engine that refreshes the view; auto: postgres.",
)


@dataclass(frozen=True, slots=True)
class AuditShare:
    """The value of --audit: a share of refreshes, None for as many as a hundredth of their work allows."""

    share: float | None


class _AuditShare(click.ParamType[AuditShare]):
    """auto, off, or a share of refreshes."""

    name = "share"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> AuditShare:
        if isinstance(value, AuditShare):
            return value
        if value in ("auto", "off"):
            return AuditShare(None if value == "auto" else 0.0)
        share = click.FloatRange(0, 1).convert(value, param, ctx)
        if math.isnan(share):
            self.fail(f"{value} is no share.", param, ctx)
        return AuditShare(share)


_audit_option = click.option(
    "--audit",
    type=_AuditShare(),
    metavar="auto|off|SHARE",
    help="How many refreshes compare some rows with the query; auto: as many as a hundredth of their work allows.",
)
_audit_keys_option = click.option(
    "--audit-keys", type=click.IntRange(1, 1000), metavar="N", help="How many keys such a refresh compares; first: 20."
)


@click.command("create-view")
@click.argument("name")
@click.option("-q", "--queue", metavar="QUEUE", help="The queue that captures the view's tables, if not the only one.")
@click.option("--sql", "file", required=True, type=click.File(), help="File with the view's SELECT; - for stdin.")
@click.option(
    "--target",
    required=True,
    metavar="TARGET",
    help="The table that refreshes fill: SCHEMA.TABLE, or delta:, parquet: or iceberg: and a place.",
)
@click.option("--target-dsn", metavar="CONNINFO", help="Database of the target, without a password; default: this one.")
@_engine_option
@_audit_option
@_audit_keys_option
@base.dsn_option
def create_view_command(
    *,
    name: str,
    queue: str | None,
    file: IO[str],
    target: str,
    target_dsn: str | None,
    engine: EngineChoice,
    audit: AuditShare | None,
    audit_keys: int | None,
    dsn: str | None,
) -> None:
    """Register a materialized view that is refreshed from a queue."""
    # the checks write temporary objects, after which a transaction can take no tick
    with base.command_session(dsn, autocommit=True) as connection:
        queue = queue or only_queue(connection)
        check_tables(connection, queue)
        plan = create_view(
            connection,
            name,
            queue,
            file.read(),
            target,
            target_dsn=target_dsn,
            engine=engine,
            audit_share=None if audit is None else audit.share,
            audit_keys=audit_keys,
        )
        if plan is not None:
            _check_target(connection, name)
    base.talk(f"already there: view {name}" if plan is None else f"created view {name}: {plan.strategy}")


def _check_target(connection: Connection[Any], name: str) -> None:
    """Drop a new view again if its target elsewhere belongs to another; say so if the target cannot be reached."""
    (info,) = view.view_info(connection, name)
    try:
        if info.lake is not None:
            open_lake(info.lake, f"view {name}", info.source).state()
        elif info.target_dsn is not None:
            with target_conninfo(info.target_dsn) as own, connect(own) as there:
                Target(name, info.source, info.target).exists(there)
    except ForeignTarget:
        view.drop_view(connection, name)
        raise
    except Exception as error:
        if not base.is_expected(error):
            raise
        base.talk(f"the target was not looked at: {base.command_failure(error).message}")


@click.command()
@listing_options
@base.dsn_option
def views_command(shape: Shape, dsn: str | None) -> None:
    """List views with the outcome of their last refresh."""
    list_rows(dsn, view.view_info, row_type=ViewInfo, columns=_VIEW_COLUMNS, shape=shape)


@click.command("view-history")
@click.argument("name")
@click.option("--limit", type=click.IntRange(min=1), default=20, show_default=True, help="At most this many refreshes.")
@listing_options
@base.dsn_option
def view_history_command(name: str, limit: int, shape: Shape, dsn: str | None) -> None:
    """List the refreshes of a view, newest first."""
    list_rows(dsn, view.view_history, name, limit, row_type=view.ViewRun, columns=_RUN_COLUMNS, shape=shape)


@click.command("alter-view")
@click.argument("name")
@click.option("--owner", metavar="ROLE", help="The role with whose rights the view is refreshed.")
@_audit_option
@_audit_keys_option
@base.dsn_option
def alter_view_command(
    name: str, owner: str | None, audit: AuditShare | None, audit_keys: int | None, dsn: str | None
) -> None:
    """Give a view to another role, or change its audits. The target needs the same owner: ALTER TABLE ... OWNER TO."""
    if owner is None and audit is None and audit_keys is None:
        raise click.UsageError("give --owner, --audit or --audit-keys")
    with base.command_session(dsn) as connection:
        if owner is not None:
            view.set_view_owner(connection, name, owner)
        if audit is not None or audit_keys is not None:
            (info,) = view.view_info(connection, name)
            view.set_view_audit(connection, name, info.audit_share if audit is None else audit.share, audit_keys)
    if owner is not None:
        base.talk(f"view {name} belongs to {owner}")
    if audit is not None or audit_keys is not None:
        base.talk(f"changed the audits of view {name}")


@click.command("drop-view")
@click.argument("name")
@click.option("--keep-target", is_flag=True, help="Leave the target table and its rows.")
@base.dsn_option
def drop_view_command(name: str, keep_target: bool, dsn: str | None) -> None:
    """Delete a view and drop its target. A slot of the view stays; its name is printed."""
    with base.command_session(dsn) as connection:
        known = {info.view_name: info for info in view.view_info(connection)}
        if name not in known:
            base.talk(f"already gone: view {name}")
            return
        if not keep_target:
            _drop_target(known[name], dsn)
        view.drop_view(connection, name)
        slot = slot_of_view(connection, known[name].queue_name, name)
    base.talk(f"dropped view {name}")
    if slot is not None:
        drop = f"gdq drop-slot {known[name].queue_name} {name}"
        base.talk(f"slot {slot} is still there and keeps the write-ahead log: drop it with {drop}")


def _drop_target(info: ViewInfo, dsn: str | None) -> None:
    """Drop the target of a view; one that is not the view's own stays."""
    if info.lake is not None:
        with suppress(ForeignTarget):
            open_lake(info.lake, f"view {info.view_name}", info.source).drop()
        return
    place = nullcontext(dsn) if info.target_dsn is None else target_conninfo(info.target_dsn)
    with place as own, base.command_session(own) as connection:
        Target(info.view_name, info.source, info.target, in_source=not info.elsewhere).drop(connection)


def _show_functions(connection: Connection[Any], name: str, *, as_json: bool) -> None:
    """Print the CREATE FUNCTION statements of what CALL gdq.refresh() runs for a view."""
    (info,) = view.view_info(connection, name)
    target = Target(info.view_name, info.source, info.target, in_source=not info.elsewhere)
    query = """select pg_catalog.pg_get_functiondef(p.oid) from pg_catalog.unnest(%s::pg_catalog.text[]) n
                 join pg_catalog.pg_proc p on p.oid operator(pg_catalog.=) pg_catalog.to_regproc(n)::pg_catalog.oid"""
    texts = [text.rstrip() for (text,) in connection.execute(query, [target.functions]).fetchall()]
    if not texts:
        raise GdqError(
            f"view {info.view_name} has no functions that refresh it",
            hint=f"gdq refresh {info.view_name} makes them, if it has engine postgres and its target in this database.",
        )
    click.echo(json.dumps({"functions": texts}) if as_json else printable(";\n\n".join(texts), lines=True))


def _show_plans(connection: Connection[Any], name: str, *, as_json: bool) -> None:
    """Print the server's plans for the statements of these functions."""
    from gdq.consumers.refresh.statement_plans import statement_plans  # noqa: PLC0415 (loads sqlglot, an extra)

    found = statement_plans(connection, name)
    if as_json:
        click.echo(json.dumps({"plans": [asdict(one) for one in found]}, indent=1))
    else:
        click.echo(printable("\n\n".join(map(str, found)), lines=True))


@click.command("explain-view")
@click.argument("name", required=False)
@click.option("-q", "--queue", metavar="QUEUE", help="With --sql: the queue of its tables, if not the only one.")
@click.option("--sql", "file", type=click.File(), help="File with a SELECT to explain instead of a view; - for stdin.")
@click.option(
    "--elsewhere",
    is_flag=True,
    help="With --sql: for a target in another database; for a lake table with --engine postgres.",
)
@click.option("--functions", is_flag=True, help="Show the functions that CALL gdq.refresh() runs instead.")
@click.option("--plans", is_flag=True, help="Show the server's plans for the statements of these functions instead.")
@_engine_option
@base.dsn_option
@base.json_object_option
def explain_view_command(
    *,
    name: str | None,
    queue: str | None,
    file: IO[str] | None,
    elsewhere: bool,
    engine: EngineChoice,
    functions: bool,
    plans: bool,
    dsn: str | None,
    as_json: bool,
) -> None:
    """Show how a view is refreshed and why. Exit code 3 if it cannot be refreshed from changes."""
    if (name is None) == (file is None) or (file is None and queue is not None):
        raise click.UsageError("give the NAME of a view, or --sql and --queue")
    if elsewhere and file is None:
        raise click.UsageError("--elsewhere needs --sql")
    if (functions or plans) and (name is None or functions == plans):
        raise click.UsageError("give --functions or --plans, with the NAME of a view")
    with base.command_session(dsn) as connection:
        if functions or plans:
            show = _show_functions if functions else _show_plans
            show(connection, str(name), as_json=as_json)
            return
        try:
            if file is not None:
                queue = queue or only_queue(connection)
                plan = view.explain_view(connection, queue, file.read(), engine=engine, elsewhere=elsewhere)
            else:
                (info,) = view.view_info(connection, name)
                with pinned(connection):
                    plan = view.load_plan(connection, with_canonical_sql(connection, info))
        except PlanError as error:
            if as_json:
                click.echo(json.dumps({"strategy": None, "code": error.code, "reason": str(error)}))
            raise base.FoundWanting(str(error), error.detail, error.hint) from error
    click.echo(json.dumps(plan.as_dict(), indent=1) if as_json else printable(str(plan), lines=True))
    if plan.strategy == "full":
        raise base.FoundWanting("the view is loaded in full at every refresh that finds changes", None, None)
