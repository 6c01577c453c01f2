"""Large tables of a mirror by Spark: its tasks read a copy, or a batch's changes, and the lake's connector writes them.

What a table gets, from which position on and with what columns, is decided by the mirror, as without Spark; the commit
holds the position in the same way. So a mirror may be run with Spark or without it, by turns.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any

from psycopg import Connection

from gdq.call import scalar
from gdq.conninfo import conninfo_of, resolve_conninfo
from gdq.consumers.lake.types import LakeColumn
from gdq.consumers.mirror.batch_changes import CopyAgain, TableLog
from gdq.consumers.mirror.chunked_load import LARGE_BYTES
from gdq.consumers.mirror.table import LakeMove, MirrorTable
from gdq.consumers.replica.copy_sizes import table_sizes
from gdq.consumers.replica.source_tables import SourceTable
from gdq.consumers.spark import jobs
from gdq.consumers.spark.lake_engine import check_jars, lake_errors, lake_writer, row_copies
from gdq.consumers.spark.lake_merge import SparkDifference
from gdq.consumers.spark.lake_types import lake_type_as_text, lake_type_ddl, lake_type_from_text
from gdq.consumers.spark.session import SparkRun, start_run
from gdq.consumers.spark.source import read_statements
from gdq.consumers.spark.table_sql import block_ranges, split_log_rows_sql, table_rows_sql
from gdq.consumers.views.change_source import weighted_log_rows
from gdq.consumers.views.signals import TableWanted
from gdq.plan.table import WEIGHT_COLUMN
from gdq.qualified_sql import qualified
from gdq.sql_text import quote, raw
from gdq.typed.arrow import ARROW_LOG_SETTINGS, ArrowColumn, arrow_select_sql
from gdq.typed.pgtypes import READ_SETTINGS
from gdq.view.lake_name import LakeKind

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

_TYPES = qualified("""
select a.attname::text, a.atttypid::bigint from pg_catalog.pg_attribute a
 where a.attrelid = %s::oid and a.attnum > 0 and not a.attisdropped""")


@dataclass
class SparkTables:
    """Spark for the large tables of the mirror `owner` of `queue`, whose lake tables are `kind`.

    `given`: the connection string as the user gave it. Spark starts with the first table that is large. Close it by
    close().
    """

    source: Connection[Any]
    given: str | None
    queue: str
    owner: str
    kind: LakeKind
    _stack: ExitStack = field(default_factory=ExitStack, init=False)

    def close(self) -> None:
        """Remove the password file of Spark's tasks; the Spark session stays."""
        self._stack.close()

    def takes(self, captured: SourceTable) -> bool:
        """True if a table is large: of a smaller one this process copies more than Spark would in that time."""
        return table_sizes(self.source, [captured.relid])[captured.relid].bytes > LARGE_BYTES

    def copy(self, table: MirrorTable, snapshot: tuple[Connection[Any], str], move: LakeMove) -> bool:
        """Have the lake table hold all rows as of a snapshot, which a session has exported under a name.

        False, and nothing done, if the connector cannot replace what is there: others have changed it, or Iceberg's
        table has other columns.
        """
        holder, exported = snapshot
        if move.stored is not None:
            if move.lake.state().foreign is not None:
                return False
            there = [(one.name, one.type) for one in move.lake.schema()]
            ours = [(one.name, one.type) for one in (*table.schema, *table.kept)]
            if self.kind == "iceberg" and there != ours:
                return False
        query = qualified("select relkind = 'p' from pg_catalog.pg_class where oid = %s::oid")
        only = "" if scalar(holder, query, table.captured.relid) else "only "
        ranges = block_ranges(holder, table.name, jobs.PARTITION_BYTES)
        columns = [*table.columns, *(LakeColumn(one.name, "text", one.type, "{c}") for one in table.kept)]
        with self._at_work(table):
            texts = self._texts(table, table.columns)
            relations = [table_rows_sql(only + table.name, one) for one in ranges]
            parts = [arrow_select_sql(_numbered(one, table.columns), texts) for one in relations]
            rows = self._frame(parts, texts, READ_SETTINGS, exported)
            self._commit(SparkDifference("full", columns, _typed(rows, table.columns, columns)), move)
        return True

    def apply(self, table: MirrorTable, log: TableLog, move: LakeMove) -> int | None:
        """Bring the lake table to the end of a log; returns rows deleted plus rows inserted.

        None, and nothing done, if there is nothing to read, or if the lake table has columns that no row of the table
        has: MERGE would compare them.
        """
        if not log.truncates and not self.source.execute(raw(f"select 1 from ({log.select}) t limit 1")).fetchall():
            return None
        known, there = {column.name: column for column in table.columns}, move.lake.schema().names
        if known.keys() != {*there}:
            return None
        parts = split_log_rows_sql(self.source, self.queue, table.name, log.select, jobs.PARTITION_BYTES)
        if log.truncates:
            after = f"where ev_id operator(pg_catalog.>) {log.truncates[-1]}"
            parts = [f"select * from ({part}) t {after}" for part in parts]
        columns = [known[name] for name in there]
        with self._at_work(table):
            texts = self._texts(table, columns)
            read = [*texts, ArrowColumn("w", jobs.LONG_TYPE)]
            signed = [_numbered(weighted_log_rows(part, table.logged), columns) for part in parts]
            parts = [arrow_select_sql(one, read) for one in signed]
            images = self._frame(parts, read, ARROW_LOG_SETTINGS, None)
            names = [f"c{number}" for number in range(1, len(columns) + 1)]
            netted = images.groupBy(*names).agg({"w": "sum"}).withColumnRenamed("sum(w)", "w").where("w <> 0")
            if log.truncates:
                rows = _typed(row_copies(netted.where("w > 0")), columns, columns)
                return self._commit(SparkDifference("full", columns, rows), move)
            image = f"to_json(struct({', '.join(names)}), map('ignoreNullFields', 'false')) as image"
            rows = _typed(netted, columns, columns, image, "w").persist()
            try:
                return self._commit(SparkDifference("signed", columns, rows), move)
            finally:
                rows.unpersist()

    @cached_property
    def _run(self) -> SparkRun:
        run = self._stack.enter_context(start_run(conninfo_of(self.source), resolve_conninfo(self.given), 0))
        check_jars(run.spark, self.kind)
        return run

    @contextmanager
    def _at_work(self, table: MirrorTable) -> Iterator[None]:
        """Spark's jobs for one table; CopyAgain if a statement wants the table whose snapshot is read."""
        try:
            with jobs.own_jobs(self._run.spark), lake_errors(delta=False, cure=table.columns[0].cure):
                yield
        except TableWanted:
            raise CopyAgain(table.name) from None

    def _texts(self, table: MirrorTable, columns: Sequence[LakeColumn]) -> list[ArrowColumn]:
        """The columns as text, named c1, c2, ..."""
        oids = dict(self.source.execute(_TYPES, [table.captured.relid]).fetchall())
        if not oids.keys() >= {column.name for column in columns}:
            raise CopyAgain(table.name)
        plain = jobs.text_columns(self.source, [(column.name, oids[column.name], column.type) for column in columns])
        texts = [lake_type_as_text(column, one) for column, one in zip(columns, plain, strict=True)]
        return [ArrowColumn(f"c{number}", text.type) for number, text in enumerate(texts, 1)]

    def _frame(
        self, parts: Sequence[str], columns: Sequence[ArrowColumn], settings: dict[str, str], snapshot: str | None
    ) -> DataFrame:
        run = self._run
        return read_statements(run.spark, run.worker_dsn, parts, columns, settings=settings, snapshot=snapshot)

    def _commit(self, change: SparkDifference, move: LakeMove) -> int:
        writer = lake_writer(self._run.spark, move.name, self.owner, move.new.source)
        return writer.commit(change, move.stored, move.new)


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
