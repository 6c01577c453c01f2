"""What Spark computes for a lake table: all rows of a view, or what changes in them, as frames of text.

JoinedRows for a view that Spark joins, KeyRows for one whose rows Spark's tasks compute by key. Columns are named c1,
c2, ... as in the view's order.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal, Protocol

from gdq.consumers.spark.jobs import LONG, Texts, weighed
from gdq.consumers.spark.join_engine import SparkViews
from gdq.consumers.spark.key_statements import KeyStatements, array_sql
from gdq.consumers.views.difference import Difference, KeySet
from gdq.consumers.views.engine import Effort
from gdq.consumers.views.signals import NeedsFull
from gdq.plan.spark.keys import SparkKeyPlan
from gdq.plan.steps import Replace
from gdq.sql_text import raw
from gdq.typed.arrow import Column, select_sql
from gdq.view.table_schema import describe

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

# Signed rows of a view that is computed by key come through this process.
_SIGNED_MAX = 100_000


@dataclass(frozen=True, slots=True)
class Rows:
    """Rows of a view as text.

    kind full:    all rows; those of JoinedRows as often as the column w says
         signed:  rows that come or, with w below zero, go: none twice
         replace: the rows that have one of `keys` in each of these columns (number from 1) give way to the rows
    """

    kind: Literal["full", "signed", "replace"]
    frame: DataFrame
    keys: Mapping[int, DataFrame]


class RowSource(Protocol):
    """What computes the rows of a refresh."""

    def rows(self, changed: Mapping[str, str] | None) -> Rows | None:
        """All rows (None), or what changes by the log rows of the tables that changed; None for nothing."""

    def effort(self) -> Effort:
        """What the refresh took so far."""


@dataclass(slots=True)
class JoinedRows:
    """The rows of a view that Spark joins. What `stack` holds is wanted until the rows are written."""

    engine: SparkViews
    stack: ExitStack
    width: int
    _effort: Effort = field(default=Effort("none"), init=False)

    def rows(self, changed: Mapping[str, str] | None) -> Rows:
        engine = self.engine
        kind: Literal["full", "signed"] = "full" if changed is None else "signed"
        delta_rows = weighed(engine.task.holder, changed or {}, engine.task.choose)
        self._effort = Effort("full" if changed is None else "incremental", delta_rows)
        data, _ = self.stack.enter_context(engine.frame(None if changed is None else engine.logs(changed)))
        data.createOrReplaceTempView("gdq_joined")
        parts = []
        for number, branch in enumerate(engine.plan.branches):
            items = ", ".join(f"{item} as c{n}" for n, item in enumerate(branch.items, 1))
            where = f" where b = '{number}'" if len(engine.plan.branches) > 1 else ""
            parts.append(f"select {items}, w from gdq_joined{where}")
        return Rows(kind, engine.run.spark.sql(_netted(" union all ".join(parts), self.width)), {})

    def effort(self) -> Effort:
        return self._effort


@dataclass(frozen=True, slots=True)
class KeyRows:
    """The rows of a view that Spark's tasks compute by key. `texts`: how its columns travel."""

    statements: KeyStatements
    plan: SparkKeyPlan
    texts: Texts

    def rows(self, changed: Mapping[str, str] | None) -> Rows | None:
        made = self.statements.made
        names = [f"c{n}" for n in range(1, len(made.types) + 1)]
        if changed is None:
            made.full()
            kinds = {name: column.type for name, column in zip(names, made.types, strict=True)}
            by = [f"c{self._number(column)}" for column in self.plan.divided_by]
            queries = self.statements.whole(self.plan.query, kinds, by)
            return Rows("full", self.statements.frame(queries, names, self.texts), {})
        with made.computing():
            outcome = made.outcome(changed, once=True)
            difference = made.difference_of(outcome)
            if difference.kind == "signed":
                return Rows("signed", self._signed(difference, names), {})
            if not isinstance(outcome, Replace):
                return None
            keys = {self._number(key.column): self._keys(key) for key in difference.keys}
            queries = self.statements.of_keys(outcome, difference.keys)
        return Rows("replace", self.statements.frame(queries, names, self.texts), keys)

    def effort(self) -> Effort:
        return self.statements.made.effort()

    def _number(self, column: str) -> int:
        """The number of a column of the view."""
        return 1 + next(n for n, known in enumerate(self.statements.made.types) if known.name == column)

    def _signed(self, difference: Difference, names: Sequence[str]) -> DataFrame:
        """The signed rows, which one session has computed. NeedsFull when they are too many for this process."""
        made, spark = self.statements.made, self.statements.run.spark
        listed = ", ".join([*names, "w"])
        query = f"select * from ({difference.rows}) as r({listed})"
        columns = self.texts(made.connection, describe(made.connection, query, {})[:-1])
        query = f"{select_sql(f'({query}) as q', [*columns, Column('w', LONG)])} limit {_SIGNED_MAX + 1}"
        rows = made.connection.execute(raw(query)).fetchall()
        if len(rows) > _SIGNED_MAX:
            raise NeedsFull(f"more than {_SIGNED_MAX} rows changed")
        kinds = ", ".join([*(f"{name} string" for name in names), "w bigint"])
        spark.createDataFrame(rows, kinds).createOrReplaceTempView("gdq_computed")
        return spark.sql(_netted("select * from gdq_computed", len(names)))

    def _keys(self, key: KeySet) -> DataFrame:
        """The values of one key, as text."""
        made, name = self.statements.made, f"c{self._number(key.column)}"
        query = f"select pg_catalog.unnest({array_sql(key)}) as {name}"
        columns = self.texts(made.connection, describe(made.connection, query, {}))
        found = made.connection.execute(raw(select_sql(f"({query}) as q", columns))).fetchall()
        return self.statements.run.spark.createDataFrame([*found, *([(None,)] if key.null else [])], f"{name} string")


def _netted(rows: str, width: int) -> str:
    """The SELECT of signed rows (c1, c2, ..., w), none twice."""
    values = "".join(f"c{n}, " for n in range(1, width + 1))
    group = f" group by {values.rstrip(', ')}" if values else ""
    return f"select {values}sum(w) as w from ({rows}){group} having sum(w) <> 0"
