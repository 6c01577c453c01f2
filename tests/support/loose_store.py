"""A store that keeps less than S3 promises: a proxy before a real one, for its bucket that takes all requests."""

from __future__ import annotations

import multiprocessing
from collections.abc import Iterator
from contextlib import contextmanager
from http.client import HTTPConnection
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from multiprocessing.connection import Connection
from urllib.parse import urlsplit

# What the real store must not see: signatures that the proxy's address makes wrong, and what the proxy says itself.
_OWN = {"authorization", "host", "connection", "content-length", "transfer-encoding"}
# A process of its own: Delta's library keeps Python's lock while it waits for an answer.
_FORKS = multiprocessing.get_context("forkserver")


@contextmanager
def loose_store(endpoint: str, *, overwrites: bool = False, loses: str | None = None) -> Iterator[str]:
    """The endpoint of a proxy for the store at another one.

    `overwrites`: it knows no If-None-Match. `loses`: the part of a path; the first put there is made, and answered with
    an error.
    """
    ours, theirs = _FORKS.Pipe()
    process = _FORKS.Process(target=_serve, args=(urlsplit(endpoint).netloc, overwrites, loses, theirs))
    process.start()
    try:
        yield f"http://127.0.0.1:{ours.recv()}"
    finally:
        process.kill()
        process.join()


def _serve(place: str, overwrites: bool, loses: str | None, told: Connection) -> None:
    lost: list[str] = []

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def _body(self) -> bytes:
            if self.headers.get("transfer-encoding") != "chunked":
                return self.rfile.read(int(self.headers.get("content-length", 0)))
            body = b""
            while size := int(self.rfile.readline().partition(b";")[0], 16):
                body += self.rfile.read(size)
                self.rfile.readline()
            self.rfile.readline()
            return body

        def _pass_on(self) -> None:
            body = self._body()
            dropped = _OWN | ({"if-none-match"} if overwrites else set())
            headers = {name: value for name, value in self.headers.items() if name.lower() not in dropped}
            connection = HTTPConnection(place)
            connection.request(self.command, self.path, body or None, headers)
            with connection.getresponse() as answer:
                status, given, said = answer.status, answer.getheaders(), answer.read()
            connection.close()
            if self.command == "PUT" and loses is not None and loses in self.path and not lost:
                lost.append(self.path)
                status, given, said = 500, [], b""
            self.send_response_only(status)
            for name, value in given:
                if name.lower() not in _OWN:
                    self.send_header(name, value)
            length = dict(given).get("Content-Length", "0") if self.command == "HEAD" else str(len(said))
            self.send_header("Content-Length", length)
            self.end_headers()
            self.wfile.write(said)

        do_GET = do_PUT = do_POST = do_HEAD = do_DELETE = _pass_on  # noqa: N815 (the names that http.server calls)

        def log_message(self, *_: object) -> None:
            """Nothing."""

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        told.send(server.server_port)
        server.serve_forever()
