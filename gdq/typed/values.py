"""The values of events: PostgreSQL's in Python, by psycopg's adapters, and in JSON, as `gdq consume` prints them.

A type whose values Python holds exactly comes as Python's; every other type, and a date or time outside of Python's
range, comes as PostgreSQL's text. The names of types are those of the log, as format_type() gives them.
"""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Callable, Mapping
from datetime import UTC, date, datetime, time, timedelta
from decimal import Decimal, InvalidOperation
from typing import Any
from uuid import UUID

from psycopg import DataError
from psycopg._cursor_base import BaseCursor
from psycopg.adapt import AdaptersMap, Loader, Transformer
from psycopg.pq import Format
from psycopg.types.datetime import (
    DateBinaryLoader,
    TimeBinaryLoader,
    TimestampBinaryLoader,
    TimetzBinaryLoader,
)

_SMALL_REAL = 1.2e-38
_DAY = 86_400_000_000
_EPOCH = date(2000, 1, 1).toordinal()
_EPOCH_UTC = datetime(2000, 1, 1, tzinfo=UTC)
_INT64 = struct.Struct(">q")
# The calendar repeats itself.
_CYCLE_DAYS, _CYCLE_YEARS = 146_097, 400
_INFINITE_DAYS = {2**31 - 1: "infinity", -(2**31): "-infinity"}
_INFINITE_TIMES = {2**63 - 1: "infinity", -(2**63): "-infinity"}

# Large integers come as text, so a number of 16 digits or more is a float.
_FLOAT_DIGITS = 16

Types = Mapping[str, str]
Image = dict[str, Any]


class _RealLoader(Loader):
    """A real as the float of its shortest digits, as PostgreSQL writes it: 0.1 and not 0.10000000149011612."""

    format = Format.BINARY

    def load(self, data: Any) -> float:
        return short_real(bytes(data))


def short_real(data: bytes) -> float:
    """The float of the shortest digits that name a real, four bytes."""
    (value,) = struct.unpack(">f", data)
    if not math.isfinite(value):
        return float(value)
    # a number near 0 has fewer digits
    for digits in range(6 if abs(value) > _SMALL_REAL else 1, 9):
        short = float(f"{value:.{digits}g}")
        try:
            if struct.pack(">f", short) == data:
                return short
        except OverflowError:  # rounded up beyond the largest real
            continue
    return float(f"{value:.9g}")


def _date_text(days: int, time_text: str = "") -> str:
    """PostgreSQL's text of a day, counted from 2000-01-01."""
    cycles, rest = divmod(days + _EPOCH - 1, _CYCLE_DAYS)
    day = date.fromordinal(rest + 1)
    year = day.year + cycles * _CYCLE_YEARS
    return f"{year if year > 0 else 1 - year:04}-{day:%m-%d}{time_text}{'' if year > 0 else ' BC'}"


def _time_text(microseconds: int) -> str:
    seconds, fraction = divmod(microseconds, 1_000_000)
    text = f"{seconds // 3600:02}:{seconds // 60 % 60:02}:{seconds % 60:02}"
    return f"{text}.{fraction:06}".rstrip("0") if fraction else text


def _timestamp_text(microseconds: int, zone: str = "") -> str:
    days, rest = divmod(microseconds, _DAY)
    return _INFINITE_TIMES.get(microseconds) or _date_text(days, f" {_time_text(rest)}{zone}")


class _DateLoader(DateBinaryLoader):
    def load(self, data: Any) -> Any:
        try:
            return super().load(data)
        except DataError:
            (days,) = struct.unpack(">i", data)
            return _INFINITE_DAYS.get(days) or _date_text(days)


class _TimeLoader(TimeBinaryLoader):
    def load(self, data: Any) -> Any:
        try:
            return super().load(data)
        except DataError:
            return _time_text(*struct.unpack(">q", data))


class _TimetzLoader(TimetzBinaryLoader):
    def load(self, data: Any) -> Any:
        try:
            return super().load(data)
        except DataError:
            microseconds, west = struct.unpack(">qi", data)
            return _time_text(microseconds) + _offset_text(-west)


class _TimestampLoader(TimestampBinaryLoader):
    def load(self, data: Any) -> Any:
        try:
            return super().load(data)
        except DataError:
            return _timestamp_text(*struct.unpack(">q", data))


class _UtcLoader(Loader):
    """A timestamptz in UTC, as event.time is, whatever the session's time zone."""

    format = Format.BINARY

    def load(self, data: Any) -> Any:
        (microseconds,) = _INT64.unpack(data)
        try:
            return _EPOCH_UTC + timedelta(microseconds=microseconds)
        except OverflowError:
            return _timestamp_text(microseconds, "+00")


_WIDE_LOADERS: dict[str, type[Loader]] = {
    "date": _DateLoader,
    "time": _TimeLoader,
    "timetz": _TimetzLoader,
    "timestamp": _TimestampLoader,
}


def adapt_events(adapters: AdaptersMap) -> None:
    """Register the loaders for the binary columns of events where psycopg's would give another value."""
    adapters.register_loader("float4", _RealLoader)
    adapters.register_loader("timestamptz", _UtcLoader)


