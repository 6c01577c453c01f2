"""Options of Spark's data source gdq: which there are, and what their values may be; one clear line for others."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from typing import Any, Literal

from gdq.errors import GdqError
from gdq.source import Images, Position

_SNAPSHOT = re.compile(r"\d+:\d+:(\d+(,\d+)*)?")
_EXPORTED = re.compile(r"[0-9A-Fa-f]+-[0-9A-Fa-f]+-\d+")

_ALWAYS = ("dsn", "service", "queue", "table", "columns", "as_text", "partition_bytes")
_BATCH = (*_ALWAYS, "from", "to", "images", "keys", "snapshot")
_STREAM = (*_ALWAYS, "consumer", "from", "images", "max_events", "gaps")


def check_options(options: Mapping[str, str], *, stream: bool) -> None:
    """GdqError unless all options are known, and their values are such as are allowed."""
    if "statements" in options:
        return
    known = _STREAM if stream else _BATCH
    if "consumer" in options and not stream:
        raise GdqError('the option "consumer" belongs to spark.readStream')
    for name in options:
        if name.lower() not in known:
            listed = ", ".join(known)
            raise GdqError(f'the data source gdq has no option "{name}" for {_reader(stream)}: it has {listed}')
    for name in ("queue", "table", *(("consumer",) if stream else ())):
        required_option(options, name)
    if "dsn" in options and "service" in options:
        raise GdqError('the data source gdq takes the option "dsn" or "service", not both')
    if not stream:
        _check_reads(options)
    for name, (is_allowed, allowed) in (_STREAM_VALUES if stream else _BATCH_VALUES).items():
        if name in options and not is_allowed(options[name]):
            raise GdqError(f'the option "{name}" of the data source gdq is {allowed}, not {options[name]!r}')


def _reader(stream: bool) -> str:
    return "spark.readStream" if stream else "spark.read"


def _check_reads(options: Mapping[str, str]) -> None:
    """GdqError for options of which one excludes or needs the other."""
    for one, other in (("from", "to"), ("to", "from"), ("images", "from")):
        if one in options and other not in options:
            raise GdqError(f'the option "{one}" of the data source gdq needs the option "{other}" for spark.read')
    for name in ("keys", "snapshot"):
        if name in options and "from" in options:
            raise GdqError(f'the option "{name}" of the data source gdq reads rows, "from" and "to" read changes')


def required_option(options: Mapping[str, str], name: str) -> str:
    """The value of a required option."""
    if not options.get(name):
        raise GdqError(f'the data source gdq needs the option "{name}"')
    return options[name]


def option_number(options: Mapping[str, str], name: str, default: int) -> int:
    """The value of a checked option that is a number."""
    return int(options.get(name, default))


def listed_option(options: Mapping[str, str], name: str) -> set[str]:
    """The names in an option that lists columns, with commas between them."""
    return {column.strip() for column in options.get(name, "").split(",")} - {""}


def image_option(options: Mapping[str, str]) -> Images | Literal["net"]:
    """The value of the checked option `images`."""
    known: Mapping[str, Images | Literal["net"]] = {"new": "new", "net": "net"}
    return known.get(options.get("images", ""), "both")


def _is_number(text: str) -> bool:
    return text.isascii() and text.isdecimal() and 0 < int(text) < 2**63


def _is_position(text: str) -> bool:
    try:
        Position.parse(text)
    except GdqError:
        return False
    return True


def _is_keys(text: str) -> bool:
    """True for a JSON array of arrays, all as long as the first, of texts and nulls."""
    try:
        keys: Any = json.loads(text)
    except ValueError:
        return False
    return (
        isinstance(keys, list)
        and all(isinstance(key, list) and key and len(key) == len(keys[0]) for key in keys)
        and all(value is None or isinstance(value, str) for key in keys for value in key)
    )


_Values = dict[str, tuple[Callable[[str], object], str]]
_NUMBER = (_is_number, "a whole number above 0")
_IMAGES = (("both", "new", "net").__contains__, "both, new or net")
_BATCH_VALUES: _Values = {
    "partition_bytes": _NUMBER,
    "from": (_SNAPSHOT.fullmatch, "a snapshot such as 100:104:100,102"),
    "to": (_SNAPSHOT.fullmatch, "a snapshot such as 100:104:100,102"),
    "images": _IMAGES,
    "snapshot": (_EXPORTED.fullmatch, "the name of an exported snapshot such as 00000003-0000001B-1"),
    "keys": (_is_keys, "a JSON array of keys, each an array of texts and nulls"),
}
_STREAM_VALUES: _Values = {
    "partition_bytes": _NUMBER,
    "from": (_is_position, "a position, as gdq position prints it"),
    "images": _IMAGES,
    "max_events": _NUMBER,
    "gaps": (("stop", "rows").__contains__, "stop or rows"),
}
