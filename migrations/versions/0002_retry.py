"""Retries, dead letters and members of consumers."""

from __future__ import annotations

from gdq.installer.install import run_revision

revision = "0002"
down_revision = "0001"


def upgrade() -> None:
    run_revision(__file__)
