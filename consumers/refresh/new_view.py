"""Views as they are created: with the functions that refresh them, so that the first CALL gdq.refresh() loads them.

A refresh makes the functions anew when its view has changed; an install makes them anew that an upgrade outdates.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

import psycopg
from psycopg import Connection

from gdq.call import call, scalar
from gdq.consumers.refresh.audit import is_auditable
from gdq.consumers.views.own_objects import check_own_tables
from gdq.consumers.views.progress import Progress
from gdq.consumers.views.target import Target, target_types
from gdq.consumers.views.target_rows import TargetRows
from gdq.errors import GdqError
from gdq.extra import missing_extra
from gdq.sql_text import pinned
from gdq.view import view as views
from gdq.view.current_query import with_canonical_sql
from gdq.view.table_schema import describe_query
from gdq.view.view import EngineChoice, ViewInfo, load_plan, view_info

if TYPE_CHECKING:
    from gdq.consumers.views.compiled_view import CompiledView
    from gdq.view.view import Plan

log = logging.getLogger(__name__)


def create_view(
    connection: Connection[Any],
    name: str,
    queue: str,
    query: str,
    target: str,
    *,
    target_dsn: str | None = None,
    engine: EngineChoice = "auto",
    audit_share: float | None = None,
    audit_keys: int | None = None,
) -> Plan | None:
    """Register the view `query` over tables that `queue` captures; the first refresh fills `target`.

    `target`: SCHEMA.TABLE, or delta:, parquet: or iceberg: and a place. `target_dsn`: connection string without a
    password, None for the source's own database. `engine`: auto takes postgres. The session's TimeZone is stored for
    all refreshes. `audit_share` and `audit_keys`: as for set_view_audit(). Returns the plan, None if the same view
    existed. Writes the view, a consumer for its tables, and as compile_view(). PlanError for a query that the engine
    cannot refresh, GdqError for a bad target, ForeignTarget if there is such a table in this database.
    """
    plan = views.create_view(
        connection,
        name,
        queue,
        query,
        target,
        target_dsn=target_dsn,
        engine=engine,
        audit_share=audit_share,
        audit_keys=audit_keys,
    )
    if plan is not None:
        compile_view(connection, name)
    return plan


def compile_view(connection: Connection[Any], name: str) -> bool:
    """Make the functions by which CALL gdq.refresh() refreshes a view; False if there can be none.

    They are for views of engine postgres that belong to the session's role, with their target in this database.
    Writes the functions in schema gdq_target, which it makes if it is missing. psycopg.errors.UndefinedObject if there
    is no such view.
    """
    (view,) = view_info(connection, name)
    return _compiled(connection, view)


def compile_views(connection: Connection[Any]) -> list[str]:
    """Make the functions of all views for which compile_view() can; returns the names of these views.

    For after an upgrade of gdq: those of other roles' views are made by their next gdq refresh.
    """
    return [view.view_name for view in view_info(connection) if _compiled(connection, view)]


def _compiled(connection: Connection[Any], view: ViewInfo) -> bool:
    me = scalar(connection, "select current_user::pg_catalog.text")
    if view.engine != "postgres" or view.elsewhere or view.owner != me:
        return False
    try:
        with pinned(connection):
            _compile(connection, view)
    except (psycopg.Error, GdqError, ModuleNotFoundError) as error:
        if isinstance(error, ModuleNotFoundError) and missing_extra(error) is None:
            raise
        log.info("view %s is not compiled: %s", view.view_name, error)
        return False
    return True


def _compile(connection: Connection[Any], view: ViewInfo) -> None:
    # before the plan, so that what changes meanwhile tells
    stamp, definitions = call(connection, "view_stamp", view.view_name), call(connection, "user_definitions")
    _, compiled = plan_functions(connection, view)
    check_own_tables(connection, "position", in_source=True)
    compiled.rows.target.prepare(connection)
    plan = compiled.plan
    compiled.store(connection, stamp, None if plan.is_own else definitions, auditable=is_auditable(plan))


def plan_functions(connection: Connection[Any], view: ViewInfo) -> tuple[ViewInfo, CompiledView]:
    """A view with its query as it is now, and its functions, of which none is made; in a transaction that is pinned.

    PlanError if the view can no longer be planned.
    """
    from gdq.consumers.views.compiled_view import CompiledView  # noqa: PLC0415 (loads sqlglot, an extra)
    from gdq.plan.postgres import PostgresPlan  # noqa: PLC0415

    view = with_canonical_sql(connection, view)
    plan = load_plan(connection, view)
    assert isinstance(plan, PostgresPlan)
    types = target_types(describe_query(connection, plan.query, view.settings), same_database=True)
    target = Target(view.view_name, view.source, view.target)
    return view, CompiledView(view, plan, TargetRows(connection, target, types, Progress()))
