"""allow_rls."""

from __future__ import annotations

from gdq.installer.install import run_revision

revision = "0009"
down_revision = "0008"


def upgrade() -> None:
    run_revision(__file__)
