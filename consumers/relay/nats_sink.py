"""The sink of NATS JetStream: each record is a message of a stream, which knows by its identity what it has already."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Coroutine, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeVar
from urllib.parse import quote

from gdq.consumers.relay.sink import Record, Settings, check_template
from gdq.errors import GdqError, SinkUnavailable
from gdq.extra import extra_named
from gdq.retry import DeadLetter, Retry, RetryOutcome

if TYPE_CHECKING:
    from nats.aio.client import Client
    from nats.js.errors import APIError

_Result = tuple[Record, RetryOutcome | None]
_T = TypeVar("_T")

# Error codes of JetStream: the message, or its headers, are larger than the stream takes.
_TOO_LARGE = frozenset({10054, 10097})
# ... and the account takes no more; what else concerns no single message has a status from 500 on.
_ACCOUNT_FULL = 10002


@extra_named()
def open_sink(address: str, given: Mapping[str, str]) -> NatsSink:
    """The sink of the streams of a NATS server: nats://HOST:PORT,.../SUBJECT with places such as {table}."""
    return NatsSink(address, given)


class NatsSink:
    """Publishes each record, and waits for the stream to have stored it; many keys at a time.

    Settings: timeout (seconds for connecting and for each acknowledgement), concurrency, credentials (a file), user,
    password, token, ca (a file of certificates). A connection that was lost is opened again at the next record.
    """

    def __init__(self, address: str, given: Mapping[str, str]) -> None:
        import nats  # noqa: F401, PLC0415 (of an extra: missed here, not at the first record)

        settings = Settings("nats", given)
        self._timeout = settings.number("timeout", 5, least=0.001)
        self._concurrency = int(settings.number("concurrency", 256, least=1))
        self._login = {
            option: value
            for name, option in _LOGIN.items()
            if (value := settings.text(name, "")) != ""
        }  # fmt: skip
        self._ca = settings.text("ca", "")
        settings.done()
        scheme, _, rest = address.partition("://")
        hosts, _, self._subject = rest.partition("/")
        if not hosts or not self._subject:
            raise GdqError(f"{address!r} must name a server and a subject", hint="nats://host:4222/shop.{table}.{key}")
        check_template(self._subject)
        self._servers = [f"{scheme}://{host}" for host in hosts.split(",")]
        self._client: Client | None = None
        # a loop of its own answers the server's pings while no batch is sent
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="gdq relay", daemon=True)
        self._thread.start()

    def send(self, lanes: Sequence[Sequence[Record]]) -> Iterator[_Result]:
        """Publish lanes side by side, each record when the one before it was stored."""
        results: list[_Result] = []
        failure = self._run(self._send(lanes, results))
        yield from results
        if failure is not None:
            raise failure

    def close(self) -> None:
        """Close the connection."""
        self._run(self._disconnect())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    def _run(self, work: Coroutine[Any, Any, _T]) -> _T:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result()

    async def _send(self, lanes: Sequence[Sequence[Record]], results: list[_Result]) -> Exception | None:
        """Publish lanes; returns why it ended early."""
        failures: list[Exception] = []
        free = asyncio.Semaphore(self._concurrency)
        try:
            client = await self._connected()
        except Exception as error:
            return _unavailable(error)

        async def run(lane: Sequence[Record]) -> None:
            async with free:
                for record in lane:
                    if failures:
                        return
                    try:
                        outcome = await self._publish(client, record)
                    except Exception as error:
                        failures.append(error)
                        return
                    results.append((record, outcome))
                    if outcome is not None:
                        return

        await asyncio.gather(*map(run, lanes))
        if not failures:
            return None
        await self._disconnect()
        return failures[0]

    async def _publish(self, client: Client, record: Record) -> RetryOutcome | None:
        """Publish one record; returns why it was refused. SinkUnavailable if the server or the stream takes nothing."""
        from nats import errors  # noqa: PLC0415 (of an extra)
        from nats.js.errors import APIError, NoStreamResponseError  # noqa: PLC0415

        subject = record.place(self._subject, _token)
        headers = {"Nats-Msg-Id": record.id, "Content-Type": record.content_type, **record.headers}
        if record.key is not None:
            headers["Gdq-Key"] = quote(record.key, safe=" !#$&'()*+,/:;=?@[]{}\"")
        stream = client.jetstream(timeout=self._timeout)
        try:
            await stream.publish(subject, record.value or b"", timeout=self._timeout, headers=headers)
        except errors.MaxPayloadError:
            return DeadLetter(f"{len(record.value or b'')} bytes are more than the server takes")
        except NoStreamResponseError as error:
            raise SinkUnavailable(f"no stream takes subject {subject}") from error
        except APIError as error:
            return _refusal(error)
        except (errors.Error, OSError, TimeoutError) as error:
            raise _unavailable(error) from error
        return None

    async def _connected(self) -> Client:
        import nats  # noqa: PLC0415 (of an extra)

        if self._client is None or not self._client.is_connected:
            await self._disconnect()
            more: dict[str, Any] = dict(self._login)
            if self._ca:
                import ssl  # noqa: PLC0415 (rarely needed)

                more["tls"] = ssl.create_default_context(cafile=self._ca)
            self._client = await nats.connect(
                self._servers,
                name="gdq relay",
                allow_reconnect=False,
                connect_timeout=max(1, round(self._timeout)),
                error_cb=_say_nothing,
                **more,
            )
        return self._client

    async def _disconnect(self) -> None:
        client, self._client = self._client, None
        if client is not None:
            with contextlib.suppress(Exception):  # it is given up
                await asyncio.wait_for(client.close(), self._timeout)


_LOGIN = {"credentials": "user_credentials", "user": "user", "password": "password", "token": "token"}


async def _say_nothing(_error: Exception) -> None:
    """An error of the connection comes back to whoever publishes, too."""


def _refusal(error: APIError) -> RetryOutcome:
    """Why a stream has refused a message; SinkUnavailable if it would refuse any."""
    reason = f"JetStream {error.err_code}: {error.description}"
    if error.err_code in _TOO_LARGE:
        return DeadLetter(reason)
    concerns_all = (error.code or 0) >= 500 or error.err_code == _ACCOUNT_FULL
    if concerns_all and "per subject" not in (error.description or ""):
        raise SinkUnavailable(f"stream takes nothing: {reason}") from error
    return Retry(reason)


def _unavailable(error: Exception) -> SinkUnavailable:
    # some errors of the client begin with "nats: ", a timeout has no text of its own
    return SinkUnavailable(f"NATS server unreachable: {str(error).removeprefix('nats: ') or type(error).__name__}")


def _token(text: str) -> str:
    """A value as one token of a subject: without dots, blanks and wildcards, and not empty."""
    return quote(text, safe="").replace(".", "%2E") or "_"
