"""Converts the values of an Event to the JSON of Debezium's PostgreSQL connector.

A value that does not have the form of its column's type stays unchanged: it is older than a change of the type.
"""

from __future__ import annotations

import base64
import json
import re
import struct
from collections.abc import Callable
from dataclasses import dataclass
from datetime import date
from typing import Any

_DAY_US = 86_400_000_000
# 365.25 / 12 days, as Debezium counts a month of an interval
_MONTH_US = 2_629_800_000_000
_EPOCH_DAY = date(1970, 1, 1).toordinal()
_ERA_DAYS, _ERA_YEARS = 146_097, 400  # the calendar repeats after these days and years
_FOREVER = {"infinity": 9_223_372_036_825_200_000, "-infinity": -9_223_372_036_832_400_000}
_MILLISECONDS = range(4)  # digits of a second
_DIGITS = range(7)

_DATE = r"(?P<year>\d{4,})-(?P<month>\d\d)-(?P<day>\d\d)"
_TIME = r"(?P<h>\d\d):(?P<m>\d\d):(?P<s>\d\d)(?:\.(?P<us>\d{1,6}))?"
_ZONE = r"(?P<zone>[+-])(?P<zh>\d\d)(?::(?P<zm>\d\d))?(?::(?P<zs>\d\d))?"
_IS_DATE = re.compile(rf"{_DATE}(?P<bc> BC)?")
_IS_TIME = re.compile(_TIME)
_IS_TIMETZ = re.compile(rf"{_TIME}{_ZONE}")
_IS_TIMESTAMP = re.compile(rf"{_DATE} {_TIME}(?P<bc> BC)?")
_IS_TIMESTAMPTZ = re.compile(rf"{_DATE} {_TIME}\+00(?P<bc> BC)?")
_IS_INTERVAL = re.compile(
    r"(?:(?P<years>[+-]?\d+) years? ?)?(?:(?P<months>[+-]?\d+) mons? ?)?(?:(?P<days>[+-]?\d+) days? ?)?"
    r"(?:(?P<sign>[+-]?)(?P<h>\d+):(?P<m>\d\d):(?P<s>\d\d)(?:\.(?P<us>\d{1,6}))?)?"
)
_IS_POINT = re.compile(r"\(([^,()]+),([^,()]+)\)")
_IS_MONEY = re.compile(r"-?\$[\d,]+\.\d+")
_PAIR = re.compile(r'"((?:[^"\\]|\\.)*)"=>(?:"((?:[^"\\]|\\.)*)"|NULL)(?:, |$)', re.DOTALL)
_ITEM = re.compile(r'"((?:[^"\\]|\\.)*)"|([^",{}]+)', re.DOTALL)


@dataclass(frozen=True, slots=True)
class DebeziumKind:
    """The base type of a column: name and modifier (-1: none); `array`: the column is an array of this type."""

    name: str
    modifier: int = -1
    array: bool = False


def unavailable_value(kind: DebeziumKind | None) -> Any:
    """What stands for a large value that an update left as it was and that was not sent: Debezium's default."""
    if kind is not None and kind.array:
        return [unavailable_value(DebeziumKind(kind.name, kind.modifier))]
    text = "__debezium_unavailable_value"
    return base64.b64encode(text.encode()).decode() if kind is not None and kind.name == "bytea" else text


def debezium_value(value: Any, kind: DebeziumKind | None) -> Any:
    """The value in Debezium's form; unchanged if Debezium has no special form for the type, or the type is unknown."""
    if value is None or kind is None:
        return value
    if kind.array:
        return _array(value, kind)
    convert = _CONVERSIONS.get(kind.name)
    try:
        return value if convert is None else convert(value, kind.modifier)
    except (ValueError, TypeError):
        return value


def _matched(pattern: re.Pattern[str], text: str) -> re.Match[str]:
    found = pattern.fullmatch(text)
    if found is None:
        raise ValueError(text)
    return found


def _days(found: re.Match[str]) -> int:
    """Days since 1970-01-01, also for years outside of Python's dates."""
    year = int(found["year"])
    year = 1 - year if found["bc"] else year
    eras = (year - 1) // _ERA_YEARS
    within = date(year - eras * _ERA_YEARS, int(found["month"]), int(found["day"])).toordinal()
    return within + eras * _ERA_DAYS - _EPOCH_DAY


def _microseconds(found: re.Match[str]) -> int:
    seconds = (int(found["h"]) * 60 + int(found["m"])) * 60 + int(found["s"])
    return seconds * 1_000_000 + int((found["us"] or "").ljust(6, "0"))


def _of_precision(microseconds: int, modifier: int) -> int:
    return microseconds // 1000 if modifier in _MILLISECONDS else microseconds


def _timestamp(text: str, modifier: int) -> int:
    if text in _FOREVER:
        return _FOREVER[text]
    found = _matched(_IS_TIMESTAMP, text)
    return _of_precision(_days(found) * _DAY_US + _microseconds(found), modifier)


