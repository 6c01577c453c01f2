"""A TCP proxy between programs and a server, whose connections can be cut, left half open, held up or refused."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from typing import cast


class _End(asyncio.Protocol):
    """One end of a connection: what it receives goes to the other end."""

    def __init__(self, link: _Link, proxy: Proxy) -> None:
        self.link = link
        self.proxy = proxy
        self.transport: asyncio.Transport | None = None
        self.other: _End | None = None
        self.waiting: list[bytes] = []

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast("asyncio.Transport", transport)
        if self.proxy.held:
            self.transport.pause_reading()

    def data_received(self, data: bytes) -> None:
        if self.other is None or self.other.transport is None:
            self.waiting.append(data)
        elif not self.link.severed:
            self.other.transport.write(data)

    def pause_writing(self) -> None:
        if self.other is not None and self.other.transport is not None:
            self.other.transport.pause_reading()

    def resume_writing(self) -> None:
        if self.other is not None and self.other.transport is not None and not self.proxy.held:
            self.other.transport.resume_reading()

    def connection_lost(self, _: Exception | None) -> None:
        self.link.lost(self)

    def hold(self) -> None:
        if self.transport is not None:
            self.transport.pause_reading()

    def go_on(self) -> None:
        if self.transport is not None and not self.transport.is_closing():
            self.transport.resume_reading()

    def abort(self) -> None:
        if self.transport is not None:
            self.transport.abort()


class _Link:
    """One connection of a program, and the connection to the server that belongs to it."""

    def __init__(self, proxy: Proxy) -> None:
        self.proxy = proxy
        self.client = _End(self, proxy)
        self.server = _End(self, proxy)
        self.severed = False

    def lost(self, end: _End) -> None:
        if not self.severed:
            for one in (self.client, self.server):
                if one is not end and one.transport is not None:
                    one.transport.close()
            self.proxy.links.discard(self)

    def abort(self) -> None:
        self.severed = True
        self.client.abort()
        self.server.abort()
        self.proxy.links.discard(self)


class Proxy:
    """Listens on a free port of 127.0.0.1 and passes everything on to `upstream`, a port that may change.

    `port` is free again after close(). All methods may be called from any thread.
    """

    def __init__(self, upstream: int) -> None:
        self.upstream = upstream
        self.links: set[_Link] = set()
        self.held = False
        self.refusing = False
        self.port = 0
        self._loop = asyncio.new_event_loop()
        self._tasks: set[asyncio.Task[None]] = set()
        self._ready = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True, name="proxy")
        self._thread.start()
        self._ready.wait()

    def cut(self) -> None:
        """End all connections at both ends, as a firewall does that lost its state."""
        self._end(lambda _: True)

    def half_open(self, *, client: bool) -> None:
        """End all connections at one end only; the end that stays (the client's, or the server's) hears nothing."""

        def work() -> None:
            for link in list(self.links):
                link.severed = True
                gone, kept = (link.server, link.client) if client else (link.client, link.server)
                gone.abort()
                kept.hold()

        self._call(work)

    def reap(self) -> None:
        """End what half_open() left, as keepalives do that nobody answers."""
        self._end(lambda link: link.severed)

    def hold(self) -> None:
        """Pass nothing on, and end nothing: packets are lost."""

        def work() -> None:
            self.held = True
            for link in self.links:
                link.client.hold()
                link.server.hold()

        self._call(work)

    def go_on(self) -> None:
        """Pass everything on again."""

        def work() -> None:
            self.held = False
            for link in self.links:
                link.client.go_on()
                link.server.go_on()

        self._call(work)

    def refuse(self, yes: bool) -> None:
        """End new connections at once, or no longer."""
        self.refusing = yes

    def close(self) -> None:
        self.cut()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()

    def _end(self, which: Callable[[_Link], bool]) -> None:
        def work() -> None:
            for link in list(self.links):
                if which(link):
                    link.abort()

        self._call(work)

    def _call(self, work: Callable[[], object]) -> None:
        done = threading.Event()

        def run() -> None:
            try:
                work()
            finally:
                done.set()

        self._loop.call_soon_threadsafe(run)
        done.wait(10)

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        server = self._loop.run_until_complete(self._loop.create_server(self._accept, "127.0.0.1", 0))
        self.port = server.sockets[0].getsockname()[1]
        self._ready.set()
        self._loop.run_forever()
        server.close()

    def _accept(self) -> _End:
        link = _Link(self)
        self.links.add(link)
        task = self._loop.create_task(self._connect(link))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return link.client

    async def _connect(self, link: _Link) -> None:
        if self.refusing:
            link.abort()
            return
        try:
            await self._loop.create_connection(lambda: link.server, "127.0.0.1", self.upstream)
        except OSError:
            link.abort()
            return
        if link.client.transport is None or link.client.transport.is_closing():
            link.abort()
            return
        for data in link.client.waiting:
            assert link.server.transport is not None
            link.server.transport.write(data)
        link.client.waiting.clear()
        link.client.other, link.server.other = link.server, link.client
        for data in link.server.waiting:
            link.client.transport.write(data)
        link.server.waiting.clear()
