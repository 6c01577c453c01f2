"""Refreshes views that Spark does not join itself: its tasks run the view's statement for the changed keys.

A session in the source nets the changes and finds the keys, as for the engine postgres. Each task opens its own
connection at the refresh's snapshot, runs the statement for its share of the keys and writes the rows into a staging
table beside the target. If the plan gives signed rows, that session copies them to the target itself.
Counts and sums kept beside the target are changed there.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Any

from psycopg import Connection

from gdq.call import scalar
from gdq.consumers.spark.jobs import own_jobs, stage_job_rows, text_columns, worker_errors
from gdq.consumers.spark.key_statements import ROWS_READ_COLUMN, KeyStatements
from gdq.consumers.spark.session import SparkRun
from gdq.consumers.views.copy_engine import CopyEngine
from gdq.consumers.views.difference import Difference, KeySet
from gdq.consumers.views.engine import EngineEffort
from gdq.consumers.views.kept_state import KeptState, KeptSums
from gdq.consumers.views.netting import make_temporary_table
from gdq.consumers.views.target import TargetColumn
from gdq.owner_sql import OwnerSql
from gdq.plan.steps import ReplaceOutcome
from gdq.sql_text import raw
from gdq.typed.pgtypes import READ_SETTINGS
from gdq.view.table_schema import apply_view_settings, describe_query

if TYPE_CHECKING:
    from collections.abc import Mapping

    from gdq.consumers.views.computation import Computation
    from gdq.consumers.views.postgres_engine import PostgresEngine
    from gdq.plan.spark.keys import SparkKeyPlan


@dataclass(frozen=True, slots=True)
class _Staged:
    """A staging table, the types that its text columns are read as, and the keys whose rows it holds."""

    table: str
    columns: Sequence[TargetColumn]
    keys: tuple[KeySet, ...] | None

    @property
    def rows(self) -> str:
        """SELECT of the staged rows."""
        values = ", ".join(f"{column.name}::{column.type} as {column.name}" for column in self.columns)
        return f"select {values} from {self.table} where {ROWS_READ_COLUMN} is null"


@dataclass(slots=True)
class SparkKeyEngine:
    """Engine of one refresh of one view. `inner` changes the target and computes signed rows without Spark's tasks.

    `start` gives the Spark session, which starts only if there is something to compute.
    """

    start: Callable[[], SparkRun]
    plan: SparkKeyPlan
    inner: PostgresEngine | CopyEngine
    _staged: _Staged | None = field(default=None, init=False)
    _read: int = field(default=0, init=False)

    @property
    def computation(self) -> Computation:
        """As Engine.computation."""
        return self.inner.computation

    def compute(self, s0: str | None, changed: Mapping[str, str]) -> None:
        """Let Spark stage all rows, or the rows of the changed keys. Signed rows are not staged."""
        if s0 is None:
            self._staged = self._load()
        elif not isinstance(self.inner, CopyEngine):
            self.inner.compute(s0, changed)
        elif changed:
            made = self.inner.computation
            with made.computing():
                outcome = made.outcome(changed, once=True)
                difference = made.difference_of(outcome)
                if not isinstance(outcome, ReplaceOutcome):
                    self.inner.difference = difference
                    return
                queries = self._statements.of_keys(outcome, difference.keys)
            columns = self._numbered(self.inner.rows.types)
            self._staged = self._stage(columns, queries, difference.keys)

    def apply(self, s0: str | None, changed: Mapping[str, str]) -> int:
        """Write the result into the target; returns the rows deleted plus the rows inserted."""
        staged = self._staged
        if staged is None:
            return self.inner.apply(s0, changed)
        output = self.inner.rows.output
        apply_view_settings(output, READ_SETTINGS | self._view.target_settings)
        self.inner.computation.task.tell("writing")
        output.execute(raw(f"analyze {staged.table}"))
        read = ROWS_READ_COLUMN
        counted = f"select coalesce(sum({read}::bigint), 0)::bigint from {staged.table} where {read} is not null"
        self._read = scalar(output, counted)
        return self.inner.rows.change(self._difference(staged))

    def effort(self) -> EngineEffort:
        """The work of the refresh."""
        if self._staged is None:
            return self.inner.effort()
        if self._staged.keys is None:
            return EngineEffort("full", None, self._read)
        effort = self.inner.computation.effort()
        return replace(effort, rows_read=(effort.rows_read or 0) + self._read)

    def _difference(self, staged: _Staged) -> Difference:
        match = self.plan.match
        if staged.keys is not None:
            return Difference("replace", staged.rows, self._target_keys(staged.keys), match)
        if self.plan.state is None:
            return Difference("full", staged.rows, match=match)
        inner, kept = self.inner, KeptSums(self.plan.state, self.plan.state.loose)
        make = partial(make_temporary_table, inner.rows.sql)
        return KeptState(inner.rows, match, kept, make).load(staged.rows)

    def _target_keys(self, keys: tuple[KeySet, ...]) -> tuple[KeySet, ...]:
        """The keys with the types of the target's columns if the target is in another database than the tables."""
        if not self._view.elsewhere:
            return keys
        kinds = {column.name: column.type for column in self.inner.rows.types}
        return tuple(replace(key, array_type=f"{kinds[key.column]}[]") for key in keys)

    # what Spark does

    @property
    def _statements(self) -> KeyStatements:
        return KeyStatements(self.inner.computation, self.start())

    @property
    def _view(self) -> Any:
        return self.inner.computation.task.view

    @property
    def _source(self) -> Connection[Any]:
        return self.inner.computation.task.holder.connection

    def _numbered(self, types: Sequence[TargetColumn]) -> list[TargetColumn]:
        return [TargetColumn(f"c{n}", column.type) for n, column in enumerate(types, 1)]

    def _load(self) -> _Staged:
        """Stage all rows of the view, or its state; large tables are read by several tasks."""
        state = self.plan.state
        if state is None:
            columns = self._numbered(self.inner.rows.types)
            names = {column.name: f"c{n}" for n, column in enumerate(self.inner.rows.types, 1)}
            query, by = self.plan.query, [names[name] for name in self.plan.divided_by]
        else:
            query, by = KeptSums(state, state.loose).whole(), list(self.plan.divided_by)
            columns = self._state_columns(query)
        kinds = {column.name: column.type for column in columns}
        tell, owned = self.inner.computation.task.tell, OwnerSql(self._source, self._view.acts_as)
        tell.expect_rows_of(owned, query, "computing")
        return self._stage(columns, self._statements.whole(query, kinds, by), None)

    def _state_columns(self, query: str) -> list[TargetColumn]:
        """The state's columns; collatable ones carry the collation of their group expression."""
        described = describe_query(self._source, query, self._view.settings)
        kinds = "select oid from pg_catalog.pg_type where oid = any (%s::oid[]) and typcollation <> 0"
        collatable = {oid for (oid,) in self._source.execute(kinds, [[oid for _, oid, _ in described]])}
        names = [name for name, oid, _ in described if oid in collatable]
        found: Sequence[str] = ()
        if names:
            asked = ", ".join(f"pg_catalog.pg_collation_for(q.{name}) as {name}" for name in names)
            none = f"(select * from ({query}) as q limit 0)"
            with self._source.transaction(force_rollback=True):
                apply_view_settings(self._source, self._view.settings)
                owned = OwnerSql(self._source, self._view.acts_as)
                (found,) = owned.rows(f"select {asked} from (values (1)) as v left join {none} as q on true")
        collations = dict(zip(names, found, strict=True))
        own = {name: f" collate {collation}" for name, collation in collations.items() if collation != '"default"'}
        return [TargetColumn(name, kind + own.get(name, "")) for name, _, kind in described]

    def _stage(
        self, columns: Sequence[TargetColumn], queries: Sequence[str], keys: tuple[KeySet, ...] | None
    ) -> _Staged:
        """Run each query, all with these columns, in a Spark task that writes its rows into a new staging table."""
        view, run, place = self._view, self.start(), self.inner.rows
        tell = self.inner.computation.task.tell
        tell("computing")
        with worker_errors(delta=keys is not None), own_jobs(run.spark, tell):
            names = [column.name for column in columns]
            data = self._statements.frame(queries, names, text_columns, counted=True)
            dsn = run.worker_dsn if view.target_dsn is None else view.target_dsn
            stage = place.target.stage(secrets.token_hex(4))
            stage_job_rows(data, (place.output, place.target, stage), dsn)
        return _Staged(stage, columns, keys)
