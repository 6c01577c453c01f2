"""Applies a difference to immutable Parquet files by rewriting only the files that lose rows.

Delta, Iceberg and the plain Parquet versions share this; each commits the files in its own way. NULL equals NULL and
NaN equals NaN; of equal rows exactly the wanted number is deleted.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import reduce
from typing import Literal, cast

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from pyarrow import fs

from gdq.consumers.lake.columns import EvolvedColumn, evolved_rows, stored_names, with_columns
from gdq.consumers.lake.data_files import DataFile, DataFileWriter, RowParts, StagedFiles, write_parts
from gdq.consumers.views.signals import Diverged
from gdq.plan.table import WEIGHT_COLUMN

# Each refresh adds a small file: more than this many are rewritten as one.
_SMALL_BYTES = 8 * 2**20
_SMALL_FILES = 16


@dataclass(frozen=True, slots=True)
class LakeKey:
    """Values of one key column whose rows are replaced; `null`: NULL is one of the values."""

    name: str
    values: pa.Array
    null: bool


@dataclass(frozen=True, slots=True)
class ArrowDifference:
    """A Difference (consumers.views.difference) as Arrow, for lake tables written by this process.

    `rows()` gives record batches of `schema`, plus WEIGHT_COLUMN if signed. It may be called again, since a commit
    that fails because another came first is retried. `ignored`: columns that are not compared to find rows that go.
    `parts`: the rows of a full load, where they can be read side by side; `staged`: files that have them already.
    """

    kind: Literal["none", "full", "replace", "signed"]
    schema: pa.Schema
    rows: Callable[[], Iterator[pa.RecordBatch]] = lambda: iter(())
    keys: tuple[LakeKey, ...] = ()
    match: tuple[str, ...] = ()
    ignored: frozenset[str] = frozenset()
    parts: RowParts | None = None
    staged: StagedFiles | None = None

    def arranged(self, names: Sequence[str]) -> ArrowDifference:
        """The same with the columns in another order; a difference with other columns is returned as it is."""
        if sorted(names) != sorted(self.schema.names) or list(names) == self.schema.names:
            return self
        weight = [WEIGHT_COLUMN] if self.kind == "signed" else []
        schema = pa.schema([self.schema.field(name) for name in names])
        return replace(self, schema=schema, rows=lambda: (rows.select([*names, *weight]) for rows in self.rows()))


@dataclass(frozen=True, slots=True)
class RewrittenDataFiles:
    """The files removed and added, and the rows deleted and inserted."""

    removed: list[DataFile]
    added: list[DataFile]
    deleted: int
    inserted: int


def rewrite_data_files(
    system: fs.FileSystem,
    folder: str,
    files: Sequence[DataFile],
    change: ArrowDifference,
    schema: pa.Schema | None = None,
) -> RewrittenDataFiles:
    """Apply a change: write new files into `folder` and leave `files` as they are.

    `schema`: for the new files, if it has more metadata than the change's. Diverged if rows to delete are missing.
    """
    if change.kind == "none":
        return RewrittenDataFiles([], [], 0, 0)
    if change.kind == "full":
        added = _loaded(system, folder, change, schema or change.schema)
        return RewrittenDataFiles(
            list(files), added, sum(file.rows for file in files), sum(file.rows for file in added)
        )
    with DataFileWriter(system, folder, schema or change.schema) as writer:
        if change.kind == "replace":
            removed, deleted = _drop(system, files, schema or change.schema, _Keys(change.keys), writer)
            kept = writer.rows
            for batch in change.rows():
                writer.write(batch)
            inserted = writer.rows - kept
        else:
            signed = pa.Table.from_batches(change.rows(), change.schema.append(pa.field(WEIGHT_COLUMN, pa.int64())))
            weights, rows = signed[WEIGHT_COLUMN].to_pylist(), signed.drop_columns([WEIGHT_COLUMN])
            lost = rows.filter(pc.less(signed[WEIGHT_COLUMN], 0)).drop_columns(sorted(change.ignored))
            gone = _Images(lost, [-weight for weight in weights if weight < 0], change.match)
            removed, deleted = _drop(system, files, schema or change.schema, gone, writer)
            if gone.left:
                raise Diverged(f"{deleted} of the {deleted + gone.left} rows that went were there")
            copies = [number for number, weight in enumerate(weights) for _ in range(weight)]
            writer.write(rows.take(pa.array(copies, pa.int64())))
            inserted = len(copies)
    return RewrittenDataFiles(removed, writer.files, deleted, inserted)


def _loaded(system: fs.FileSystem, folder: str, change: ArrowDifference, schema: pa.Schema) -> list[DataFile]:
    """All rows of a full load in new files, or in those that have them already."""
    if change.staged is not None and (taken := change.staged.taken(system, folder, schema)) is not None:
        return taken
    if change.parts is not None:
        return write_parts(system, folder, schema, change.parts)
    with DataFileWriter(system, folder, schema) as writer:
        for batch in change.rows():
            writer.write(batch)
    return writer.files


def _drop(
    system: fs.FileSystem, files: Sequence[DataFile], schema: pa.Schema, gone: _Keys | _Images, writer: DataFileWriter
) -> tuple[list[DataFile], int]:
    """Write the remaining rows of files that lose rows; returns these files and the number of rows lost.

    `gone`: the rows to delete. Its `columns`, with the values of such rows, are looked at first in each row group.
    """
    small = [file for file in files if file.bytes < _SMALL_BYTES]
    fold = set(small) if len(small) > _SMALL_FILES else set()
    removed, deleted = [], 0
    for file in files:
        if gone.done and file not in fold:
            continue
        with pq.ParquetFile(file.path, filesystem=system) as parquet:
            there = stored_names(parquet, schema)
            groups = [_Group(parquet, number, schema, there) for number in range(parquet.num_row_groups)]
            found = [[] if gone.done or not group.may_hold(gone.columns) else gone.find(group) for group in groups]
            lost = sum(len(numbers) for numbers in found)
            if not lost and file not in fold:
                continue
            for group, numbers in zip(groups, found, strict=True):
                writer.write(group.without(numbers))
        removed.append(file)
        deleted += lost
    return removed, deleted


@dataclass(frozen=True, slots=True)
class _Group:
    """One row group of a file, read column by column; `there`: the columns that it has, by those of the schema."""

    file: pq.ParquetFile
    number: int
    schema: pa.Schema
    there: Mapping[str, str]

    @property
    def rows(self) -> int:
        return int(self.file.metadata.row_group(self.number).num_rows)

    def read(self, names: Sequence[str]) -> pa.Table:
        table = self.file.read_row_group(
            self.number, columns=[self.there[name] for name in names if name in self.there]
        )
        return with_columns(table, pa.schema([self.schema.field(name) for name in names]), self.there, self.rows)

    def without(self, numbers: list[int]) -> pa.Table:
        """The rows except those with these numbers."""
        if len(numbers) == self.rows:
            return self.schema.empty_table()
        rows = self.read(self.schema.names)
        if not numbers:
            return rows
        gone = pc.is_in(pa.array(range(self.rows), pa.int64()), value_set=pa.array(numbers, pa.int64()))
        return rows.filter(pc.invert(gone))

    def may_hold(self, columns: Mapping[str, pa.Array]) -> bool:
        """True if one value of each column may lie between the smallest and the largest of the row group."""
        return all(self._overlaps(name, values) for name, values in columns.items())

    def _overlaps(self, name: str, values: pa.Array) -> bool:
        # floats are compared by their bits, for which the file has no statistics
        kind = self.schema.field(name).type
        if not (pa.types.is_integer(kind) or pa.types.is_date(kind) or pa.types.is_string(kind)) or values.null_count:
            return True
        names, there = self.file.schema.names, self.there.get(name)
        statistics = (
            self.file.metadata.row_group(self.number).column(names.index(there)).statistics
            if there is not None and names.count(there) == 1
            else None
        )
        if statistics is None or not statistics.has_min_max:
            return True
        ends = pc.min_max(values).as_py()
        return bool(ends["min"] <= statistics.max and statistics.min <= ends["max"]) if len(values) else False


class _Keys:
    """Rows whose key columns all have one of their values."""

    def __init__(self, keys: Sequence[LakeKey]) -> None:
        self.columns = {
            key.name: pa.concat_arrays([_folded(key.values), pa.nulls(1 if key.null else 0, key.values.type)])
            for key in keys
        }
        self.done = any(not len(values) for values in self.columns.values())

    def find(self, group: _Group) -> list[int]:
        rows = group.read(list(self.columns))
        return _among([(_folded(whole_array(rows[name])), values) for name, values in self.columns.items()])


class _Images:
    """Rows equal to given rows, each up to its count. `first`: the columns that are compared first."""

    def __init__(self, rows: pa.Table, counts: Sequence[int], first: Sequence[str]) -> None:
        self._rest = [name for name in rows.schema.names if name not in first]
        columns = {name: float_bits(whole_array(rows[name])) for name in [*first, *self._rest]}
        self._values = {name: column.unique() for name, column in columns.items()}
        self.columns = {name: self._values[name] for name in first}
        codes = [_numbers(column, self._values[name]) for name, column in columns.items()]
        self._left: Counter[tuple[int | None, ...]] = Counter()
        for code, count in zip(zip(*codes, strict=True), counts, strict=True):
            self._left[code] += count
        self.left = sum(counts)

    @property
    def done(self) -> bool:
        return not self.left

    def find(self, group: _Group) -> list[int]:
        numbers = list(range(group.rows))
        codes: list[list[int | None]] = []
        for names in filter(None, (list(self.columns), self._rest)):
            rows = group.read(names)
            if codes:
                rows = rows.take(pa.array(numbers, pa.int64()))
            pairs = [(float_bits(whole_array(rows[name])), self._values[name]) for name in names]
            some = _among(pairs)
            if not some:
                return []
            taken = pa.array(some, pa.int64())
            numbers = [numbers[n] for n in some]
            codes = [[code[n] for n in some] for code in codes]
            codes += [_numbers(column.take(taken), values) for column, values in pairs]
        return [number for number, code in zip(numbers, zip(*codes, strict=True), strict=True) if self._take(code)]

    def _take(self, code: tuple[int | None, ...]) -> bool:
        """Count down one row with these values; False if none is left to delete."""
        if not self._left.get(code):
            return False
        self._left[code] -= 1
        self.left -= 1
        return True


def evolved(rows: Callable[[], Iterator[pa.RecordBatch]], columns: Sequence[EvolvedColumn]) -> ArrowDifference:
    """The difference that writes the rows of a table again, with the columns that it gets."""
    schema = pa.schema([column.field for column in columns])
    return ArrowDifference("full", schema, lambda: evolved_rows(rows(), columns))


def whole_array(column: pa.ChunkedArray) -> pa.Array:
    """A column as one array."""
    array = column.combine_chunks()
    return array if isinstance(array, pa.Array) else pa.concat_arrays(array.chunks)


def _among(pairs: Sequence[tuple[pa.Array, pa.Array]]) -> list[int]:
    """Numbers of the rows where each column has one of its values; NULL counts as a value."""
    found = [pc.is_in(column, value_set=values, skip_nulls=False) for column, values in pairs]
    return cast("list[int]", pc.indices_nonzero(reduce(pc.and_, found)).to_pylist())


def _numbers(column: pa.Array, values: pa.Array) -> list[int | None]:
    """The index of each value in `values`, None if missing there; NULL counts as a value."""
    return cast("list[int | None]", pc.index_in(column, value_set=values, skip_nulls=False).to_pylist())


def float_bits(column: pa.Array) -> pa.Array:
    """Floats as integers: 0 and -0 differ, as in a row's text, and NaN equals NaN."""
    if pa.types.is_float32(column.type):
        return column.view(pa.int32())
    return column.view(pa.int64()) if pa.types.is_float64(column.type) else column


def _folded(column: pa.Array) -> pa.Array:
    """Values as PostgreSQL compares them: -0 is 0."""
    return pc.add(column, pa.scalar(0, column.type)) if pa.types.is_floating(column.type) else column
