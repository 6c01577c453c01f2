"""Pause, size limits and resynchronised tables."""

from __future__ import annotations

from gdq.installer.install import run_revision

revision = "0003"
down_revision = "0002"


def upgrade() -> None:
    run_revision(__file__)
