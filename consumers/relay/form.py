"""The forms of a record that are JSON: gdq's own, CloudEvents, Debezium's envelope."""

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

FormName = Literal["json", "cloudevents", "debezium", "avro"]
JsonFormName = Literal["json", "cloudevents", "debezium"]

# What an event has more when it comes again: a record must not differ from attempt to attempt.
_OF_ATTEMPT = ("retries",)


class Form(Protocol):
    """Makes the records of an event; none if the form has none for it. `takes_json`: of events with JSON's values."""

    takes_json: bool

    def __call__(self, event: Event, key: str | None, number: str) -> Iterator[Record]:
        """The records of one event, in order. `key`: as Place has it. `number`: which no other event has.

        DeadLetter for an event that the form cannot hold.
        """


def json_form(
    name: JsonFormName, connection: Connection[Any], queue: str, era: str, *, tombstones: bool = False
) -> Form:
    """The form of this name. `era`: of the queue. `tombstones`: Debezium's records without a value."""
    if name == "debezium":
        return _Debezium(connection, queue, era, tombstones=tombstones)
    if name == "cloudevents":
        return _CloudEvents(connection, queue, era)
    return _Json(queue, era)


def _id(queue: str, era: str, event: Event, number: str) -> str:
    # in mode pk a delete and an insert have one number
    return f"{quote(queue, safe='')}/{era}/{number}/{event.op}"


def _bytes(value: Any) -> bytes:
    return json_text(value).encode("utf-8", "surrogatepass")


class _Json:
    """The line that `gdq consume` prints."""

    takes_json = True

    def __init__(self, queue: str, era: str) -> None:
        self._queue = queue
        self._era = era

    def __call__(self, event: Event, key: str | None, number: str) -> Iterator[Record]:
        value = {name: found for name, found in event_json(event).items() if name not in _OF_ATTEMPT}
        id_ = _id(self._queue, self._era, event, number)
        yield Record(id_, self._queue, key, _bytes(value), "application/json", event)


class _CloudEvents:
    """CloudEvents 1.0 in JSON, structured: all attributes and the data are the value."""

    takes_json = True

    def __init__(self, connection: Connection[Any], queue: str, era: str) -> None:
        self._queue = queue
        self._era = era
        self._source = f"/gdq/{quote(connection.info.dbname, safe='')}/{quote(queue, safe='')}"

    def __call__(self, event: Event, key: str | None, number: str) -> Iterator[Record]:
        id_ = _id(self._queue, self._era, event, number)
        made: dict[str, Any] = {"specversion": "1.0", "id": id_, "source": self._source, "type": f"gdq.{event.op}"}
        made |= {"time": iso_utc(event.time), "sequence": f"{event.id:020}", "datacontenttype": "application/json"}
        if event.table:
            made["subject"] = event.table
        if key is not None:
            made["partitionkey"] = key
        made |= self._message(event) if event.op == "message" else {"data": self._data(event)}
        yield Record(id_, self._queue, key, _bytes(made), "application/cloudevents+json", event)

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

    takes_json = True

    def __init__(self, connection: Connection[Any], queue: str, era: str, *, tombstones: bool) -> None:
        self._queue = queue
        self._era = era
        self._envelope = Envelope(connection, queue, tombstones=tombstones)

    def __call__(self, event: Event, key: str | None, number: str) -> Iterator[Record]:  # noqa: ARG002 (it has its own)
        for place, made in enumerate(self._envelope.records(event)):
            yield Record(
                f"{_id(self._queue, self._era, event, number)}/{place}",
                self._queue,
                None if made["key"] is None else json_text(made["key"]),
                None if made["value"] is None else _bytes(made["value"]),
                "application/json",
                event,
                {name: json.dumps(value) for name, value in made.get("headers", {}).items()},
            )
