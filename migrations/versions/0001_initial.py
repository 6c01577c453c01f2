"""Schemas, the capture role and the control tables."""

from gdq.migrations import upgrade_by_sql

revision = "0001"
down_revision = None
upgrade = upgrade_by_sql(__file__)
