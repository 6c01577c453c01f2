"""A lake table that is equal to its table: a copy replaces all rows, a batch the rows that its net change names."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import pyarrow as pa
from psycopg import Connection

from gdq.consumers.lake.files import ArrowDifference
from gdq.consumers.lake.table import LakeTable
from gdq.consumers.mirror.batch_changes import TableLog
from gdq.consumers.mirror.state import History
from gdq.consumers.mirror.table import CopiedRows, CopyTarget, MirrorTable, net_images, repeated_rows

# So many changes of a table are held in memory to be added up; a batch with more has the table copied again.
MAX_CHANGES = 5_000_000


@dataclass(frozen=True, slots=True)
class CurrentRows:
    """What a lake table gets that has the rows of a table of `queue` as they are."""

    queue: str
    history: ClassVar[History | None] = None
    own: ClassVar[frozenset[str]] = frozenset()

    def check(self, table: MirrorTable) -> None:
        """Nothing: a lake table has the columns of its table."""

    def copied(self, table: MirrorTable, _target: CopyTarget, rows: CopiedRows) -> ArrowDifference:
        """All rows of the copy."""
        return table.loaded(rows, table.schema)

    def changed(
        self, table: MirrorTable, _lake: LakeTable, source: Connection[Any], log: TableLog
    ) -> ArrowDifference | None:
        """The net change of the log's rows, or the rows after the last TRUNCATE; None if nothing changes."""
        select = log.select
        if log.truncates:
            select = f"select * from ({select}) t where ev_id operator(pg_catalog.>) {log.truncates[-1]}"
        net = net_images(table.images(source, select, most=MAX_CHANGES))
        if log.truncates:
            rows: pa.Table = repeated_rows(net, 1)
            return table.difference("full", table.schema, lambda: iter(rows.to_batches()))
        if not net.num_rows:
            return None
        return table.difference("signed", table.schema, lambda: iter(net.to_batches()), table.key)
