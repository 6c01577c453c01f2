"""Compares the schema in a database with this version of gdq.

Install leaves a mark in the comment of schema gdq, which everybody may read: the newest revision and a digest of the
functions.
"""

from __future__ import annotations

import hashlib
import logging
import re
from functools import cache
from pathlib import Path
from typing import Any

import psycopg

from gdq.errors import InstallError

log = logging.getLogger(__name__)

_FOLDER = Path(__file__).parent.parent

# The folders of sql/ in the order in which they run. A function calls functions of its own folder and of those before.
SQL_FOLDERS = (
    "base",
    "position",
    "log",
    "capture",
    "ddl",
    "queue",
    "batch",
    "consumer",
    "retry",
    "maintain",
    "views",
    "monitor",
    "restore",
)


def function_files() -> list[Path]:
    """The files that create the functions, in the order in which they run: by folder, then by name."""
    return [path for folder in SQL_FOLDERS for path in sorted((_FOLDER / "sql" / folder).glob("*.sql"))]


def function_texts() -> list[str]:
    """The SQL of the files that create the functions, in the order in which they run."""
    return [path.read_text(encoding="utf-8") for path in function_files()]


@cache
def version_mark() -> str:
    """The comment that this gdq puts on schema gdq."""
    digest = hashlib.sha256("\0".join(function_texts()).encode()).hexdigest()
    return (
        "Queues of row changes: control tables and the functions that are the API."
        f" Revision {_revisions()[-1]}, functions {digest[:16]}."
    )


def installed_mark(connection: psycopg.Connection[Any]) -> str | None:
    """The comment on schema gdq; None without one, or without the schema."""
    query = "select pg_catalog.obj_description(pg_catalog.to_regnamespace('gdq'), 'pg_namespace')"
    row = connection.execute(query).fetchone()
    return row[0] if row else None


def check_version(connection: psycopg.Connection[Any]) -> None:
    """Compare the database's gdq with this one by one small query.

    InstallError if the database's is older: functions that this gdq calls may be missing. If it is newer, as during an
    upgrade of several machines, or has other functions of the same revision, a warning is logged. Does nothing if gdq
    is not installed: the next call fails with a clear error.
    """
    found = installed_mark(connection)
    if found is None or found == version_mark():
        return
    match = re.search(r"Revision (\w+), functions", found)
    revision = match[1] if match else "unknown"
    if match and revision == _revisions()[-1]:
        log.warning(
            "the functions of gdq in this database are not those of this gdq: run gdq install with the newer one"
        )
    elif match and revision not in _revisions():
        log.warning(
            "the database has a newer gdq, revision %s, this one knows %s: upgrade it", revision, _revisions()[-1]
        )
    else:
        raise InstallError(
            f"the database has an older gdq, revision {revision}, this one needs {_revisions()[-1]}",
            hint="gdq install upgrades it.",
        )


@cache
def _revisions() -> list[str]:
    return sorted(path.name[:4] for path in (_FOLDER / "migrations" / "versions").glob("[0-9]*_*.sql"))
