"""Revisions: tables and types of schema gdq, each frozen in a SQL file of versions/ with a Python file for Alembic.

The Python files import this module alone, which does not move and calls nothing of gdq.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path


def upgrade_by_sql(python_file: str) -> Callable[[], None]:
    """The upgrade() of a revision: runs the SQL file beside its Python file, or prints that file in offline mode."""

    def upgrade() -> None:
        # op.execute() would read :name as a parameter and double every % of a script; an ordinary execute fails on %
        from alembic import op  # noqa: PLC0415

        text = Path(python_file).with_suffix(".sql").read_text(encoding="utf-8")
        context = op.get_context()
        if context.as_sql:
            context.impl.static_output(text)
        else:
            op.get_bind().exec_driver_sql(text, execution_options={"no_parameters": True})

    return upgrade
