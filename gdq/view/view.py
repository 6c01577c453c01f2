"""Views that are refreshed from a queue: create, list and drop them, and plan their refresh.

The functions take a connection to the source and leave the transaction to the caller.
"""

from __future__ import annotations

import json
import uuid
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from typing import TYPE_CHECKING, Any, Literal

import psycopg
from psycopg import Connection
from psycopg.conninfo import conninfo_to_dict

from gdq.call import call, rows, scalar
from gdq.errors import ForeignTarget, GdqError, PlanError
from gdq.extra import extra_named
from gdq.shown import Shown
from gdq.sql_text import PINNED_SETTINGS, pinned, quote
from gdq.view.lake_name import LakeKind, LakeName, check_lake_columns, lake_name
from gdq.view.table_schema import describe_query, load_schemas

# Settings of the session that created a view: its SQL may depend on them, so every refresh uses them.
KEPT_SETTINGS = ("timezone", "datestyle")
_TARGET_HINT = "Write schema.table, delta:/folder, parquet:/folder or iceberg:/folder/NAMESPACE.TABLE."

# A session beside the one that holds the tables' locks waits only for statements that wait for these locks.
_READER_LOCK_TIMEOUT = "1s"

if TYPE_CHECKING:
    from gdq.plan.postgres import PostgresPlan
    from gdq.plan.spark.keys import SparkKeyPlan
    from gdq.plan.spark.plan import SparkPlan

    Plan = PostgresPlan | SparkPlan | SparkKeyPlan
EngineChoice = Literal["auto", "spark", "postgres"]


@dataclass(frozen=True, slots=True, repr=False)
class ViewRun(Shown):
    """One refresh of a view. `action`: full, delta, none or failed; None while it runs or if it was killed.

    `kind`: the way of computing (none, incremental, by-key, full). `delta_rows`: netted changes used; `rows_read`: rows
    read from the tables; None if unknown. `work_seconds`: for computing and writing alone. `choice`: why this kind was
    expected to cost less. `group_name`: the group that was refreshed. `audit`: passed, failed or skipped, None without
    an audit; `audit_keys`: the keys compared; `audit_reason`: why it was skipped, or what it found.
    """

    _shown = "started_at action reason rows_changed seconds error kind audit"

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
    audit: str | None = None
    audit_keys: int | None = None
    audit_seconds: float | None = None
    audit_reason: str | None = None


@dataclass(frozen=True, slots=True, repr=False)
class ViewInfo(Shown):
    """One view, its age, and the outcome of its last refresh.

    `age`: time since the start of the last successful refresh, an upper bound for the age of the target's rows; None
    before the first. `last_action`: full, delta, none or failed; `kind` (none, incremental, by-key, full) and
    `delta_rows` as for ViewRun, for that refresh. `group_name`: the group that the view is refreshed with. `owner`: the
    role with whose rights it is refreshed; `acts_as`: the same, if the refreshing session is another role's.
    `audit_share` and `audit_keys`: as for set_view_audit(). `audit_credit`: the seconds that audits may take by now;
    `audit_need`: that the next one is expected to take. `audits`, `audits_skipped`, `audits_failed`: their numbers.
    `diverged`: what an audit found different, until a full load.
    """

    _shown = "view_name queue_name target tables age last_action last_reason rows_changed error diverged"

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
    owner: str | None
    audit_share: float | None
    audit_keys: int
    audit_credit: float
    audit_need: float
    last_audit: datetime | None
    audits: int
    audits_skipped: int
    audits_failed: int
    diverged: str | None
    acts_as: str | None = field(default=None, kw_only=True)

    @property
    def kind_name(self) -> str:
        """The kind, or "unknown" before the first refresh and after a failed one."""
        return self.kind or "unknown"

    @property
    def source(self) -> str:
        """Random mark that distinguishes the view's position in a target from that of another view of this name."""
        return str(self.options["source"])

    @property
    def target_dsn(self) -> str | None:
        """Connection string of the target's database; None for the source's own database."""
        return self.options.get("target_dsn")

    @property
    def elsewhere(self) -> bool:
        """True if the target is not in the source's own database."""
        return self.target_dsn is not None or self.lake is not None

    @property
    def lake(self) -> LakeName | None:
        """The lake table that is the target; None for a PostgreSQL table."""
        return lake_name(self.target)

    @property
    def engine(self) -> str:
        """The engine that refreshes the view: spark or postgres."""
        return str(self.options.get("engine", "spark"))

    @property
    def settings(self) -> dict[str, str]:
        """Session settings for the view's canonical SQL, which names everything outside pg_catalog with its schema.

        With `acts_as` the view's code runs as that role, the view's owner.
        """
        return safe_settings(self.options) | self.role

    @property
    def target_settings(self) -> dict[str, str]:
        """The settings for the session of the target: another database does not know the owner's role."""
        return safe_settings(self.options) | ({} if self.elsewhere else self.role)

    @property
    def role(self) -> dict[str, str]:
        """The setting by which a session acts as the view's owner; empty if it does so already."""
        return {} if self.acts_as is None else {"role": self.acts_as}


