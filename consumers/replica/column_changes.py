"""Columns of a target table, and its key, brought in line with another version of the source's.

Two versions of a captured table are compared by the numbers of their columns, which PostgreSQL gives only once: a
column whose number is gone was dropped, one with a new number was added, one with another name was renamed. What
somebody has changed in the target already is left as it is.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any, Self

import psycopg
from psycopg import Connection
from psycopg.types.json import Jsonb

from gdq.consumers.replica.table import has_unique_key
from gdq.errors import GdqError, mapped_errors
from gdq.qualified_sql import qualified
from gdq.sql_text import pinned, quote, raw

_COLUMNS = qualified("select attnum, name, type, is_key from gdq.table_columns(%s, %s::pg_catalog.regclass, %s)")

# Columns that are no longer captured, but still there.
_LEFT_OUT = """
select a.attnum from pg_attribute a
 where a.attrelid = %s::oid and a.attnum = any (%s::int2[]) and not a.attisdropped"""

_TARGET = """
select a.attname::text, format_type(a.atttypid, a.atttypmod) from pg_attribute a
 where a.attrelid = to_regclass(%s) and a.attnum > 0 and not a.attisdropped"""


@dataclass(frozen=True, slots=True)
class SourceColumns:
    """The columns of a table of the source at one version: by their numbers the names, and the types with length.

    `mark`: what else shows changes of a table that a slot feeds; empty for captured tables. `key`: of captured tables.
    """

    version: int
    columns: dict[int, tuple[str, str]]
    mark: dict[str, str] = field(default_factory=dict)
    key: tuple[int, ...] = ()

    @classmethod
    def stored(cls, stored: dict[str, Any]) -> Self:
        """Columns as to_store() gave them."""
        columns = {number: (name, kind) for number, name, kind in stored["columns"]}
        return cls(stored["version"], columns, stored.get("mark", {}), tuple(stored.get("key", ())))

    def unmarked(self) -> Self:
        """The same columns, of a table that is to be copied again."""
        return replace(self, mark={"stale": "yes"})

    def while_copied(self) -> Self:
        """The same columns, of a table whose copy is not whole."""
        return replace(self, mark={"copying": "yes"})

    @property
    def copying(self) -> bool:
        """True if the copy is not whole."""
        return "copying" in self.mark

    def to_store(self) -> Jsonb:
        """The columns as a JSON value."""
        columns = [(number, *column) for number, column in self.columns.items()]
        more = {name: value for name, value in (("mark", self.mark), ("key", self.key)) if value}
        return Jsonb({"version": self.version, "columns": columns} | more)

    def of_other_table(self, other: SourceColumns) -> SourceColumns:
        """These columns under the numbers that another table's have: those of the same names are the same."""
        numbers = {name: number for number, (name, _) in other.columns.items()}
        return SourceColumns(
            self.version,
            {numbers.get(name, -number): (name, kind) for number, (name, kind) in self.columns.items()},
            key=tuple(sorted(numbers.get(self.columns[number][0], -number) for number in self.key)),
        )


class VersionGoneError(GdqError):
    """The source has dropped a version of a table's columns, since no log has rows of it."""


def source_columns(source: Connection[Any], queue: str, relid: int, version: int) -> SourceColumns:
    """The columns of a captured table at a version; VersionGoneError if the source has it no longer."""
    with mapped_errors():
        found = source.execute(_COLUMNS, [queue, str(relid), version], prepare=True).fetchall()
    if not found:
        raise VersionGoneError(f"version {version} of a table's columns is gone in queue {queue}")
    key = tuple(number for number, _, _, is_key in found if is_key)
    return SourceColumns(version, {number: (name, kind) for number, name, kind, _ in found}, key=key)


def change_columns(
    source: Connection[Any], target: Connection[Any], table: str, old: SourceColumns, new: SourceColumns, *, relid: int
) -> None:
    """Alter a target table, in the open transaction, by what has changed between two versions of the source's columns.

    `relid`: the oid of the source's table.
    A column is added without default and constraints, which never change a row that the replica writes. Another key
    gets a unique index, by which rows are found. GdqError if the target refuses.
    """
    if old.columns != new.columns:
        _change_columns(source, target, table, old, new, relid=relid)
    key = [new.columns[number][0] for number in new.key]
    if new.key not in ((), old.key) and not has_unique_key(target, table, key):
        _make_key(target, table, ", ".join(map(quote, key)))


def _make_key(target: Connection[Any], table: str, key: str) -> None:
    try:
        target.execute(raw(f"create unique index on {table} ({key})"))
    except psycopg.OperationalError:
        raise
    except psycopg.Error as error:
        raise GdqError(
            f"table {table} has the key ({key}) in the source by now, and cannot get it in the target: "
            f"{error.diag.message_primary}",
            hint="Make the unique index there, or what it lacks, or have its owner do it; then start again.",
        ) from error


def _change_columns(
    source: Connection[Any], target: Connection[Any], table: str, old: SourceColumns, new: SourceColumns, *, relid: int
) -> None:
    gone = [*(old.columns.keys() - new.columns.keys())]
    left_out = {number for (number,) in source.execute(_LEFT_OUT, [relid, gone])}
    with pinned(target):
        there: dict[str, str] = dict(target.execute(_TARGET, [table]).fetchall())
    if not there:  # whoever describes the table says so
        return
    for clause in _clauses({n: column for n, column in old.columns.items() if n not in left_out}, new.columns, there):
        try:
            target.execute(raw(f"alter table {table} {clause}"))
        except psycopg.OperationalError:
            raise
        except psycopg.Error as error:
            raise GdqError(
                f"table {table} has other columns in the source by now, and the target refuses ALTER TABLE {table} "
                f"{clause}: {error.diag.message_primary}",
                hint="Have its owner change it there; then start again.",
            ) from error


def _clauses(old: dict[int, tuple[str, str]], new: dict[int, tuple[str, str]], there: dict[str, str]) -> Iterator[str]:
    """What ALTER TABLE has to do, in an order that works. `there`: the target's columns with their types."""
    for number, (name, _) in old.items():
        if number not in new and name in there:
            yield f"drop column {quote(name)}"
            there.pop(name)
    renamed = {
        name: (number, new[number][0])
        for number, (name, _) in old.items()
        if number in new and name != new[number][0] and name in there
    }
    # by way of names that nothing else has, if one takes over another's name
    taken_over = renamed.keys() & {to for _, to in renamed.values()}
    between = {name: f"!gdq_{number}" for name, (number, _) in renamed.items()} if taken_over else {}
    for name, other in between.items():
        yield f"rename column {quote(name)} to {quote(other)}"
    for name, (_, to) in renamed.items():
        yield f"rename column {quote(between.get(name, name))} to {quote(to)}"
    there = {renamed[name][1] if name in renamed else name: kind for name, kind in there.items()}
    for number, (name, kind) in new.items():
        before = old.get(number, (name, kind))[1]
        if number not in old and name not in there:
            yield f"add column {quote(name)} {kind}"
        elif number in old and before != kind and there.get(name) == before:
            yield f"alter column {quote(name)} type {kind} using {quote(name)}::{kind}"
