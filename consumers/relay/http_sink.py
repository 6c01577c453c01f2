"""The sink of web hooks: each record is the body of a request of its own."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING
from urllib.parse import quote

from gdq.consumers.relay.http_client import HttpClient, shown_answer
from gdq.consumers.relay.sink import Record, Settings, check_template
from gdq.errors import SinkUnavailable
from gdq.extra import extra_named
from gdq.retry import DeadLetter, Retry, RetryOutcome

if TYPE_CHECKING:
    import urllib3

ID_HEADER = "Idempotency-Key"

# Answers that say: the body itself is wrong, and will be.
_DEAD = frozenset({400, 410, 413, 414, 415, 422, 431})
# Answers that do not concern the one request: nobody is let in, or the hook wants a pause.
_ALL = frozenset({401, 403, 407, 429, 503})
# Seconds that a hook may have the relay wait.
_WAIT_MAX = 3600.0

_Result = tuple[Record, RetryOutcome | None]


class _TimedOut(Retry):
    """The hook did not answer in time."""


@extra_named()
def open_sink(address: str, given: Mapping[str, str]) -> HttpSink:
    """The sink of a web hook, whose URL may have places such as {table}."""
    return HttpSink(address, given)


class HttpSink:
    """Sends each record as a request, several keys side by side.

    Settings: timeout (seconds for connecting and for each answer), concurrency, method, ca (a file of certificates),
    header.NAME.
    """

    def __init__(self, address: str, given: Mapping[str, str]) -> None:
        settings = Settings("http", given)
        self._concurrency = int(settings.number("concurrency", 8, least=1))
        self._method = settings.text("method", "POST")
        self._client = HttpClient(address, settings, connections=self._concurrency)
        check_template(self._client.url)
        self._threads = ThreadPoolExecutor(self._concurrency, thread_name_prefix="gdq relay")

    def send(self, lanes: Sequence[Sequence[Record]]) -> Iterator[_Result]:
        """Send lanes side by side, each record when the one before it was taken."""
        yield from _send_lanes(lanes, self._send, self._threads, slow_most=self._concurrency)

    def close(self) -> None:
        """Close the connections."""
        self._threads.shutdown(cancel_futures=True)
        self._client.close()

    def _send(self, record: Record) -> RetryOutcome | None:
        """Send one record; returns why it was refused. SinkUnavailable if the hook as a whole is."""
        from urllib3 import exceptions  # noqa: PLC0415 (of an extra)

        url = record.place(self._client.url, _quoted)
        headers = {**record.headers, ID_HEADER: record.id, "Content-Type": record.content_type}
        if record.key is not None:
            headers["Gdq-Key"] = quote(record.key, safe=" !#$&'()*+,/:;=?@[]{}\"")
        try:
            answer = self._client.request(self._method, url, record.value or b"", headers)
        except exceptions.ReadTimeoutError:
            return _TimedOut("no answer in time")
        except exceptions.ProtocolError as error:
            return Retry(f"connection broken: {error}")
        except exceptions.HTTPError as error:
            raise SinkUnavailable(f"web hook unreachable: {error}") from error
        return self._outcome(answer)

    def _outcome(self, answer: urllib3.BaseHTTPResponse) -> RetryOutcome | None:
        status = answer.status
        if 200 <= status < 300:
            return None
        reason = shown_answer(answer)
        if status in _ALL:
            raise SinkUnavailable(f"web hook takes nothing: {reason}", wait_seconds=_wait(answer.headers))
        return DeadLetter(reason) if status in _DEAD else Retry(reason)


def _wait(headers: Mapping[str, str]) -> float | None:
    """The seconds of a header Retry-After; None without one, or if it is a date."""
    text = headers.get("Retry-After") or ""
    return min(float(text), _WAIT_MAX) if text.isdecimal() else None


def _send_lanes(
    lanes: Sequence[Sequence[Record]],
    send: Callable[[Record], RetryOutcome | None],
    threads: ThreadPoolExecutor,
    *,
    slow_most: int,
) -> Iterable[_Result]:
    """Send lanes by threads. After `slow_most` times without an answer, and no other answer, the sink is unavailable.

    Results are given when all threads have ended, also if the sink is unavailable: that is raised after them.
    """
    results: list[_Result] = []
    failures: list[BaseException] = []
    stop = threading.Event()
    slow = 0

    def run(lane: Sequence[Record]) -> None:
        nonlocal slow
        for record in lane:
            if stop.is_set():
                return
            try:
                outcome = send(record)
            except BaseException as error:  # raised below, in the thread that called
                failures.append(error)
                stop.set()
                return
            results.append((record, outcome))
            slow = slow + 1 if isinstance(outcome, _TimedOut) else 0
            if slow >= slow_most > 1:
                failures.append(SinkUnavailable("web hook does not answer in time"))
                stop.set()
            if outcome is not None:
                return

    for done in [threads.submit(run, lane) for lane in lanes]:
        done.result()
    yield from results
    if failures:
        raise failures[0]


def _quoted(text: str) -> str:
    """A text as a part of an address."""
    return quote(text, safe="")