@extra_named()
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
    existed. Writes the view and a consumer for its tables. PlanError for a query that the engine cannot refresh,
    GdqError for a bad target, ForeignTarget if there is such a table in this database.
    """
    _check_target_dsn(target_dsn)
    lake = lake_name(target)
    if lake is not None:
        _check_lake(lake.kind, target_dsn, engine)
    elsewhere = target_dsn is not None or lake is not None
    plan = explain_view(connection, queue, query, engine=engine, elsewhere=elsewhere, lake=lake is not None)
    settings: dict[str, str] = {
        setting: scalar(connection, "select pg_catalog.current_setting(%s)", setting) for setting in KEPT_SETTINGS
    }
    # dates keep the session's order of day and month; ISO output can be read back
    settings["datestyle"] = f"ISO, {settings['datestyle'].rpartition(' ')[2]}"
    options = plan_options(plan, settings) | {"source": str(uuid.uuid4())}
    from gdq.plan.canonical import written_sql  # noqa: PLC0415 (loads sqlglot)

    written = written_sql(connection, query)
    if written is not None:
        options["written"] = written
    if target_dsn is not None:
        options["target_dsn"] = target_dsn
    if lake is None:
        qualified = _qualified_target(connection, target)
    else:
        qualified = str(lake)
        described = describe_query(connection, plan.query, safe_settings(options))
        check_lake_columns(lake.kind, [column for column, _, _ in described])
    with connection.transaction():
        # before any other write: the consumer's tick needs a transaction that has written nothing
        tables = [table.name for table in plan.tables]
        created = call(connection, "create_view", name, queue, plan.query, qualified, tables, json.dumps(options))
        if created and not elsewhere and scalar(connection, "select pg_catalog.to_regclass(%s)", qualified) is not None:
            raise ForeignTarget(f"table {qualified} exists already", hint="Choose another target, or drop the table.")
        if created and (audit_share, audit_keys) != (None, None):
            set_view_audit(connection, name, audit_share, audit_keys)
    return plan if created else None


def drop_view(connection: Connection[Any], name: str) -> bool:
    """Delete a view with its history and consumer, but not its target; False if there was none."""
    return bool(call(connection, "drop_view", name))


def set_view_owner(connection: Connection[Any], name: str, role: str) -> None:
    """Give a view to another role, with whose rights it is then refreshed; its target needs the same owner.

    psycopg.errors.UndefinedObject for an unknown view or role, InsufficientPrivilege unless the session is an
    administrator's and may act as the role.
    """
    call(connection, "set_view_owner", name, role)


def set_view_audit(connection: Connection[Any], name: str, share: float | None, keys: int | None = None) -> None:
    """Set how often refreshes of a view are audited, and how many keys an audit compares (None: as before).

    `share`: of the refreshes; 0: none, None: as many as a hundredth of their work allows.
    psycopg.errors.UndefinedObject if there is no such view, psycopg.errors.CheckViolation for bad numbers.
    """
    call(connection, "set_view_audit", name, share, keys)


def view_info(connection: Connection[Any], name: str | None = None) -> list[ViewInfo]:
    """All views, or one; psycopg.errors.UndefinedObject if there is no such view."""
    return rows(connection, ViewInfo, "select * from gdq.view_info(%s)", name)


def view_history(connection: Connection[Any], name: str, limit: int | None = None) -> list[ViewRun]:
    """A view's refreshes, newest first, at most `limit`; psycopg.errors.UndefinedObject if there is no such view."""
    return rows(connection, ViewRun, "select * from gdq.view_history(%s, %s)", name, limit)


def view_changed(connection: Connection[Any], name: str) -> bool:
    """True if a refresh of the view would find changes; cheap. psycopg.errors.UndefinedObject as for view_info()."""
    return bool(call(connection, "view_changed", name))


