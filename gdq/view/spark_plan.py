"""The plan of a view on Spark, checked on the server: a join by Spark if the types allow it, else by keys."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from psycopg import Connection

from gdq.errors import PlanError
from gdq.plan.canonical import read_tree
from gdq.plan.query_tree import walk_tree
from gdq.plan.spark.keys import SparkKeyPlan, plan_spark_keys
from gdq.plan.spark.plan import SparkPlan, plan_spark
from gdq.plan.table import TableSchema
from gdq.plan.whitelist import QueryReading
from gdq.qualified_sql import qualified
from gdq.typed.pgtypes import FIRST_USER_OID


def plan_on_spark(
    connection: Connection[Any],
    canonical: str,
    schemas: Sequence[TableSchema],
    reading: QueryReading,
    *,
    elsewhere: bool,
    lake: bool = False,
) -> SparkPlan | SparkKeyPlan:
    """The plan of a view by its canonical SQL. `elsewhere`: the target is outside the tables' database; `lake`: in one.

    PlanError only for views that the engine postgres refuses too.
    """
    try:
        plan = plan_spark(canonical, schemas, reading)
        _refuse_joined(connection, plan, elsewhere=elsewhere, lake=lake)
    except PlanError as error:
        return plan_spark_keys(canonical, schemas, str(error), elsewhere=elsewhere, reading=reading)
    return plan


def load_on_spark(
    canonical: str, schemas: Sequence[TableSchema], reading: QueryReading, refused: str | None, *, elsewhere: bool
) -> SparkPlan | SparkKeyPlan:
    """The plan of a stored view by its current tables; `refused`: why Spark did not join it when it was created."""
    if refused is None:
        try:
            return plan_spark(canonical, schemas, reading)
        except PlanError as error:
            refused = str(error)
    return plan_spark_keys(canonical, schemas, refused, elsewhere=elsewhere, reading=reading)


def _refuse_joined(connection: Connection[Any], plan: SparkPlan, *, elsewhere: bool, lake: bool) -> None:
    """PlanError, with a code, for a plan that Spark must not join.

    For a `lake` table Spark must compute the rows alone. Groups are compared in the target's database: PlanError if
    their values compare differently there.
    """
    _refuse_sets(connection, plan.query)
    if lake:
        _refuse_unfinished(plan)
    if plan.state is None and plan.detail is None:
        return
    _refuse_collations(connection, plan)
    if elsewhere:
        _refuse_types(connection, plan)


def _refuse_unfinished(plan: SparkPlan) -> None:
    """PlanError for groups and expressions over several tables: PostgreSQL computes these in the target's database."""
    if plan.state is not None or plan.detail is not None:
        raise PlanError("spark-lake", "Spark keeps no such groups beside a lake table")
    if not all(branch.bare for branch in plan.branches):
        raise PlanError("spark-lake", "Spark puts rows of a join into a lake table, not expressions over them")


def _refuse_sets(connection: Connection[Any], canonical: str) -> None:
    """PlanError for set-returning functions: those of one SELECT run in step, whichever table they read."""
    if any(node.flag("funcretset") or node.flag("opretset") for node in walk_tree(read_tree(connection, canonical))):
        raise PlanError("spark-set-function", "Spark takes no function that gives several rows for one")


def _refuse_collations(connection: Connection[Any], plan: SparkPlan) -> None:
    query = qualified("""select pg_catalog.quote_ident(a.attname)
                 from pg_catalog.pg_attribute a join pg_catalog.pg_type t on t.oid = a.atttypid
                where a.attrelid = %s::pg_catalog.regclass and a.attname = any (%s)
                  and a.attcollation <> t.typcollation""")
    for table in plan.tables:
        found = connection.execute(query, [table.name, list(table.columns)]).fetchone()
        if found is not None:
            raise PlanError("collation", f"Spark keeps no groups where a column has a collation of its own: {found[0]}")


def _refuse_types(connection: Connection[Any], plan: SparkPlan) -> None:
    from gdq.view.table_schema import describe_query  # noqa: PLC0415 (uses this module)

    values = {name for branch in plan.branches for name, _, _ in branch.values}
    oids = []
    for leaf in (leaf for branch in plan.branches for leaf in branch.leaves):
        described = describe_query(connection, leaf.render(leaf.table, "1 as n, 1 as o"), {})
        oids += [oid for name, oid, _ in described if name in values]
    query = qualified("""select pg_catalog.format_type(t.oid, null), t.oid::bigint from pg_catalog.pg_type t
                where t.oid = any (%s::oid[]) and (t.oid >= %s or t.typcollation <> 0)""")
    for kind, oid in connection.execute(query, [oids, FIRST_USER_OID]).fetchall():
        if oid >= FIRST_USER_OID or _is_computed_there(plan):
            raise PlanError("group-by-type", f"groups: another database does not compare {kind} alike")


def _is_computed_there(plan: SparkPlan) -> bool:
    """True if the target's database computes with the groups' values, and does not only compare them."""
    if plan.state is None or plan.state.having or plan.state.order:
        return True
    return any("s.c" in shown and shown not in plan.state_columns for shown in plan.state.visible)
