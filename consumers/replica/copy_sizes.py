"""The sizes of tables that a replica copies: which are large, and which small ones share a snapshot."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from psycopg import Connection

# A table of more bytes is copied in parts however many rows it has: it takes half a minute on a slow machine.
_LARGE_BYTES = 128 * 2**20

# Tables of a group, and their bytes on disk: much beside the statements that a snapshot costs, little beside a copy.
_GROUP_TABLES = 50
_GROUP_BYTES = 16 * 2**20

# Of each table and its partitions: bytes, and about how many rows; the estimate follows the blocks since ANALYZE. Sizes
# wait for locks: of p.oid, so that no plan looks at all tables.
_SIZES = """
select o.relid::bigint, s.bytes, s.rows
  from unnest(%s::oid[]) as o(relid), lateral (
    select coalesce(sum(b.bytes), 0)::bigint as bytes,
           sum(case when c.reltuples >= 0 then c.reltuples / greatest(c.relpages, 1) end
               * b.heap / current_setting('block_size')::int)::bigint as rows
      from (select o.relid::oid union select t.relid from pg_partition_tree(o.relid) t where t.isleaf) as p(oid)
      join pg_class c on c.oid = p.oid and c.relkind <> 'p',
           lateral (select pg_table_size(p.oid) as bytes, pg_relation_size(p.oid) as heap) as b) as s"""

_Table = TypeVar("_Table")


@dataclass(frozen=True, slots=True)
class TableSize:
    """Bytes of a table, and about how many rows it has, None if nobody knows."""

    bytes: int = 0
    rows: int | None = None

    def is_large(self, chunk_rows: int) -> bool:
        """True if the table is worth parts of so many rows."""
        return self.bytes > _LARGE_BYTES or (self.rows or 0) > chunk_rows


def table_sizes(source: Connection[Any], relids: Sequence[int]) -> dict[int, TableSize]:
    """The sizes of tables by their oids; of a table that has gone there is none, or an empty one."""
    found = {relid: TableSize(*size) for relid, *size in source.execute(_SIZES, [list(relids)])}
    return {relid: found.get(relid, TableSize()) for relid in relids}


def expected_rows(sizes: Iterable[TableSize]) -> int | None:
    """About how many rows tables have together; None if nobody knows of one of them."""
    rows = [size.rows for size in sizes]
    known = [number for number in rows if number is not None]
    return sum(known) if len(known) == len(rows) else None


def shown_names(names: Sequence[str]) -> str:
    """Tables as the progress of their copies names them."""
    return names[0] if len(names) == 1 else f"{len(names)} tables"


def grouped(tables: Sequence[_Table], size: Callable[[_Table], TableSize]) -> list[list[_Table]]:
    """Tables in groups, the largest first; those of a group share a snapshot."""
    groups: list[list[_Table]] = []
    full = 0
    for table in sorted(tables, key=lambda one: -size(one).bytes):
        if not groups or full + size(table).bytes > _GROUP_BYTES or len(groups[-1]) == _GROUP_TABLES:
            groups.append([])
            full = 0
        groups[-1].append(table)
        full += size(table).bytes
    return groups
