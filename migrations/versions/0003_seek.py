"""Pause, size limits and resynchronised tables."""

from gdq.migrations import upgrade_by_sql

revision = "0003"
down_revision = "0002"
upgrade = upgrade_by_sql(__file__)
