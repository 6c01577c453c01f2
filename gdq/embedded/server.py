"""An embedded PostgreSQL server for the demo, the benchmarks and the tests.

    with EmbeddedServer(18) as server:
        connection = psycopg.connect(server.conninfo())

A server never outlives the process that started it, however that process ends: a small watcher waits on a pipe and
stops the server when the pipe closes.
"""

from __future__ import annotations

import atexit
import os
import re
import secrets
import shutil
import socket
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Literal, Self

from psycopg.conninfo import make_conninfo

from gdq.embedded.files import PostgresBinaries, ServerAccount, cache_folder, find_binaries, make_cache_folder
from gdq.errors import EmbeddedError

SUPERUSER = "postgres"

# The kernel takes 107 bytes; a socket's own name takes up to 19 of them.
_SOCKET_PATH_MAX = 100
_SOCKET_NAME_LENGTH = len("/.s.PGSQL.65535.lock")

# Where a server that lies in memory needs at least this much room, in bytes.
_MEMORY = Path("/dev/shm")
_MEMORY_MIN = 8 << 30

_START_SECONDS = 120
_START_TRIES = 5

# Arguments: pg_ctl, data folder, then what to remove. A line on the pipe means: no longer needed.
_WATCHER = """
read -r _ && exit
"$1" stop --silent --wait --mode=fast --pgdata="$2"
shift 2
[ $# -eq 0 ] || rm -rf -- "$@"
"""


