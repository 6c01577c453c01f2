"""What a sink is: the protocol, the records that it is given, and how it is found by the scheme of its address."""

from __future__ import annotations

import importlib
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from importlib.metadata import entry_points
from typing import Protocol, runtime_checkable

from gdq.consumers.debezium.envelope import table_parts
from gdq.errors import GdqError
from gdq.retry import RetryOutcome
from gdq.source import Event

# The group of entry points by which other packages bring sinks; the name of an entry point is the scheme.
ENTRY_POINTS = "gdq.sinks"

_OWN = {
    "http": "gdq.consumers.relay.http_sink:open_sink",
    "https": "gdq.consumers.relay.http_sink:open_sink",
    "kafka": "gdq.consumers.relay.kafka_sink:open_sink",
    "nats": "gdq.consumers.relay.nats_sink:open_sink",
    "tls": "gdq.consumers.relay.nats_sink:open_sink",
}
_PLACE = re.compile(r"\{(\w*)\}")
_PLACES = ("queue", "schema", "table", "op", "key", "type")


@dataclass(frozen=True, slots=True)
class Record:
    """What a sink sends for an event.

    `id`: the same at each attempt, different from that of any other record, also after a restore. `key`: None if the
    event has none. `value`: None for a tombstone. `headers`: what the form adds. `event`: the event itself.
    `encoded_key`: the key in the form's own encoding, if that is not the text.
    """

    id: str
    queue: str
    key: str | None
    value: bytes | None
    content_type: str
    event: Event
    headers: Mapping[str, str] = field(default_factory=dict)
    encoded_key: bytes | None = None

    def place(self, template: str, quote: Callable[[str], str]) -> str:
        """The template with {queue}, {schema}, {table}, {op}, {key} and {type} filled in, each passed through `quote`.

        {type} is the type of a message. What an event does not have is empty.
        """
        schema, table = table_parts(self.event.table)
        kind = (self.event.new or {}).get("type") if self.event.op == "message" else None
        key = (self.key or "") if "{key}" in template else ""
        return _filled(template, (self.queue, schema, table, self.event.op, key, kind or ""), quote)


@lru_cache(maxsize=4096)
def _filled(template: str, values: tuple[str, ...], quote: Callable[[str], str]) -> str:
    """A template with the values of _PLACES; most records of a table have the same."""
    filled = dict(zip(_PLACES, values, strict=True))
    return _PLACE.sub(lambda found: quote(filled[found[1]]), template)


class Sink(Protocol):
    """Where a relay sends its records: a package brings one by an entry point in the group `gdq.sinks`.

    The entry point is named after the scheme of its addresses. It is called with the address and the settings (texts by
    name), and gives the sink; GdqError for an address or a setting that is wrong.
    """

    def send(self, lanes: Sequence[Sequence[Record]]) -> Iterable[tuple[Record, RetryOutcome | None]]:
        """Send the records of each lane in their order, and tell of each that the receiver has it, or why not.

        None: it has it, durably. gdq.Retry: this record is tried again later, gdq.DeadLetter: it never will be; nothing
        after it in its lane may have been sent. Lanes are independent, and may be sent side by side. Raises
        gdq.SinkUnavailable if the receiver as a whole takes nothing: all that was not told of is sent again.
        """

    def close(self) -> None:
        """Close its connections."""


@runtime_checkable
class TransactionalSink(Sink, Protocol):
    """A sink whose transactions hold all records of a batch and a note, so that it has each record exactly once.

    What send() tells counts with the transaction.
    """

    def begin(self, relay: str) -> str | None:
        """Begin a transaction of a relay; returns the note of its last committed one, None if there is none.

        Ends what another process has begun for the relay.
        """

    def commit(self, note: str) -> bool:
        """Commit all records and the note; False if nothing was sent, and the same is to be sent again.

        Then send() tells of more records that they are refused. SinkUnavailable if it may or may not have happened:
        the next begin() knows.
        """

    def abort(self) -> None:
        """Give the transaction up."""


def open_sink(address: str, settings: Mapping[str, str]) -> Sink:
    """The sink of an address, by its scheme; GdqError if no sink has it."""
    scheme = address.partition("://")[0]
    opener: Callable[[str, Mapping[str, str]], Sink]
    if scheme in _OWN:
        module, _, function = _OWN[scheme].partition(":")
        opener = getattr(importlib.import_module(module), function)
    else:
        found = list(entry_points(group=ENTRY_POINTS, name=scheme))
        if not found:
            others = {point.name for point in entry_points(group=ENTRY_POINTS)}
            known = ", ".join(f"{name}://" for name in sorted(others | set(_OWN)))
            raise GdqError(f"no sink for {address!r}", hint=f"An address begins with one of: {known}")
        opener = found[0].load()
    return opener(address, settings)


def check_template(template: str) -> None:
    """GdqError if a template has a place that Record.place() cannot fill."""
    for name in _PLACE.findall(template):
        if name not in _PLACES:
            raise GdqError(f"unknown place {{{name}}} in {template}", hint=f"There are: {', '.join(_PLACES)}.")


class Settings:
    """The settings of a sink, taken one by one; done() refuses those that nobody took."""

    def __init__(self, kind: str, given: Mapping[str, str]) -> None:
        self._kind = kind
        self._left = dict(given)
        self._known: list[str] = []

    def text(self, name: str, default: str) -> str:
        """A setting as text."""
        self._known.append(name)
        return self._left.pop(name, default)

    def number(self, name: str, default: float, *, least: float = 0) -> float:
        """A setting as a number, at least `least`."""
        text = self.text(name, str(default))
        try:
            number = float(text)
        except ValueError:
            number = least - 1
        if not least <= number < float("inf"):
            raise GdqError(f"setting {name} of {self._kind} must be a number from {least:g} on, not {text!r}")
        return number

    def prefixed(self, prefix: str) -> dict[str, str]:
        """All settings whose name begins with a prefix, without it."""
        self._known.append(f"{prefix}NAME")
        names = [name for name in self._left if name.startswith(prefix)]
        return {name.removeprefix(prefix): self._left.pop(name) for name in names}

    def done(self) -> None:
        """GdqError if a setting is left that the sink does not have."""
        for name in self._left:
            raise GdqError(f"{self._kind} has no setting {name}", hint=f"There are: {', '.join(self._known)}.")
