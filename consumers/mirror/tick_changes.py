"""A table's changes for a history: signed images, each with the first tick that sees it; TRUNCATE as rows that went."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Collection, Sequence
from datetime import UTC, datetime
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
from psycopg import Connection

from gdq.consumers.lake.types import LakeColumn, lake_column
from gdq.consumers.mirror.batch_changes import TableLog, Tick, ticks_of, truncate_tick
from gdq.consumers.mirror.table import MirrorTable, net_images, repeated_rows
from gdq.consumers.views.change_source import LogColumn
from gdq.errors import GdqError
from gdq.plan.table import WEIGHT_COLUMN

# The columns after those of the table: the operation of the log row, the tick, when, and the number of the event.
OP, VERSION, TIME, EVENT = "_op", "_commit_version", "_commit_timestamp", "ev_id"
_TXID = "_txid"


def _header(name: str, pg_type: str, oid: int, log_column: str) -> tuple[LakeColumn, LogColumn]:
    logged = LogColumn(name, pg_type, pg_type, False, False, log_column, None, None, None)
    return lake_column(name, oid, pg_type, "delta"), logged


_HEADER = (
    _header(OP, "text", 25, "ev_op"),
    _header(_TXID, "bigint", 20, "ev_txid"),
    _header(TIME, "timestamp with time zone", 1184, "ev_time"),
    _header(EVENT, "bigint", 20, "ev_id"),
)
_NAMES = frozenset({VERSION, *(column.name for column, _ in _HEADER)})


def check_names(table: MirrorTable, own: Collection[str]) -> None:
    """GdqError if a table has a column that a history needs itself; `own`: its further columns."""
    if taken := sorted({*_NAMES, *own}.intersection(table.schema.names)):
        raise GdqError(f'the history of table {table.name} cannot have its column "{taken[0]}", which it needs itself')


def tick_changes(
    table: MirrorTable, source: Connection[Any], queue: str, log: TableLog, live: Callable[[], pa.Table]
) -> pa.Table:
    """The images of a table's log: its columns, OP, VERSION, TIME, EVENT, and the weight -1 or 1.

    `live` gives the rows that the table had before, with weights. The rows that a TRUNCATE took away have its event.
    """
    images = table.images(source, log.select, header=_HEADER)
    ticks = ticks_of(source, queue, log)
    rows = images.select(table.schema.names)
    rows = rows.append_column(OP, images[OP]).append_column(VERSION, _versions(images[_TXID], ticks))
    rows = rows.append_column(TIME, images[TIME]).append_column(EVENT, images[EVENT])
    parts = [rows.append_column(images.schema.field(WEIGHT_COLUMN), images[WEIGHT_COLUMN])]
    before, start = live() if log.truncates else None, 0
    for event in log.truncates:
        tick = truncate_tick(source, queue, log, ticks, event)
        between = pc.and_(pc.greater(images[EVENT], start), pc.less(images[EVENT], event))
        later = images.filter(between).select([*table.schema.names, WEIGHT_COLUMN])
        gone = repeated_rows(net_images(later if before is None else pa.concat_tables([before, later])), 1)
        for name, value in ((OP, "D"), (VERSION, tick), (TIME, datetime.now(UTC)), (EVENT, event), (WEIGHT_COLUMN, -1)):
            field = parts[0].schema.field(name)
            gone = gone.append_column(field, pa.repeat(pa.scalar(value, field.type), gone.num_rows))
        parts.append(gone)
        before, start = None, event
    return pa.concat_tables(part.cast(parts[0].schema) for part in parts)


def _versions(txids: pa.ChunkedArray, ticks: Sequence[Tick]) -> pa.Array:
    """The first of the ticks that sees each transaction; the last one sees all."""
    known: dict[int, int] = {}
    for txid in txids.unique().to_pylist():
        found = bisect_left(ticks, True, hi=len(ticks) - 1, key=lambda tick: tick.snapshot.sees(txid))
        known[txid] = ticks[found].number
    return pa.array([known[txid] for txid in txids.to_pylist()], pa.int64())
