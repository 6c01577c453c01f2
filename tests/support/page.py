"""A page of the documentation whose code blocks are run in their order, as a reader would run them."""

from __future__ import annotations

import json
import os
import re
import subprocess
from pathlib import Path
from typing import Any

from tests.support.programs import client_program
from tests.support.server import Database

ROOT = Path(__file__).parent.parent.parent

_BLOCK = re.compile(r"^```(\w+)(?: ([\w.]+))?\n(.*?)^```$", re.DOTALL | re.MULTILINE)


def blocks(page: str) -> list[tuple[str, str, str]]:
    """The fenced blocks of a page that have a language: it, the name of the file if one follows, and the text."""
    return _BLOCK.findall((ROOT / page).read_text(encoding="utf-8"))


def run_page(page: str, database: Database, folder: Path, programs: Path) -> None:
    """Run the blocks of a page in `folder` as superuser of a database; an AssertionError names the block that fails.

    Blocks: sh and sql are run, python is run or written to its file, json is compared with the output before it.
    `programs`: the folder of python and gdq. Lines that install gdq or set the connection are left out.
    """
    psql = client_program(database, "psql")
    path = os.pathsep.join([str(programs), str(psql.parent), os.environ["PATH"]])
    env = {name: value for name, value in os.environ.items() if name not in {"GDQ_DSN", "PYTHONPATH", "VIRTUAL_ENV"}}
    env |= {"PATH": path, "DATABASE_URL": database.su_dsn}
    output = ""
    for language, file, text in blocks(page):
        if file:
            (folder / file).write_text(text)
            continue
        match language:
            case "sh":
                lines = [line for line in text.splitlines() if not line.startswith(("pip ", "export DATABASE_URL"))]
                command = ["bash", "-e", "-u", "-o", "pipefail", "-c", "\n".join(lines)]
            case "sql":
                command = [str(psql), "-Xq", "-v", "ON_ERROR_STOP=1", "-d", database.su_dsn]
            case "python":
                command = [str(programs / "python"), "-c", text]
            case "json":
                printed = [line for line in output.splitlines() if line.startswith("{")]
                assert list(map(_shape, text.splitlines())) == list(map(_shape, printed))
                continue
            case _:
                raise AssertionError(f"{page} has a block of {language}, which nothing runs")
        given = text if language == "sql" else None
        done = subprocess.run(command, cwd=folder, env=env, input=given, capture_output=True, text=True, check=False)
        assert done.returncode == 0, f"{text}\n{done.stdout}\n{done.stderr}"
        output = done.stdout


def _shape(line: str) -> dict[str, Any]:
    """An event as it is printed, without what differs from run to run."""
    event: dict[str, Any] = json.loads(line)
    return {name: value for name, value in event.items() if name not in {"id", "xid", "time"}} | {"names": list(event)}
