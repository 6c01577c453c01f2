"""Options of capture."""

from gdq.migrations import upgrade_by_sql

revision = "0004"
down_revision = "0003"
upgrade = upgrade_by_sql(__file__)
