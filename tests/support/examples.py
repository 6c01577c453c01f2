"""The examples, started as their users start them: a shop's database, and a program that ends by SIGTERM."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

from psycopg.conninfo import conninfo_to_dict

from tests.support.programs import psql
from tests.support.server import Database

ROOT = Path(__file__).parent.parent.parent
EXAMPLES = ROOT / "examples"


def command_folder(folder: Path) -> Path:
    """A folder with the one program gdq, that of this checkout, for a PATH or in the place of an installed one."""
    program = folder / "gdq"
    folder.mkdir(parents=True, exist_ok=True)
    program.write_text(f'#!/bin/sh\nPYTHONPATH="{ROOT}:$PYTHONPATH" exec {sys.executable} -m gdq "$@"\n')
    program.chmod(0o755)
    return folder


def libpq_variables(database: Database) -> dict[str, str]:
    """The connection of the superuser as libpq's variables."""
    names = {"host": "PGHOST", "port": "PGPORT", "user": "PGUSER", "password": "PGPASSWORD", "dbname": "PGDATABASE"}
    return {names[name]: str(value) for name, value in conninfo_to_dict(database.su_dsn).items() if name in names}


def program_environment(folder: Path, given: Mapping[str, str]) -> dict[str, str]:
    """The variables of a program that finds gdq in `folder`, and the database only by what is given."""
    own = {name: value for name, value in os.environ.items() if not name.startswith(("PG", "GDQ_", "DATABASE_URL"))}
    return own | {"PATH": f"{folder}:{os.environ['PATH']}", "PYTHONUNBUFFERED": "1"} | dict(given)


def make_shop(database: Database, folder: Path) -> None:
    """Run schema.sql and setup.sh, the latter twice: what is done stays done."""
    done = psql(database, (EXAMPLES / "shop" / "schema.sql").read_text(encoding="utf-8"), database.su_dsn)
    assert done.returncode == 0, done.stderr
    for _ in range(2):
        setup(["sh", str(EXAMPLES / "shop" / "setup.sh")], program_environment(folder, libpq_variables(database)))


def setup(command: Sequence[str], env: Mapping[str, str]) -> str:
    """Run a program that ends by itself; returns its output."""
    done = subprocess.run(command, env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


@contextmanager
def running(command: Sequence[str], env: Mapping[str, str]) -> Iterator[subprocess.Popen[str]]:
    """A service while the block runs. SIGTERM ends it with exit code 0, or it is killed if the block fails."""
    process = subprocess.Popen(
        command, env=env, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    try:
        yield process
        process.send_signal(signal.SIGTERM)
        errors = process.communicate()[1]
        assert process.returncode == 0, errors
    finally:
        if process.poll() is None:
            process.kill()
            process.communicate()
