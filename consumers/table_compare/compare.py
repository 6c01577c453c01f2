"""`gdq compare-tables`: tables of two databases compared row by row, while both are written to.

Each table is read once on either side, in pieces, and divided into buckets by the hashes of its keys. Only of buckets
whose sums differ are the rows' hashes read, in one order, and laid side by side. So nothing is held in memory but the
sums, and the rows that differ.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from psycopg import Connection

from gdq.call import scalar
from gdq.conninfo import Connectable, connect, conninfo_from
from gdq.consumers.replica.held_replicas import replica_tables
from gdq.consumers.table_compare.rows import (
    Differing,
    bucket_sums,
    differing_columns,
    differing_rows,
    found_rows,
    merge,
)
from gdq.consumers.table_compare.shape import BUCKETS
from gdq.consumers.table_compare.sides import Choice, Databases, Link, TwoSides, open_sides
from gdq.errors import GdqError
from gdq.shown import Shown, ShownRows

# Rows that differ and are looked at again, in databases without a link; more are not in passing.
_LOOKED_AT_AGAIN = 10_000

_LOOK_SECONDS = 1.0

# Called with the table, the phase, the rows so far, and about how many there will be (None if unknown).
CompareProgress = Callable[[str, str, int, int | None], None]


@dataclass(frozen=True, slots=True, repr=False)
class TableComparison(Shown):
    """The comparison of one table; numbers are of rows.

    `rows`: in the source. `different`: in both, with other values; `missing`: not in the target; `extra`: only there.
    `lacking`: columns that the target does not have. `tick`: where both sides were compared; None if the databases are
    not linked, and rows that differed were looked at again. `examples`: the first rows that differ, each with its kind,
    its key's texts (None for a table without a key), and the columns that differ.
    """

    table_name: str
    rows: int
    different: int
    missing: int
    extra: int
    lacking: list[str]
    tick: int | None
    seconds: float
    examples: list[dict[str, Any]]

    @property
    def equal(self) -> bool:
        return not (self.different or self.missing or self.extra or self.lacking)


@dataclass(slots=True)
class Found:
    """The rows that differ: their numbers, the first of them, and a list for another look, as long as it is short."""

    examples_wanted: int
    different: int = 0
    missing: int = 0
    extra: int = 0
    examples: list[Differing] = field(default_factory=list)
    listed: list[Differing] = field(default_factory=list)

    @property
    def any(self) -> bool:
        return bool(self.different or self.missing or self.extra)

    @property
    def may_settle(self) -> bool:
        """True if all rows that differ are listed."""
        return 0 < len(self.listed) < _LOOKED_AT_AGAIN

    def take(self, rows: Iterable[Differing], each: Callable[[Differing], None] | None = None) -> None:
        """Count the rows; `each` is called with every one."""
        for row in rows:
            self.different += row.different
            self.missing += row.missing
            self.extra += row.extra
            if len(self.examples) < self.examples_wanted:
                self.examples.append(row)
            if len(self.listed) < _LOOKED_AT_AGAIN:
                self.listed.append(row)
            if each is not None:
                each(row)


def compare_tables(
    connection: Connectable,
    target: str,
    tables: Sequence[str] | None = None,
    *,
    queue: str | None = None,
    replica: str | None = None,
    columns: Sequence[str] | None = None,
    where: str | None = None,
    examples: int = 10,
    wait_seconds: float = 10.0,
    progress: CompareProgress | None = None,
) -> list[TableComparison]:
    """Compare tables with those of the same names in another database, while both may be written to.

    `target`: its connection string. `tables`: named as in SQL; None for all of a replica. `replica`, of `queue`: the
    target is compared with the source as of the replica's position, so that what is under way is no difference. Without
    it, rows that differ are looked at again for up to `wait_seconds`. `columns`: only these, beside the key. `where`: a
    condition in SQL on the rows of both sides. `examples`: how many rows that differ are named. GdqError if a table
    cannot be compared.
    """
    compared = compare_each(
        connection,
        target,
        tables,
        link=link_of(queue, replica),
        columns=columns,
        where=where,
        examples=examples,
        wait_seconds=wait_seconds,
        progress=progress,
    )
    return ShownRows(compared)


def compare_each(
    connection: Connectable,
    target: str,
    tables: Sequence[str] | None,
    *,
    link: Link | None,
    columns: Sequence[str] | None = None,
    where: str | None = None,
    examples: int = 10,
    wait_seconds: float = 10.0,
    progress: CompareProgress | None = None,
) -> Iterator[TableComparison]:
    """As compare_tables(), one table after the other."""
    source = conninfo_from(connection)
    for name in chosen_tables(source, target, tables, link):
        choice = Choice(name, where, columns)
        yield _compare(Databases(source, target, link, wait_seconds), choice, Found(examples), progress)


def link_of(queue: str | None, replica: str | None) -> Link | None:
    """The link of two databases, if they have one; GdqError for half of it."""
    if queue is None and replica is None:
        return None
    if queue is None or replica is None:
        raise GdqError("a replica is named by its queue and its name", hint="Give both, or none of them.")
    return Link(queue, replica)


def chosen_tables(source: str | None, target: str, tables: Sequence[str] | None, link: Link | None) -> list[str]:
    """The qualified names of the tables to compare; GdqError for one that the source does not have."""
    if tables is None:
        if link is None:
            raise GdqError("no table to compare", hint="Name tables, or the replica whose tables are to be compared.")
        with connect(target, application_name="gdq:compare") as there:
            return replica_tables(there, link.queue, link.replica)
    with connect(source, application_name="gdq:compare") as here:
        return list(dict.fromkeys(_qualified(here, name) for name in tables))


def compared_rows(
    sides: TwoSides, found: Found, tell: CompareProgress, each: Callable[[Differing], None] | None = None
) -> int:
    """Read both sides and count the rows that differ; the number of the source's rows."""
    name, expected = sides.shape.name, sides.source.table.rows
    about = None if expected is None else round(expected)
    tell(name, "comparing", 0, about)
    sums = bucket_sums(sides, lambda rows: tell(name, "comparing", rows, about))
    if sums.differing:
        tell(name, "looking for rows that differ", 0, None)
        found.take(differing_rows(sides, f"kh & {BUCKETS - 1} = any({{}})", sums.differing), each)
    return sums.source_rows


