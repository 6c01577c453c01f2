"""A NATS server with JetStream, built by Go from the released source, that tests may kill, stop and start again."""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
import socket
import subprocess
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

import nats
import pytest
from nats.aio.msg import Msg
from nats.js import JetStreamContext

from gdq.embedded.files import cache_folder
from tests.support.waiting import until

VERSION = "v2.15.3"

_T = TypeVar("_T")


@pytest.fixture(scope="session")
def nats_program() -> Path:
    """The server; Go builds it where it is not there yet."""
    folder = cache_folder() / f"nats-server-{VERSION}"
    program = folder / "nats-server"
    if not program.exists():
        if shutil.which("go") is None:
            pytest.skip("NATS cannot be run: there is no go")
        command = ["go", "install", f"github.com/nats-io/nats-server/v2@{VERSION}"]
        folder.mkdir(exist_ok=True)
        env = os.environ | {"GOBIN": str(folder)}
        done = subprocess.run(command, env=env, capture_output=True, text=True, check=False, timeout=1200)
        if done.returncode:
            pytest.skip(f"Go cannot build NATS {VERSION}")
    return program


class NatsServer:
    """A server at one port, whose streams survive its end."""

    def __init__(self, program: Path, folder: Path) -> None:
        self._program = program
        self._folder = folder
        with socket.create_server(("127.0.0.1", 0)) as free:
            self.port = int(free.getsockname()[1])
        self.process: subprocess.Popen[bytes] | None = None

    @property
    def url(self) -> str:
        return f"nats://127.0.0.1:{self.port}"

    def start(self) -> None:
        self._folder.mkdir(exist_ok=True)
        store = str(self._folder / "store")
        command = [str(self._program), "-a", "127.0.0.1", "-p", str(self.port), "-js", "-sd", store]
        with (self._folder / "log").open("ab") as log:
            self.process = subprocess.Popen(command, stdout=log, stderr=log)
        until(self._answers, "the NATS server")

    def kill(self) -> None:
        assert self.process
        self.process.send_signal(signal.SIGCONT)
        self.process.kill()
        self.process.wait()

    def signal(self, number: signal.Signals) -> None:
        assert self.process
        self.process.send_signal(number)

    def run(self, work: Callable[[JetStreamContext], Awaitable[_T]]) -> _T:
        """The result of work with the server's streams."""

        async def connected() -> _T:
            client = await nats.connect(self.url, connect_timeout=30)
            try:
                return await work(client.jetstream(timeout=30))
            finally:
                await client.close()

        return asyncio.run(connected())

    def make_stream(self, **options: Any) -> None:
        """The stream `shop`, of all subjects that begin so."""

        async def make(streams: JetStreamContext) -> None:
            await streams.add_stream(name="shop", subjects=["shop.>"], **options)

        self.run(make)

    def count(self) -> int:
        """The number of messages in the stream."""

        async def read(streams: JetStreamContext) -> int:
            return (await streams.stream_info("shop")).state.messages

        return self.run(read)

    def messages(self) -> list[Msg]:
        """All messages of the stream, in order."""

        async def read(streams: JetStreamContext) -> list[Msg]:
            count = (await streams.stream_info("shop")).state.messages
            subscription = await streams.subscribe("shop.>", ordered_consumer=True)
            return [await subscription.next_msg(timeout=30) for _ in range(count)]

        return self.run(read)

    def _answers(self) -> bool:
        with socket.socket() as client:
            if client.connect_ex(("127.0.0.1", self.port)):
                return False
            return client.recv(4) == b"INFO"


@contextmanager
def nats_server(program: Path, folder: Path) -> Iterator[NatsServer]:
    """A running server, killed in the end."""
    server = NatsServer(program, folder)
    server.start()
    try:
        yield server
    finally:
        server.kill()
