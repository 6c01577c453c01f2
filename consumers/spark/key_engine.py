"""Refreshes views that Spark does not join itself: its tasks run the view's statement for keys that changed.

A session in the source nets the changes and finds the keys, as for the engine postgres. Each task opens a connection of
its own at the refresh's snapshot, runs the statement for its share of the keys and writes the rows into a staging table
beside the target. What the plan gives as signed rows goes from that session to the target by COPY; counts and sums that
are kept beside the target are changed there.
"""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Any

from psycopg import Connection

from gdq.consumers.spark.jobs import own_jobs, put, text_columns, worker_errors
from gdq.consumers.spark.key_statements import READ, KeyStatements
from gdq.consumers.spark.session import SparkRun
from gdq.consumers.views.computation import temporary
from gdq.consumers.views.copy_engine import CopyEngine
from gdq.consumers.views.difference import Difference, KeySet
from gdq.consumers.views.engine import Effort
from gdq.consumers.views.kept_state import KeptState, KeptSums
from gdq.consumers.views.target import OutputType
from gdq.plan.steps import Replace
from gdq.sql_text import raw
from gdq.typed.pgtypes import READ_SETTINGS
from gdq.view.table_schema import apply_settings, describe

if TYPE_CHECKING:
    from collections.abc import Mapping

    from gdq.consumers.views.postgres_engine import PostgresEngine
    from gdq.plan.spark.keys import SparkKeyPlan


@dataclass(frozen=True, slots=True)
class _Staged:
    """The staging table and its columns with the types that their text is read as; the keys whose rows it holds."""

    table: str
    columns: Sequence[OutputType]
    keys: tuple[KeySet, ...] | None

    @property
    def rows(self) -> str:
        """The SELECT of the rows."""
        values = ", ".join(f"{column.name}::{column.type} as {column.name}" for column in self.columns)
        return f"select {values} from {self.table} where {READ} is null"


