"""The server of the benchmark: PostgreSQL 15 and PgQ from Debian's packages."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

from gdq.embedded import Binaries, Server, binaries_in

_PROGRAMS = Path("/usr/lib/postgresql/15/bin")
# Files by which a package is known to be there; pgbench comes with the server's package, not with the client's.
_FILES = {
    "postgresql-15": (_PROGRAMS / "postgres", _PROGRAMS / "pgbench"),
    "postgresql-15-pgq3": (
        Path("/usr/lib/postgresql/15/lib/pgq_triggers.so"),
        Path("/usr/share/postgresql/15/extension/pgq.control"),
    ),
}

# Autovacuum stays as it is by default; the measured tables and the logs are out of its reach (see contenders.py).
SETTINGS: dict[str, str | float | bool] = {
    "fsync": True,
    "full_page_writes": True,
    "synchronous_commit": False,
    "shared_buffers": "512MB",
    "max_wal_size": "8GB",
    "checkpoint_timeout": "1h",
}


class BenchError(RuntimeError):
    """The benchmark cannot run here, or did not measure what it says; the message is one line."""


def provide(progress: Callable[[str], None]) -> Binaries:
    """Debian's PostgreSQL 15 with PgQ, installed with apt-get when missing and the caller is root.

    `progress` gets one line before an installation. Result: the programs of that PostgreSQL. BenchError when packages
    are missing and cannot be installed.
    """
    if missing := _missing():
        # Only what is missing: naming an installed package would upgrade it below running servers.
        command = f"apt-get install -y --no-install-recommends {' '.join(missing)}"
        if shutil.which("apt-get") is None:
            raise BenchError(f"{' and '.join(missing)} missing: the benchmark needs Debian's packages")
        if os.getuid() != 0:
            raise BenchError(f"{' and '.join(missing)} missing: as root, run {command}")
        progress(f"installing {' '.join(missing)}")
        _install(command.split())
        if missing := _missing():
            raise BenchError(f"{command} ended well, but files of {' and '.join(missing)} are not in their place")
    return binaries_in(_PROGRAMS)


def start(binaries: Binaries) -> Server:
    """A temporary server with SETTINGS; the caller stops it."""
    return Server(binaries=binaries, settings=SETTINGS).start()


def _missing() -> list[str]:
    return [package for package, files in _FILES.items() if not all(file.exists() for file in files)]


def _install(command: list[str]) -> None:
    environment = os.environ | {"DEBIAN_FRONTEND": "noninteractive"}
    for step in (["apt-get", "update"], command):
        done = subprocess.run([*step, "-qq"], check=False, capture_output=True, text=True, env=environment)
        if done.returncode != 0:
            said = (done.stderr.strip() or done.stdout.strip() or "no output").splitlines()[-1]
            raise BenchError(f"{' '.join(step)} failed with exit code {done.returncode}: {said}")
