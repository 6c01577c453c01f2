"""DDL events and logs in JSON."""

from gdq.migrations import upgrade_by_sql

revision = "0005"
down_revision = "0004"
upgrade = upgrade_by_sql(__file__)
