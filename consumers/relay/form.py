"""The forms of a record: gdq's JSON, CloudEvents, or Debezium's envelope."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any, Literal, Protocol
from urllib.parse import quote

from psycopg import Connection

from gdq.consumers.debezium.envelope import Envelope
from gdq.consumers.printer import event_json
from gdq.consumers.relay.sink import Record
from gdq.json_text import json_text
from gdq.source import Event, iso_utc

FormName = Literal["json", "cloudevents", "debezium"]

# What an event has more when it comes again: a record must not differ from attempt to attempt.
_OF_ATTEMPT = ("retries",)


class Form(Protocol):
    """Makes the records of an event; none if the form has none for it."""

    def __call__(self, event: Event, key: str | None) -> Iterator[Record]:
        """The records of one event, in order. `key`: as Place has it."""


def form_named(name: FormName, connection: Connection[Any], queue: str, era: str, *, tombstones: bool = False) -> Form:
    """The form of this name. `era`: of the queue. `tombstones`: Debezium's records without a value."""
    if name == "debezium":
        return _Debezium(connection, queue, era, tombstones=tombstones)
    if name == "cloudevents":
        return _CloudEvents(connection, queue, era)
    return _Json(queue, era)


def _id(queue: str, era: str, event: Event) -> str:
    # in mode pk a delete and an insert have one number
    return f"{quote(queue, safe='')}/{era}/{event.id}/{event.op}"


def _bytes(value: Any) -> bytes:
    return json_text(value).encode("utf-8", "surrogatepass")


class _Json:
    """The line that `gdq consume` prints."""

    def __init__(self, queue: str, era: str) -> None:
        self._queue = queue
        self._era = era

    def __call__(self, event: Event, key: str | None) -> Iterator[Record]:
        value = {name: found for name, found in event_json(event).items() if name not in _OF_ATTEMPT}
        yield Record(_id(self._queue, self._era, event), self._queue, key, _bytes(value), "application/json", event)


class _CloudEvents:
    """CloudEvents 1.0 in JSON, structured: all attributes and the data are the value."""

    def __init__(self, connection: Connection[Any], queue: str, era: str) -> None:
        self._queue = queue
        self._era = era
        self._source = f"/gdq/{quote(connection.info.dbname, safe='')}/{quote(queue, safe='')}"

    def __call__(self, event: Event, key: str | None) -> Iterator[Record]:
        number = _id(self._queue, self._era, event)
        made: dict[str, Any] = {"specversion": "1.0", "id": number, "source": self._source, "type": f"gdq.{event.op}"}
        made |= {"time": iso_utc(event.time), "sequence": f"{event.id:020}", "datacontenttype": "application/json"}
        if event.table:
            made["subject"] = event.table
        if key is not None:
            made["partitionkey"] = key
        made |= self._message(event) if event.op == "message" else {"data": self._data(event)}
        yield Record(number, self._queue, key, _bytes(made), "application/cloudevents+json", event)

    def _data(self, event: Event) -> dict[str, Any]:
        whole = event_json(event)
        return {name: whole[name] for name in ("op", "table", "key", "old", "new", "xid", "unchanged") if name in whole}

    def _message(self, event: Event) -> dict[str, Any]:
        """The type and data of a message are those of its CloudEvent."""
        new = event_json(event)["new"] or {}
        kind = {"type": new["type"]} if new.get("type") else {}
        return kind | {"data": new.get("data")}


class _Debezium:
    """Debezium's envelope: the value, the key as JSON, and headers."""

    def __init__(self, connection: Connection[Any], queue: str, era: str, *, tombstones: bool) -> None:
        self._queue = queue
        self._era = era
        self._envelope = Envelope(connection, queue, tombstones=tombstones)

    def __call__(self, event: Event, key: str | None) -> Iterator[Record]:  # noqa: ARG002 (Debezium has its own)
        for place, made in enumerate(self._envelope.records(event)):
            yield Record(
                f"{_id(self._queue, self._era, event)}/{place}",
                self._queue,
                None if made["key"] is None else json_text(made["key"]),
                None if made["value"] is None else _bytes(made["value"]),
                "application/json",
                event,
                {name: json.dumps(value) for name, value in made.get("headers", {}).items()},
            )
