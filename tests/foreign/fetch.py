"""Foreign material from Debian's source packages, for a machine that reaches them: PostgreSQL's own suites."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

# Debian's releases by the newest major version that each has.
_RELEASES = ("bookworm", "trixie", "sid")
_KEYRING = Path("/usr/share/keyrings/debian-archive-keyring.gpg")
PACKAGES = ("postgresql-15", "postgresql-18")


def fetch_packages(folder: Path, packages: tuple[str, ...], tell: Callable[[str], None]) -> bool:
    """Unpack Debian's sources of these packages below `folder`; False, and a line, if that is not to be had here."""
    missing = [name for name in ("apt-get", "dpkg-source") if shutil.which(name) is None]
    if missing or not _KEYRING.exists():
        tell(f"no source packages of Debian here: {', '.join(missing) or _KEYRING} is missing")
        return False
    lists = folder / "apt"
    (lists / "partial").mkdir(parents=True, exist_ok=True)
    sources = folder / "debian.list"
    lines = [f"deb-src [signed-by={_KEYRING}] http://deb.debian.org/debian {one} main\n" for one in _RELEASES]
    sources.write_text("".join(lines))
    apt = [
        "apt-get", "-q", "-o", f"Dir::Etc::sourcelist={sources.resolve()}", "-o", "Dir::Etc::sourceparts=-",
        "-o", f"Dir::State::lists={lists.resolve()}",
    ]  # fmt: skip
    if subprocess.run([*apt, "update"], check=False, capture_output=True).returncode:
        tell("Debian's lists of source packages cannot be reached")
        return False
    found = True
    for package in packages:
        done = subprocess.run([*apt, "source", package], check=False, capture_output=True, cwd=folder, text=True)
        if done.returncode:
            tell(f"{package}: {(done.stderr.strip() or 'not found').splitlines()[-1]}")
            found = False
    return found
