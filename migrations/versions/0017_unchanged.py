"""unchanged of add_table()."""

from gdq.migrations import upgrade_by_sql

revision = "0017"
down_revision = "0016"
upgrade = upgrade_by_sql(__file__)
