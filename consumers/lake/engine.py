"""Brings the difference of a refresh into a lake table.

It is computed beside the tables, in a session whose transaction stays open until the lake has taken the rows; they go
through this process as Arrow, batch by batch in a full load.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from psycopg import sql

from gdq.consumers.lake.table import Lake
from gdq.consumers.views.computation import Computation
from gdq.consumers.views.difference import Difference, KeySet
from gdq.consumers.views.engine import Effort
from gdq.consumers.views.target import StoredPosition
from gdq.plan.table import WEIGHT

if TYPE_CHECKING:
    import pyarrow as pa

    from gdq.consumers.lake.files import ArrowDifference, LakeKey
    from gdq.consumers.lake.types import LakeColumn


@dataclass(slots=True)
class LakeEngine:
    """One refresh of one view whose target is `lake`, with `columns`."""

    computation: Computation
    lake: Lake
    columns: Sequence[LakeColumn]
    _difference: Difference = field(default=Difference("none"), init=False)

    def compute(self, s0: str | None, changed: Mapping[str, str]) -> None:
        """Compute what changes; the lake is not touched."""
        self._difference = self.computation.difference(s0, changed)

    def effort(self) -> Effort:
        """The work of the refresh."""
        return self.computation.effort()

    def commit(self, stored: StoredPosition | None, new: StoredPosition) -> int:
        """Change the lake table and move its position in one commit; the rows deleted and inserted.

        RefreshConflict unless the position is still `stored`, Diverged when the rows are not those of that position.
        """
        return self.lake.commit(self._change(), stored, new)

    def _change(self) -> ArrowDifference:
        from gdq.consumers.lake.files import ArrowDifference  # noqa: PLC0415 (pyarrow is slow to load)
        from gdq.consumers.lake.types import schema_of  # noqa: PLC0415

        done = self._difference
        keys = tuple(self._key(key) for key in done.keys)
        return ArrowDifference(done.kind, schema_of(self.columns), self._rows, keys, done.match)

    def _rows(self) -> Iterator[pa.RecordBatch]:
        from gdq.consumers.lake.types import read  # noqa: PLC0415

        done = self._difference
        # reading the rows may compute them
        with nullcontext() if done.kind == "full" else self.computation.computing():
            weight = WEIGHT if done.kind == "signed" else None
            written = 0
            for batch in read(self.computation.connection, done.rows, self.columns, weight):
                self.computation.task.tell("writing", written)
                yield batch
                written += batch.num_rows

    def _key(self, key: KeySet) -> LakeKey:
        from gdq.consumers.lake.files import LakeKey  # noqa: PLC0415
        from gdq.consumers.lake.types import read_column  # noqa: PLC0415

        column = next(column for column in self.columns if column.name == key.column)
        array = f"{sql.Literal(key.array).as_string(self.computation.connection)}::{key.array_type}"
        return LakeKey(
            key.column, read_column(self.computation.connection, f"select pg_catalog.unnest({array})", column), key.null
        )
