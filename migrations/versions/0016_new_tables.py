"""Tables to capture when they are made."""

from gdq.migrations import upgrade_by_sql

revision = "0016"
down_revision = "0015"
upgrade = upgrade_by_sql(__file__)
