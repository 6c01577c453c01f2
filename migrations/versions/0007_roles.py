"""Roles."""

from __future__ import annotations

from gdq.installer.install import run_revision

revision = "0007"
down_revision = "0006"


def upgrade() -> None:
    run_revision(__file__)
