"""Schemas, the capture role and the control tables."""

from __future__ import annotations

from gdq.installer.install import run_revision

revision = "0001"
down_revision = None


def upgrade() -> None:
    run_revision(__file__)