def _timestamptz(text: str, modifier: int) -> str:
    """As many digits of a second as the type has, years as in ISO 8601: the one before year 1 is year 0."""
    found = _matched(_IS_TIMESTAMPTZ, text)
    year = int(found["year"])
    year = 1 - year if found["bc"] else year
    sign = "-" if year < 0 else "+" if year > 9999 else ""
    digits = modifier if modifier in _DIGITS else 6
    fraction = "." + (found["us"] or "").ljust(digits, "0") if digits else ""
    date_ = f"{sign}{abs(year):04}-{found['month']}-{found['day']}"
    return f"{date_}T{found['h']}:{found['m']}:{found['s']}{fraction}Z"


def _timetz(text: str, _modifier: int) -> str:
    found = _matched(_IS_TIMETZ, text)
    offset = (int(found["zh"]) * 60 + int(found["zm"] or 0)) * 60 + int(found["zs"] or 0)
    utc = _microseconds(found) - (offset if found["zone"] == "+" else -offset) * 1_000_000
    seconds, micros = divmod(utc % _DAY_US, 1_000_000)
    fraction = f".{micros:06}".rstrip("0") if micros else ""
    return f"{seconds // 3600:02}:{seconds // 60 % 60:02}:{seconds % 60:02}{fraction}Z"


def _interval(text: str, _modifier: int) -> int:
    found = _matched(_IS_INTERVAL, text)
    if not text:
        raise ValueError(text)
    months = int(found["years"] or 0) * 12 + int(found["months"] or 0)
    time = _microseconds(found) if found["h"] else 0
    return months * _MONTH_US + int(found["days"] or 0) * _DAY_US + (-time if found["sign"] == "-" else time)


def _bytea(text: str, _modifier: int) -> str:
    if not text.startswith("\\x"):
        raise ValueError(text)
    return base64.b64encode(bytes.fromhex(text[2:])).decode()


def _bits(text: str, modifier: int) -> bool | str:
    if set(text) - {"0", "1"}:
        raise ValueError(text)
    if modifier == 1:
        return text == "1"
    return base64.b64encode(int(text or "0", 2).to_bytes((len(text) + 7) // 8, "little")).decode()


def _float(value: Any, _modifier: int) -> Any:
    return value if value in ("NaN", "Infinity", "-Infinity") else float(value)


def _money(text: str, _modifier: int) -> str:
    return _matched(_IS_MONEY, text)[0].replace("$", "").replace(",", "")


def _point(text: str, modifier: int) -> dict[str, Any]:
    """The coordinates, and the point once more in the well-known binary of OGC, little-endian."""
    found = _matched(_IS_POINT, text)
    wkb = struct.pack("<BIdd", 1, 1, float(found[1]), float(found[2]))
    x, y = (_float(coordinate, modifier) for coordinate in found.groups())
    return {"x": x, "y": y, "wkb": base64.b64encode(wkb).decode(), "srid": None}


def _hstore(text: str, _modifier: int) -> str:
    pairs, at = {}, 0
    while at < len(text):
        found = _PAIR.match(text, at)
        if found is None:
            raise ValueError(text)
        pairs[_unescaped(found[1])] = None if found[2] is None else _unescaped(found[2])
        at = found.end()
    return json.dumps(pairs, ensure_ascii=False, separators=(",", ":"))


def _unescaped(text: str) -> str:
    return re.sub(r"\\(.)", r"\1", text, flags=re.DOTALL)


def _array(value: Any, kind: DebeziumKind) -> Any:
    """A list of the elements; the text for an array whose indexes do not start at 1, which a list cannot show."""
    if not isinstance(value, str) or not value.startswith("{") or kind.name == "box":  # boxes have commas
        return value
    try:
        items, end = _items(value, 0, DebeziumKind(kind.name, kind.modifier))
    except (ValueError, IndexError):
        return value
    return items if end == len(value) else value


def _items(text: str, start: int, kind: DebeziumKind) -> tuple[list[Any], int]:
    items: list[Any] = []
    at = start + 1
    if text[at] == "}":
        return items, at + 1
    while True:
        if text[at] == "{":
            inner, at = _items(text, at, kind)
            items.append(inner)
        else:
            found = _ITEM.match(text, at)
            if found is None:
                raise ValueError(text)
            plain = found[1] is None
            item = found[2] if plain else _unescaped(found[1])
            items.append(None if plain and item == "NULL" else debezium_value(_json(item, kind.name), kind))
            at = found.end()
        if text[at] == "}":
            return items, at + 1
        if text[at] != ",":
            raise ValueError(text)
        at += 1


def _json(text: str, type_: str) -> Any:
    """An element's text converted to an event's value of its type."""
    if type_ == "bool":
        return text == "t"
    return int(text) if type_ in ("int2", "int4") else text


_CONVERSIONS: dict[str, Callable[[Any, int], Any]] = {
    "int8": lambda value, _: int(value),
    "oid": lambda value, _: int(value),
    "float4": _float,
    "float8": _float,
    "money": _money,
    "bytea": _bytea,
    "bit": _bits,
    "varbit": _bits,
    "date": lambda text, _: _days(_matched(_IS_DATE, text)),
    "time": lambda text, modifier: _of_precision(_microseconds(_matched(_IS_TIME, text)), modifier),
    "timetz": _timetz,
    "timestamp": _timestamp,
    "timestamptz": _timestamptz,
    "interval": _interval,
    "point": _point,
    "hstore": _hstore,
}
