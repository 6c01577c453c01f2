"""A schema registry of its own, Apicurio's with the API of Confluent's, fetched by Maven; it forgets all at its end."""

from __future__ import annotations

import io
import json
import os
import shutil
import socket
import subprocess
import tarfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import fastavro
import pytest
import urllib3

from tests.support.waiting import until

VERSION = "2.6.13.Final"
_ARTIFACT = f"io.apicurio:apicurio-registry-app:{VERSION}:tar.gz:all"


@pytest.fixture(scope="session")
def registry_program(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The registry's program; Maven fetches it where it is not there yet."""
    for name in ("mvn", "java"):
        if shutil.which(name) is None:
            pytest.skip(f"the schema registry cannot be run: there is no {name}")
    folder = tmp_path_factory.mktemp("registry")
    goal = ["dependency:copy", f"-Dartifact={_ARTIFACT}", f"-DoutputDirectory={folder}"]
    done = subprocess.run(["mvn", "-q", "-B", *goal], capture_output=True, text=True, check=False, timeout=600)
    if done.returncode:
        pytest.skip(f"Maven cannot fetch the schema registry {VERSION}")
    with tarfile.open(folder / f"apicurio-registry-app-{VERSION}-all.tar.gz") as archive:
        archive.extractall(folder, filter="data")
    return folder / f"apicurio-registry-app-{VERSION}-runner.jar"


class SchemaRegistry:
    """A registry at one port."""

    def __init__(self, program: Path, folder: Path) -> None:
        self._program = program
        self._log = folder / "registry.log"
        with socket.create_server(("127.0.0.1", 0)) as free:
            self.port = int(free.getsockname()[1])
        self._process: subprocess.Popen[bytes] | None = None
        self._http = urllib3.PoolManager(retries=False)
        self._schemas: dict[int, Any] = {}

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}/apis/ccompat/v7"

    def start(self) -> None:
        options = ["-Xmx400m", "-Dquarkus.http.host=127.0.0.1", f"-Dquarkus.http.port={self.port}"]
        with self._log.open("ab") as log:
            command = ["java", *options, "-jar", os.fspath(self._program)]
            self._process = subprocess.Popen(command, stdout=log, stderr=log)
        until(self._answers, "the schema registry", pause=0.1)
        self.call("PUT", "config", {"compatibility": "BACKWARD"})

    def kill(self) -> None:
        assert self._process
        self._process.kill()
        self._process.wait()

    def call(self, method: str, path: str, body: Any = None) -> Any:
        """The answer to a request."""
        headers = {"Content-Type": "application/vnd.schemaregistry.v1+json"}
        given = None if body is None else json.dumps(body).encode()
        answer = self._http.request(method, f"{self.url}/{path}", body=given, headers=headers)
        assert answer.status < 300, answer.data
        return json.loads(answer.data)

    def versions(self, subject: str) -> list[Any]:
        """The schemas of a subject."""
        numbers = self.call("GET", f"subjects/{subject}/versions")
        return [json.loads(self.call("GET", f"subjects/{subject}/versions/{one}")["schema"]) for one in numbers]

    def decoded(self, data: bytes | None) -> Any:
        """A value, read by the schema that it names."""
        if data is None:
            return None
        assert data[0] == 0
        number = int.from_bytes(data[1:5], "big")
        if number not in self._schemas:
            text = self.call("GET", f"schemas/ids/{number}")["schema"]
            self._schemas[number] = fastavro.parse_schema(json.loads(text))
        return fastavro.schemaless_reader(io.BytesIO(data[5:]), self._schemas[number], None)

    def _answers(self) -> bool:
        try:
            return self._http.request("GET", f"{self.url}/subjects").status == 200
        except urllib3.exceptions.HTTPError:
            return False


@contextmanager
def schema_registry(program: Path, folder: Path) -> Iterator[SchemaRegistry]:
    """A running registry, killed in the end."""
    registry = SchemaRegistry(program, folder)
    registry.start()
    try:
        yield registry
    finally:
        registry.kill()
