"""unchanged "omit" of add_table()."""

from gdq.migrations import upgrade_by_sql

revision = "0018"
down_revision = "0017"
upgrade = upgrade_by_sql(__file__)
