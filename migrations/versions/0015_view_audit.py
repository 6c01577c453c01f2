"""Audits of views."""

from gdq.migrations import upgrade_by_sql

revision = "0015"
down_revision = "0014"
upgrade = upgrade_by_sql(__file__)
