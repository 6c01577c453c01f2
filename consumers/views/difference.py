"""Difference: the changes of a view's rows in one refresh; every engine computes one, every target takes one."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from gdq.sql_text import quote

# The net signed rows of a view: c1, c2, ..., the row as one text `image`, and `net`.
NETTED_ROWS = "pg_temp.gdq_out"


@dataclass(frozen=True, slots=True)
class KeySet:
    """Values of one column of the view; the rows with these values are replaced.

    `array`: the non-NULL values as the text of a PostgreSQL array of type `array_type`; `null`: NULL is a value too.
    For a target in another database the values have the column's own type.
    """

    column: str
    array: str
    array_type: str
    null: bool


@dataclass(frozen=True, slots=True)
class Difference:
    """The changes of a view's rows in one refresh.

    kind none:    no change
         full:    `rows` are all rows of the view
         replace: delete the rows that match all of `keys`, insert `rows`
         signed:  insert each row `weight` times, or delete as many equal rows if weight < 0; no row comes twice
    `rows`: a SELECT of the view's columns by name, for signed followed by the bigint column `weight`, never 0. It works
    in the session that computed it, until the transaction ends. `match`: columns to find the target's rows by, best
    with an index; may be empty.
    """

    kind: Literal["none", "full", "replace", "signed"]
    rows: str = ""
    keys: tuple[KeySet, ...] = ()
    match: tuple[str, ...] = ()
    weight: str = "w"


def row_image_sql(columns: Sequence[str], prefix: str = "") -> str:
    """SQL of a row's columns as one text, to compare rows of types without an equality; NULL differs from ''."""
    return f"row({', '.join(prefix + quote(name) for name in columns)})::text"
