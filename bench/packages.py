"""The server of the benchmark: PostgreSQL 15 and the peers that it is measured beside, from Debian's packages.

GDQ_BENCH_ROOT names a folder into which the packages were unpacked, where they are not to be installed.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from gdq.embedded.files import PostgresBinaries, binaries_in
from gdq.embedded.server import EmbeddedServer

ROOT = Path(os.environ.get("GDQ_BENCH_ROOT", "/"))
_PROGRAMS = ROOT / "usr/lib/postgresql/15/bin"
_LIBRARIES = ROOT / "usr/lib/postgresql/15/lib"
SLONY_SQL = ROOT / "usr/share/slony1"
PGQ_PL_SQL = ROOT / "usr/share/postgresql/15/contrib/pgq_pl_only.sql"
_Files = dict[str, tuple[Path, ...]]

# Files by which a package is known to be there; pgbench comes with the server's package, not with the client's.
_SERVER: _Files = {"postgresql-15": (_PROGRAMS / "postgres", _PROGRAMS / "pgbench")}
PGQ, PGQ_PL, SLONY, WAL2JSON = "PgQ", "PgQ PL", "Slony", "wal2json"
_PEERS: dict[str, _Files] = {
    PGQ: {
        "postgresql-15-pgq3": (
            _LIBRARIES / "pgq_triggers.so",
            ROOT / "usr/share/postgresql/15/extension/pgq.control",
        )
    },
    PGQ_PL: {"postgresql-15-pgq3": (PGQ_PL_SQL,)},
    SLONY: {
        "postgresql-15-slony1-2": (_LIBRARIES / "slony1_funcs.2.2.11.so",),
        "slony1-2-bin": (SLONY_SQL / "slony1_base.2.2.11.sql",),
    },
    WAL2JSON: {"postgresql-15-wal2json": (_LIBRARIES / "wal2json.so",)},
}

# Autovacuum stays as it is by default; the measured tables and the logs are out of its reach (see contenders.py).
SETTINGS: dict[str, str | float | bool] = {
    "fsync": True,
    "full_page_writes": True,
    "synchronous_commit": False,
    "shared_buffers": "512MB",
    "max_wal_size": "8GB",
    "checkpoint_timeout": "1h",
    # For all, the slot's rivals too: what it adds to the log of a table is in the table without trigger already.
    "wal_level": "logical",
    "max_replication_slots": 64,
    "max_wal_senders": 64,
}


@dataclass(frozen=True, slots=True)
class Place:
    """Where to measure: the programs, a server of them, and the peers that could not be had."""

    binaries: PostgresBinaries
    conninfo: str
    missing: frozenset[str]


class BenchError(RuntimeError):
    """The benchmark cannot run here, or did not measure what it says; the message is one line."""


def provide(progress: Callable[[str], None], peer: str = PGQ) -> PostgresBinaries:
    """Debian's PostgreSQL 15 with one peer, installed with apt-get when missing and the caller is root.

    `progress` gets one line before an installation. Result: the programs of that PostgreSQL. BenchError when packages
    are missing and cannot be installed.
    """
    _provide(_SERVER | _PEERS[peer], progress)
    return binaries_in(_PROGRAMS)


def provide_peers(progress: Callable[[str], None], *, install: bool = True) -> tuple[PostgresBinaries, dict[str, str]]:
    """The same with every peer that can be had, and {peer: why it is missing} of the others.

    `install`: get packages that are missing.
    BenchError when PostgreSQL itself is missing.
    """
    _provide(_SERVER, progress, install=install)
    missing: dict[str, str] = {}
    for peer, packages in _PEERS.items():
        try:
            _provide(packages, progress, install=install)
        except BenchError as error:
            missing[peer] = str(error)
            progress(f"without {peer}: {error}")
    return binaries_in(_PROGRAMS), missing


def start(binaries: PostgresBinaries) -> EmbeddedServer:
    """A temporary server with SETTINGS; the caller stops it."""
    settings = dict(SETTINGS)
    # Minor releases that restrict output plugins refuse wal2json unless it is named here.
    if binaries.knows("output_plugin_libraries"):
        settings["output_plugin_libraries"] = "pgoutput, wal2json"
    return EmbeddedServer(binaries=binaries, settings=settings).start()


def _provide(packages: _Files, progress: Callable[[str], None], *, install: bool = True) -> None:
    if not (missing := _missing(packages)):
        return
    named = " and ".join(missing)
    if Path("/") != ROOT or not install:
        raise BenchError(f"{named} missing in {ROOT}")
    # Only what is missing: naming an installed package would upgrade it below running servers.
    command = f"apt-get install -y --no-install-recommends {' '.join(missing)}"
    if shutil.which("apt-get") is None:
        raise BenchError(f"{named} missing: the benchmark needs Debian's packages")
    if os.getuid() != 0:
        raise BenchError(f"{named} missing: as root, run {command}")
    progress(f"installing {' '.join(missing)}")
    _install(command.split())
    if missing := _missing(packages):
        raise BenchError(f"{command} ended well, but files of {' and '.join(missing)} are not in their place")


def _missing(packages: _Files) -> list[str]:
    return [package for package, files in packages.items() if not all(file.exists() for file in files)]


def _install(command: list[str]) -> None:
    environment = os.environ | {"DEBIAN_FRONTEND": "noninteractive"}
    for step in (["apt-get", "update"], command):
        done = subprocess.run([*step, "-qq"], check=False, capture_output=True, text=True, env=environment)
        if done.returncode != 0:
            said = (done.stderr.strip() or done.stdout.strip() or "no output").splitlines()[-1]
            raise BenchError(f"{' '.join(step)} failed with exit code {done.returncode}: {said}")
