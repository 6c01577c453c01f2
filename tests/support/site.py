"""The site of the documentation, built for one test: another build in the tree does not change it while it is read."""

from __future__ import annotations

import fcntl
import subprocess
from pathlib import Path

from tests.support.page import ROOT


def built_site(folder: Path) -> Path:
    """The folder of the site's pages, which `make docs` has written into a folder."""
    with (ROOT / "Makefile").open() as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # the first make installs what builds the site
        done = subprocess.run(["make", "docs", f"SITE={folder}"], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return folder / "site"
