"""The statements that compute a view by key in parts; each of Spark's tasks runs one statement.

a refresh after 2,000 keys changed: four statements, each selects the rows of 500 keys
a full load: one statement per 64 MB of tables, each selects the rows of a share of the keys' hashes
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import psycopg
from psycopg import Connection, sql

from gdq.consumers.spark.jobs import LONG_TYPE, PARTITION_BYTES, ColumnsAsText, as_owner
from gdq.consumers.spark.session import SparkRun
from gdq.consumers.spark.source import read_statements
from gdq.consumers.spark.table_sql import table_bytes
from gdq.consumers.views.computation import Computation
from gdq.consumers.views.difference import KeySet
from gdq.consumers.views.engine import ROWS_READ_SQL
from gdq.owner_sql import OwnerSql
from gdq.plan.steps import ReplaceOutcome
from gdq.typed.arrow import ArrowColumn, arrow_select_sql
from gdq.typed.pgtypes import READ_SETTINGS, base_type_name
from gdq.view.table_schema import apply_view_settings, describe_query

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

# Keys of one task at least, and tasks per core at most.
KEYS_EACH = 500
_TASKS_EACH = 4

# A value of these types never equals two different values of a type that it is compared with.
_TOLD_APART = {"smallint", "integer", "bigint", "text", "character varying", "uuid", "date"}

# A frame's column for the task's count of table rows read; NULL in the view's rows.
ROWS_READ_COLUMN = "rows_read"


@dataclass(frozen=True, slots=True)
class KeyStatements:
    """Makes the statements of one refresh. `made` nets the changes and finds the keys."""

    made: Computation
    run: SparkRun

    @property
    def source(self) -> Connection[Any]:
        """The connection to the tables, at the refresh's snapshot."""
        return self.made.task.holder.connection

    def whole(self, query: str, columns: Mapping[str, str], by: Sequence[str]) -> list[str]:
        """Statements that together give all rows of `query`, divided by a hash of the columns `by`.

        `columns`: name and type of each column, in the order of the query.
        """
        named = f"select * from ({query}) as r({', '.join(columns)})" if columns else query
        tasks = self._tasks() if by and self._is_hashed([columns[name] for name in by]) else 1
        if tasks == 1:
            return [named]
        part = f"pg_catalog.hash_record(row({', '.join(f'r.{name}' for name in by)})) & 2147483647"
        return [f"select * from ({named}) as r where ({part}) % {tasks} = {n}" for n in range(tasks)]

    def of_keys(self, outcome: ReplaceOutcome, keys: Sequence[KeySet]) -> list[str]:
        """Statements that together give the rows of the changed keys; each takes a share of one column's keys."""
        made = self.made
        names = [name for _, name in outcome.keys]
        types = {column.name: column.type for column in made.types}
        single = {
            name: key
            for name, key in zip(names, keys, strict=True)
            if names.count(name) == 1 and has_one_key(made.connection, types[key.column], key)
        }
        if not single:
            return [made.rows_of(outcome)]
        sizes = {name: made.one(f"select pg_catalog.cardinality({key_array_sql(key)})") for name, key in single.items()}
        name = max(sizes, key=lambda known: int(sizes[known]))
        most = _TASKS_EACH * self.run.spark.sparkContext.defaultParallelism
        parts = max(1, min(most, sizes[name] // KEYS_EACH))
        each = -(-sizes[name] // parts)
        query = (
            f"select a[i * {each} + 1 : (i + 1) * {each}]::text "
            f"from (select {key_array_sql(single[name])} as a) as a, generate_series(0, {parts - 1}) as i order by i"
        )
        found = [array for (array,) in made.sql.rows(query)]
        # the first statement also computes the key NULL
        some = [replace(single[name], array=array, null=single[name].null and not n) for n, array in enumerate(found)]
        return [made.rows_of(outcome, {name: key}) for key in some]

    def frame(
        self, queries: Sequence[str], names: Sequence[str], texts: ColumnsAsText, *, counted: bool = False
    ) -> DataFrame:
        """The statements' rows as text columns `names`, one task per statement.

        `counted`: each task adds one row whose extra column holds the number of table rows that it read.
        """
        alias = f"r({', '.join(names)})" if names else "r"
        settings = self.made.task.view.settings
        described = describe_query(self.source, f"select * from ({queries[0]}) as {alias}", settings)
        columns = texts(self.source, described)
        counter, more = None, ""
        if counted:
            tables = sql.Literal([table.name for table in self.made.plan.tables]).as_string(self.source)
            columns, counter = [*columns, ArrowColumn(ROWS_READ_COLUMN, LONG_TYPE)], ROWS_READ_SQL.replace("%s", tables)
            more = f", null::bigint as {ROWS_READ_COLUMN}"
        selects = [arrow_select_sql(f"(select r.*{more} from ({query}) as {alias}) as q", columns) for query in queries]
        return read_statements(
            self.run.spark,
            self.run.worker_dsn,
            as_owner(self.source, self.made.task.view, selects),
            columns,
            settings=READ_SETTINGS | settings,
            snapshot=self.made.task.holder.exported,
            counter=counter,
        )

    def _tasks(self) -> int:
        """Number of tasks for a full load: one per 64 MB of tables, at most one per core."""
        size = sum(table_bytes(self.source, table)[1] for table in self.made.task.view.tables)
        return int(min(self.run.spark.sparkContext.defaultParallelism, 1 + size // PARTITION_BYTES))

    def _is_hashed(self, types: Sequence[str]) -> bool:
        """True if PostgreSQL can hash rows of these types."""
        nulls = ", ".join(f"null::{kind}" for kind in types)
        try:
            with self.source.transaction(force_rollback=True):
                apply_view_settings(self.source, self.made.task.view.settings)
                OwnerSql(self.source, self.made.task.view.acts_as).rows(f"select pg_catalog.hash_record(row({nulls}))")
        except psycopg.Error:
            return False
        return True


def has_one_key(connection: Connection[Any], column_type: str, keys: KeySet) -> bool:
    """True if no value of the view's column equals two keys, so each row belongs to exactly one task.

    Keys may have another type than the column: the bigints 2^53 and 2^53 + 1 both equal one double precision.
    """
    if base_type_name(column_type) in _TOLD_APART:
        return True
    query = "select pg_catalog.to_regtype(%s) = pg_catalog.to_regtype(%s)"
    row = connection.execute(query, [f"{column_type}[]", keys.array_type]).fetchone()
    return row is not None and row[0] is True


def key_array_sql(keys: KeySet) -> str:
    """The non-NULL keys as a SQL array literal."""
    return f"{sql.Literal(keys.array).as_string(None)}::{keys.array_type}"
