"""The plan of a view on Spark, checked on the server: joined by Spark where its types allow that, else by keys."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from psycopg import Connection, sql

from gdq.errors import PlanError
from gdq.plan.spark.keys import SparkKeyPlan, plan_spark_keys
from gdq.plan.spark.plan import SparkPlan, plan_spark
from gdq.plan.table import TableSchema
from gdq.sql_text import raw
from gdq.typed.pgtypes import FIRST_USER_OID


def plan_on_spark(
    connection: Connection[Any], canonical: str, schemas: Sequence[TableSchema], *, elsewhere: bool, lake: bool = False
) -> SparkPlan | SparkKeyPlan:
    """The plan of a view by its canonical SQL, for a target in the tables' database, `elsewhere`, or in a `lake`.

    PlanError for what the engine postgres refuses too.
    """
    try:
        return _plan_joined(connection, canonical, schemas, elsewhere=elsewhere, lake=lake)
    except PlanError as error:
        return plan_spark_keys(canonical, schemas, str(error), elsewhere=elsewhere)


def load_on_spark(
    canonical: str, schemas: Sequence[TableSchema], refused: str | None, *, elsewhere: bool
) -> SparkPlan | SparkKeyPlan:
    """The plan of a view that was made for Spark, which `refused` to join it then, by its tables as they are now."""
    if refused is None:
        try:
            return plan_spark(canonical, schemas)
        except PlanError as error:
            refused = str(error)
    return plan_spark_keys(canonical, schemas, refused, elsewhere=elsewhere)


def _plan_joined(
    connection: Connection[Any], canonical: str, schemas: Sequence[TableSchema], *, elsewhere: bool, lake: bool
) -> SparkPlan:
    """The plan of a view that Spark joins. PlanError, whose code names what Spark does not cover.

    Into a `lake` table go rows that Spark alone can make. Values of groups are compared where the target is: where they
    would compare otherwise there, the view is refused.
    """
    plan = plan_spark(canonical, schemas)
    _refuse_sets(connection, canonical)
    if lake:
        _refuse_unfinished(plan)
    if plan.state is None and plan.detail is None:
        return plan
    _refuse_collations(connection, plan)
    if elsewhere:
        _refuse_types(connection, plan)
    return plan


def _refuse_unfinished(plan: SparkPlan) -> None:
    """PlanError for what PostgreSQL finishes where the target is: groups, and expressions over several tables."""
    if plan.state is not None or plan.detail is not None:
        raise PlanError("spark-lake", "Spark keeps no such groups beside a lake table")
    if not all(branch.bare for branch in plan.branches):
        raise PlanError("spark-lake", "Spark puts rows of a join into a lake table, not expressions over them")


def _refuse_sets(connection: Connection[Any], canonical: str) -> None:
    """A function that gives several rows for one does so in step with others of the same SELECT, of any table."""
    with connection.transaction(force_rollback=True):
        connection.execute(sql.SQL("create temp view gdq_check as {}").format(raw(canonical)))
        query = """select ev_action::text ~ ':(func|op)retset true' from pg_catalog.pg_rewrite
                    where ev_class = 'pg_temp.gdq_check'::regclass"""
        found = connection.execute(query).fetchone()
    if found is not None and found[0]:
        raise PlanError("spark-set-function", "Spark takes no function that gives several rows for one")


def _refuse_collations(connection: Connection[Any], plan: SparkPlan) -> None:
    query = """select pg_catalog.quote_ident(a.attname)
                 from pg_catalog.pg_attribute a join pg_catalog.pg_type t on t.oid = a.atttypid
                where a.attrelid = %s::pg_catalog.regclass and a.attname = any (%s)
                  and a.attcollation <> t.typcollation"""
    for table in plan.tables:
        found = connection.execute(query, [table.name, list(table.columns)]).fetchone()
        if found is not None:
            raise PlanError("collation", f"Spark keeps no groups where a column has a collation of its own: {found[0]}")


def _refuse_types(connection: Connection[Any], plan: SparkPlan) -> None:
    from gdq.view.table_schema import describe  # noqa: PLC0415 (uses this module)

    values = {name for branch in plan.branches for name, _, _ in branch.values}
    oids = []
    for leaf in (leaf for branch in plan.branches for leaf in branch.leaves):
        described = describe(connection, leaf.render(leaf.table, "1 as n, 1 as o"), {})
        oids += [oid for name, oid, _ in described if name in values]
    query = """select pg_catalog.format_type(t.oid, null), t.oid::bigint from pg_catalog.pg_type t
                where t.oid = any (%s::oid[]) and (t.oid >= %s or t.typcollation <> 0)"""
    for kind, oid in connection.execute(query, [oids, FIRST_USER_OID]).fetchall():
        if oid >= FIRST_USER_OID or _is_computed_there(plan):
            raise PlanError("group-by-type", f"groups: another database does not compare {kind} alike")


def _is_computed_there(plan: SparkPlan) -> bool:
    """Whether more is done with the values in the target's database than to tell them apart."""
    if plan.state is None or plan.state.having or plan.state.order:
        return True
    return any("s.c" in shown and shown not in plan.state_columns for shown in plan.state.visible)
