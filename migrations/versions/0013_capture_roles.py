"""Capture roles by owner."""

from gdq.migrations import upgrade_by_sql

revision = "0013"
down_revision = "0012"
upgrade = upgrade_by_sql(__file__)
