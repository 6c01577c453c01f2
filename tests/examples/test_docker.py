"""The image and the compose file of examples/docker: what they run works, in the order that they say."""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
import venv
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.support.examples import (
    EXAMPLES,
    ROOT,
    command_folder,
    libpq_variables,
    program_environment,
    running,
    setup,
)
from tests.support.programs import psql
from tests.support.server import Database
from tests.support.waiting import until

DOCKERFILE = EXAMPLES / "docker" / "Dockerfile"


def instructions() -> list[tuple[str, str]]:
    """The Dockerfile's instructions with their arguments."""
    lines = [line for line in DOCKERFILE.read_text(encoding="utf-8").splitlines() if line and line[0] != "#"]
    return [(line.partition(" ")[0], line.partition(" ")[2]) for line in lines]


def of(instruction: str) -> str:
    (found,) = (arguments for name, arguments in instructions() if name == instruction)
    return found


def services() -> dict[str, Any]:
    text = (EXAMPLES / "docker" / "compose.yaml").read_text(encoding="utf-8")
    found: dict[str, Any] = yaml.safe_load(text)["services"]
    return found


@pytest.mark.long
@pytest.mark.server
def test_what_the_containers_run(empty_db: Database, tmp_path: Path) -> None:
    """Each service with its own command and variables: only the place of the server is another."""
    folder = command_folder(tmp_path / "bin")
    place = libpq_variables(empty_db)
    image = dict(word.split("=", 1) for word in shlex.split(of("ENV")))
    copied, there = of("COPY").split()
    entry, health = json.loads(of("ENTRYPOINT")), json.loads(re.sub(r"^.* CMD ", "", of("HEALTHCHECK")))

    def local(text: str) -> str:
        return text.replace(there, str(EXAMPLES / copied))

    def of_service(service: dict[str, Any]) -> tuple[list[str], dict[str, str]]:
        variables = image | service["environment"]
        assert {"PGHOST", "PGDATABASE", "PGUSER", "PGPASSWORD"} <= variables.keys()
        assert re.match(r"\$\{POSTGRES_PASSWORD:\?.+\}$", variables["PGPASSWORD"])
        command = [*service.get("entrypoint", entry), *service["command"]]
        env = {name: local(value) for name, value in variables.items()} | place
        return [local(word) for word in command], program_environment(folder, env)

    found = services()
    scripts = [volume for volume in found["db"]["volumes"] if "docker-entrypoint-initdb.d" in volume]
    (schema,) = (EXAMPLES / "docker" / volume.split(":")[0] for volume in scripts)
    done = psql(empty_db, schema.read_text(encoding="utf-8"), empty_db.su_dsn)
    assert done.returncode == 0, done.stderr
    setup(*of_service(found["setup"]))
    others = {name: service for name, service in found.items() if name not in ("db", "setup")}
    with empty_db.connect("su") as su, ExitStack() as stack:
        for service in others.values():
            assert service["depends_on"] == {"setup": {"condition": "service_completed_successfully"}}
            assert service["restart"] == "unless-stopped"
            stack.enter_context(running(*of_service(service)))
        su.execute("insert into orders (customer, amount) values ('Ann', 9.90)")
        until(lambda: su.execute("select customer from mirror").fetchall() == [("Ann",)])
        checked = subprocess.run(health, env=of_service(others["ticker"])[1], capture_output=True, check=False)
        assert checked.returncode == 0, checked.stdout
        default = [*entry, *json.loads(of("CMD"))]
        assert default == of_service(others["ticker"])[0]


@pytest.mark.long
def test_the_image_has_the_command(tmp_path: Path) -> None:
    """RUN in an empty environment, with this checkout in the place of the released package."""
    venv.create(tmp_path / "env", with_pip=True)
    own = {name: value for name, value in os.environ.items() if name not in {"PYTHONPATH", "VIRTUAL_ENV"}}
    env = own | {"PATH": f"{tmp_path}/env/bin:{os.environ['PATH']}"}
    name, _, default = of("ARG").partition("=")
    wanted = default.strip('"').replace("gdq", str(ROOT), 1)
    subprocess.run(["/bin/sh", "-c", of("RUN")], env=env | {name: wanted}, check=True, capture_output=True)
    done = subprocess.run(
        [*json.loads(of("ENTRYPOINT")), "--version"], env=env, cwd=tmp_path, check=True, capture_output=True, text=True
    )
    assert done.stdout.startswith("gdq, version")
    assert re.search(r"^python:3\.\d+-slim$", of("FROM"))
    assert sys.version_info >= (3, 11)
