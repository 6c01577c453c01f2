"""The captured tables that a replica takes, as the source has them now: found by oid, since names change hands."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import psycopg
from psycopg import Connection

from gdq.call import rows
from gdq.errors import GdqError

# Seconds between two looks of a replica that follows.
_LOOK_SECONDS = 1.0

_TABLES = """
select tbl::oid::bigint as relid, table_name, is_there, version, mode, key, operations, "where" as filter, always,
       origin
  from gdq.consumer_tables(%s, %s)"""

_OTHER = """
select name from unnest(%s::text[], %s::bigint[]) t(name, relid)
 where to_regclass(name)::oid::bigint is distinct from relid limit 1"""

# Tables whose capture is off: the changes that they have now will never come.
_CAPTURE_OFF = """
select i.table_name, i.reason
  from pg_current_snapshot() s, gdq.delta_events(%(queue)s, s, s) e, gdq.table_info(%(queue)s) i
 where e.data->>'kind' = 'off' and i.table_name = e.tbl and i.table_name = any (%(tables)s) order by 1 limit 1"""


class CaptureOffError(GdqError):
    """A table cannot be copied so that its changes follow, since its capture is off."""


@dataclass(frozen=True, slots=True)
class SourceTable:
    """A captured table that a replica takes: its present name as `%I.%I`, its newest version, its options of capture.

    `is_there`: False once it was dropped, or is captured through its root alone.
    """

    relid: int
    table_name: str
    is_there: bool
    version: int
    mode: str
    key: list[str] | None
    operations: list[str]
    filter: str | None
    always: bool
    origin: bool


def source_tables(source: Connection[Any], queue: str, name: str) -> dict[int, SourceTable]:
    """The captured tables that a replica's consumer takes, by their oids."""
    return {table.relid: table for table in rows(source, SourceTable, _TABLES, queue, name)}


def require_oids(source: Connection[Any], tables: Mapping[str, int]) -> None:
    """UndefinedTable, as for a name that is gone, if one of these names is not that of the table with this oid."""
    other = source.execute(_OTHER, [list(tables.keys()), list(tables.values())]).fetchone()
    if other is not None:
        raise psycopg.errors.UndefinedTable(f"table {other[0]} has got another name meanwhile")


def require_capture(source: Connection[Any], queue: str, tables: Sequence[str]) -> None:
    """CaptureOffError for a table whose capture is off: a copy of it would be wrong with the next change."""
    off = source.execute(_CAPTURE_OFF, {"queue": queue, "tables": tables}).fetchone()
    if off is not None:
        raise CaptureOffError(
            f"capture of table {off[0]} is off, so that no copy can follow its changes: {off[1]}",
            hint="gdq.maintain() or a ticker switches it on when its cause is mended.",
        )


class NewTableWatch:
    """Looks every second whether tables have come that a replica has not copied, or left that it knows.

    `known`: those that it has copied, by their oids.
    """

    def __init__(self, source: Connection[Any], queue: str, name: str, known: Collection[int]) -> None:
        self._source, self._queue, self._name = source, queue, name
        self._known = set(known)
        self._looked = time.monotonic()
        self.found = False

    def watched(self, stop: Callable[[], bool]) -> Callable[[], bool]:
        """`stop` of a loop that calls it between batches and while waiting; True also if other tables are there."""
        return lambda: stop() or self._look()

    def _look(self) -> bool:
        """True if there are other tables than the known ones, as of a second ago at most."""
        if time.monotonic() - self._looked >= _LOOK_SECONDS:
            self._looked = time.monotonic()
            tables = source_tables(self._source, self._queue, self._name)
            # a table that was dropped is left in the place of its event
            there = {relid for relid, table in tables.items() if table.is_there}
            self.found = not there.issubset(self._known) or not self._known.issubset(tables)
        return self.found
