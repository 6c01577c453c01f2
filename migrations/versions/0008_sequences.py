"""Sequences."""

from __future__ import annotations

from gdq.installer.install import run_revision

revision = "0008"
down_revision = "0007"


def upgrade() -> None:
    run_revision(__file__)
