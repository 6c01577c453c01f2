"""view_groups."""

from __future__ import annotations

from gdq.installer.install import run_revision

revision = "0011"
down_revision = "0010"


def upgrade() -> None:
    run_revision(__file__)
