"""allow_rls of add_table()."""

from gdq.migrations import upgrade_by_sql

revision = "0009"
down_revision = "0008"
upgrade = upgrade_by_sql(__file__)
