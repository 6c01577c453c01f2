"""PostgreSQL's client programs, and gdq's own command, as the tests run them."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from gdq.embedded.files import MAJORS, find_binaries
from gdq.errors import EmbeddedError
from tests.support.server import Database
from tests.support.waiting import SECONDS


def client_program(database: Database, name: str) -> Path:
    """psql or pg_dump, of the server's own version or of the newest: some distributions bring a server alone."""
    try:
        return database.server.binaries.program(name)
    except EmbeddedError:
        return find_binaries(max(MAJORS)).program(name)


def psql(database: Database, script: str, dsn: str | None = None) -> subprocess.CompletedProcess[str]:
    """Run a script as psql does in a pipe, and stop at the first error."""
    command = [str(client_program(database, "psql")), "-Xq", "-v", "ON_ERROR_STOP=1", "-d", dsn or database.dsn]
    return subprocess.run(command, input=script, capture_output=True, text=True, check=False)


def dump(database: Database, *options: str) -> list[str]:
    """What pg_dump prints, without the lines that differ from run to run."""
    command = [str(client_program(database, "pg_dump")), *options, database.su_dsn]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    return [line for line in done.stdout.splitlines() if not line.startswith(("\\restrict", "\\unrestrict"))]


def gdq(
    *arguments: str, dsn: str, stdin: str | None = None, env: dict[str, str] | None = None, cwd: Path | None = None
) -> subprocess.CompletedProcess[str]:
    """Run the command to its end."""
    return subprocess.run(
        [sys.executable, "-m", "gdq", *arguments],
        input=stdin,
        env=environment(dsn) | (env or {}),
        cwd=cwd,
        capture_output=True,
        text=True,
        check=False,
        timeout=SECONDS,
    )


def start_gdq(*arguments: str, dsn: str, cwd: Path | None = None) -> subprocess.Popen[str]:
    """Start the command; the caller ends it."""
    return subprocess.Popen(
        [sys.executable, "-m", "gdq", *arguments],
        env=environment(dsn),
        cwd=cwd,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def environment(dsn: str) -> dict[str, str]:
    """The variables that the command runs with."""
    root = str(Path(__file__).parent.parent.parent)
    path = os.pathsep.join([root, *filter(None, [os.environ.get("PYTHONPATH")])])
    return os.environ | {"GDQ_DSN": dsn, "PYTHONUNBUFFERED": "1", "PYTHONPATH": path}
