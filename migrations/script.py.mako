"""${message}."""

from __future__ import annotations

from gdq.installer.install import run_revision

revision = ${repr(up_revision)}
down_revision = ${repr(down_revision)}


def upgrade() -> None:
    run_revision(__file__)
