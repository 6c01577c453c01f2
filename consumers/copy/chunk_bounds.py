"""Where a chunk ends: at one of the keys of some blocks, which are looked at once, or after so many rows of the index.

    id of some blocks' rows   3  40  41  ...  99,870  100,012  ...  200,340
    ends of chunks                                    100,012       200,340   about 100,000 rows after one another

An index that is counted through costs a tenth of a copy, while the target waits. Any key may end a chunk: a bad choice
makes it larger or smaller, and no row is read twice or left out.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from psycopg import Connection

from gdq.consumers.copy.chunk_table import Bound, ChunkTable

# Rows between two keys that are kept; smaller chunks are counted.
_APART_ROWS = 100_000


@dataclass(slots=True)
class ChunkBounds:
    """The keys that are kept of each range that has been looked at, from where it was then.

    A range is known by its table's columns, too: a copy that starts again looks anew if they have changed.
    """

    _kept: dict[tuple[str, str, int], list[Bound | None]] = field(default_factory=dict)

    def next(
        self,
        connection: Connection[Any],
        table: ChunkTable,
        after: Bound | None,
        until: Bound | None,
        size: int,
        *,
        number: int = 1,
    ) -> Bound | None:
        """The end of the chunk of about `size` rows after a key, in the range `number`, which ends with `until`."""
        if size >= _APART_ROWS:
            known = (table.name, table.described, number)
            if known not in self._kept:
                self._kept[known] = [after, *table.sampled_bounds(connection, after, until, _APART_ROWS)]
            kept = self._kept[known]
            # a copy that was killed goes on from another key; behind the last one the rows are counted
            if after in kept:
                place = kept.index(after) + size // _APART_ROWS
                if place < len(kept):
                    return kept[place]
        return table.next_bound(connection, after, until, size)
