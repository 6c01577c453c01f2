"""Compiled views keep the values of subqueries."""

from gdq.migrations import upgrade_by_sql

revision = "0020"
down_revision = "0019"
upgrade = upgrade_by_sql(__file__)
