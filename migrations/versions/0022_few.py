"""The functions of compiled views choose by the changes how their statements are planned."""

from gdq.migrations import upgrade_by_sql

revision = "0022"
down_revision = "0021"
upgrade = upgrade_by_sql(__file__)