class EmbeddedServer:
    """One PostgreSQL server with a data folder in the cache folder, on a free port of 127.0.0.1 and a private socket.

    Nothing is written before `start`. Every role needs a password; the superuser `postgres` has `password`. Without
    `name` the server is temporary: its data is removed at the end, and it does not wait for the disk (`fsync = off`).
    With `name` the data stays for the next server of that name and major version. `settings`: lines of postgresql.conf;
    a change of the dictionary takes effect at the next start. `in_memory`: a temporary server's data folder lies in
    /dev/shm where that has 8 GiB free, so that many small databases are made and dropped without the disk.
    """

    def __init__(
        self,
        major: int = 18,
        *,
        name: str | None = None,
        settings: Mapping[str, str | float | bool] | None = None,
        binaries: PostgresBinaries | None = None,
        in_memory: bool = False,
    ) -> None:
        if name is not None and not re.fullmatch(r"[a-z0-9_-]{1,40}", name):
            raise EmbeddedError(f"server name {name!r}: use up to 40 of a-z, 0-9, _ and -")
        self.binaries = binaries or find_binaries(major)
        self.account = ServerAccount.choose()
        self.temporary = name is None
        self.settings: dict[str, str | float | bool] = {"max_prepared_transactions": 50}
        if self.temporary:
            self.settings |= {"fsync": False, "full_page_writes": False}
        self.settings |= settings or {}
        self.port = 0
        self.password = ""
        folder_name = f"{name}-{self.binaries.major}" if name else secrets.token_hex(4)
        if self.temporary and in_memory and _free_memory() >= _MEMORY_MIN:
            self.folder = _MEMORY / f"gdq-{folder_name}"
        else:
            self.folder = cache_folder(self.account) / "run" / folder_name
        self.socket_folder = self.folder / "socket"
        if len(os.fsencode(self.socket_folder)) + _SOCKET_NAME_LENGTH > _SOCKET_PATH_MAX:
            self.socket_folder = Path("/tmp", f"gdq-{secrets.token_hex(8)}")
        self._watcher: subprocess.Popen[str] | None = None

    @property
    def data(self) -> Path:
        """The data folder."""
        return self.folder / "data"

    @property
    def log(self) -> Path:
        """The server's log file."""
        return self.folder / "log"

    @property
    def running(self) -> bool:
        """True if the server was started and not stopped since."""
        return self._watcher is not None

    def start(self) -> Self:
        """Start the server and wait until it takes connections; it keeps its port from an earlier start.

        EmbeddedError with the last messages of the log if it does not start; then a new temporary server's data is
        removed.
        """
        if self.running:
            return self
        try:
            self._prepare()
            self._start()
        except BaseException:
            if not self.port:
                self.stop()
            raise
        atexit.register(self.stop)
        return self

    def stop(self) -> None:
        """Stop the server, cut off its clients, and remove a temporary server's data; a second call does nothing."""
        atexit.unregister(self.stop)
        try:
            self._halt("fast")
        finally:
            if self.temporary:
                shutil.rmtree(self.folder, ignore_errors=True)
                shutil.rmtree(self.socket_folder, ignore_errors=True)
                self.port = 0

    def crash(self) -> None:
        """Stop the server at once, without a checkpoint; the next start recovers. The data of a temporary one stays."""
        self._halt("immediate")

    def restart(self) -> Self:
        """Stop the server in an orderly way if it runs, and start the server on the same port."""
        self._halt("fast")
        return self.start()

    def conninfo(self, user: str = SUPERUSER, dbname: str = "postgres", password: str | None = None) -> str:
        """A libpq connection string over TCP; without `password` the superuser's own."""
        return make_conninfo(
            host="127.0.0.1", port=self.port, user=user, dbname=dbname, password=password or self.password
        )

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.stop()

    def _prepare(self) -> None:
        """Create what a start needs and is missing: folders, data, password."""
        parent = self.folder.parent
        if parent != _MEMORY:
            make_cache_folder(parent)
            if os.getuid() != self.account.uid:
                # The watcher, which is not root, removes what is in it.
                os.chown(parent, self.account.uid, self.account.gid, follow_symlinks=False)
        self.account.run("mkdir", "-p", self.folder)
        if self.account.run(self.binaries.program("pg_ctl"), "status", "-D", self.data, check=False).returncode == 0:
            raise EmbeddedError(f"the server {self.folder.name} is running already: stop it first, or use another name")
        if not self.socket_folder.exists():
            self.account.run("mkdir", self.socket_folder)
        password_file = self.folder / "password"
        if not (self.data / "PG_VERSION").exists():
            shutil.rmtree(self.data, ignore_errors=True)  # left by a killed initdb
            self._initialise(password_file)
        self.password = password_file.read_text().strip()

    def _start(self) -> None:
        for _ in range(_START_TRIES):
            port = self.port or _free_port()
            self._configure(port)
            self._watch()
            try:
                self._pg_ctl("start", f"--log={self.log}", f"--timeout={_START_SECONDS}")
            except EmbeddedError as error:
                self._unwatch()
                complaint = self._complaint()
                if not self.port and "TCP/IP" in complaint:
                    continue  # another program took the port meanwhile
                raise EmbeddedError(f"PostgreSQL {self.binaries.major} did not start: {complaint}") from error
            self.port = port
            return
        raise EmbeddedError(f"PostgreSQL {self.binaries.major} found no free port in {_START_TRIES} tries")

    def _initialise(self, password_file: Path) -> None:
        self.account.write(password_file, secrets.token_urlsafe(12) + "\n")
        self.account.run(
            self.binaries.program("initdb"),
            f"--pgdata={self.data}",
            f"--username={SUPERUSER}",
            f"--pwfile={password_file}",
            "--auth=scram-sha-256",
            "--encoding=UTF8",
            "--no-locale",
            "--no-sync",
        )
        configuration = self.data / "postgresql.conf"
        self.account.write(configuration, configuration.read_text() + "include 'embedded.conf'\n")

    def _configure(self, port: int) -> None:
        settings = self.settings | {
            "listen_addresses": "127.0.0.1",
            "port": port,
            "unix_socket_directories": str(self.socket_folder),
        }
        lines = [f"{name} = '{_setting(value)}'\n" for name, value in settings.items()]
        self.account.write(self.data / "embedded.conf", "".join(lines))

    def _pg_ctl(self, verb: str, *options: str) -> None:
        self.account.run(self.binaries.program("pg_ctl"), verb, "--silent", "--wait", f"--pgdata={self.data}", *options)

    def _halt(self, mode: Literal["fast", "immediate"]) -> None:
        if not self.running:
            return
        if (self.data / "postmaster.pid").exists():
            self._pg_ctl("stop", f"--mode={mode}", f"--timeout={_START_SECONDS}")
        self._unwatch()

    def _watch(self) -> None:
        doomed = [self.folder, self.socket_folder] if self.temporary else []
        self._watcher = subprocess.Popen(
            ["/bin/sh", "-c", _WATCHER, "gdq-watcher", self.binaries.program("pg_ctl"), self.data, *doomed],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            text=True,
            # Ctrl-C goes to the whole group of the terminal and must not end the watcher before its time.
            start_new_session=True,
            **self.account.popen_options(),
        )

    def _unwatch(self) -> None:
        if self._watcher is not None:
            self._watcher.communicate("done\n")
            self._watcher = None

    def _complaint(self) -> str:
        """The last two messages of the log in one line: the last alone may not tell the cause."""
        text = self.log.read_text(errors="replace") if self.log.exists() else ""
        messages = re.findall(r"\b(?:LOG|WARNING|ERROR|FATAL|PANIC): +(.+)", text)
        return "; ".join(messages[-2:]) or f"nothing in {self.log}"


def _free_memory() -> int:
    """Bytes that a file in memory can take; 0 where the system has no such folder."""
    try:
        return shutil.disk_usage(_MEMORY).free
    except OSError:
        return 0


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port: int = listener.getsockname()[1]
    return port


def _setting(value: str | float | bool) -> str:
    text = ("on" if value else "off") if isinstance(value, bool) else str(value)
    return text.replace("\\", "\\\\").replace("'", "''")


def main(arguments: list[str]) -> int:
    """`python -m gdq.embedded MAJOR...`: fetch these PostgreSQLs and print their folders; exit code 3 without one."""
    if not arguments or not all(argument.isdecimal() for argument in arguments):
        print("usage: python -m gdq.embedded MAJOR...", file=sys.stderr)
        return 2
    try:
        for major in arguments:
            print(find_binaries(int(major), lambda line: print(line, file=sys.stderr, flush=True)).folder)
    except EmbeddedError as error:
        print(error, file=sys.stderr)
        return 3
    return 0
