"""What is compared of a table: its columns on both sides, the key that names its rows, and the SQL that hashes them.

A row's hash is that of its text, made by both servers under the same settings, so that neither the order of the columns
nor a setting of a role counts. No order of key values is used: two servers rarely sort texts alike.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from psycopg import Connection

from gdq.consumers.copy.pieces import HOLDS_NO_NULL, CopyColumn, SourceTable
from gdq.consumers.replica.table import value_text
from gdq.errors import GdqError
from gdq.sql_text import quote

# Rows are divided by the hash of their key. A differing row has the rows of its own bucket read on both sides.
BUCKETS = 4096

_KEY = f"""
select array(select a.attname::text
               from unnest((i.indkey::int2[])[0:i.indnkeyatts - 1]) with ordinality k(attnum, place)
               join pg_attribute a on a.attrelid = i.indrelid and a.attnum = k.attnum order by k.place)
  from pg_index i
 where i.indrelid = %s::regclass and i.indisunique and i.indisvalid and i.indpred is null and i.indexprs is null
   and not exists (select from pg_attribute a where a.attrelid = i.indrelid and a.attnum = any (i.indkey)
                      and not {HOLDS_NO_NULL})
 order by i.indisprimary desc, i.indexrelid limit 1"""

# Values of different types are equal if they say the same.
_NUMBERS = frozenset(("smallint", "integer", "bigint", "numeric", "real", "double precision"))
_PADDED = frozenset(("character", "bpchar"))
_TEXTS = frozenset(("character varying", "text", "name")) | _PADDED
_JSONS = frozenset(("json", "jsonb"))
_TIMES = frozenset(("date", "timestamp without time zone"))
_TYPMOD = re.compile(r"\([\d,]+\)")


@dataclass(frozen=True, slots=True)
class TableShape:
    """What is compared of one table, which has the same name on both sides.

    `key`: the columns that name a row, none if rows are told apart by all their values alone. `values`: SQL of the
    compared columns by name, the key's first. `types`: of the key's columns, if they are PostgreSQL's own. `lacking`:
    columns of the source that the target does not have. `others`: columns that both have and that are not compared.
    `blanks`: those of the key whose values may differ in blanks at their end alone. `recoded`: the sides have different
    encodings.
    """

    name: str
    key: tuple[str, ...]
    values: Mapping[str, str]
    types: Mapping[str, str]
    lacking: tuple[str, ...]
    others: tuple[str, ...]
    blanks: frozenset[str]
    recoded: bool

    @property
    def hashes(self) -> str:
        """The SELECT list of a row's hashes: kh, by which rows are divided and ordered, and h, of the whole row."""
        whole = self._hash(self.values)
        return f"{self._hash(self.key)} as kh, {whole} as h" if self.key else f"{whole} as kh, null::bigint as h"

    @property
    def row_hash(self) -> str:
        """SQL of a row's hash, given the columns of `hashes`."""
        return "h" if self.key else "kh"

    @property
    def key_texts(self) -> str:
        """SQL of the key as an array of texts; NULL without a key."""
        return f"array[{', '.join(map(self.key_text, self.key))}]" if self.key else "null::text[]"

    def key_text(self, column: str) -> str:
        """SQL of the text of a key's column, compared byte by byte."""
        return f'{value_text(f"({self.values[column]})", padded=column in self.blanks)} collate "C"'

    def row_texts(self) -> str:
        """SQL of the compared columns beyond the key as an array of texts, each of a value's own row."""
        return f"array[{', '.join(f'row({self.values[name]})::text' for name in self.rest)}]::text[]"

    @property
    def rest(self) -> tuple[str, ...]:
        """The compared columns that are not of the key."""
        return tuple(name for name in self.values if name not in self.key)

    def has_key(self, texts: str) -> str:
        """Condition that a row has the key whose texts are the array `texts`, found by an index where that is safe.

        Without a key that is the hash of the row.
        """
        if not self.key:
            return f"{self._hash(self.values)} = {texts}[1]::bigint"
        conditions = []
        for place, name in enumerate(self.key, 1):
            if name in self.types:
                conditions.append(f"{quote(name)} = {texts}[{place}]::{self.types[name]}")
            conditions.append(f"{self.key_text(name)} = {texts}[{place}]")
        return " and ".join(conditions)

    def _hash(self, columns: Mapping[str, str] | Sequence[str]) -> str:
        text = f"row({', '.join(self.values[name] for name in columns)})::text"
        if self.recoded:
            text = f"encode(convert_to({text}, 'UTF8'), 'hex')"
        return f'hashtextextended({text} collate "C", 0)'


def compared_shape(
    source: SourceTable,
    target: SourceTable,
    key: Sequence[str],
    *,
    known: Sequence[str] | None = None,
    columns: Sequence[str] | None = None,
    recoded: bool = False,
) -> TableShape:
    """What is compared of a table that both sides have described.

    `known`: the columns that the source's log has, None without a log. `columns`: only these, beside the key.
    """
    theirs = {column.name: column for column in target.columns}
    if not set(key).isdisjoint(target.generated):
        key = ()  # made of other columns, which tell rows apart as well
    # what the target computes is not compared, and it need not have what the source computes
    ours = [
        column
        for column in source.columns
        if (known is None or column.name in known)
        and column.name not in target.generated
        and (column.name in theirs or not column.generated)
    ]
    if unknown := sorted(set(columns or ()) - {column.name for column in ours}):
        raise GdqError(
            f"column {', '.join(map(quote, unknown))} of table {source.name} cannot be compared",
            hint="Name columns that the target does not generate, and that the queue captures.",
        )
    wanted = [column for column in ours if columns is None or column.name in columns or column.name in key]
    there = [column for column in wanted if column.name in theirs]
    found = {column.name for column in there}
    if not found or not set(key) <= found:
        named = sorted(set(key) - found) or [column.name for column in wanted]
        raise GdqError(f"table {source.name} of the target lacks {', '.join(map(quote, named))}")
    ordered = [column for column in there if column.name in key] + [c for c in there if c.name not in key]
    return TableShape(
        name=source.name,
        key=tuple(name for name in key),
        values={column.name: _value(column, theirs[column.name]) for column in ordered},
        types={c.name: c.type for c in there if c.name in key and c.has_binary and theirs[c.name].type == c.type},
        lacking=tuple(column.name for column in wanted if column.name not in theirs),
        others=tuple(column.name for column in ours if column.name in theirs and column not in wanted),
        blanks=frozenset(c.name for c in there if c.name in key and c.blanks and theirs[c.name].type == c.type),
        recoded=recoded,
    )


def key_of(connection: Connection[Any], table: str) -> tuple[str, ...]:
    """The columns of a table's primary key, or of another unique index without NULLs; none if it has neither."""
    row = connection.execute(_KEY, [table]).fetchone()
    return () if row is None else tuple(row[0])


def _value(ours: CopyColumn, theirs: CopyColumn) -> str:
    """SQL of a column's value: as it is, or in a form that both types have."""
    name = quote(ours.name)
    if ours.type == theirs.type:
        return name
    kinds = {_TYPMOD.sub("", ours.type), _TYPMOD.sub("", theirs.type)}
    if kinds <= _NUMBERS:
        return f"trim_scale({name}::text::numeric)"  # by its text: numeric takes but 15 digits of a float
    if kinds <= _TEXTS:
        # a cast of character cuts the blanks that fill it up, on whichever side they are
        return f"{name}::text::bpchar::text" if kinds & _PADDED else f"{name}::text"
    if kinds <= _TIMES:
        return f"{name}::timestamp"
    return f"{name}::jsonb" if kinds <= _JSONS else name
