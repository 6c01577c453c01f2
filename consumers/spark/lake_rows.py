"""Rows that Spark computes for a lake table, all or the changed ones, as frames of text.

JoinedLakeRows: for views that Spark joins. KeyLakeRows: for views that Spark's tasks compute by key. Columns are named
c1, c2, ... in the view's order.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal

from gdq.consumers.spark.jobs import LONG_TYPE, ColumnsAsText, weighed_log_images
from gdq.consumers.spark.join_engine import SparkJoinEngine
from gdq.consumers.spark.key_statements import KeyStatements, key_array_sql
from gdq.consumers.views.difference import Difference, KeySet
from gdq.consumers.views.engine import EngineEffort
from gdq.consumers.views.signals import NeedsFull
from gdq.plan.spark.keys import SparkKeyPlan
from gdq.plan.steps import ReplaceOutcome
from gdq.typed.arrow import ArrowColumn, arrow_select_sql
from gdq.view.table_schema import describe_query

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

# Limit of signed rows of a view that is computed by key: they pass through this process.
_SIGNED_MAX = 100_000


@dataclass(frozen=True, slots=True)
class LakeRows:
    """Rows of a view as text.

    kind full:    all rows; JoinedLakeRows adds a column w with the number of copies
         signed:  insert each row w times, or delete it if w < 0; no row comes twice
         replace: delete the rows with one of `keys` in each of these columns (number from 1), insert the rows
    """

    kind: Literal["full", "signed", "replace"]
    frame: DataFrame
    keys: Mapping[int, DataFrame]


@dataclass(slots=True)
class JoinedLakeRows:
    """Rows of a view that Spark joins. `stack` keeps the cached frames until the rows are written."""

    engine: SparkJoinEngine
    stack: ExitStack
    width: int
    _effort: EngineEffort = field(default=EngineEffort("none"), init=False)

    def rows(self, changed: Mapping[str, str] | None) -> LakeRows:
        """All rows for None, else the changes that follow from the tables' log rows."""
        engine = self.engine
        kind: Literal["full", "signed"] = "full" if changed is None else "signed"
        delta_rows = weighed_log_images(engine.task.holder, changed or {}, engine.task.choose)
        self._effort = EngineEffort("full" if changed is None else "incremental", delta_rows)
        data, _ = self.stack.enter_context(engine.frame(None if changed is None else engine.logs(changed)))
        data.createOrReplaceTempView("gdq_joined")
        parts = []
        for number, branch in enumerate(engine.plan.branches):
            items = ", ".join(f"{item} as c{n}" for n, item in enumerate(branch.items, 1))
            where = f" where b = '{number}'" if len(engine.plan.branches) > 1 else ""
            parts.append(f"select {items}, w from gdq_joined{where}")
        return LakeRows(kind, engine.run.spark.sql(_netted(" union all ".join(parts), self.width)), {})

    def effort(self) -> EngineEffort:
        return self._effort


@dataclass(frozen=True, slots=True)
class KeyLakeRows:
    """Rows of a view that Spark's tasks compute by key. `texts` says how columns become text."""

    statements: KeyStatements
    plan: SparkKeyPlan
    texts: ColumnsAsText

    def rows(self, changed: Mapping[str, str] | None) -> LakeRows | None:
        """As JoinedLakeRows.rows(); None if the view has no changes."""
        made = self.statements.made
        names = [f"c{n}" for n in range(1, len(made.types) + 1)]
        if changed is None:
            made.full()
            kinds = {name: column.type for name, column in zip(names, made.types, strict=True)}
            by = [f"c{self._number(column)}" for column in self.plan.divided_by]
            queries = self.statements.whole(self.plan.query, kinds, by)
            return LakeRows("full", self.statements.frame(queries, names, self.texts), {})
        with made.computing():
            outcome = made.outcome(changed, once=True)
            difference = made.difference_of(outcome)
            if difference.kind == "signed":
                return LakeRows("signed", self._signed(difference, names), {})
            if not isinstance(outcome, ReplaceOutcome):
                return None
            keys = {self._number(key.column): self._keys(key) for key in difference.keys}
            queries = self.statements.of_keys(outcome, difference.keys)
        return LakeRows("replace", self.statements.frame(queries, names, self.texts), keys)

    def effort(self) -> EngineEffort:
        return self.statements.made.effort()

    def _number(self, column: str) -> int:
        """Number, from 1, of a view's column."""
        return 1 + next(n for n, known in enumerate(self.statements.made.types) if known.name == column)

    def _signed(self, difference: Difference, names: Sequence[str]) -> DataFrame:
        """Signed rows that one session has computed; NeedsFull if they are too many for this process."""
        made, spark = self.statements.made, self.statements.run.spark
        listed = ", ".join([*names, "w"])
        query = f"select * from ({difference.rows}) as r({listed})"
        columns = self.texts(made.connection, describe_query(made.connection, query, made.task.view.role)[:-1])
        query = (
            f"{arrow_select_sql(f'({query}) as q', [*columns, ArrowColumn('w', LONG_TYPE)])} limit {_SIGNED_MAX + 1}"
        )
        rows = made.sql.rows(query)
        if len(rows) > _SIGNED_MAX:
            raise NeedsFull(f"more than {_SIGNED_MAX} rows changed")
        kinds = ", ".join([*(f"{name} string" for name in names), "w bigint"])
        spark.createDataFrame(rows, kinds).createOrReplaceTempView("gdq_computed")
        return spark.sql(_netted("select * from gdq_computed", len(names)))

    def _keys(self, key: KeySet) -> DataFrame:
        """Values of one key as text."""
        made, name = self.statements.made, f"c{self._number(key.column)}"
        query = f"select pg_catalog.unnest({key_array_sql(key)}) as {name}"
        columns = self.texts(made.connection, describe_query(made.connection, query, made.task.view.role))
        found = made.sql.rows(arrow_select_sql(f"({query}) as q", columns))
        return self.statements.run.spark.createDataFrame([*found, *([(None,)] if key.null else [])], f"{name} string")


def _netted(rows: str, width: int) -> str:
    """SELECT of netted signed rows (c1, c2, ..., w): no row comes twice."""
    values = "".join(f"c{n}, " for n in range(1, width + 1))
    group = f" group by {values.rstrip(', ')}" if values else ""
    return f"select {values}sum(w) as w from ({rows}){group} having sum(w) <> 0"
