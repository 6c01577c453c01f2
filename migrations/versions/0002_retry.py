"""Retries, dead letters and members of consumers."""

from gdq.migrations import upgrade_by_sql

revision = "0002"
down_revision = "0001"
upgrade = upgrade_by_sql(__file__)
