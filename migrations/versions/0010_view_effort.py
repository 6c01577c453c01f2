"""view_effort."""

from __future__ import annotations

from gdq.installer.install import run_revision

revision = "0010"
down_revision = "0009"


def upgrade() -> None:
    run_revision(__file__)
