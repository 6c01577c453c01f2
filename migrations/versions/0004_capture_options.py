"""Options of capture."""

from __future__ import annotations

from gdq.installer.install import run_revision

revision = "0004"
down_revision = "0003"


def upgrade() -> None:
    run_revision(__file__)
