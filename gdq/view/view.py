"""Views that are refreshed from a queue: making, listing and dropping them, and planning their refresh.

The functions take a connection to the source and leave the transaction to the caller.
"""

from __future__ import annotations

import json
import uuid
from dataclasses import dataclass, replace
from datetime import datetime, timedelta
from typing import TYPE_CHECKING, Any, Literal

import psycopg
from psycopg import Connection
from psycopg.conninfo import conninfo_to_dict

from gdq.call import call, rows, scalar
from gdq.errors import GdqError, PlanError
from gdq.sql_text import quote
from gdq.view.lake_name import LakeKind, LakeName, check_columns, lake_name
from gdq.view.table_schema import apply_settings, describe, load_schemas

# Settings of the session that made the view and that its SQL may depend on: every refresh uses them.
_KEPT_SETTINGS = ("search_path", "timezone", "datestyle")

if TYPE_CHECKING:
    from gdq.plan.postgres import PostgresPlan
    from gdq.plan.spark.keys import SparkKeyPlan
    from gdq.plan.spark.plan import SparkPlan

    Plan = PostgresPlan | SparkPlan | SparkKeyPlan
EngineChoice = Literal["auto", "spark", "postgres"]


@dataclass(frozen=True, slots=True)
class ViewRun:
    """One refresh of a view. `action`: full, delta, none or failed; None while it is at work or when it was killed.

    `kind`: none, incremental, by-key or full, what was computed. `delta_rows`: netted changes that it worked on,
    `rows_read`: rows of the tables that it read, None where that is not known. `work_seconds`: computing and writing
    alone. `choice`: why that was expected to cost less. `group_name`: the group that was refreshed.
    """

    started_at: datetime
    finished_at: datetime | None
    action: str | None
    reason: str | None
    rows_changed: int | None
    seconds: float | None
    error: str | None
    kind: str | None
    delta_rows: int | None
    rows_read: int | None
    work_seconds: float | None
    choice: str | None
    group_name: str | None = None


@dataclass(frozen=True, slots=True)
class ViewInfo:
    """One view, how fresh it is, and the outcome of its last refresh.

    `age`: since the start of the last refresh that succeeded, so what the target stands for is at most as old; None
    before the first. `last_action`: full, delta, none or failed; `kind`: none, incremental, by-key or full, what that
    refresh computed, and `delta_rows`: the netted changes that it worked on. `group_name`: the group of views that it
    is refreshed with.
    """

    view_name: str
    queue_name: str
    consumer_name: str
    tables: list[str]
    target: str
    definition: str
    options: dict[str, Any]
    created_at: datetime
    age: timedelta | None
    last_refresh: datetime | None
    last_action: str | None
    last_reason: str | None
    rows_changed: int | None
    error: str | None
    kind: str | None
    delta_rows: int | None
    group_name: str | None

    @property
    def kind_name(self) -> str:
        """The kind, unknown before the first refresh and after one that failed."""
        return self.kind or "unknown"

    @property
    def source(self) -> str:
        """Drawn when the view was made: tells its position in a target from that of another view of the same name."""
        return str(self.options["source"])

    @property
    def target_dsn(self) -> str | None:
        """Where the target is; None: in the source's own database."""
        return self.options.get("target_dsn")

    @property
    def elsewhere(self) -> bool:
        """Whether the target is not in the source's own database."""
        return self.target_dsn is not None or self.lake is not None

    @property
    def lake(self) -> LakeName | None:
        """The lake table that is the target, None when that is a table of PostgreSQL."""
        return lake_name(self.target)

    @property
    def engine(self) -> str:
        """What refreshes the view: spark or postgres."""
        return str(self.options.get("engine", "spark"))

    @property
    def settings(self) -> dict[str, str]:
        """Session settings under which the view's SQL is run."""
        return {name: str(self.options[name]) for name in _KEPT_SETTINGS}


def create_view(
    connection: Connection[Any],
    name: str,
    queue: str,
    query: str,
    target: str,
    *,
    target_dsn: str | None = None,
    engine: EngineChoice = "auto",
) -> Plan | None:
    """Register the view `query` over tables that `queue` captures; its first refresh fills `target`.

    `target` is a table name, with a schema, or the name of a lake table (gdq.lake); `target_dsn` a connection string
    without a password, None for the source's own database. `engine`: what refreshes it; auto takes postgres. The
    session's search_path and TimeZone are kept for all refreshes. Returns the plan, None when the very same
    view existed. Writes the view and a consumer for its tables. PlanError for a query that the engine cannot refresh,
    GdqError for a bad target.
    """
    _check_target_dsn(target_dsn)
    lake = lake_name(target)
    if lake is not None:
        _check_lake(lake.kind, target_dsn, engine)
    elsewhere = target_dsn is not None or lake is not None
    plan = explain_view(connection, queue, query, engine=engine, elsewhere=elsewhere, lake=lake is not None)
    settings: dict[str, str] = {
        setting: scalar(connection, "select pg_catalog.current_setting(%s)", setting) for setting in _KEPT_SETTINGS
    }
    # Dates are read in the order of the session, and written so that they can be read back.
    settings["datestyle"] = f"ISO, {settings['datestyle'].rpartition(' ')[2]}"
    options = _options(plan, settings) | {"source": str(uuid.uuid4())}
    if target_dsn is not None:
        options["target_dsn"] = target_dsn
    if lake is None:
        qualified = qualified_target(connection, target)
    else:
        qualified = str(lake)
        settings = {setting: options[setting] for setting in _KEPT_SETTINGS}
        check_columns(lake.kind, [column for column, _, _ in describe(connection, plan.query, settings)])
    with connection.transaction():
        # The consumer comes first: its tick wants a transaction that has written nothing.
        tables = [table.name for table in plan.tables]
        created = call(connection, "create_view", name, queue, plan.query, qualified, tables, json.dumps(options))
    return plan if created else None