@extra_named()
def load_plan(connection: Connection[Any], view: ViewInfo, reader: Connection[Any] | None = None) -> Plan:
    """The view's plan by the current schema and capture of its tables; PlanError if there is none.

    `reader`: a session for temporary views if `connection` is read only; psycopg.errors.LockNotAvailable if a statement
    that waits for locks of `connection` is in its way.
    """
    if not view.tables:
        raise PlanError("unknown-table", f"the table of view {view.view_name} is no longer captured")
    from gdq.plan.canonical import refuse_inheritance  # noqa: PLC0415 (loads sqlglot)

    schemas = load_schemas(connection, view.queue_name, view.tables)
    refuse_inheritance(view.definition, schemas)
    from gdq.view.query_reading import read_query  # noqa: PLC0415 (loads sqlglot)

    settings = view.settings if reader is None else view.settings | {"lock_timeout": _READER_LOCK_TIMEOUT}
    reading = read_query(reader or connection, view.definition, schemas, settings)
    if view.engine == "spark":
        from gdq.view.spark_plan import load_on_spark  # noqa: PLC0415 (loads sqlglot)

        return load_on_spark(view.definition, schemas, reading, view.options.get("refused"), elsewhere=view.elsewhere)
    from gdq.plan.postgres import plan_postgres  # noqa: PLC0415 (loads sqlglot)

    return plan_postgres(view.definition, schemas, elsewhere=view.elsewhere, reading=reading)


def safe_settings(options: Mapping[str, Any]) -> dict[str, str]:
    """The settings for a view's canonical SQL, from the view's stored options."""
    return {name: str(options[name]) for name in KEPT_SETTINGS} | PINNED_SETTINGS


def plan_options(plan: Plan, settings: dict[str, str]) -> dict[str, str]:
    """The stored options of a view: its settings, and its engine's data for planning it again."""
    from gdq.plan.spark.keys import SparkKeyPlan  # noqa: PLC0415 (loads sqlglot)
    from gdq.plan.spark.plan import SparkPlan  # noqa: PLC0415

    if isinstance(plan, SparkKeyPlan):
        return settings | {"planner": "tables", "refused": plan.refused}
    return settings | ({"planner": "tables"} if isinstance(plan, SparkPlan) else {"engine": "postgres"})


@extra_named()
def explain_view(
    connection: Connection[Any],
    queue: str,
    query: str,
    *,
    engine: EngineChoice = "auto",
    elsewhere: bool = False,
    lake: bool = False,
) -> Plan:
    """The plan that create_view() would make; writes nothing. PlanError as for create_view().

    `elsewhere`: for a target outside the tables' database; `lake`: for a lake table.
    """
    from gdq.plan.canonical import (  # noqa: PLC0415 (loads sqlglot)
        canonical_sql,
        canonical_tables,
        refuse_inheritance,
    )
    from gdq.plan.postgres import plan_postgres  # noqa: PLC0415
    from gdq.view.query_reading import read_query  # noqa: PLC0415

    text = canonical_sql(connection, query)
    tables = canonical_tables(text)
    if not tables:
        raise PlanError("no-table", "the view reads no table")
    with pinned(connection):
        schemas = load_schemas(connection, queue, tables)
        refuse_inheritance(text, schemas)
        reading = read_query(connection, text, schemas, {})
        if engine == "spark":
            from gdq.view.spark_plan import plan_on_spark  # noqa: PLC0415

            return plan_on_spark(connection, text, schemas, reading, elsewhere=elsewhere, lake=lake)
    return plan_postgres(text, schemas, elsewhere=elsewhere, reading=reading)


def _qualified_target(connection: Connection[Any], target: str) -> str:
    """`target`, a schema.table as in SQL, with both names quoted; GdqError for other names."""
    try:
        with connection.transaction():
            parts: list[str] = scalar(connection, "select pg_catalog.parse_ident(%s)", target)
    except psycopg.errors.InvalidParameterValue as error:
        raise GdqError(f"target {target!r} is no table name", hint=_TARGET_HINT) from error
    if len(parts) != 2:
        raise GdqError(f"target {target!r} names no schema and table", hint=_TARGET_HINT)
    return f"{quote(parts[0])}.{quote(parts[1])}"


def _check_lake(kind: LakeKind, target_dsn: str | None, engine: EngineChoice) -> None:
    """GdqError for options that a lake table does not allow."""
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
