"""The catalog's data about tables that a slot's stream describes: names, keys and base types."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from psycopg import Connection

from gdq.call import scalar
from gdq.consumers.slot.pgoutput import RelationMessage
from gdq.sql_text import pin_transaction
from gdq.typed.pgtypes import base_type_name

# The rows of a partitioned table have the replica identities of its partitions, while its description has its own.
_DESCRIBE = """
    with identity as (
      select c.relreplident::text as kind,
             array(select a.attname::text from pg_catalog.pg_index i
                     join pg_catalog.pg_attribute a on a.attrelid = i.indrelid
                      and a.attnum = any ((i.indkey::int2[])[0:i.indnkeyatts - 1])
                    where i.indrelid = c.oid
                      and case c.relreplident when 'd' then i.indisprimary when 'i' then i.indisreplident end
                    order by a.attname) as columns
        from pg_catalog.pg_partition_tree(%(oid)s::oid::pg_catalog.regclass) t
        join pg_catalog.pg_class c on c.oid = t.relid
       where t.isleaf and t.level > 0)
    select pg_catalog.format('%%I.%%I', %(schema)s::text, %(name)s::text),
           array(select a.attname::text from pg_catalog.pg_index i
                   join pg_catalog.pg_attribute a on a.attrelid = i.indrelid
                    and a.attnum = any ((i.indkey::int2[])[0:i.indnkeyatts - 1])
                  where i.indrelid = %(oid)s::oid and i.indisprimary),
           exists (select from pg_catalog.pg_index i
                    where i.indrelid = %(oid)s::oid and i.indisprimary and not i.indimmediate),
           (select pg_catalog.jsonb_agg(distinct pg_catalog.jsonb_build_array(kind, columns)) from identity)"""
# Resolves domains to their base types; the type modifier comes from the domain.
_BASE_TYPES = """
    with recursive b(number, oid, modifier) as (
      select number, oid, modifier from unnest(%s::oid[], %s::int[]) with ordinality as u(oid, modifier, number)
      union all
      select b.number, t.typbasetype, t.typtypmod
        from b join pg_catalog.pg_type t on t.oid = b.oid where t.typbasetype <> 0)
    select pg_catalog.format_type(b.oid, b.modifier) from b
     where not exists (select from pg_catalog.pg_type t where t.oid = b.oid and t.typbasetype <> 0) order by number"""


@dataclass(frozen=True, slots=True)
class CatalogTable:
    """A table as the slot described it, plus from the catalog its quoted name, key columns and base types.

    `key`: the replica identity as described; for a partitioned table the one that all its partitions have. Where that
    names no columns (full, nothing), today's primary key. `deferrable`: that is checked at the end of a statement or
    transaction, so that two rows may have one key for a while. `whole`: an old row has all columns. `types`: the base
    types' names, "-" if dropped. `value_types`: the same by column, without modifiers.
    """

    name: str
    relation: RelationMessage
    key: tuple[str, ...]
    deferrable: bool
    whole: bool
    types: tuple[str, ...]
    value_types: dict[str, str] = field(compare=False)


class SlotCatalog:
    """Looks tables up in the catalog, each version once; also converts messages from the database's encoding."""

    def __init__(self, connection: Connection[Any]) -> None:
        self._connection = connection
        self._encoding = connection.info.parameter_status("server_encoding")
        self._known: dict[RelationMessage, CatalogTable] = {}

    def text(self, content: bytes) -> str:
        """The text of a message's content, which the server sends in the database's encoding.

        UnicodeDecodeError or psycopg.DataError if it is not text.
        """
        if content.isascii() or self._encoding in ("UTF8", "SQL_ASCII"):
            return content.decode()
        with self._connection.transaction():
            query = "select pg_catalog.convert(%s, pg_catalog.getdatabaseencoding(), 'UTF8')"
            return bytes(scalar(self._connection, query, content)).decode()

    def forget(self, relation: RelationMessage) -> None:
        """Look a table up anew: the server describes it again after a change, such as that of its primary key."""
        self._known.pop(relation, None)

    def describe(self, relation: RelationMessage) -> CatalogTable:
        """The table with its names and types from the catalog."""
        if relation not in self._known:
            given = {"schema": relation.schema, "name": relation.name, "oid": relation.oid}
            columns = [[c.type_oid for c in relation.columns], [c.type_modifier for c in relation.columns]]
            with self._connection.transaction(force_rollback=True):
                pin_transaction(self._connection)
                row = self._connection.execute(_DESCRIBE, given).fetchone()
                bases = self._connection.execute(_BASE_TYPES, columns).fetchall()
            name, primary, is_deferrable, partitions = row or ("", (), False, None)
            types = tuple(one for (one,) in bases)
            names = (column.name for column in relation.columns)
            value_types = {name: base_type_name(one) for name, one in zip(names, types, strict=True)}
            whole = relation.identity == "f" and all(kind == "f" for kind, _ in partitions or ())
            key = _key(relation, primary, partitions or ())
            deferrable = is_deferrable and whole and set(key) == set(primary)
            self._known[relation] = CatalogTable(name, relation, key, deferrable, whole, types, value_types)
        return self._known[relation]


def _key(
    relation: RelationMessage, primary: Sequence[str], partitions: Sequence[tuple[str, Sequence[str]]]
) -> tuple[str, ...]:
    sent = {column.name for column in relation.columns}
    named = [column.name for column in relation.columns if column.identity and relation.identity != "f"]
    if len(partitions) == 1 and set(partitions[0][1]) <= sent:
        named = list(partitions[0][1]) or named
    return tuple(named or (primary if sent >= set(primary) else ()))
