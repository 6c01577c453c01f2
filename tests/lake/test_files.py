"""Files that lose rows are written anew without them: bags with NULLs, copies, NaN and both zeros, at random."""

from __future__ import annotations

import math
import random
from collections import Counter
from decimal import Decimal
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from pyarrow import fs

from gdq.consumers.lake import data_files
from gdq.consumers.lake import files as lake_rows
from gdq.consumers.lake.data_files import DataFile
from gdq.consumers.lake.files import ArrowDifference, LakeKey, rewrite_data_files
from gdq.consumers.views.signals import Diverged
from gdq.plan.table import WEIGHT_COLUMN

SCHEMA = pa.schema(
    [
        ("a", pa.int64()),
        ("f", pa.float64()),
        ("s", pa.string()),
        ("b", pa.bool_()),
        ("d", pa.decimal128(6, 2)),
        ("a.x", pa.binary()),
    ]
)
VALUES: list[list[Any]] = [
    [None, 1, 2, 3],
    [None, 0.0, -0.0, math.nan, 1.5, math.inf],
    [None, "", "x", "y"],
    [None, True, False],
    [None, Decimal("1.00")],
    [None, b"", b"q"],
]
SYSTEM = fs.LocalFileSystem()
Row = tuple[Any, ...]


def table(rows: list[Row], schema: pa.Schema = SCHEMA) -> pa.Table:
    columns = [pa.array([row[n] for row in rows], field.type) for n, field in enumerate(schema)]
    return pa.table(columns, schema=schema)


def bag(files: list[DataFile]) -> Counter[str]:
    return Counter(
        repr(tuple(row[name] for name in SCHEMA.names))
        for file in files
        for row in pq.read_table(file.path).to_pylist()
    )


def some_row(rng: random.Random) -> Row:
    return tuple(rng.choice(values) for values in VALUES)


def is_one_of(value: Any, values: list[Any], null: bool) -> bool:
    return null if value is None else value in values or str(value) in map(str, values)


@pytest.mark.parametrize("seed", range(40))
def test_bags(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, seed: int) -> None:
    rng = random.Random(seed)
    monkeypatch.setattr(data_files, "_GROUP_ROWS", 7)
    monkeypatch.setattr(lake_rows, "_SMALL_FILES", rng.choice([0, 16]))
    rows = [some_row(rng) for _ in range(rng.choice([0, 1, 40]))]
    rows += [row for row in rows if rng.random() < 0.5]
    files: list[DataFile] = []
    for part in (rows[::2], rows[1::2]):
        files += rewrite_data_files(SYSTEM, str(tmp_path), [], full(part)).added
    change, left = (signed if seed % 2 else replaced)(rng, rows)
    done = rewrite_data_files(SYSTEM, str(tmp_path), files, change)
    after = [file for file in files if file not in done.removed] + done.added
    assert bag(after) == Counter(map(repr, left))
    assert len(left) - len(rows) == done.inserted - done.deleted
    assert sum(file.rows for file in after) == len(left)


def full(rows: list[Row]) -> ArrowDifference:
    return ArrowDifference("full", SCHEMA, lambda: iter(table(rows).to_batches(max_chunksize=5)))


def signed(rng: random.Random, rows: list[Row]) -> tuple[ArrowDifference, list[Row]]:
    copies = Counter(map(repr, rows))
    known = {repr(row): row for row in rows}
    weights = {text: -rng.randint(1, n) for text, n in copies.items() if rng.random() < 0.3}
    for row in (some_row(rng), some_row(rng)):
        known[repr(row)] = row
        weights.setdefault(repr(row), rng.randint(1, 3))
    rows_in = table(
        [(*known[text], weight) for text, weight in weights.items()], SCHEMA.append(pa.field(WEIGHT_COLUMN, pa.int64()))
    )
    left = [known[text] for text in known for _ in range(copies[text] + weights.get(text, 0))]
    match = rng.choice([(), ("a",), ("s", "f")])
    return ArrowDifference("signed", SCHEMA, lambda: iter(rows_in.to_batches()), match=match), left


def replaced(rng: random.Random, rows: list[Row]) -> tuple[ArrowDifference, list[Row]]:
    integers, floats = ([value for value in VALUES[n][1:] if rng.random() < 0.5] for n in (0, 1))
    nulls = rng.random() < 0.5, rng.random() < 0.5
    new = [some_row(rng)]
    left = [row for row in rows if not (is_one_of(row[0], integers, nulls[0]) and is_one_of(row[1], floats, nulls[1]))]
    keys = (
        LakeKey("a", pa.array(integers, pa.int64()), nulls[0]),
        LakeKey("f", pa.array(floats, pa.float64()), nulls[1]),
    )
    return ArrowDifference("replace", SCHEMA, lambda: iter(table(new).to_batches()), keys), [*left, *new]


def test_row_that_is_missing(tmp_path: Path) -> None:
    """Nothing is left behind either."""
    row = some_row(random.Random(1))
    gone = table([(*row, -1)], SCHEMA.append(pa.field(WEIGHT_COLUMN, pa.int64())))
    with pytest.raises(Diverged):
        rewrite_data_files(
            SYSTEM, str(tmp_path), [], ArrowDifference("signed", SCHEMA, lambda: iter(gone.to_batches()))
        )
    assert list(tmp_path.iterdir()) == []
