"""Upper bounds of a queue's intervals."""

from gdq.migrations import upgrade_by_sql

revision = "0012"
down_revision = "0011"
upgrade = upgrade_by_sql(__file__)
