"""Views that are refreshed from a queue: making, listing and dropping them, and planning their refresh.

The functions take a connection to the source and leave the transaction to the caller.
"""

from __future__ import annotations

import importlib.util
import json
import re
import uuid
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import TYPE_CHECKING, Any, Literal

import psycopg
from psycopg import Connection, sql
from psycopg.conninfo import conninfo_to_dict

from gdq.call import call, rows, scalar
from gdq.errors import GdqError
from gdq.plan.table import PlanError, RefreshPlan, plan_view, referenced_table
from gdq.sql_text import quote, raw
from gdq.view.lake_name import LakeKind, LakeName, check_columns, lake_name
from gdq.view.table_schema import describe, load_schema, load_schemas

# Settings of the session that made the view and that its SQL may depend on: every refresh uses them.
_KEPT_SETTINGS = ("search_path", "timezone", "datestyle")

if TYPE_CHECKING:
    from gdq.plan.postgres import PostgresPlan
    from gdq.plan.spark.keys import SparkKeyPlan
    from gdq.plan.spark.plan import SparkPlan

    Plan = RefreshPlan | PostgresPlan | SparkPlan | SparkKeyPlan
EngineChoice = Literal["auto", "spark", "postgres"]

# What no engine can do.
_FINAL = {
    "syntax",
    "several-statements",
    "unknown-table",
    "pk-columns-missing",
    "column-not-captured",
    "lake-key",
}

