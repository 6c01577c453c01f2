"""A lake table that is the change feed of its table: a row for each image of each change, which stays for good.

The rows whose `_commit_version` is at most a tick add up to the table at that tick: those of `insert` and
`update_postimage` came, those of `delete` and `update_preimage` went. What no log row tells, as which rows a TRUNCATE
or a gap of capture took away, is found by adding up the feed itself.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any, ClassVar

import pyarrow as pa
import pyarrow.compute as pc
from psycopg import Connection

from gdq.consumers.lake.files import ArrowDifference
from gdq.consumers.lake.table import LakeTable
from gdq.consumers.mirror.batch_changes import TableLog
from gdq.consumers.mirror.state import History
from gdq.consumers.mirror.table import CopiedRows, CopyTarget, MirrorTable, net_images, repeated_rows, with_weight
from gdq.consumers.mirror.tick_changes import EVENT, OP, TIME, VERSION, check_names, tick_changes
from gdq.plan.table import WEIGHT_COLUMN
from gdq.source import Position

TYPE = "_change_type"
FEED_FIELDS = (
    pa.field(TYPE, pa.string()),
    pa.field(VERSION, pa.int64()),
    pa.field(TIME, pa.timestamp("us", "UTC")),
    pa.field(EVENT, pa.int64()),
)
# The types of rows that came; those of others went.
CAME = ("insert", "update_postimage")

# The change type of an image, by the operation of its log row and its weight.
CHANGE_TYPES = {
    ("I", 1): "insert",
    ("D", -1): "delete",
    **{(op, -1): "update_preimage" for op in "Uo"},
    **{(op, 1): "update_postimage" for op in "Un"},
}

# Rows of a feed that are added up at a time.
_NET_ROWS = 1_000_000


@dataclass(frozen=True, slots=True)
class ChangeFeed:
    """What a lake table gets that is the change feed of a table of `queue`."""

    queue: str
    history: ClassVar[History] = "feed"
    own: ClassVar[frozenset[str]] = frozenset(field.name for field in FEED_FIELDS)

    def check(self, table: MirrorTable) -> None:
        """GdqError if the table has a column that the feed needs itself."""
        check_names(table, self.own)

    def copied(self, table: MirrorTable, target: CopyTarget, rows: CopiedRows) -> ArrowDifference:
        """All rows as inserts; of a feed that is there already, what has changed since as deletes and inserts."""
        stamp = _Stamp(Position.parse(target.position).tick, datetime.now(UTC))
        schema = _feed_schema(table)
        if target.stored is None:
            return table.loaded(rows, schema, lambda batch: _stamped(batch, "insert", stamp))
        came = pa.Table.from_batches(rows.all(), table.schema)
        weight = pa.repeat(pa.scalar(1, pa.int64()), came.num_rows)
        change = net_images(
            pa.concat_tables([came.append_column(WEIGHT_COLUMN, weight), _negated(_live(table, target.lake))])
        )
        gone, new = repeated_rows(change, -1), repeated_rows(change, 1)
        stamped = [_stamped(batch, "delete", stamp) for batch in gone.to_batches()]
        stamped += [_stamped(batch, "insert", stamp) for batch in new.to_batches()]
        return _appended(table, pa.Table.from_batches(stamped, schema))

    def changed(
        self, table: MirrorTable, lake: LakeTable, source: Connection[Any], log: TableLog
    ) -> ArrowDifference | None:
        """A row for each image of the log's rows, and for each row that a TRUNCATE took away; None if there is none."""
        changes = tick_changes(table, source, self.queue, log, lambda: _live(table, lake))
        if not changes.num_rows:
            return None
        kinds = zip(changes[OP].to_pylist(), changes[WEIGHT_COLUMN].to_pylist(), strict=True)
        types = pa.array([CHANGE_TYPES[kind] for kind in kinds], pa.string())
        whole = changes.append_column(FEED_FIELDS[0], types).select(_feed_schema(table).names).cast(_feed_schema(table))
        # the old image of an update comes before the new one
        place = pc.is_in(whole[TYPE], value_set=pa.array(CAME))
        ordered = whole.append_column("place", place).sort_by([(EVENT, "ascending"), ("place", "ascending")])
        return _appended(table, ordered.drop_columns(["place"]))


@dataclass(frozen=True, slots=True)
class _Stamp:
    """What rows of the feed get that no log row has brought: their tick, the time, and the number of the event."""

    version: int
    time: datetime
    event: int = 0


def _feed_schema(table: MirrorTable) -> pa.Schema:
    return pa.schema([*table.schema, *FEED_FIELDS])


def _stamped(rows: pa.RecordBatch, change_type: str, stamp: _Stamp) -> pa.RecordBatch:
    """Rows of the table as rows of its feed."""
    values = (change_type, stamp.version, stamp.time, stamp.event)
    more = [
        pa.repeat(pa.scalar(value, field.type), rows.num_rows) for value, field in zip(values, FEED_FIELDS, strict=True)
    ]
    return pa.RecordBatch.from_arrays([*rows.columns, *more], schema=pa.schema([*rows.schema, *FEED_FIELDS]))


def _appended(table: MirrorTable, rows: pa.Table) -> ArrowDifference:
    """The difference that adds rows, and takes none away."""
    weight = pa.repeat(pa.scalar(1, pa.int64()), rows.num_rows)
    signed = rows.append_column(WEIGHT_COLUMN, weight)
    return table.difference("signed", rows.schema, lambda: iter(signed.to_batches()))


def _live(table: MirrorTable, lake: LakeTable) -> pa.Table:
    """The rows that a feed adds up to, with their counts as weights, with the table's present columns."""
    names = table.schema.names
    found: pa.Table = with_weight(table.schema).empty_table()
    waiting: list[pa.Table] = []
    for batch in lake.scan():
        came = pc.is_in(batch.column(TYPE), value_set=pa.array(CAME))
        weight = pc.if_else(came, pa.scalar(1, pa.int64()), pa.scalar(-1, pa.int64()))
        rows = batch.select(names)
        waiting.append(pa.Table.from_arrays([*rows.columns, weight], names=[*names, WEIGHT_COLUMN]))
        if sum(part.num_rows for part in waiting) > _NET_ROWS:
            found, waiting = net_images(pa.concat_tables([found, *waiting])), []
    return net_images(pa.concat_tables([found, *waiting]))


def _negated(images: pa.Table) -> pa.Table:
    place = images.num_columns - 1
    return images.set_column(place, images.schema.field(place), pc.negate(images[WEIGHT_COLUMN]))
