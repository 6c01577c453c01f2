"""Random rows of a lake table, and the columns of a view whose values can be looked up in it."""

from __future__ import annotations

import random
from collections.abc import Sequence
from datetime import date, datetime
from itertools import islice

import pyarrow as pa

from gdq.consumers.lake.table import LakeTable
from gdq.consumers.lake.types import lake_columns_as_text
from gdq.typed.pgtypes import FIRST_USER_OID

# A sample of rows is taken from one of the first batches.
_BATCHES = 4


def lake_key_names(described: Sequence[tuple[str, int, str]]) -> set[str]:
    """Columns, of (name, type oid, type) each, whose values are equal in the lake exactly if they are in PostgreSQL.

    Floats are not among them: 0 and -0.
    """
    folded = lake_columns_as_text(described) | {
        name for name, oid, kind in described if oid >= FIRST_USER_OID or kind in ("real", "double precision")
    }
    return {name for name, _, _ in described} - folded


def sample_lake_rows(
    lake: LakeTable, columns: Sequence[str], most: int, choices: random.Random
) -> list[tuple[str | None, ...]]:
    """Values of some columns of random rows of the table, as texts that PostgreSQL reads."""
    found: pa.RecordBatch | None = None
    for batch in islice(lake.scan(), choices.randint(1, _BATCHES)):
        found = batch if batch.num_rows else found
    if found is None:
        return []
    places = choices.sample(range(found.num_rows), min(most, found.num_rows))
    lists = [found.column(name).take(pa.array(places)).to_pylist() for name in columns]
    return [tuple(_text(value) for value in row) for row in zip(*lists, strict=True)]


def _text(value: object) -> str | None:
    if value is None:
        return None
    if isinstance(value, bytes):
        return f"\\x{value.hex()}"
    return value.isoformat() if isinstance(value, datetime | date) else str(value)
