"""The statements that compute a view by key, in parts: each part is one statement of one of Spark's tasks.

a refresh after 2,000 keys changed: four statements, each selects the rows of 500 of the keys
a full load: a statement for 64 MB of tables, each selects the rows of a share of the keys' hashes
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import psycopg
from psycopg import Connection, sql

from gdq.consumers.spark.jobs import LONG, PARTITION_BYTES, Texts
from gdq.consumers.spark.session import SparkRun
from gdq.consumers.spark.source import read_statements
from gdq.consumers.spark.table_sql import table_bytes
from gdq.consumers.views.computation import Computation
from gdq.consumers.views.difference import KeySet
from gdq.consumers.views.engine import ROWS_READ
from gdq.plan.steps import Replace
from gdq.sql_text import raw
from gdq.typed.arrow import Column, select_sql
from gdq.typed.pgtypes import READ_SETTINGS, base_name
from gdq.view.table_schema import apply_settings, describe

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

# A task takes at least this many keys while there are more tasks' worth of them; at most this many tasks run per core.
KEYS_EACH = 500
_TASKS_EACH = 4

# Types whose values equal no two different values of any other type that they are compared with.
_TOLD_APART = {"smallint", "integer", "bigint", "text", "character varying", "uuid", "date"}

# The column of a frame in which a task counts the rows of tables that it read; NULL in the view's rows.
READ = "rows_read"


@dataclass(frozen=True, slots=True)
class KeyStatements:
    """The statements of one refresh. `made` nets the changes and finds the keys."""

    made: Computation
    run: SparkRun

    @property
    def source(self) -> Connection[Any]:
        """The connection to the tables, at the refresh's snapshot."""
        return self.made.task.holder.connection

    def whole(self, query: str, columns: Mapping[str, str], by: Sequence[str]) -> list[str]:
        """Statements that give all rows of `query` together.

        `columns`: their names, in the order of the query, and types; `by`: those of them that divide the rows.
        """
        named = f"select * from ({query}) as r({', '.join(columns)})" if columns else query
        tasks = self._tasks() if by and self._is_hashed([columns[name] for name in by]) else 1
        if tasks == 1:
            return [named]
        part = f"pg_catalog.hash_record(row({', '.join(f'r.{name}' for name in by)})) & 2147483647"
        return [f"select * from ({named}) as r where ({part}) % {tasks} = {n}" for n in range(tasks)]

    def of_keys(self, outcome: Replace, keys: Sequence[KeySet]) -> list[str]:
        """Statements that give the rows of changed keys together, each of a share of those of one column."""
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
        sizes = {name: made.one(f"select pg_catalog.cardinality({array_sql(key)})") for name, key in single.items()}
        name = max(sizes, key=lambda known: int(sizes[known]))
        most = _TASKS_EACH * self.run.spark.sparkContext.defaultParallelism
        parts = max(1, min(most, sizes[name] // KEYS_EACH))
        each = -(-sizes[name] // parts)
        query = (
            f"select a[i * {each} + 1 : (i + 1) * {each}]::text "
            f"from (select {array_sql(single[name])} as a) as a, generate_series(0, {parts - 1}) as i order by i"
        )
        found = [array for (array,) in made.connection.execute(raw(query)).fetchall()]
        # NULL is computed with the first
        some = [replace(single[name], array=array, null=single[name].null and not n) for n, array in enumerate(found)]
        return [made.rows_of(outcome, {name: key}) for key in some]

    def frame(self, queries: Sequence[str], names: Sequence[str], texts: Texts, *, counted: bool = False) -> DataFrame:
        """What the statements give, as text under these names, computed by one task for each.

        `counted`: each task adds a row with the rows of tables that it read, in one more column, READ.
        """
        alias = f"r({', '.join(names)})" if names else "r"
        settings = self.made.task.view.settings
        described = describe(self.source, f"select * from ({queries[0]}) as {alias}", settings)
        columns = texts(self.source, described)
        counter, more = None, ""
        if counted:
            tables = sql.Literal([table.name for table in self.made.plan.tables]).as_string(self.source)
            columns, counter = [*columns, Column(READ, LONG)], ROWS_READ.replace("%s", tables)
            more = f", null::bigint as {READ}"
        return read_statements(
            self.run.spark,
            self.run.worker_dsn,
            [select_sql(f"(select r.*{more} from ({query}) as {alias}) as q", columns) for query in queries],
            columns,
            settings=READ_SETTINGS | settings,
            snapshot=self.made.task.holder.exported,
            counter=counter,
        )

    def _tasks(self) -> int:
        """How many tasks a full load is worth: each of them reads the tables, and computes its part of the rows."""
        size = sum(table_bytes(self.source, table)[1] for table in self.made.task.view.tables)
        return int(min(self.run.spark.sparkContext.defaultParallelism, 1 + size // PARTITION_BYTES))

    def _is_hashed(self, types: Sequence[str]) -> bool:
        """Whether values of these types have a hash that is the same for equal ones."""
        nulls = ", ".join(f"null::{kind}" for kind in types)
        try:
            with self.source.transaction(force_rollback=True):
                apply_settings(self.source, self.made.task.view.settings)
                self.source.execute(raw(f"select pg_catalog.hash_record(row({nulls}))"))
        except psycopg.Error:
            return False
        return True


def has_one_key(connection: Connection[Any], column_type: str, keys: KeySet) -> bool:
    """True if no value of the view's column equals two of the keys, so that its rows are one task's.

    Keys may come from a column of another type: 2^53 and 2^53 + 1 are two bigints, and equal to one double precision.
    """
    if base_name(column_type) in _TOLD_APART:
        return True
    query = "select pg_catalog.to_regtype(%s) = pg_catalog.to_regtype(%s)"
    row = connection.execute(query, [f"{column_type}[]", keys.array_type]).fetchone()
    return row is not None and row[0] is True


def array_sql(keys: KeySet) -> str:
    """The keys that are not NULL as an array in SQL."""
    return f"{sql.Literal(keys.array).as_string(None)}::{keys.array_type}"
