"""The difference that one refresh makes in the rows of a view: what every engine computes and every target takes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from gdq.sql_text import quote

# The net signed rows of a view: c1, c2, ..., the row as one text `image`, and `net`.
OUT = "pg_temp.gdq_out"


@dataclass(frozen=True, slots=True)
class KeySet:
    """The values of one key column whose rows are replaced.

    `column` is the view's. `array` holds the values that are not NULL as PostgreSQL writes an array of them,
    `array_type` is its type; `null`: NULL is one of the values too. For a target elsewhere the values have the column's
    own type.
    """

    column: str
    array: str
    array_type: str
    null: bool


@dataclass(frozen=True, slots=True)
class Difference:
    """The changes of a view's rows in one refresh.

    kind none:    nothing
         full:    `rows` are all rows of the view
         replace: the rows that match all of `keys` go, and `rows` come
         signed:  each of `rows`, none twice, comes as often as its weight says; below zero as many equal ones go
    `rows`: a SELECT for the session that computed it, good until its transaction ends, of the view's columns under
    their names and, when signed, of the net `weight` after them, a bigint that is not 0. `match`: columns by which
    rows of the target are looked for, best indexed there; none when there are no such.
    """

    kind: Literal["none", "full", "replace", "signed"]
    rows: str = ""
    keys: tuple[KeySet, ...] = ()
    match: tuple[str, ...] = ()
    weight: str = "w"


def image_of(columns: Sequence[str], prefix: str = "") -> str:
    """The SQL of a row's columns as one text: rows of types without an equality compare by it, NULL is not ''."""
    return f"row({', '.join(prefix + quote(name) for name in columns)})::text"
