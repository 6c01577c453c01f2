"""A table without a key as a chunked copy reads it: all of its blocks in their order, some of them in each step.

No index finds a part of such rows. A row has a place, but leaves it with every update; so what a reading of several
snapshots has seen is true of those rows alone that have not changed meanwhile (chunk_doubt).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from gdq.consumers.copy.chunk_progress import StartAgain
from gdq.consumers.copy.chunk_table import Bound, ChunkTable
from gdq.consumers.views.snapshot_holder import SnapshotHolder
from gdq.qualified_sql import qualified

# The table, or the leaves of a partitioned one. A leaf is read by its own name if that shows what the root shows.
_LEAVES = qualified("""
select c.oid::bigint, pg_relation_filenode(c.oid)::bigint,
       pg_relation_size(c.oid) / current_setting('block_size')::bigint, pg_table_size(c.oid),
       case when c.oid = %(table)s::pg_catalog.regclass
              or (has_table_privilege(c.oid, 'select') and not c.relrowsecurity)
            then format('%%I.%%I', n.nspname, c.relname) end
  from (select %(table)s::pg_catalog.regclass::oid
        union select t.relid from pg_catalog.pg_partition_tree(%(table)s::pg_catalog.regclass) t
               where t.isleaf) as p(oid)
  join pg_catalog.pg_class c on c.oid = p.oid and c.relkind = 'r'
  join pg_catalog.pg_namespace n on n.oid = c.relnamespace
 order by c.oid""")

# Leaves that one statement reads.
_LEAVES_AT_ONCE = 50


@dataclass(frozen=True, slots=True)
class Place:
    """How far a table was read: before `block` of the leaf with the oid `leaf`, which was in `file`; 0: from the start.

    `end`: the leaf's blocks when its first one was read. Rows in later blocks are newer, and in the log; so the reading
    of a table that grows as fast comes to an end. `reading` counts the times that the table was gone through.
    """

    reading: int = 1
    leaf: int = 0
    file: int = 0
    block: int = 0
    end: int = 0

    @classmethod
    def of(cls, bound: Bound | None) -> Place:
        """The place that `bound` has kept; None: no block was read."""
        return cls() if bound is None else cls(*map(int, bound))

    @property
    def bound(self) -> Bound:
        """The place in the form in which progress is stored."""
        return tuple(map(str, (self.reading, self.leaf, self.file, self.block, self.end)))

    @property
    def begun(self) -> bool:
        """True if blocks were read in this reading."""
        return self.leaf > 0


@dataclass(frozen=True, slots=True)
class _Leaf:
    oid: int
    file: int
    blocks: int
    bytes: int
    name: str | None


class BlockReader:
    """Gives the rows of a table as a held snapshot has them, from a place on. `condition`: only rows t with that."""

    def __init__(self, holder: SnapshotHolder, table: ChunkTable, place: Place, condition: str | None) -> None:
        """StartAgain if the rows of the leaf at hand have been moved to another file."""
        self.place = place
        self._table, self._condition = table, condition
        found = holder.connection.execute(_LEAVES, {"table": table.name}).fetchall()
        self._leaves: Sequence[_Leaf] = [_Leaf(*row) for row in found]
        if any(leaf.oid == place.leaf and leaf.file != place.file and place.block for leaf in self._leaves):
            raise StartAgain(table.name, "its rows were moved, as VACUUM FULL does")

    @property
    def at_end(self) -> bool:
        """True if all blocks were read."""
        return all(self._start(leaf) is None for leaf in self._leaves)

    @property
    def block_bytes(self) -> int:
        """The bytes of a block with the large values of its rows, on the average."""
        return max(1, sum(leaf.bytes for leaf in self._leaves) // max(1, sum(leaf.blocks for leaf in self._leaves)))

    def next(self, blocks: int) -> str:
        """SELECT of the rows of about so many blocks, after which the place is; at_end is False before."""
        parts: list[str] = []
        for leaf in self._leaves:
            start = self._start(leaf)
            if start is None:
                continue
            if blocks <= 0 or len(parts) == _LEAVES_AT_ONCE:
                break
            limit = self._limit(leaf)
            stop = min(start + blocks, limit)
            parts.append(self._select(leaf, start, stop))
            blocks -= stop - start
            self.place = replace(self.place, leaf=leaf.oid, file=leaf.file, block=stop, end=limit)
        return " union all ".join(parts)

    def _start(self, leaf: _Leaf) -> int | None:
        """The first block of a leaf that was not read; None if there is none."""
        start = self.place.block if leaf.oid == self.place.leaf else 0
        return start if leaf.oid >= self.place.leaf and start < self._limit(leaf) else None

    def _limit(self, leaf: _Leaf) -> int:
        """The block of a leaf before which this reading ends."""
        return min(self.place.end, leaf.blocks) if leaf.oid == self.place.leaf else leaf.blocks

    def _select(self, leaf: _Leaf, start: int, end: int) -> str:
        places = f"t.ctid >= '({start},0)' and t.ctid < '({end},0)'"
        conditions = [places, *([self._condition] if self._condition else [])]
        if leaf.name is None:
            conditions.append(f"t.tableoid = {leaf.oid}::oid")
        of = self._table.name if leaf.name is None else f"only {leaf.name}"
        return f"select {self._table.listed} from {of} as t where {' and '.join(conditions)}"
