"""Eras."""

from gdq.migrations import upgrade_by_sql

revision = "0006"
down_revision = "0005"
upgrade = upgrade_by_sql(__file__)
