"""Engine for lake tables: computes the difference beside the tables and writes it to the lake by this process.

The computing session's transaction stays open until the lake has the rows. They pass through this process as Arrow,
in a full load batch by batch.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field

import pyarrow as pa
from psycopg import sql

from gdq.consumers.lake.files import ArrowDifference, LakeKey
from gdq.consumers.lake.table import LakeTable
from gdq.consumers.lake.types import LakeColumn, lake_schema, read_lake_column, read_lake_rows
from gdq.consumers.views.computation import Computation
from gdq.consumers.views.difference import Difference, KeySet
from gdq.consumers.views.engine import EngineEffort
from gdq.consumers.views.target import StoredPosition
from gdq.plan.table import WEIGHT_COLUMN


@dataclass(slots=True)
class LakeEngine:
    """Engine of one refresh of one view whose target is `lake`, with `columns`."""

    computation: Computation
    lake: LakeTable
    columns: Sequence[LakeColumn]
    _difference: Difference = field(default=Difference("none"), init=False)

    def compute(self, s0: str | None, changed: Mapping[str, str]) -> None:
        """Compute the difference; the lake is not touched."""
        self._difference = self.computation.difference(s0, changed)

    def effort(self) -> EngineEffort:
        return self.computation.effort()

    def commit(self, stored: StoredPosition | None, new: StoredPosition) -> int:
        """As CommittingEngine.commit()."""
        return self.lake.commit(self._change(), stored, new)

    def _change(self) -> ArrowDifference:
        done = self._difference
        keys = tuple(self._key(key) for key in done.keys)
        return ArrowDifference(done.kind, lake_schema(self.columns), self._rows, keys, done.match)

    def _rows(self) -> Iterator[pa.RecordBatch]:
        done = self._difference
        # the SELECT may still have to compute the rows
        with nullcontext() if done.kind == "full" else self.computation.computing():
            weight = WEIGHT_COLUMN if done.kind == "signed" else None
            written = 0
            for batch in read_lake_rows(self.computation.sql, done.rows, self.columns, weight):
                self.computation.task.tell("writing", written)
                yield batch
                written += batch.num_rows

    def _key(self, key: KeySet) -> LakeKey:
        column = next(column for column in self.columns if column.name == key.column)
        array = f"{sql.Literal(key.array).as_string(self.computation.connection)}::{key.array_type}"
        return LakeKey(
            key.column,
            read_lake_column(self.computation.sql, f"select pg_catalog.unnest({array})", column),
            key.null,
        )
