"""For the env.py of Alembic: migrations that capture follows without event triggers, and an autogenerate without gdq.

from gdq.alembic import follow_ddl, include_name
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from gdq.ddl import Follower

if TYPE_CHECKING:
    from collections.abc import Mapping

    from sqlalchemy import Connection


def follow_ddl(connection: Connection) -> None:
    """Have capture follow each DDL statement of this SQLAlchemy connection from now on, as gdq.apply_ddl() does.

    It does nothing where gdq is not installed, its event triggers follow DDL, or the database is no PostgreSQL. In a
    project with several databases, call it for the connection of each.
    Statements in AUTOCOMMIT are not followed, which is a warning; the next tick finds those that concern capture. The
    role needs gdq_admin; an error of gdq is a warning.
    """
    from sqlalchemy import event, text  # noqa: PLC0415 (slow to load)

    if connection.dialect.name != "postgresql":
        return

    def run(query: str, value: str | None) -> Any:
        return connection.execute(text(query.format(":value")), {} if value is None else {"value": value}).first()

    follower = Follower(run, connection.begin_nested)
    followed = False

    def before(_c: Any, _cursor: Any, statement: str, _parameters: Any, _context: Any, _many: bool) -> None:
        nonlocal followed
        if connection.get_execution_options().get("isolation_level") == "AUTOCOMMIT":
            follower.leave(statement)
        else:
            followed = follower.begin(statement)

    def after(_c: Any, _cursor: Any, statement: str, _parameters: Any, _context: Any, _many: bool) -> None:
        nonlocal followed
        if followed:
            followed = False
            follower.end(statement)

    event.listen(connection, "before_cursor_execute", before)
    event.listen(connection, "after_cursor_execute", after)


def include_name(name: str | None, type_: str, parent_names: Mapping[str, str | None]) -> bool:  # noqa: ARG001
    """Leave out gdq's schemas and the tables that it keeps beside views, for context.configure(include_name=...)."""
    if type_ == "schema":
        return name not in ("gdq", "gdq_log", "gdq_target")
    return type_ != "table" or not (name or "").startswith("gdq_state_")
