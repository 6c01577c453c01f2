"""A captured table and its lake table: which columns it has there, its rows, and its changes between two snapshots."""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import pyarrow as pa
import pyarrow.compute as pc
from psycopg import Connection

from gdq.call import scalar
from gdq.consumers.lake.data_files import RowParts, StagedFiles
from gdq.consumers.lake.files import ArrowDifference, float_bits, whole_array
from gdq.consumers.lake.table import LakeTable
from gdq.consumers.lake.types import LakeColumn, lake_columns, lake_schema, read_lake_rows
from gdq.consumers.mirror.state import History
from gdq.consumers.replica.source_tables import SourceTable
from gdq.consumers.views.change_source import LogColumn, log_columns, weighted_log_rows
from gdq.consumers.views.target import StoredPosition
from gdq.errors import GdqError
from gdq.owner_sql import OwnerSql
from gdq.plan.table import WEIGHT_COLUMN
from gdq.qualified_sql import qualified
from gdq.sql_text import quote
from gdq.view.lake_name import LakeKind, LakeName

_OPERATIONS = {"insert", "update", "delete", "truncate"}

_TYPE_OIDS = qualified("""
select a.attname::text, a.atttypid::bigint, a.attnum from pg_catalog.pg_attribute a
 where a.attrelid = %s::oid and a.attnum > 0 and not a.attisdropped""")


@dataclass(frozen=True, slots=True)
class CopiedRows:
    """The rows of a copy; `staged`: files of the lake that have them already."""

    parts: RowParts
    staged: StagedFiles | None = None

    def all(self) -> Iterator[pa.RecordBatch]:
        """The rows one after another."""
        return self.parts.rows()


# A column of the log in the lake and in the log.
HeaderColumn = tuple[LakeColumn, LogColumn]


class TooManyChanges(Exception):  # noqa: N818 (a signal)
    """A batch has more changes of a table than are held in memory."""


@dataclass(frozen=True, slots=True)
class MirrorTable:
    """A captured table at one version of its columns, and these columns in the lake.

    `numbers`: those of the columns, which PostgreSQL gives only once. `history`: what the lake table is, None for the
    table as it is. `kept`: columns that only the lake table has, besides those of a history.
    """

    captured: SourceTable
    logged: tuple[LogColumn, ...]
    columns: tuple[LakeColumn, ...]
    numbers: tuple[int, ...]
    history: History | None
    kept: tuple[pa.Field, ...] = ()

    @property
    def name(self) -> str:
        return self.captured.table_name

    @property
    def plan(self) -> str:
        """What the lake table is made from: the table, and its columns by their numbers."""
        columns = {str(number): name for number, name in zip(self.numbers, self.schema.names, strict=True)}
        of = {"relid": self.captured.relid, "version": self.captured.version, "columns": columns}
        return json.dumps(of | ({"history": self.history} if self.history else {}))

    def fits(self, plan: str) -> bool:
        """True if a lake table that is made by a plan has the columns of this version."""
        known = json.loads(plan)
        return bool(known["relid"] == self.captured.relid and known["version"] == self.captured.version)

    def numbers_of(self, plan: str) -> dict[int, str] | None:
        """The columns that a lake table was made with, by their numbers; None if the plan does not tell."""
        known = json.loads(plan)
        if known["relid"] != self.captured.relid or "columns" not in known:
            return None
        return {int(number): name for number, name in known["columns"].items()}

    def keeping(self, lake: pa.Schema, own: Collection[str]) -> MirrorTable:
        """The same with the further columns of a lake table; `own`: those that a history needs itself."""
        ours = {*self.schema.names, *own}
        return replace(self, kept=tuple(field for field in lake if field.name not in ours))

    @property
    def key(self) -> tuple[str, ...]:
        """The columns of the key by which capture identifies rows; none for a table without one."""
        return tuple(column.name for column in self.logged if column.is_key)

    @property
    def schema(self) -> pa.Schema:
        return lake_schema(self.columns)

    def select(self, reader: Connection[Any], within: str = "") -> str:
        """The SELECT of the table's rows; `within`: a WHERE of the rows t."""
        query = qualified("select relkind = 'p' from pg_catalog.pg_class where oid = %s::oid")
        only = "" if scalar(reader, query, self.captured.relid) else "only "
        listed = ", ".join(f"t.{quote(column.name)}" for column in self.columns)
        return f"select {listed} from {only}{self.name} as t {within}"

    def images(
        self,
        source: Connection[Any],
        log_rows: str,
        *,
        header: Sequence[HeaderColumn] = (),
        most: int | None = None,
        within: str = "",
    ) -> pa.Table:
        """The images that log rows have, old ones with the weight -1, new ones with 1.

        `log_rows`: their SELECT. `header`: columns of the log that follow those of the table. `within`: a WHERE of
        the images t. TooManyChanges if there are more than `most`.
        """
        columns = [*self.columns, *(column for column, _ in header)]
        logged = [*self.logged, *(column for _, column in header)]
        listed = ", ".join(quote(column.name) for column in columns)
        images = f"select {listed}, {quote(WEIGHT_COLUMN)} from {weighted_log_rows(log_rows, logged)} t {within}"
        batches, read = [], 0
        for batch in read_lake_rows(OwnerSql(source, None), images, columns, WEIGHT_COLUMN):
            batches.append(batch)
            read += batch.num_rows
            if most is not None and read > most:
                raise TooManyChanges
        return pa.Table.from_batches(batches, with_weight(lake_schema(columns)))

    def loaded(
        self, copied: CopiedRows, schema: pa.Schema, stamp: Callable[[pa.RecordBatch], pa.RecordBatch] | None = None
    ) -> ArrowDifference:
        """The difference that gives the lake table all rows of a copy; `stamp` makes rows of `schema` of them."""
        parts, whole = copied.parts if stamp is None else copied.parts.mapped(stamp), self._wide(schema)
        if whole is not schema:
            parts = parts.mapped(lambda batch: _filled(batch, whole))
        as_they_are = stamp is None and whole is schema
        return ArrowDifference("full", whole, parts.rows, parts=parts, staged=copied.staged if as_they_are else None)

    def difference(
        self,
        kind: Literal["full", "signed"],
        schema: pa.Schema,
        rows: Callable[[], Iterator[pa.RecordBatch]],
        match: tuple[str, ...] = (),
    ) -> ArrowDifference:
        """A difference of the lake table, whose rows have NULL in the kept columns that they lack.

        By these no rows are told apart.
        """
        whole = self._wide(schema)
        if whole is schema:
            return ArrowDifference(kind, schema, rows, match=match)
        ignored = frozenset(whole.names[len(schema) :])
        wide = with_weight(whole) if kind == "signed" else whole
        return ArrowDifference(
            kind, whole, lambda: (_filled(batch, wide) for batch in rows()), match=match, ignored=ignored
        )

    def _wide(self, schema: pa.Schema) -> pa.Schema:
        """A schema with the kept columns that it lacks."""
        lacking = [field for field in self.kept if field.name not in schema.names]
        return pa.schema([*schema, *lacking]) if lacking else schema


