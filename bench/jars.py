"""Java's packages for the peers of the benchmarks, fetched by Maven where they are not there yet."""

from __future__ import annotations

import shutil
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path

from bench.packages import BenchError

_FETCH_SECONDS = 900
_POM = """<project xmlns="http://maven.apache.org/POM/4.0.0"><modelVersion>4.0.0</modelVersion>
<groupId>gdq</groupId><artifactId>bench</artifactId><version>1</version><dependencies>
{}</dependencies></project>
"""
_DEPENDENCY = "<dependency><groupId>{}</groupId><artifactId>{}</artifactId><version>{}</version></dependency>\n"


def jar(artifact: str) -> Path:
    """The jar of one artifact, group:name:version, without what it needs."""
    group, name, version = artifact.split(":")
    path = Path.home().joinpath(".m2", "repository", *group.split("."), name, version, f"{name}-{version}.jar")
    if not path.exists():
        _maven("dependency:get", f"-Dartifact={artifact}", "-Dtransitive=false")
    if not path.exists():
        raise BenchError(f"Maven has not put {artifact} into {path.parent}")
    return path


def classpath(artifacts: Sequence[str]) -> str:
    """The jars of artifacts with all that they need, as Java's option -cp takes them."""
    with tempfile.TemporaryDirectory() as folder:
        wanted = "".join(_DEPENDENCY.format(*artifact.split(":")) for artifact in artifacts)
        Path(folder, "pom.xml").write_text(_POM.format(wanted), encoding="utf-8")
        _maven("dependency:build-classpath", "-Dmdep.outputFile=classpath", folder=folder)
        return Path(folder, "classpath").read_text(encoding="utf-8").strip()


def _maven(*given: str, folder: str | None = None) -> None:
    if shutil.which("mvn") is None:
        raise BenchError("there is no Maven, which fetches what this benchmark measures beside")
    done = subprocess.run(
        ["mvn", "-q", "-B", *given], cwd=folder, capture_output=True, text=True, check=False, timeout=_FETCH_SECONDS
    )
    if done.returncode:
        said = (done.stdout.strip() or done.stderr.strip() or "no output").splitlines()[0]
        raise BenchError(f"mvn {given[0]} failed: {said}")
