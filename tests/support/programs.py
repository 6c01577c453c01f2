"""PostgreSQL's client programs, and gdq's own command, as the tests run them."""

from __future__ import annotations

import atexit
import multiprocessing
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory

from gdq.cli import main
from gdq.cli.sections import SECTIONS
from gdq.embedded.files import MAJORS, find_binaries
from gdq.errors import EmbeddedError
from tests.support.server import Database
from tests.support.waiting import SECONDS

# A process that has imported all commands once, and is forked for each: importing takes longer than most commands.
_FORKS = multiprocessing.get_context("forkserver")
_FORKS.set_forkserver_preload(
    [
        "pytest",
        __name__,
        *(f"gdq.cli.{module}" for modules in SECTIONS.values() for module in modules),
        "gdq.consumers.refresh.engines",
        "sqlalchemy",
        "alembic.config",
    ]
)


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
    *arguments: str, dsn: str, stdin: str = "", env: dict[str, str] | None = None, cwd: Path | None = None
) -> subprocess.CompletedProcess[str]:
    """Run the command to its end. With variables of its own it is started anew, else forked: that is much quicker."""
    if env is not None:
        return subprocess.run(
            [sys.executable, "-m", "gdq", *arguments],
            input=stdin,
            env=environment(dsn) | env,
            cwd=cwd,
            capture_output=True,
            text=True,
            check=False,
            timeout=SECONDS,
        )
    with TemporaryDirectory() as folder:
        given, said, complained = (Path(folder, name) for name in ("stdin", "stdout", "stderr"))
        for path, text in ((given, stdin), (said, ""), (complained, "")):
            path.write_text(text)
        files = [str(path) for path in (given, said, complained)]
        process = _FORKS.Process(target=_run_here, args=(arguments, environment(dsn), str(cwd or Path.cwd()), files))
        process.start()
        process.join(SECONDS)
        if process.exitcode is None:
            process.kill()
            raise subprocess.TimeoutExpired(["gdq", *arguments], SECONDS, said.read_bytes(), complained.read_bytes())
        return subprocess.CompletedProcess(arguments, process.exitcode, said.read_text(), complained.read_text())


def _run_here(arguments: Sequence[str], environ: dict[str, str], folder: str, files: Sequence[str]) -> None:
    """Be the command, in a forked process, with these files as its standard input and outputs."""
    for number, path in enumerate(files):
        opened = os.open(path, os.O_RDWR | os.O_APPEND)
        os.dup2(opened, number)
        os.close(opened)
    os.environ.clear()
    os.environ.update(environ)
    os.chdir(folder)
    sys.stdin = open(0, closefd=False)  # noqa: SIM115 (as long as the process)
    sys.argv[:] = ["gdq", *arguments]
    try:
        main(prog_name="gdq")
    finally:
        atexit._run_exitfuncs()  # multiprocessing ends its processes without


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
