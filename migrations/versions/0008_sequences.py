"""Sequences."""

from gdq.migrations import upgrade_by_sql

revision = "0008"
down_revision = "0007"
upgrade = upgrade_by_sql(__file__)
