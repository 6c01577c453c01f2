"""Compiled views: refreshes by CALL gdq.refresh()."""

from gdq.migrations import upgrade_by_sql

revision = "0019"
down_revision = "0018"
upgrade = upgrade_by_sql(__file__)
