"""Large tables of a mirror by Spark: its tasks read a copy, or a batch's changes, and the lake's connector writes them.

What a table gets, from which position on and with what columns, is decided by the mirror, as without Spark; the commit
holds the position in the same way. So a mirror may be run with Spark or without it, by turns.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from itertools import count
from typing import TYPE_CHECKING, Any

from psycopg import Connection

from gdq.call import scalar
from gdq.conninfo import conninfo_of, resolve_conninfo
from gdq.consumers.lake.types import LakeColumn
from gdq.consumers.mirror.batch_changes import CopyAgain, TableLog, ticks_of
from gdq.consumers.mirror.chunked_load import LARGE_BYTES
from gdq.consumers.mirror.copies import TableCopy
from gdq.consumers.mirror.spark_history import SparkFeed, SparkHistory, SparkVersions
from gdq.consumers.mirror.state import History
from gdq.consumers.mirror.table import HeaderColumn, LakeMove, MirrorTable
from gdq.consumers.mirror.tick_changes import HEADER, numbered_rows, truncations
from gdq.consumers.replica.copy_sizes import table_sizes
from gdq.consumers.replica.source_tables import SourceTable
from gdq.consumers.spark import jobs
from gdq.consumers.spark.lake_engine import check_jars, lake_errors, lake_writer, row_copies
from gdq.consumers.spark.lake_merge import SparkDifference, SparkTableWriter, row_image
from gdq.consumers.spark.lake_types import lake_type_as_text, lake_type_ddl, lake_type_from_text
from gdq.consumers.spark.session import SparkRun, start_run
from gdq.consumers.spark.source import read_statements
from gdq.consumers.spark.table_sql import block_ranges, split_log_rows_sql, table_rows_sql
from gdq.consumers.views.change_source import weighted_log_rows
from gdq.consumers.views.signals import TableWanted
from gdq.plan.table import WEIGHT_COLUMN
from gdq.qualified_sql import qualified
from gdq.source import Position
from gdq.sql_text import quote, raw
from gdq.typed.arrow import ARROW_LOG_SETTINGS, ArrowColumn, arrow_select_sql
from gdq.typed.pgtypes import READ_AS_TEXT, READ_SETTINGS
from gdq.view.lake_name import LakeKind

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

_FORMS: dict[History, type[SparkHistory]] = {"feed": SparkFeed, "scd2": SparkVersions}

_TYPES = qualified("""
select a.attname::text, a.atttypid::bigint from pg_catalog.pg_attribute a
 where a.attrelid = %s::oid and a.attnum > 0 and not a.attisdropped""")


@dataclass
class SparkTables:
    """Spark for the large tables of the mirror `owner` of `queue`, whose lake tables are `kind` with a `history`.

    `given`: the connection string as the user gave it. Spark starts with the first table that is large. Close it by
    close().
    """

    source: Connection[Any]
    given: str | None
    queue: str
    owner: str
    kind: LakeKind
    history: History | None
    _stack: ExitStack = field(default_factory=ExitStack, init=False)

    def close(self) -> None:
        """Remove the password file of Spark's tasks; the Spark session stays."""
        self._stack.close()

    def takes(self, captured: SourceTable) -> bool:
        """True if a table is large: of a smaller one this process copies more than Spark would in that time."""
        return table_sizes(self.source, [captured.relid])[captured.relid].bytes > LARGE_BYTES

    def copy(self, table: MirrorTable, copy: TableCopy, move: LakeMove) -> bool:
        """Have the lake table hold what a copy says, whose snapshot a session has exported.

        False, and nothing done, if Spark cannot replace what is there: others have changed it, Iceberg's table has
        other columns, or rows of Parquet files are to end.
        """
        assert copy.exported is not None
        holder, exported = copy.exported
        columns = [*table.columns, *(LakeColumn(one.name, "text", one.type, "{c}") for one in table.kept)]
        if move.stored is not None:
            if move.lake.state().foreign is not None or self._ends_in_files:
                return False
            there = [(one.name, one.type) for one in move.lake.schema()]
            if not self.history and self.kind == "iceberg" and there != [(one.name, one.arrow) for one in columns]:
                return False
        query = qualified("select relkind = 'p' from pg_catalog.pg_class where oid = %s::oid")
        only = "" if scalar(holder, query, table.captured.relid) else "only "
        ranges = block_ranges(holder, table.name, jobs.PARTITION_BYTES)
        with self._at_work(table) as stack:
            texts = self._texts(table, table.columns)
            relations = [table_rows_sql(only + table.name, one) for one in ranges]
            parts = [arrow_select_sql(_numbered(one, table.columns), texts) for one in relations]
            rows = self._frame(parts, texts, READ_SETTINGS, exported)
            if self.history is None:
                self._commit(SparkDifference("full", columns, _typed(rows, table.columns, columns)), move)
            else:
                whole, tick = _typed(rows, table.columns, table.columns), Position.parse(copy.position).tick
                self._commit(self._form(table, move, stack).copied(whole, tick), move)
        return True

    def apply(self, table: MirrorTable, log: TableLog, move: LakeMove) -> int | None:
        """Bring the lake table to the end of a log; returns rows deleted plus rows inserted.

        None, and nothing done, if there is nothing to read, or if this process is to do it: where rows of Parquet files
        are to go; where a lake table that is as its table has columns that no row of the table has, which MERGE would
        compare; and of a feed if one task would read the log: nothing else is read then, and small files are joined.
        """
        if self._ends_in_files or (self.kind == "parquet" and self.history is None and not log.truncates):
            return None
        if not log.truncates and not self.source.execute(raw(f"select 1 from ({log.select}) t limit 1")).fetchall():
            return None
        parts = split_log_rows_sql(self.source, self.queue, table.name, log.select, jobs.PARTITION_BYTES)
        if self.history == "feed" and len(parts) == 1 and not log.truncates:
            return None
        with self._at_work(table) as stack:
            if self.history is None:
                return self._apply_current(table, log, parts, move, stack)
            ticks = ticks_of(self.source, self.queue, log)
            images = self._images(table, [numbered_rows(part, ticks) for part in parts], table.columns, HEADER)
            header = zip(count(len(table.columns) + 1), HEADER, ("op", "v", "t", "e"), strict=False)
            more = [f"{lake_type_from_text(column, f'c{n}')} as {name}" for n, (column, _), name in header]
            rows = _typed(images, table.columns, table.columns, *more, "w")
            found = truncations(self.source, self.queue, log, ticks)
            return self._commit(self._form(table, move, stack).changed(rows, found), move)

    def _apply_current(
        self, table: MirrorTable, log: TableLog, parts: Sequence[str], move: LakeMove, stack: ExitStack
    ) -> int | None:
        known, there = {column.name: column for column in table.columns}, move.lake.schema().names
        if known.keys() != {*there}:
            return None
        if log.truncates:
            after = f"where ev_id operator(pg_catalog.>) {log.truncates[-1]}"
            parts = [f"select * from ({part}) t {after}" for part in parts]
        columns = [known[name] for name in there]
        names = [f"c{number}" for number in range(1, len(columns) + 1)]
        images = self._images(table, parts, columns)
        netted = images.groupBy(*names).agg({"w": "sum"}).withColumnRenamed("sum(w)", "w").where("w <> 0")
        if log.truncates:
            rows = _typed(row_copies(netted.where("w > 0")), columns, columns)
            return self._commit(SparkDifference("full", columns, rows), move)
        rows = _typed(netted, columns, columns, row_image(len(columns)), "w").persist()
        stack.callback(rows.unpersist)
        return self._commit(SparkDifference("signed", columns, rows), move)

    @property
    def _ends_in_files(self) -> bool:
        """True if a history's versions end in Parquet files, of which Spark only adds some or replaces all."""
        return self.kind == "parquet" and self.history == "scd2"

    @cached_property
    def _run(self) -> SparkRun:
        run = self._stack.enter_context(start_run(conninfo_of(self.source), resolve_conninfo(self.given), 0))
        check_jars(run.spark, self.kind)
        return run

    @contextmanager
    def _at_work(self, table: MirrorTable) -> Iterator[ExitStack]:
        """Spark's jobs for one table; CopyAgain if a statement wants the table whose snapshot is read.

        What is on the stack is done when they have ended.
        """
        try:
            with (
                jobs.own_jobs(self._run.spark),
                lake_errors(delta=False, cure=table.columns[0].cure),
                ExitStack() as stack,
            ):
                yield stack
        except TableWanted:
            raise CopyAgain(table.name) from None

    def _texts(
        self, table: MirrorTable, columns: Sequence[LakeColumn], header: Sequence[LakeColumn] = ()
    ) -> list[ArrowColumn]:
        """The columns as text, named c1, c2, ..., with those of the log's header after them."""
        oids = dict(self.source.execute(_TYPES, [table.captured.relid]).fetchall())
        if not oids.keys() >= {column.name for column in columns}:
            raise CopyAgain(table.name)
        plain = jobs.text_columns(self.source, [(column.name, oids[column.name], column.type) for column in columns])
        plain += [ArrowColumn(column.name, READ_AS_TEXT) for column in header]
        texts = [lake_type_as_text(column, one) for column, one in zip((*columns, *header), plain, strict=True)]
        return [ArrowColumn(f"c{number}", text.type) for number, text in enumerate(texts, 1)]

    def _images(
        self,
        table: MirrorTable,
        parts: Sequence[str],
        columns: Sequence[LakeColumn],
        header: Sequence[HeaderColumn] = (),
    ) -> DataFrame:
        """The images of the parts of a log as text, with w."""
        more, logged = [column for column, _ in header], [*table.logged, *(column for _, column in header)]
        read = [*self._texts(table, columns, more), ArrowColumn("w", jobs.LONG_TYPE)]
        signed = [_numbered(weighted_log_rows(part, logged), [*columns, *more]) for part in parts]
        return self._frame([arrow_select_sql(one, read) for one in signed], read, ARROW_LOG_SETTINGS, None)

    def _frame(
        self, parts: Sequence[str], columns: Sequence[ArrowColumn], settings: dict[str, str], snapshot: str | None
    ) -> DataFrame:
        run = self._run
        return read_statements(run.spark, run.worker_dsn, parts, columns, settings=settings, snapshot=snapshot)

    def _writer(self, move: LakeMove) -> SparkTableWriter:
        return lake_writer(self._run.spark, move.name, self.owner, move.new.source)

    def _form(self, table: MirrorTable, move: LakeMove, stack: ExitStack) -> SparkHistory:
        assert self.history is not None
        writer = self._writer(move)
        there = None if move.stored is None else writer.rows()
        return _FORMS[self.history](writer.session, table, there, stack)

    def _commit(self, change: SparkDifference, move: LakeMove) -> int:
        return self._writer(move).commit(change, move.stored, move.new)


def _numbered(relation: str, columns: Sequence[LakeColumn]) -> str:
    """The columns of a relation with WEIGHT_COLUMN as c1, c2, ... and w, for FROM."""
    listed = [f"q.{quote(column.name)} as c{number}" for number, column in enumerate(columns, 1)]
    return f"(select {', '.join(listed)}, q.{quote(WEIGHT_COLUMN)} as w from {relation} as q) as r"


def _typed(rows: DataFrame, filled: Sequence[LakeColumn], columns: Sequence[LakeColumn], *more: str) -> DataFrame:
    """Text columns c1, c2, ... with the lake's types, those after `filled` NULL, plus the expressions `more`."""
    values = [f"{lake_type_from_text(column, f'c{n}')} as c{n}" for n, column in enumerate(filled, 1)]
    nulls = [
        f"cast(null as {lake_type_ddl(column)}) as c{n}"
        for n, column in enumerate(columns[len(filled) :], len(filled) + 1)
    ]
    return rows.selectExpr(*values, *nulls, *more)
