"""The alarm and the witness of the DDL guard."""

from gdq.migrations import upgrade_by_sql

revision = "0014"
down_revision = "0013"
upgrade = upgrade_by_sql(__file__)