def _compare(databases: Databases, choice: Choice, found: Found, progress: CompareProgress | None) -> TableComparison:
    started = time.monotonic()
    with open_sides(databases, choice) as sides:
        rows = compared_rows(sides, found, progress or (lambda *_: None))
        named = _named(sides, found)
    deadline = time.monotonic() + databases.wait_seconds
    while databases.link is None and found.may_settle and time.monotonic() < deadline:
        time.sleep(min(_LOOK_SECONDS, databases.wait_seconds))
        with open_sides(databases, choice) as again:
            found = _again(again, found)
            named = _named(again, found)
    return TableComparison(
        table_name=choice.table,
        rows=rows,
        different=found.different,
        missing=found.missing,
        extra=found.extra,
        lacking=[] if choice.columns is not None else list(sides.shape.lacking),
        tick=sides.tick,
        seconds=round(time.monotonic() - started, 3),
        examples=named,
    )


def _again(sides: TwoSides, before: Found) -> Found:
    """What still differs of the rows that did."""
    found = Found(before.examples_wanted)
    if sides.shape.key:
        keys = [row.key for row in before.listed if row.key is not None]
        here, there = (found_rows(side, sides.shape, keys) for side in (sides.source, sides.target))
        found.take(merge(here, there))
    else:
        found.take(differing_rows(sides, "kh = any({})", [row.kh for row in before.listed]))
    return found


def _named(sides: TwoSides, found: Found) -> list[dict[str, Any]]:
    """The examples with their keys by column, and the columns that differ."""
    keys = [row.key for row in found.examples if row.key is not None and row.different]
    columns = differing_columns(sides, keys) if keys else {}
    named = []
    for row in found.examples:
        key = None if row.key is None else dict(zip(sides.shape.key, row.key, strict=True))
        for kind, count in (("different", row.different), ("missing", row.missing), ("extra", row.extra)):
            if count:
                differing = list(columns.get(row.key or (), ())) if kind == "different" else []
                named.append({"kind": kind, "rows": count, "key": key, "columns": differing})
    return named


def _qualified(connection: Connection[Any], table: str) -> str:
    query = """select pg_catalog.format('%%I.%%I', n.nspname, c.relname)
                 from pg_catalog.pg_class c
                 join pg_catalog.pg_namespace n on n.oid operator(pg_catalog.=) c.relnamespace
                where c.oid operator(pg_catalog.=) %s::pg_catalog.regclass"""
    return str(scalar(connection, query, table))