def drop_view(connection: Connection[Any], name: str) -> bool:
    """Forget a view with its history and consumer; False when there was none. The target is left alone."""
    return bool(call(connection, "drop_view", name))


def view_info(connection: Connection[Any], name: str | None = None) -> list[ViewInfo]:
    """All views, or one. psycopg.errors.UndefinedObject when there is no such view."""
    return rows(connection, ViewInfo, "select * from gdq.view_info(%s)", name)


def view_history(connection: Connection[Any], name: str, limit: int | None = None) -> list[ViewRun]:
    """A view's refreshes, newest first, at most `limit`. psycopg.errors.UndefinedObject when there is no such view."""
    return rows(connection, ViewRun, "select * from gdq.view_history(%s, %s)", name, limit)


def view_changed(connection: Connection[Any], name: str) -> bool:
    """Whether a refresh of the view would find something to do; cheap. psycopg.errors.UndefinedObject as above."""
    return bool(call(connection, "view_changed", name))


def load_plan(connection: Connection[Any], view: ViewInfo) -> Plan:
    """The view's plan by the schema and the capture of its tables as they are now. PlanError when there is none."""
    if not view.tables:
        raise PlanError("unknown-table", f"the table of view {view.view_name} is no longer captured")
    schemas = load_schemas(connection, view.queue_name, view.tables)
    if view.engine == "spark":
        from gdq.view.spark_plan import load_on_spark  # noqa: PLC0415 (loads sqlglot)

        return load_on_spark(view.definition, schemas, view.options.get("refused"), elsewhere=view.elsewhere)
    from gdq.plan.postgres import plan_postgres  # noqa: PLC0415 (loads sqlglot)

    return plan_postgres(view.definition, schemas, elsewhere=view.elsewhere)


def with_canonical_sql(connection: Connection[Any], view: ViewInfo) -> ViewInfo:
    """`view` with its definition as create_view() stores it: older versions stored the user's own SQL for Spark.

    `connection` may write: a temporary view is made and taken back. PlanError when it can no longer be planned.
    """
    if view.engine == "postgres" or "planner" in view.options or not view.tables:
        return view
    with connection.transaction():
        apply_settings(connection, view.settings)
        plan = explain_view(
            connection,
            view.queue_name,
            view.definition,
            engine="spark",
            elsewhere=view.elsewhere,
            lake=view.lake is not None,
        )
    return replace(view, definition=plan.query, options=view.options | _options(plan, view.settings))


def _options(plan: Plan, settings: dict[str, str]) -> dict[str, str]:
    """What is stored beside the canonical SQL of a view: its settings, and what its engine needs to plan it again."""
    from gdq.plan.spark.keys import SparkKeyPlan  # noqa: PLC0415 (loads sqlglot)
    from gdq.plan.spark.plan import SparkPlan  # noqa: PLC0415

    # Canonical SQL names what is not in pg_catalog with its schema: nothing may come before that.
    options = settings | {"search_path": ", ".join(filter(None, ["pg_catalog", settings["search_path"]]))}
    if isinstance(plan, SparkKeyPlan):
        return options | {"planner": "tables", "refused": plan.refused}
    return options | ({"planner": "tables"} if isinstance(plan, SparkPlan) else {"engine": "postgres"})


def explain_view(
    connection: Connection[Any],
    queue: str,
    query: str,
    *,
    engine: EngineChoice = "auto",
    elsewhere: bool = False,
    lake: bool = False,
) -> Plan:
    """The plan that create_view() would make; nothing is written. PlanError as there.

    `elsewhere`: for a target that is not in the database of the tables; `lake`: for a lake table.
    """
    from gdq.plan.canonical import canonical, tables_of  # noqa: PLC0415 (loads sqlglot)
    from gdq.plan.postgres import plan_postgres  # noqa: PLC0415

    text = canonical(connection, query)
    tables = tables_of(text)
    if not tables:
        raise PlanError("no-table", "the view reads no table")
    schemas = load_schemas(connection, queue, tables)
    if engine == "spark":
        from gdq.view.spark_plan import plan_on_spark  # noqa: PLC0415

        return plan_on_spark(connection, text, schemas, elsewhere=elsewhere, lake=lake)
    return plan_postgres(text, schemas, elsewhere=elsewhere)


def qualified_target(connection: Connection[Any], target: str) -> str:
    """`target`, schema.table as in SQL, in PostgreSQL's own spelling. GdqError when it is no such name."""
    try:
        with connection.transaction():
            parts: list[str] = scalar(connection, "select pg_catalog.parse_ident(%s)", target)
    except psycopg.errors.InvalidParameterValue as error:
        raise GdqError(f"{target!r} is no table name", hint="Write schema.table.") from error
    if len(parts) != 2:
        raise GdqError(f"target {target!r}: write schema.table")
    return f"{quote(parts[0])}.{quote(parts[1])}"


def _check_lake(kind: LakeKind, target_dsn: str | None, engine: EngineChoice) -> None:
    """GdqError for what does not go with a lake table."""
    if target_dsn is not None:
        raise GdqError("a lake table is in no database", hint="Leave the target's dsn out.")
    if engine == "spark" and kind == "parquet":
        raise GdqError(
            "the engine spark fills Delta and Iceberg tables", hint="Leave the engine out, or take postgres."
        )


def _check_target_dsn(target_dsn: str | None) -> None:
    if target_dsn is not None and conninfo_to_dict(target_dsn).get("password"):
        raise GdqError(
            "the target's connection string holds a password, which would be stored with the view",
            hint="Leave it to PGPASSFILE or a connection service (service=NAME).",
        )