@dataclass(frozen=True, slots=True)
class CopyTarget:
    """A lake table that a copy goes to, the position of the copy, and what the lake table stood at."""

    lake: LakeTable
    position: str
    stored: StoredPosition | None


@dataclass(frozen=True, slots=True)
class LakeMove:
    """A lake table, and the positions between which a commit moves it."""

    name: LakeName
    lake: LakeTable
    stored: StoredPosition | None
    new: StoredPosition


def describe_table(
    source: Connection[Any], queue: str, captured: SourceTable, kind: LakeKind, *, history: History | None
) -> MirrorTable:
    """A captured table at its newest version; GdqError if a lake table of this kind cannot be kept equal to it."""
    table = captured.table_name
    if captured.mode != "full" or captured.filter is not None or not _OPERATIONS.issubset(captured.operations):
        raise GdqError(
            f"table {table} is captured in part: a mirror needs whole rows of all changes",
            hint=f"Capture it in mode full, without a filter: gdq alter-table {queue} {table}",
        )
    logged = tuple(log_columns(source, queue, table))
    if omitted := sorted(column.name for column in logged if column.omitted):
        raise GdqError(
            f"table {table} has updates that do not log {', '.join(omitted)}: a mirror needs whole rows",
            hint=f"gdq alter-table {queue} {table} --unchanged once",
        )
    known = source.execute(_TYPE_OIDS, [captured.relid]).fetchall()
    oids, numbers = {name: oid for name, oid, _ in known}, {name: number for name, _, number in known}
    if missing := [column.name for column in logged if column.name not in oids]:
        raise GdqError(f"capture of table {table} has not followed the DDL of column {missing[0]} yet", hint="gdq tick")
    if any(column.name == WEIGHT_COLUMN for column in logged):
        raise GdqError(f'a mirror cannot have a column "{WEIGHT_COLUMN}", which it needs itself')
    described = [(column.name, oids[column.name], column.type) for column in logged]
    cure = f"Capture the table without the column: gdq alter-table {queue} {table} --exclude ..."
    columns = (replace(column, of=f"table {table}", cure=cure) for column in lake_columns(described, kind))
    return MirrorTable(captured, logged, tuple(columns), tuple(numbers[column.name] for column in logged), history)


def history_of(plan: str) -> History | None:
    """What a lake table is that is made by a plan."""
    found: History | None = json.loads(plan).get("history")
    return found


def _filled(rows: pa.RecordBatch, schema: pa.Schema) -> pa.RecordBatch:
    """Rows with the columns of a schema; NULL in those that they lack."""
    there = set(rows.schema.names)
    arrays = [
        rows.column(field.name) if field.name in there else pa.nulls(rows.num_rows, field.type) for field in schema
    ]
    return pa.RecordBatch.from_arrays(arrays, names=schema.names)


def with_weight(schema: pa.Schema) -> pa.Schema:
    """The schema of signed images of rows with this one."""
    return schema.append(pa.field(WEIGHT_COLUMN, pa.int64()))


def net_images(images: pa.Table) -> pa.Table:
    """Signed images with equal ones added up, without those that add up to nothing."""
    names = [f"c{place}" for place in range(images.num_columns - 1)]
    columns = [float_bits(whole_array(images.column(place))) for place in range(images.num_columns - 1)]
    numbered = [*columns, images.column(WEIGHT_COLUMN), pa.array(range(images.num_rows), pa.int64())]
    grouped = pa.Table.from_arrays(numbered, names=[*names, "weight", "row"]).group_by(names)
    summed = grouped.aggregate([("weight", "sum"), ("row", "min")])
    left = summed.filter(pc.not_equal(summed["weight_sum"], 0))
    place = images.num_columns - 1
    return images.take(left["row_min"]).set_column(place, images.schema.field(place), left["weight_sum"])


def repeated_rows(images: pa.Table, sign: int) -> pa.Table:
    """The rows whose weights have a sign, each as often as its weight says."""
    weights = images[WEIGHT_COLUMN].to_pylist()
    numbers = [number for number, weight in enumerate(weights) for _ in range(sign * weight)]
    return images.drop_columns([WEIGHT_COLUMN]).take(pa.array(numbers, pa.int64()))
