"""DDL events and logs in JSON."""

from __future__ import annotations

from gdq.installer.install import run_revision

revision = "0005"
down_revision = "0004"


def upgrade() -> None:
    run_revision(__file__)
