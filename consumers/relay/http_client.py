"""The client of HTTP that web hooks and the schema registry share: an address, its login, its settings."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING
from urllib.parse import unquote

from gdq.consumers.relay.sink import Settings
from gdq.errors import GdqError

if TYPE_CHECKING:
    import urllib3

# Characters of an answer's body that are shown.
_SHOWN_CHARACTERS = 200


class HttpClient:
    """Sends requests to one host. `url`: the address without its login.

    Takes the settings timeout (seconds for connecting and for each answer), ca (a file of certificates) and
    header.NAME; no other may be left.
    """

    def __init__(self, address: str, settings: Settings, *, connections: int = 1) -> None:
        import urllib3  # noqa: PLC0415 (of an extra)
        from urllib3.util import make_headers, parse_url  # noqa: PLC0415

        timeout = settings.number("timeout", 30, least=0.001)
        ca = settings.text("ca", "") or None
        self._headers = {"User-Agent": "gdq"} | settings.prefixed("header.")
        settings.done()
        try:
            parsed = parse_url(address.replace("{", "").replace("}", ""))
        except urllib3.exceptions.LocationParseError as error:
            raise GdqError(f"{address!r} is no URL") from error
        if not parsed.host:
            raise GdqError(f"{address!r} is no URL: it names no host")
        scheme, _, rest = address.partition("://")
        authority, slash, path = rest.partition("/")
        if "{" in authority:
            raise GdqError("a URL may have places after its host only")
        if parsed.auth:
            self._headers |= make_headers(basic_auth=unquote(parsed.auth))
        self.url = f"{scheme}://{authority.rpartition('@')[2]}{slash}{path}"
        time = urllib3.Timeout(timeout)
        self._pool = urllib3.PoolManager(maxsize=connections, timeout=time, retries=False, ca_certs=ca)

    def request(self, method: str, url: str, body: bytes, headers: Mapping[str, str]) -> urllib3.BaseHTTPResponse:
        """The answer to a request; errors of urllib3 if there is none. Redirects are not followed."""
        return self._pool.request(method, url, body=body, headers={**self._headers, **headers}, redirect=False)

    def close(self) -> None:
        """Close the connections."""
        self._pool.clear()


def shown_answer(answer: urllib3.BaseHTTPResponse) -> str:
    """The status of an answer, and the begin of its body on one line."""
    text = " ".join(answer.data[: 4 * _SHOWN_CHARACTERS].decode("utf-8", "replace").split())
    return f"HTTP {answer.status}{f': {text[:_SHOWN_CHARACTERS]}' if text else ''}"
