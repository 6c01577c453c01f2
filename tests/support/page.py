"""A page of the documentation whose code blocks are run in their order, as a reader would run them.

A block that something else runs says so in its first line (`python stream`) or in a comment above it, which no reader
sees: `<!-- run by tests/... -->` or `<!-- not run: the reason -->`. A block without a language is what a program
prints.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from psycopg.conninfo import conninfo_to_dict

from tests.support.programs import client_program
from tests.support.server import Database

ROOT = Path(__file__).parent.parent.parent

_BLOCK = re.compile(r"^(?:<!-- (.*?) -->\n)?```(\w*) ?(.*?)\n(.*?)^```$", re.DOTALL | re.MULTILINE)

# The tests of blocks by the first word after their language.
_TESTS = {
    "schema": "tests/docs_and_bench/test_views_doc.py",
    "view": "tests/docs_and_bench/test_views_doc.py",
    "reading": "tests/spark/test_stream.py",
    "reading-sql": "tests/spark/test_stream.py",
    "at-snapshot": "tests/spark/test_stream.py",
    "stream": "tests/spark/test_stream.py",
}


@dataclass(frozen=True, slots=True)
class Block:
    """A fenced block: its language and text, the file it is to be written to, who runs it or why nobody does."""

    language: str
    text: str
    file: str | None = None
    test: str | None = None
    not_run: str | None = None


def blocks(page: str) -> list[Block]:
    """The fenced blocks of a page."""
    return [
        Block(
            language,
            text,
            file=name if "." in name else None,
            test=note.removeprefix("run by ") if note.startswith("run by ") else _TESTS.get(name.partition(" ")[0]),
            not_run=note.removeprefix("not run: ") if note.startswith("not run: ") else None,
        )
        for note, language, name, text in _BLOCK.findall((ROOT / page).read_text(encoding="utf-8"))
    ]


def run_page(
    page: str, database: Database, folder: Path, programs: Path, *, edit: Callable[[str], str] = lambda text: text
) -> list[str]:
    """Run the blocks of a page in `folder` as superuser of a database; an AssertionError names the block that fails.

    Blocks: sh and sql are run, python is run or written to its file, json is compared with the output before it.
    `programs`: the folder of python and gdq. Lines that install gdq or set the connection are left out. `edit` may
    change commands. Returns what each block that was run has printed.
    """
    psql = client_program(database, "psql")
    path = os.pathsep.join([str(programs), str(psql.parent), os.environ["PATH"]])
    env = {name: value for name, value in os.environ.items() if name not in {"GDQ_DSN", "PYTHONPATH", "VIRTUAL_ENV"}}
    connection = conninfo_to_dict(database.su_dsn)
    env |= {"PATH": path, "DATABASE_URL": database.su_dsn}
    env |= {f"PG{name.upper()}": str(connection[name]) for name in ("host", "port", "user", "password")}
    printed: list[str] = []
    for block in blocks(page):
        text = edit(block.text)
        if block.test or block.not_run or not block.language:
            continue
        if block.file:
            (folder / block.file).write_text(text)
            continue
        match block.language:
            case "sh":
                lines = [line for line in text.splitlines() if not line.startswith(("pip ", "export DATABASE_URL"))]
                command = ["bash", "-e", "-u", "-o", "pipefail", "-c", "\n".join(lines)]
            case "sql":
                command = [str(psql), "-Xq", "-v", "ON_ERROR_STOP=1", "-d", database.su_dsn]
            case "python":
                command = [str(programs / "python"), "-c", text]
            case "json":
                events = [line for line in printed[-1].splitlines() if line.startswith("{")]
                assert list(map(_shape, text.splitlines())) == list(map(_shape, events))
                continue
            case language:
                raise AssertionError(f"{page} has a block of {language}, which nothing runs")
        given = text if block.language == "sql" else None
        done = subprocess.run(command, cwd=folder, env=env, input=given, capture_output=True, text=True, check=False)
        assert done.returncode == 0, f"{text}\n{done.stdout}\n{done.stderr}"
        printed.append(done.stdout)
    return printed


def _shape(line: str) -> dict[str, Any]:
    """An event as it is printed, without what differs from run to run."""
    event: dict[str, Any] = json.loads(line)
    return {name: value for name, value in event.items() if name not in {"id", "xid", "time"}} | {"names": list(event)}
