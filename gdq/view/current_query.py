"""A view's query as it is to be read now: an ordinary view in it may have been replaced since the view was made."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import psycopg
from psycopg import Connection

from gdq.call import scalar
from gdq.errors import PlanError
from gdq.view.table_schema import apply_view_settings
from gdq.view.view import KEPT_SETTINGS, ViewInfo, explain_view, plan_options, safe_settings


def with_canonical_sql(connection: Connection[Any], view: ViewInfo) -> ViewInfo:
    """`view` with its canonical SQL by now as definition: ordinary views that it reads may have been replaced.

    Older versions stored the user's own SQL for Spark. Creates temporary views and rolls them back. PlanError if the
    view can no longer be planned.
    """
    if "written" in view.options and view.tables:
        return _with_views(connection, view)
    if view.engine == "postgres" or "planner" in view.options or not view.tables:
        return view
    with connection.transaction():
        kept = {name: str(view.options[name]) for name in KEPT_SETTINGS}
        apply_view_settings(connection, kept | {"search_path": str(view.options["search_path"])})
        plan = explain_view(
            connection,
            view.queue_name,
            view.definition,
            engine="spark",
            elsewhere=view.elsewhere,
            lake=view.lake is not None,
        )
    return replace(view, definition=plan.query, options=view.options | plan_options(plan, kept))


def _with_views(connection: Connection[Any], view: ViewInfo) -> ViewInfo:
    """A view that reads ordinary views, with their queries as they are now."""
    from gdq.plan.canonical import canonical_sql, canonical_tables  # noqa: PLC0415 (loads sqlglot)

    settings, written = safe_settings(view.options), str(view.options["written"])
    with connection.transaction(force_rollback=True):
        apply_view_settings(connection, settings)
        try:
            text = canonical_sql(connection, written)
        except (psycopg.errors.UndefinedTable, psycopg.errors.UndefinedColumn) as error:
            found = str(error.diag.message_primary)
            raise PlanError("unknown-table", f"the query of view {view.view_name}: {found}") from error
        if text == view.definition:
            return view
        query = """select n from pg_catalog.unnest(%s::pg_catalog.text[]) n
                    where n::pg_catalog.regclass <> all (%s::pg_catalog.text[]::pg_catalog.regclass[]) limit 1"""
        other = scalar(connection, query, canonical_tables(text), view.tables)
        if other is not None:
            raise PlanError(
                "unknown-table",
                f"a view in the query of {view.view_name} was replaced and reads {other}, which the query did not read",
                hint=f"gdq drop-view {view.view_name}, and create it anew.",
            )
        if view.engine == "postgres":
            return replace(view, definition=text)
        elsewhere, lake = view.elsewhere, view.lake is not None
        plan = explain_view(connection, view.queue_name, written, engine="spark", elsewhere=elsewhere, lake=lake)
    kept = {name: settings[name] for name in KEPT_SETTINGS}
    return replace(view, definition=plan.query, options=view.options | plan_options(plan, kept))
