"""The server's plans for the statements of a view's functions, of which nothing is executed.

A statement reads variables of its function. Here they are parameters of a prepared statement, whose generic plan is
that of the function: it knows no value.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import psycopg
from psycopg import Connection

from gdq.call import scalar
from gdq.consumers.refresh.new_view import plan_functions
from gdq.consumers.views.compiled_changes import ChangeStatement
from gdq.errors import GdqError
from gdq.sql_text import pinned, raw
from gdq.view.table_schema import apply_view_settings
from gdq.view.view import view_info

_NAME = re.compile(r"\bgdq_\w+\b")

# As the function of changes has them; it reads the logs by their indexes.
_GENERIC = "set local jit = off; set local plan_cache_mode = force_generic_plan; set local enable_seqscan = "

_SCANS = ("Seq Scan", "Index Scan", "Index Only Scan", "Bitmap Index Scan")


@dataclass(frozen=True, slots=True)
class StatementPlan:
    """The plan of one statement of a refresh. `changed`: the table whose changes it follows; None for a full load.

    `task`: what it does. `whole`: the tables that it reads from end to end, with the kind of scan. `plan`: as EXPLAIN
    gives it in text.
    """

    changed: str | None
    task: str
    whole: tuple[str, ...]
    plan: str
    sql: str

    def __str__(self) -> str:
        about = "full load" if self.changed is None else f"changes of {self.changed}"
        whole = f"\n-- reads the whole of {', '.join(self.whole)}" if self.whole else ""
        return f"-- {about}: {self.task}{whole}\n{self.plan}"


def statement_plans(connection: Connection[Any], name: str) -> list[StatementPlan]:
    """The plans for the statements by which the functions of a view follow changes of one table, and load it in full.

    Writes nothing. GdqError unless the view has a target in this database, is loaded, and belongs to the session's
    role: planning may call functions of its query.
    """
    (view,) = view_info(connection, name)
    me = scalar(connection, "select current_user::pg_catalog.text")
    if view.engine != "postgres" or view.elsewhere:
        raise GdqError(f"view {name} is refreshed by no function: it needs engine postgres, and a target here")
    if view.owner != me:
        raise GdqError(f"view {name} is planned with the rights of {view.owner}, this session acts as {me}")
    if scalar(connection, "select pg_catalog.to_regclass(%s)", view.target) is None:
        raise GdqError(f"view {name} is not loaded yet", hint=f"gdq refresh {name} loads it.")
    with pinned(connection):
        view, functions = plan_functions(connection, view)
        listed = functions.statements(connection)
        with connection.transaction(force_rollback=True):
            apply_view_settings(connection, view.settings)
            return [_planned(connection, statement) for statement in listed]


def _planned(connection: Connection[Any], statement: ChangeStatement) -> StatementPlan:
    """The plan of one statement, in a transaction that is rolled back."""
    if statement.table:
        connection.execute(raw(f"{_GENERIC}{'off' if 'gdq_xmax' in statement.sql else 'on'}"))
    used = [name for name in dict.fromkeys(_NAME.findall(statement.sql)) if name in statement.variables]
    text = _NAME.sub(lambda found: f"${used.index(found[0]) + 1}" if found[0] in used else found[0], statement.sql)
    types = f"({', '.join(statement.variables[name] for name in used)})" if used else ""
    nulls = f"({', '.join(f'null::{statement.variables[name]}' for name in used)})" if used else ""
    try:
        connection.execute(raw(f"prepare gdq_planned{types} as {text}"))
        lines = connection.execute(raw(f"explain execute gdq_planned{nulls}")).fetchall()
        tree = scalar(connection, raw(f"explain (verbose, format json) execute gdq_planned{nulls}"))
    except psycopg.Error as error:
        raise GdqError(f"the server does not plan '{statement.task}': {error.diag.message_primary}") from error
    connection.execute("deallocate gdq_planned")
    whole = tuple(dict.fromkeys(_whole(tree[0]["Plan"])))
    plan = "\n".join(line for (line,) in lines)
    return StatementPlan(statement.table or None, statement.task, whole, plan, statement.sql)


def _whole(node: Mapping[str, Any]) -> Iterator[str]:
    """The tables that a plan reads without a condition on an index."""
    if node["Node Type"] in _SCANS and "Index Cond" not in node and "Relation Name" in node:
        yield f"{node['Schema']}.{node['Relation Name']} ({node['Node Type']})"
    for below in node.get("Plans", ()):
        yield from _whole(below)
