"""What the commands of the Makefile tell of failures."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

_OPTIONS = "-q -n 3 --dist loadfile --no-loadscope-reorder"
_PYTHON = """#!/bin/sh
case "$*" in *"pytest $FAIL"*) exit 1;; esac
"""


@pytest.mark.parametrize("target", ["test", "test-all"])
@pytest.mark.parametrize("fail", [f"{_OPTIONS} --pg 15", f"{_OPTIONS} --pg 18", "of nothing"])
def test_one_server_that_fails_fails_all(tmp_path: Path, target: str, fail: str) -> None:
    shutil.copy("Makefile", tmp_path)
    for name in ("pyproject.toml", "constraints.txt"):
        (tmp_path / name).touch()
    for name in (".venv", ".venv-spark43"):
        python = tmp_path / name / "bin" / "python"
        python.parent.mkdir(parents=True)
        python.write_text(_PYTHON)
        python.chmod(0o755)
        (tmp_path / name / "ready").touch()
    command = ["make", "-C", str(tmp_path), target]
    ended = subprocess.run(command, env=os.environ | {"FAIL": fail}, capture_output=True, check=False)
    assert (ended.returncode == 0) == (fail == "of nothing"), ended.stdout
