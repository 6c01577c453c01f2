"""${message}."""

from gdq.migrations import upgrade_by_sql

revision = "${up_revision}"
down_revision = "${down_revision}"
upgrade = upgrade_by_sql(__file__)
