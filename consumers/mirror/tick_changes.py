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
from gdq.sql_text import quote

# The columns after those of the table: the operation of the log row, the tick, when, and the number of the event.
OP, VERSION, TIME, EVENT = "_op", "_commit_version", "_commit_timestamp", "ev_id"


def _header(name: str, pg_type: str, oid: int, log_column: str) -> tuple[LakeColumn, LogColumn]:
    logged = LogColumn(name, pg_type, pg_type, False, False, log_column, None, None, None)
    return lake_column(name, oid, pg_type, "delta"), logged


# Of the rows of numbered_rows().
HEADER = (
    _header(OP, "text", 25, "ev_op"),
    _header(VERSION, "bigint", 20, VERSION),
    _header(TIME, "timestamp with time zone", 1184, "ev_time"),
    _header(EVENT, "bigint", 20, "ev_id"),
)
_NAMES = frozenset(column.name for column, _ in HEADER)


def check_names(table: MirrorTable, own: Collection[str]) -> None:
    """GdqError if a table has a column that a history needs itself; `own`: its further columns."""
    if taken := sorted({*_NAMES, *own}.intersection(table.schema.names)):
        raise GdqError(f'the history of table {table.name} cannot have its column "{taken[0]}", which it needs itself')


def numbered_rows(rows: str, ticks: Sequence[Tick]) -> str:
    """The SELECT of log rows with the number of the first tick that sees each as VERSION; the last one sees all.

    Between the transactions at which snapshots end, or which were running then, all have the same first tick.
    """

    def first(txid: int) -> int:
        return ticks[bisect_left(ticks, True, hi=len(ticks) - 1, key=lambda tick: tick.snapshot.sees(txid))].number

    running = {txid for tick in ticks for txid in tick.snapshot.running}
    starts = sorted({tick.snapshot.xmax for tick in ticks[:-1]} | running | {txid + 1 for txid in running})
    numbers = [ticks[0].number, *map(first, starts)]
    place = f"1 operator(pg_catalog.+) pg_catalog.width_bucket(d.ev_txid, {_array(starts)})"
    return f"select d.*, ({_array(numbers)})[{place}] as {quote(VERSION)} from ({rows}) as d"


def _array(values: Sequence[int]) -> str:
    return f"'{{{','.join(map(str, values))}}}'::pg_catalog.int8[]"


def truncations(source: Connection[Any], queue: str, log: TableLog, ticks: Sequence[Tick]) -> list[tuple[int, int]]:
    """The TRUNCATEs of a log: the number of each event, and that of its tick."""
    return [(event, truncate_tick(source, queue, log, ticks, event)) for event in log.truncates]


def tick_changes(
    table: MirrorTable, source: Connection[Any], queue: str, log: TableLog, live: Callable[[], pa.Table]
) -> pa.Table:
    """The images of a table's log: its columns, OP, VERSION, TIME, EVENT, and the weight -1 or 1.

    `live` gives the rows that the table had before, with weights. The rows that a TRUNCATE took away have its event.
    """
    ticks = ticks_of(source, queue, log)
    images = table.images(source, numbered_rows(log.select, ticks), header=HEADER)
    parts = [images]
    before, start = live() if log.truncates else None, 0
    for event, tick in truncations(source, queue, log, ticks):
        between = pc.and_(pc.greater(images[EVENT], start), pc.less(images[EVENT], event))
        later = images.filter(between).select([*table.schema.names, WEIGHT_COLUMN])
        gone = repeated_rows(net_images(later if before is None else pa.concat_tables([before, later])), 1)
        for name, value in ((OP, "D"), (VERSION, tick), (TIME, datetime.now(UTC)), (EVENT, event), (WEIGHT_COLUMN, -1)):
            field = images.schema.field(name)
            gone = gone.append_column(field, pa.repeat(pa.scalar(value, field.type), gone.num_rows))
        parts.append(gone)
        before, start = None, event
    return pa.concat_tables(part.cast(images.schema) for part in parts)