# The planner writes the unit in capitals, which is the same.
_UNIT = re.compile(r"date_trunc\('\w+'")


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
    without a password, None for the source's own database. `engine`: what refreshes it; auto takes spark, where it is
    installed, for the views of one table that it covers, else postgres, wherever the target is, and postgres for lake
    tables. The session's search_path and TimeZone are kept for all refreshes. Returns the plan, None when the very same
    view existed. Writes the view and a consumer for its tables. PlanError for a query that the engine cannot refresh,
    GdqError for a bad target.
    """
    _check_target_dsn(target_dsn)
    lake = lake_name(target)
    if lake is not None:
        engine = _check_lake(lake.kind, target_dsn, engine)
    elsewhere = target_dsn is not None or lake is not None
    plan = explain_view(connection, queue, query, engine=engine, elsewhere=elsewhere, lake=lake is not None)
    from gdq.plan.spark.keys import SparkKeyPlan  # noqa: PLC0415
    from gdq.plan.spark.plan import SparkPlan  # noqa: PLC0415 (loads sqlglot)

    canonical = not isinstance(plan, RefreshPlan)
    options: dict[str, str] = {
        setting: scalar(connection, "select pg_catalog.current_setting(%s)", setting) for setting in _KEPT_SETTINGS
    }
    # Dates are read in the order of the session, and written so that they can be read back.
    options["datestyle"] = f"ISO, {options['datestyle'].rpartition(' ')[2]}"
    options["source"] = str(uuid.uuid4())
    if canonical:
        if isinstance(plan, SparkKeyPlan):
            options |= {"planner": "tables", "refused": plan.refused}
        else:
            options |= {"planner": "tables"} if isinstance(plan, SparkPlan) else {"engine": "postgres"}
        # Canonical SQL names what is not in pg_catalog with its schema: nothing may come before that.
        options["search_path"] = ", ".join(filter(None, ["pg_catalog", options["search_path"]]))
    if target_dsn is not None:
        options["target_dsn"] = target_dsn
    # A star means the columns of today, as in PostgreSQL's own views.
    definition = plan.query if canonical or "*" in query.replace("(*)", "") else query.strip()
    tables = [plan.table] if isinstance(plan, RefreshPlan) else [table.name for table in plan.tables]
    if lake is None:
        qualified = qualified_target(connection, target)
    else:
        qualified = str(lake)
        settings = {setting: options[setting] for setting in _KEPT_SETTINGS}
        check_columns(lake.kind, [column for column, _, _ in describe(connection, definition, settings)])
    with connection.transaction():
        # The consumer comes first: its tick wants a transaction that has written nothing.
        created = call(connection, "create_view", name, queue, definition, qualified, tables, json.dumps(options))
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
    if view.options.get("planner") == "tables":
        from gdq.plan.spark.plan import plan_spark  # noqa: PLC0415 (loads sqlglot)
        from gdq.view.spark_plan import load_on_spark  # noqa: PLC0415

        if view.lake is not None:
            return plan_spark(view.definition, schemas)
        return load_on_spark(view.definition, schemas, view.options.get("refused"), elsewhere=view.elsewhere)
    if view.engine != "postgres":
        return plan_view(view.definition, schemas, kept=view.lake is None)
    from gdq.plan.postgres import plan_postgres  # noqa: PLC0415 (loads sqlglot)

    return plan_postgres(view.definition, schemas, elsewhere=view.elsewhere)


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
    if engine == "auto" and importlib.util.find_spec("pyspark") is None:
        engine = "postgres"
    if engine != "postgres":
        try:
            return _plan_one_table(connection, queue, query, elsewhere=elsewhere, lake=lake)
        except PlanError as error:
            if error.code in _FINAL:
                raise
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


def _plan_one_table(connection: Connection[Any], queue: str, query: str, *, elsewhere: bool, lake: bool) -> RefreshPlan:
    """The plan of a view of one table for Spark. PlanError for any other."""
    table = _resolve(connection, query)
    plan = plan_view(query, [load_schema(connection, queue, table)], kept=not lake)
    _check_on_server(connection, query, plan)
    if elsewhere:
        _check_group_types(connection, plan)
    if lake:
        from gdq.view.spark_plan import check_lake_keys  # noqa: PLC0415 (loads sqlglot)

        check_lake_keys(connection, plan)
    return plan


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


def _check_lake(kind: LakeKind, target_dsn: str | None, engine: EngineChoice) -> EngineChoice:
    """The engine for a lake table. GdqError for what does not go with one."""
    if target_dsn is not None:
        raise GdqError("a lake table is in no database", hint="Leave the target's dsn out.")
    if engine == "spark" and kind == "parquet":
        raise GdqError(
            "the engine spark fills Delta and Iceberg tables", hint="Leave the engine out, or take postgres."
        )
    return "spark" if engine == "spark" else "postgres"


def _check_target_dsn(target_dsn: str | None) -> None:
    if target_dsn is not None and conninfo_to_dict(target_dsn).get("password"):
        raise GdqError(
            "the target's connection string holds a password, which would be stored with the view",
            hint="Leave it to PGPASSFILE or a connection service (service=NAME).",
        )


def _check_group_types(connection: Connection[Any], plan: RefreshPlan) -> None:
    """PlanError when groups are told apart by a type that another database has as text, such as citext."""
    described = {name: (oid, kind) for name, oid, kind in describe(connection, plan.query, {})}
    if not plan.strategy.startswith("group"):
        return
    for name in plan.merge.keys:
        oid, kind = described[name]
        query = "select typtype from pg_catalog.pg_type where oid = %s and oid >= 16384"
        if scalar(connection, query, oid) not in (None, "e"):
            raise PlanError("group-by-type", f"GROUP BY {quote(name)}: another database does not compare {kind} alike")


def _resolve(connection: Connection[Any], query: str) -> str:
    """The table of the view, found as the server does it, as a quoted qualified name."""
    schema, name = referenced_table(query)
    written = quote(name) if schema is None else f"{quote(schema)}.{quote(name)}"
    found = scalar(
        connection,
        """select pg_catalog.format('%%I.%%I', n.nspname, c.relname)
             from pg_catalog.pg_class c join pg_catalog.pg_namespace n on n.oid = c.relnamespace
            where c.oid = pg_catalog.to_regclass(%s)""",
        written,
    )
    if found is None:
        raise PlanError("unknown-table", f"table {written} does not exist")
    return str(found)


def _check_on_server(connection: Connection[Any], query: str, plan: RefreshPlan) -> None:
    """PlanError unless the server reads `query` and the plan's own text alike, and its expressions are immutable.

    A temporary view of each shows the server's parse tree; an index predicate takes immutable expressions only. All
    is rolled back.
    """
    delta = plan.rows or plan.delta
    with connection.transaction(force_rollback=True):
        trees = []
        for text in (query, plan.query):
            connection.execute(sql.SQL("create temp view gdq_check as {}").format(raw(text.strip().rstrip(";"))))
            tree = scalar(connection, "select pg_catalog.pg_get_viewdef('pg_temp.gdq_check'::regclass)")
            trees.append(_UNIT.sub(lambda unit: unit[0].lower(), tree))
            connection.execute("drop view pg_temp.gdq_check")
        if trees[0] != trees[1]:
            raise PlanError(
                "expression",
                "an expression of the view is not read as PostgreSQL reads it",
                hint=f"PostgreSQL: {' '.join(trees[0].split())} planner: {' '.join(trees[1].split())}",
            )
        connection.execute("set local client_min_messages = error")
        alias = sql.Identifier(delta.alias)
        connection.execute(sql.SQL("create temp table {} (like {})").format(alias, raw(plan.table)))
        for expression in plan.expressions:
            try:
                with connection.transaction():
                    connection.execute(
                        sql.SQL("create index on pg_temp.{} ((1)) where ({}) is not null").format(
                            alias, raw(expression)
                        )
                    )
            except psycopg.errors.InvalidObjectDefinition as error:
                raise PlanError(
                    "nondeterministic",
                    f"{expression} depends on more than the row",
                    hint="Use immutable functions only; for a timestamptz write AT TIME ZONE with a zone.",
                ) from error
            except (psycopg.errors.FeatureNotSupported, psycopg.errors.GroupingError) as error:
                raise PlanError("expression", f"{expression}: {error.diag.message_primary}") from error