def load_wide_rows(cursor: BaseCursor[Any, Any]) -> list[tuple[Any, ...]]:
    """The rows of a binary result that psycopg has refused with DataError: dates and times beyond Python's as text."""
    for name, loader in _WIDE_LOADERS.items():
        cursor.adapters.register_loader(name, loader)
    result = cursor.pgresult
    if result is None:
        raise AssertionError("a cursor without a result refused its rows")
    transformer = Transformer(cursor)
    transformer.set_pgresult(result)
    return transformer.load_rows(0, result.ntuples, tuple)


def _time(text: str) -> time:
    """A time; ValueError for 24:00, which later Pythons take for 00:00."""
    if text.startswith("24"):
        raise ValueError(text)
    return time.fromisoformat(text)


_FROM_JSON: dict[str, Callable[[Any], Any]] = {
    "bigint": int,
    "oid": int,
    "real": float,
    "double precision": float,
    "numeric": Decimal,
    "bytea": lambda text: bytes.fromhex(text.removeprefix("\\x")),
    "uuid": UUID,
    "date": date.fromisoformat,
    "time without time zone": _time,
    "time with time zone": _time,
    "timestamp without time zone": datetime.fromisoformat,
    "timestamp with time zone": datetime.fromisoformat,
}


def typed_image(image: Image | None, types: Types) -> Image | None:
    """An image in JSON's values with Python's, as psycopg would give them; types of columns by name."""
    return None if image is None else {name: typed_value(value, types.get(name, "")) for name, value in image.items()}


def typed_value(value: Any, type_: str) -> Any:
    """A value in JSON's form as Python's; as it is if its type has none, or does not hold it."""
    convert = _FROM_JSON.get(type_)
    if convert is None or value is None:
        return value
    try:
        return convert(value)
    except (ValueError, TypeError, InvalidOperation):
        return value


_FROM_TEXT: dict[str, Callable[[str], Any]] = {
    "boolean": lambda text: text == "t",
    "smallint": int,
    "integer": int,
}


def value_of_text(text: str, type_: str) -> Any:
    """A value from its text, rendered under READ_SETTINGS; the text itself if Python's type does not hold it."""
    convert = _FROM_TEXT.get(type_)
    return typed_value(text, type_) if convert is None else convert(text)


def _float_json(value: float) -> Any:
    if not math.isfinite(value):
        return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"
    if value == 0 and math.copysign(1, value) < 0:
        return "-0"
    if value.is_integer():
        whole = int(value)
        return whole if len(str(whole)) < _FLOAT_DIGITS else value
    return value


def _numeric_json(value: Decimal) -> str:
    return f"{value:f}" if value.is_finite() else str(value)


def _offset_text(seconds: int) -> str:
    sign, seconds = "-" if seconds < 0 else "+", abs(seconds)
    parts = [seconds // 3600, seconds // 60 % 60, seconds % 60]
    while len(parts) > 1 and not parts[-1]:
        parts.pop()
    return sign + ":".join(f"{part:02}" for part in parts)


def _trimmed(text: str) -> str:
    return text.rstrip("0") if "." in text else text


def _time_json(value: time) -> str:
    zone = value.utcoffset()
    text = _trimmed(value.replace(tzinfo=None).isoformat())
    return text if zone is None else text + _offset_text(round(zone.total_seconds()))


def _timestamptz_json(value: datetime) -> str:
    return f"{_trimmed(str(value.replace(tzinfo=None)))}+00"


# A value of another class, such as the text of an infinity, stays as it is.
_TO_JSON: dict[str, tuple[type, Callable[[Any], Any]]] = {
    "bigint": (int, str),
    "oid": (int, str),
    "real": (float, _float_json),
    "double precision": (float, _float_json),
    "numeric": (Decimal, _numeric_json),
    "bytea": (bytes, lambda value: f"\\x{value.hex()}"),
    "uuid": (UUID, str),
    "date": (date, str),
    "time without time zone": (time, _time_json),
    "time with time zone": (time, _time_json),
    "timestamp without time zone": (datetime, lambda value: _trimmed(str(value))),
    "timestamp with time zone": (datetime, _timestamptz_json),
}


def json_image(image: Image | None, types: Types) -> Image | None:
    """An image with JSON's values, as get_batch() gives them; types of columns by name."""
    return None if image is None else {name: json_value(value, types.get(name, "")) for name, value in image.items()}


def json_value(value: Any, type_: str) -> Any:
    """A value of an event in JSON's form: PostgreSQL's text if JSON cannot hold every value of its type."""
    known = _TO_JSON.get(type_)
    return known[1](value) if known is not None and isinstance(value, known[0]) else value


def json_integer(text: str) -> int | float:
    """A JSON number without a fraction. Large integers come as text, so a number of 16 digits or more is a float."""
    return int(text) if len(text) < _FLOAT_DIGITS else float(text)


def load_json(data: str | bytes) -> Any:
    """JSON's values as Python has them: a number of 16 digits or more is a float."""
    return json.loads(data, parse_int=json_integer)
