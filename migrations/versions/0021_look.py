"""Compiled views have a function that looks at their logs."""

from gdq.migrations import upgrade_by_sql

revision = "0021"
down_revision = "0020"
upgrade = upgrade_by_sql(__file__)
