"""A scenario for readers of changes: tables and statements that a queue and a slot both watch."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Scenario:
    """`tables` are made before capture, `script` runs after; `counts` are the changes that either side must have.

    A line of the script is one statement; "2: " before it names another session than the first. `rows`: whether the
    events' rows are compared with the tables at the end, not where DDL renames or drops columns,
    where two rows have one key for a moment, or where a table shows its children's rows.
    """

    name: str
    tables: tuple[str, ...]
    script: tuple[str, ...]
    counts: str
    rows: bool = True


T = "create table t (id int primary key, v text)"
FULL = "alter table t replica identity full"
LARGE = "(select string_agg(md5(i::text), '') from generate_series(1, 400) i)"
