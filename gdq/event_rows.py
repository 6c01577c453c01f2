"""Events from the cursors of gdq.open_events(), without I/O: rows decoded, and the parts merged in order.

A reader fetches what wanted() names, gives the rows to EventPart.add(), and yields what take() gives.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from operator import attrgetter
from typing import Any

from gdq.errors import GdqError
from gdq.source import Event, Images, make_event
from gdq.typed.values import Image, typed_image

_Row = Sequence[Any]
_Decode = Callable[[Sequence[_Row]], list[Event]]

# Rows fetched from a cursor at a time: a row may hold two images of megabytes. Of many cursors, the first fetch brings
# fewer of each.
FETCH_ROWS = 500
_FIRST_ROWS = 20

_OPS = {"I": "insert", "U": "update", "D": "delete"}
_ROW_OPS = frozenset(_OPS.values())

_place = attrgetter("id", "op")


@dataclass(frozen=True, slots=True)
class EventChoice:
    """What is read of events.

    `images`: both, or new for those without old images. `columns` of the images; None: all.
    """

    images: Images = "both"
    columns: tuple[str, ...] | None = None

    @classmethod
    def of(cls, images: Images, columns: Collection[str] | None) -> EventChoice:
        """The choice that the arguments of events() make."""
        return cls(images, None if columns is None else tuple(columns))

    def check(self, table: str, names: Collection[str]) -> None:
        """GdqError for other `images`, or a column that the table, with columns of these names, does not have."""
        if self.images not in ("both", "new"):
            raise GdqError(f"images must be both or new, not {self.images}")
        missing = [name for name in self.columns or () if name not in names]
        if missing:
            raise GdqError(f"table {table} has no captured column {', '.join(missing)}")

    def has(self, name: str) -> bool:
        """Whether a column of the images is read."""
        return self.columns is None or name in self.columns

    def values(self, name: str) -> list[Any]:
        """The last arguments of open_events()."""
        return [name, self.images, None if self.columns is None else list(self.columns)]

    def parts(self, listed: Sequence[_Row]) -> EventParts:
        """The parts that open_events() has listed."""
        return EventParts(listed, self)

    def old(self, image: Image | None) -> Image | None:
        """What is read of an old image."""
        return self.new(image) if self.images == "both" else None

    def new(self, image: Image | None) -> Image | None:
        """What is read of a new image."""
        if image is None or self.columns is None:
            return image
        return {name: value for name, value in image.items() if self.has(name)} or None


class EventPart:
    """One cursor of a batch's events, in order: the rows fetched and not yet given out. `rows`: how many to fetch."""

    def __init__(self, name: str, decode: _Decode, rows: int) -> None:
        self.name = name
        self.rows = rows
        self._decode = decode
        self.events: list[Event] = []
        self.ended = False

    def add(self, rows: Sequence[_Row]) -> None:
        """Take the rows of a fetch."""
        self.ended = len(rows) < self.rows
        self.events += self._decode(rows)
        self.rows = FETCH_ROWS


class EventParts:
    """The parts of a batch's events: retries first, then all others merged. `listed`: the rows of open_events()."""

    def __init__(self, listed: Sequence[_Row], choice: EventChoice) -> None:
        many = max(_FIRST_ROWS, FETCH_ROWS // len(listed))
        self._groups: list[list[EventPart]] = [[], []]
        self.first: EventPart | None = None
        for name, kind, layout in listed:
            decode = decode_events(choice) if layout is None else decode_rows(layout, choice.images)
            part = EventPart(name, decode, FETCH_ROWS if self.first is None else many)
            self._groups[kind != "retries"].append(part)
            self.first = self.first or part

    def left(self) -> bool:
        """Whether events may be left."""
        return any(self._groups)

    def wanted(self) -> list[EventPart]:
        """The parts to fetch before take() may be called."""
        while self._groups and not self._groups[0]:
            del self._groups[0]
        return [part for part in self._groups[0] if not part.events and not part.ended] if self._groups else []

    def take(self) -> list[Event]:
        """The events up to the last place that each part is known to."""
        parts = self._groups[0]
        known = [_place(part.events[-1]) for part in parts if not part.ended]
        until = min(known) if known else None
        ready: list[Event] = []
        for part in parts:
            count = len(part.events)
            if until is not None:
                while count and _place(part.events[count - 1]) > until:
                    count -= 1
            ready += part.events[:count]
            del part.events[:count]
        self._groups[0] = [part for part in parts if part.events or not part.ended]
        return sorted(ready, key=_place) if len(parts) > 1 else ready


def decode_rows(layout: Sequence[dict[str, Any]], wanted: Images) -> _Decode:
    """Makes events of the rows of part `rows`. `layout`: its columns."""
    types = {column["name"]: column["type"] for column in layout}
    keys = [column["name"] for column in layout if column["key"]]
    olds = [column["name"] for column in layout if column["old"]]
    news = [column["name"] for column in layout if column["new"]]
    shown_new = [column["name"] for column in layout if column["logged"]]
    shown_old = shown_new if wanted == "both" else []
    middle = 6 + len(olds)
    end = middle + len(news)
    may_lack = any(column.get("unchanged") for column in layout)

    def decode(rows: Sequence[_Row]) -> list[Event]:
        events = []
        for row in rows:
            number, xid, time, op, table, origin = row[:6]
            utc = time if time.tzinfo is UTC else time.astimezone(UTC)
            if op == "!":
                events.append(_not_followed(number, xid, utc, table, origin))
                continue
            old = None if op == "I" else dict(zip(olds, row[6:middle], strict=True))
            new = None if op == "D" else dict(zip(news, row[middle:end], strict=True))
            image: Any = old if new is None else new
            key = {name: image[name] for name in keys} if keys else None
            if old is not None and olds != shown_old:
                old = {name: old[name] for name in shown_old}
            if new is not None and news != shown_new:
                new = {name: new[name] for name in shown_new}
            lacks: tuple[str, ...] = ()
            if may_lack and row[end]:
                lacks = tuple(name for name in shown_new if name in row[end])
                for name in lacks:
                    for one in (old, new):
                        if one is not None:
                            one.pop(name, None)
            images = (old or None, new or None)  # an image without a column is none
            events.append(make_event(number, xid, utc, _OPS[op], table, key, *images, 0, origin, types, lacks))
        return events

    return decode


def _not_followed(number: int, xid: int, time: datetime, table: str, origin: str | None) -> Event:
    gap = {"kind": "gap", "reason": "written after an ALTER that capture had not followed"}
    return make_event(number, xid, time, "resync", table, None, None, gap, 0, origin, None, ())


def decode_events(choice: EventChoice) -> _Decode:
    """Makes events of the rows of the parts `retries` and `events`, whose images are in JSON's form."""

    def decode(rows: Sequence[_Row]) -> list[Event]:
        events = []
        for number, xid, time, op, table, *found, message, origin, retries, types in rows:
            lacks: tuple[str, ...] = ()
            if op not in _ROW_OPS:
                types = None  # noqa: PLW2901
                if message is not None:
                    found[2] = json.loads(message)
            elif types is not None:
                key, old, new = found
                if op == "update" and new is not None and len(new) < len(types):
                    held = new.keys() | (key or {}).keys()
                    lacks = tuple(name for name in types if name not in held and choice.has(name))
                sides = (key, choice.old(old), choice.new(new))
                found = [typed_image(image, types) for image in sides]  # noqa: PLW2901
            utc = time.astimezone(UTC)
            events.append(make_event(number, xid, utc, op, table, *found, retries, origin, types, lacks))
        return events

    return decode
