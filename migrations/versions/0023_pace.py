"""Consumers may say how often they need a batch; ticks come no more often than one of them needs."""

from gdq.migrations import upgrade_by_sql

revision = "0023"
down_revision = "0022"
upgrade = upgrade_by_sql(__file__)