@dataclass(slots=True)
class SparkKeys:
    """One refresh of one view. `inner` changes the target, and computes what Spark's tasks do not."""

    run: SparkRun
    plan: SparkKeyPlan
    inner: PostgresEngine | CopyEngine
    _staged: _Staged | None = field(default=None, init=False)
    _read: int = field(default=0, init=False)

    def compute(self, s0: str | None, changed: Mapping[str, str]) -> None:
        """Stage what Spark computes, all rows or those of changed keys; signed rows stay where they are made."""
        if s0 is None:
            self._staged = self._load()
        elif not isinstance(self.inner, CopyEngine):
            self.inner.compute(s0, changed)
        elif changed:
            made = self.inner.computation
            with made.computing():
                outcome = made.outcome(changed, once=True)
                difference = made.difference_of(outcome)
                if not isinstance(outcome, Replace):
                    self.inner.difference = difference
                    return
                queries = self._statements.of_keys(outcome, difference.keys)
            columns = self._numbered(self.inner.rows.types)
            self._staged = self._stage(columns, queries, difference.keys)

    def apply(self, s0: str | None, changed: Mapping[str, str]) -> int:
        """Bring what was computed into the target; the rows deleted plus the rows inserted."""
        staged = self._staged
        if staged is None:
            return self.inner.apply(s0, changed)
        output = self.inner.rows.output
        apply_settings(output, READ_SETTINGS | self._view.settings)
        self.inner.computation.task.tell("writing", 0)
        output.execute(raw(f"analyze {staged.table}"))
        counted = f"select coalesce(sum({READ}::bigint), 0)::bigint from {staged.table} where {READ} is not null"
        row = output.execute(raw(counted)).fetchone()
        self._read = int(row[0]) if row else 0
        return self.inner.rows.change(self._difference(staged))

    def effort(self) -> Effort:
        """The work of the refresh."""
        if self._staged is None:
            return self.inner.effort()
        if self._staged.keys is None:
            return Effort("full", None, self._read)
        effort = self.inner.computation.effort()
        return replace(effort, rows_read=(effort.rows_read or 0) + self._read)

    def _difference(self, staged: _Staged) -> Difference:
        match = self.plan.match
        if staged.keys is not None:
            return Difference("replace", staged.rows, self._target_keys(staged.keys), match)
        if self.plan.state is None:
            return Difference("full", staged.rows, match=match)
        inner, kept = self.inner, KeptSums(self.plan.state, self.plan.state.loose)
        make = partial(temporary, inner.rows.output)
        return KeptState(inner.rows, match, kept, make).load(staged.rows)

    def _target_keys(self, keys: tuple[KeySet, ...]) -> tuple[KeySet, ...]:
        """Keys for the target's database: types of the source are known only there, so elsewhere they have its own."""
        if not self._view.elsewhere:
            return keys
        kinds = {column.name: column.type for column in self.inner.rows.types}
        return tuple(replace(key, array_type=f"{kinds[key.column]}[]") for key in keys)

    # what Spark does

    @property
    def _statements(self) -> KeyStatements:
        return KeyStatements(self.inner.computation, self.run)

    @property
    def _view(self) -> Any:
        return self.inner.computation.task.view

    @property
    def _source(self) -> Connection[Any]:
        return self.inner.computation.task.holder.connection

    def _numbered(self, types: Sequence[OutputType]) -> list[OutputType]:
        return [OutputType(f"c{n}", column.type) for n, column in enumerate(types, 1)]

    def _load(self) -> _Staged:
        """Stage all rows of the view, or its state, in as many parts as the tables' size is worth."""
        state = self.plan.state
        if state is None:
            columns = self._numbered(self.inner.rows.types)
            names = {column.name: f"c{n}" for n, column in enumerate(self.inner.rows.types, 1)}
            query, by = self.plan.query, [names[name] for name in self.plan.divided_by]
        else:
            query, by = KeptSums(state, state.loose).whole(), list(self.plan.divided_by)
            columns = self._state_columns(query)
        kinds = {column.name: column.type for column in columns}
        return self._stage(columns, self._statements.whole(query, kinds, by), None)

    def _state_columns(self, query: str) -> list[OutputType]:
        """The state's columns, with the collations that its groups are put in order by."""
        described = describe(self._source, query, self._view.settings)
        kinds = "select oid from pg_catalog.pg_type where oid = any (%s::oid[]) and typcollation <> 0"
        collatable = {oid for (oid,) in self._source.execute(kinds, [[oid for _, oid, _ in described]])}
        names = [name for name, oid, _ in described if oid in collatable]
        found: Sequence[str] = ()
        if names:
            asked = ", ".join(f"pg_catalog.pg_collation_for(q.{name})" for name in names)
            none = f"(select * from ({query}) as q limit 0)"
            with self._source.transaction(force_rollback=True):
                apply_settings(self._source, self._view.settings | {"search_path": "pg_catalog"})
                row = self._source.execute(raw(f"select {asked} from (values (1)) as v left join {none} as q on true"))
                found = row.fetchone() or ()
        collations = dict(zip(names, found, strict=True))
        own = {name: f" collate {collation}" for name, collation in collations.items() if collation != '"default"'}
        return [OutputType(name, kind + own.get(name, "")) for name, _, kind in described]

    def _stage(self, columns: Sequence[OutputType], queries: Sequence[str], keys: tuple[KeySet, ...] | None) -> _Staged:
        """Let each of Spark's tasks run a query of these columns and write its rows into a new staging table."""
        view, run, place = self._view, self.run, self.inner.rows
        self.inner.computation.task.tell("computing", 0)
        with worker_errors(delta=keys is not None), own_jobs(run.spark):
            names = [column.name for column in columns]
            data = self._statements.frame(queries, names, text_columns, counted=True)
            dsn = run.worker_dsn if view.target_dsn is None else view.target_dsn
            stage = place.target.stage(secrets.token_hex(4))
            put(data, (place.output, place.target, stage), dsn)
        return _Staged(stage, columns, keys)
