"""Refresh groups."""

from gdq.migrations import upgrade_by_sql

revision = "0011"
down_revision = "0010"
upgrade = upgrade_by_sql(__file__)
