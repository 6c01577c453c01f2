"""Log rows as Arrow has them: the columns before the images, and images added up."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from gdq.errors import GdqError
from gdq.typed.arrow import ArrowColumn
from gdq.typed.pgtypes import COLUMN_NAMES, column_type

if TYPE_CHECKING:
    import pyarrow as pa

BATCH_WEIGHT = "_weight"

# The columns before the images in a log row.
LOG_HEADER = [
    ArrowColumn(name, column_type(kind), log_type=kind)
    for name, kind in {
        "ev_id": "bigint",
        "ev_txid": "bigint",
        "ev_time": "timestamp with time zone",
        "ev_op": "text",
    }.items()
]

# The column after them where updates may leave out large values: the names of the columns that a row lacks, else NULL.
LOG_UNCHANGED = ArrowColumn("ev_unchanged", COLUMN_NAMES, log_type="text[]")


def log_header(sources: Sequence[dict[str, Any]]) -> list[ArrowColumn]:
    """The columns before the images of these columns of gdq.table_columns()."""
    return [*LOG_HEADER, LOG_UNCHANGED] if any(source["omitted"] for source in sources) else [*LOG_HEADER]


def refuse_unchanged(table: str, rows: pa.RecordBatch) -> None:
    """GdqError if log rows lack values that updates left as they were."""
    if LOG_UNCHANGED.source in rows.schema.names:
        lacking = {name for names in rows.column(LOG_UNCHANGED.source).to_pylist() for name in names or ()}
        if lacking:
            raise GdqError(
                f"table {table} has updates that do not log {', '.join(sorted(lacking))}: there is no net change",
                hint="Read events() or arrow(), or capture the table with unchanged once, not omit.",
            )


def net_batch_rows(images: pa.Table, names: list[str]) -> pa.Table:
    """Images with a signed count in BATCH_WEIGHT, equal ones added, without zero counts; `names` are their columns."""
    import pyarrow.compute as pc  # noqa: PLC0415

    summed = images.group_by(names).aggregate([(BATCH_WEIGHT, "sum")]).rename_columns([*names, BATCH_WEIGHT])
    return summed.filter(pc.not_equal(summed.column(BATCH_WEIGHT), 0)).cast(images.schema)
