"""Conditions that two rows of a table without a key are the same in all their values, by which the server can hash.

NULL is the same as NULL here. `is not distinct from` says so, but no join is made by it. So rows are joined by the hash
of those values that may be NULL, and by each of the others, where an index of the target may help.
"""

from __future__ import annotations

from collections.abc import Sequence

from gdq.consumers.replica.table import ReplicaTable
from gdq.sql_text import quote


def found_whole_sql(table: ReplicaTable, alias: str) -> str:
    """Condition that row t of the target is the same as a staged row."""
    return found_images_sql(table, staged_images(table, alias))


def found_images_sql(table: ReplicaTable, images: Sequence[str], row: str = "t") -> str:
    """Condition that a row of the target has these values, given as staged_images() makes them."""
    own = [column.image(f"{row}.{quote(column.name)}") for column in table.columns]
    return _same_sql(own, images, [column.not_null for column in table.columns])


def staged_images(table: ReplicaTable, alias: str) -> list[str]:
    """The values that a staged row has in the target: of its types, with their precision."""
    return [column.image(f"{alias}.c{place}::{column.rounded}") for place, column in enumerate(table.columns, 1)]


def same_whole_sql(table: ReplicaTable, one: str, other: str) -> str:
    """Condition that two staged rows are the same as they travelled."""
    ours, theirs = (
        [column.staged_image(alias, place) for place, column in enumerate(table.columns, 1)] for alias in (one, other)
    )
    return _same_sql(ours, theirs, [False] * len(ours))


def _same_sql(ours: Sequence[str], theirs: Sequence[str], never_null: Sequence[bool]) -> str:
    pairs = list(zip(ours, theirs, never_null, strict=True))
    conditions = [f"{one} = {other}" for one, other, never in pairs if never]
    if with_nulls := [(one, other) for one, other, never in pairs if not never]:
        hashes = (f"hash_record_extended(row({', '.join(values)}), 0)" for values in zip(*with_nulls, strict=True))
        conditions += [" = ".join(hashes), *(f"{one} is not distinct from {other}" for one, other in with_nulls)]
    return f"({' and '.join(conditions)})"
