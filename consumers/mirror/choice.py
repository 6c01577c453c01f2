"""Which captured tables a mirror keeps, and the names of their lake tables."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Self

import psycopg
from psycopg import Connection

from gdq.call import scalar
from gdq.errors import GdqError
from gdq.view.lake_name import LakeKind, LakeName, lake_name

# What stands between the schema and the table in the name of a lake table, or would lead to another folder.
_NOT_IN_NAMES = set("./\\\n")


@dataclass(frozen=True, slots=True)
class TableChoice:
    """Tables by their schema and name, and schemas, of which all captured tables are meant, also later ones."""

    tables: frozenset[tuple[str, str]]
    schemas: frozenset[str]

    @classmethod
    def parse(cls, connection: Connection[Any], words: Sequence[str]) -> Self:
        """The choice that words like `public.orders` and `public` make, written as in SQL; GdqError for others."""
        tables, schemas = set(), set()
        for word in words:
            try:
                parts: list[str] = scalar(connection, "select pg_catalog.parse_ident(%s)", word)
            except psycopg.errors.InvalidParameterValue:
                parts = []
            if len(parts) == 2:
                tables.add((parts[0], parts[1]))
            elif len(parts) == 1:
                schemas.add(parts[0])
            else:
                raise GdqError(f"{word!r} is neither a table nor a schema", hint="Write schema.table, or a schema.")
        for schema in schemas:
            if scalar(connection, "select pg_catalog.to_regnamespace(pg_catalog.quote_ident(%s)) is null", schema):
                raise GdqError(f'there is no schema "{schema}"', hint="Write tables as schema.table.")
        return cls(frozenset(tables), frozenset(schemas))

    @property
    def consumed(self) -> list[str] | None:
        """The tables that the consumer takes: all of the queue's for a schema, since later ones are among them."""
        return None if self.schemas else [f'"{_doubled(schema)}"."{_doubled(name)}"' for schema, name in self.tables]

    def has(self, table: str) -> bool:
        """True if a table, named as `%I.%I`, is meant."""
        schema, name = name_parts(table)
        return schema in self.schemas or (schema, name) in self.tables


def name_parts(table: str) -> tuple[str, str]:
    """Schema and name of a table that is named as `%I.%I`."""
    found = re.fullmatch(r'("(?:[^"]|"")*"|[^".]+)\.("(?:[^"]|"")*"|[^".]+)', table)
    assert found is not None, table
    schema, name = (part[1:-1].replace('""', '"') if part[0] == '"' else part for part in found.groups())
    return schema, name


def table_lake_name(target: str, table: str) -> LakeName:
    """The lake table of a captured table: schema.table in the target's folder or catalog; GdqError for odd names."""
    schema, name = name_parts(table)
    if any(_NOT_IN_NAMES & set(part) for part in (schema, name)):
        raise GdqError(f"table {table} has a name that no folder of a lake table can have")
    found = lake_name(f"{target}/{schema}.{name}")
    assert found is not None
    return found


def mirror_kind(target: str) -> LakeKind:
    """The format of the tables of a target."""
    found = lake_name(f"{target}/schema.table")
    assert found is not None
    return found.kind


def mirror_target(text: str) -> str:
    """A mirror's target, with an absolute path; GdqError if it is none."""
    # as a table's name would be read
    found = lake_name(f"{text.rstrip('/')}/schema.table") if text.partition(":")[2] else None
    if found is None:
        raise GdqError(
            f"target {text!r} is no folder of lake tables",
            hint="Write delta:/folder, iceberg:/folder or parquet:/folder.",
        )
    return str(found).removesuffix("/schema.table")


def _doubled(name: str) -> str:
    return name.replace('"', '""')
