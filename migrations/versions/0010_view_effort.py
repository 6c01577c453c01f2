"""What a refresh of a view cost."""

from gdq.migrations import upgrade_by_sql

revision = "0010"
down_revision = "0009"
upgrade = upgrade_by_sql(__file__)
