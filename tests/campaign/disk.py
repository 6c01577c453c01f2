"""Small disks for a server's tables and its write-ahead log, which can be made full. Needs root (mount)."""

from __future__ import annotations

import os
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import psycopg

from gdq.embedded.files import ServerAccount
from gdq.embedded.server import EmbeddedServer

_SIZES = {"tables": 5 << 30, "wal": 3 << 30}
_ROOM = 256 << 10


class Disk:
    """Two file systems in memory, `tables` and `wal`; without the right to mount none, and `there` is False."""

    def __init__(self, folder: Path, account: ServerAccount) -> None:
        self.folder = folder
        self.account = account
        self.there = False
        self._mounted: list[Path] = []

    def mount(self) -> None:
        self.folder.chmod(0o755)
        for name, size in _SIZES.items():
            place = self.folder / name
            place.mkdir()
            command = ["mount", "-t", "tmpfs", "-o", f"size={size}", "gdq-campaign", str(place)]
            if os.getuid() != 0 or subprocess.run(command, capture_output=True, check=False).returncode:
                return
            self._mounted.append(place)
            (place / "data").mkdir(mode=0o700)
            os.chown(place / "data", self.account.uid, self.account.gid)
        self.there = True

    def unmount(self) -> None:
        for place in self._mounted:
            subprocess.run(["umount", "-l", str(place)], capture_output=True, check=False)

    def take_wal(self, server: EmbeddedServer) -> None:
        """Move a running server's write-ahead log here."""
        if not self.there:
            return
        server.crash()
        place = self.folder / "wal" / "data" / "pg_wal"
        self.account.run("mv", server.data / "pg_wal", place)
        self.account.run("ln", "-s", place, server.data / "pg_wal")
        server.start()

    def create_tablespace(self, su: psycopg.Connection[Any]) -> str:
        """Make the tablespace; what CREATE DATABASE says to be in it."""
        if not self.there:
            return ""
        su.execute(f"create tablespace campaign location '{self.folder / 'tables' / 'data'}'".encode())
        return "tablespace campaign"

    def fill(self, name: str) -> None:
        """Leave no room but a little; tried again where more was written meanwhile."""
        place = self.folder / name
        for tried in range(1, 20):
            now = os.statvfs(place)
            with suppress(subprocess.CalledProcessError):
                self._resize(place, (now.f_blocks - now.f_bfree) * now.f_frsize + tried * _ROOM)
                return

    def free(self, name: str) -> None:
        self._resize(self.folder / name, _SIZES[name])

    def _resize(self, place: Path, size: int) -> None:
        command = ["mount", "-o", f"remount,size={size}", str(place)]
        subprocess.run(command, capture_output=True, check=True)


@contextmanager
def small_disk() -> Iterator[Disk]:
    """A Disk that is unmounted after the block."""
    with tempfile.TemporaryDirectory(prefix="gdq-campaign-", ignore_cleanup_errors=True) as folder:
        disk = Disk(Path(folder), ServerAccount.choose())
        disk.mount()
        try:
            yield disk
        finally:
            disk.unmount()
