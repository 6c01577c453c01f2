"""Alembic runs this file: on the connection that gdq.installer.install hands over, or offline into its output buffer.

The installer opens and ends the one transaction that holds revisions and functions, so nothing here begins or commits.
"""

from __future__ import annotations

from alembic import context

if context.is_offline_mode():
    context.configure(
        url="postgresql+psycopg://",
        transactional_ddl=False,
        version_table="schema_version",
        version_table_schema="gdq",
    )
else:
    context.configure(
        connection=context.config.attributes["connection"],
        version_table="schema_version",
        version_table_schema="gdq",
    )
context.run_migrations()
