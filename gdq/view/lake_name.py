"""Names of lake tables, the targets outside PostgreSQL: delta:PLACE, parquet:PLACE, iceberg:PLACE.

Pure functions; the code that writes lake tables is in consumers/lake and needs the extra "lake".
"""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, get_args
from urllib.parse import urlsplit

from gdq.errors import GdqError

# Spark refuses these characters in columns of a Delta table. Iceberg writers rename columns that are not plain.
_NOT_IN_DELTA = set(" ,;{}()\n\t=")
# Libraries take a folder for a URI, where these begin a fragment, a query and an escape.
_NOT_IN_PLACE = set("#?%")
_PLAIN = re.compile("[A-Za-z_][A-Za-z0-9_]*")

LakeKind = Literal["delta", "parquet", "iceberg"]


@dataclass(frozen=True, slots=True)
class LakeName:
    """A lake table. `place`: an absolute path, or a URI (Delta, Parquet).

    An Iceberg table is FOLDER/NAMESPACE.TABLE, in the SQLite catalog of that folder, or CATALOG/NAMESPACE.TABLE.
    """

    kind: LakeKind
    place: str

    def __str__(self) -> str:
        return f"{self.kind}:{self.place}"

    @property
    def iceberg(self) -> tuple[str, str]:
        """The folder or the catalog's name, and the table's name."""
        where, _, table = self.place.rpartition("/")
        return where, table


def lake_name(target: str) -> LakeName | None:
    """`target` as the name of a lake table, None if it is not one; GdqError for an invalid place.

    Relative paths become absolute, since refreshes run in other folders.
    """
    word, colon, place = target.partition(":")
    kind: LakeKind | None = next((one for one in get_args(LakeKind) if one == word), None)
    if kind is None or not colon:
        return None
    if not place or "\n" in place:
        raise GdqError(f"target {target!r} names no place", hint=f"Write {kind}:/folder.")
    if "://" not in place and _NOT_IN_PLACE & set(place):
        raise GdqError(
            f"target {target!r} has a character that readers of lake tables take for a part of a URI",
            hint=f"Choose a folder without {' '.join(sorted(_NOT_IN_PLACE))}.",
        )
    if "://" in place:
        _check_uri(kind, place)
        name = LakeName(kind, place.rstrip("/"))
    elif kind == "iceberg" and place[0] not in "/.":
        name = LakeName("iceberg", place)
    else:
        name = LakeName(kind, os.path.abspath(place))  # noqa: PTH100 (no link is resolved)
    if kind == "iceberg":
        where, table = name.iceberg
        if not where or ("/" in where and where[0] != "/") or "." not in table or not all(table.split(".")):
            raise GdqError(
                f"target {target!r} is no Iceberg table",
                hint="Write iceberg:/folder/NAMESPACE.TABLE, or iceberg:CATALOG/NAMESPACE.TABLE.",
            )
    return name


def check_lake_columns(kind: LakeKind, names: Sequence[str]) -> None:
    """GdqError for columns that such a table cannot have: readers confuse or refuse them."""
    if not names:
        raise GdqError(f"a {kind} table cannot be without columns", hint="Select one.")
    folded = [name.lower() for name in names]
    for name in names:
        if folded.count(name.lower()) > 1:
            raise GdqError(f'lake tables do not tell columns "{name}" apart by case', hint="Name them by AS.")
        if (kind == "delta" and _NOT_IN_DELTA & set(name)) or (kind == "iceberg" and not _PLAIN.fullmatch(name)):
            raise GdqError(f'a {kind} table cannot have a column "{name}"', hint="Name it by AS.")


def _check_uri(kind: str, place: str) -> None:
    parts = urlsplit(place)
    if parts.password or parts.query or parts.fragment:
        raise GdqError(
            "the target's URI holds credentials or options, which would be stored with the view",
            hint="Leave them to the environment of the refresh, or to the profile of the cloud.",
        )
    if kind == "iceberg":
        raise GdqError(
            "an iceberg target is a folder or a catalog, not a URI",
            hint="Write iceberg:CATALOG, a catalog of pyiceberg's configuration whose warehouse is the URI.",
        )
