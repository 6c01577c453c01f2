"""Roles."""

from gdq.migrations import upgrade_by_sql

revision = "0007"
down_revision = "0006"
upgrade = upgrade_by_sql(__file__)
