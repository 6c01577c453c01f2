"""Engine for targets in another PostgreSQL: computes the difference beside the tables and copies it to the target.

The computing session's transaction stays open until the target has the rows. COPY brings them into the target's
transaction, which deletes, inserts and moves the position.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any

from psycopg import Connection

from gdq.consumers.views.computation import Computation
from gdq.consumers.views.difference import NETTED_ROWS, Difference, row_image_sql
from gdq.consumers.views.engine import EngineEffort
from gdq.consumers.views.netting import make_temporary_table
from gdq.consumers.views.row_copy import copy_rows
from gdq.consumers.views.target import text_elsewhere
from gdq.consumers.views.target_rows import TargetRows
from gdq.typed.pgtypes import READ_SETTINGS
from gdq.view.table_schema import apply_view_settings

_IN = "pg_temp.gdq_in"


@dataclass(slots=True)
class CopyEngine:
    """Engine of one refresh of one view whose target is in another PostgreSQL."""

    computation: Computation
    rows: TargetRows
    difference: Difference | None = field(default=None, init=False)
    _made: list[str] = field(default_factory=list, init=False)

    def compute(self, s0: str | None, changed: Mapping[str, str]) -> None:
        """Compute the difference; the target's session is not touched."""
        self.difference = self.computation.difference(s0, changed)

    def effort(self) -> EngineEffort:
        return self.computation.effort()

    def apply(self, s0: str | None, changed: Mapping[str, str]) -> int:  # noqa: ARG002 (what changed is computed)
        """Copy the rows into the target's transaction and change the target; returns the rows deleted plus inserted."""
        difference = self.difference
        if difference is None or difference.kind == "none":
            return 0
        apply_view_settings(self.rows.output, READ_SETTINGS | self.computation.task.view.target_settings)
        self.computation.task.tell("writing")
        rows, target = self.rows, self.rows.target
        if difference.kind == "full":
            deleted = target.empty(self.rows.output, self.rows.types)
            into = f"{target.table} ({rows.columns})"
            inserted = target.fill(self.rows.output, lambda: self._copy(difference, into))
            rows.loaded(difference)
            return deleted + inserted
        names = [f"c{n}" for n in range(1, len(self.rows.types) + 1)]
        columns = [f"{name} {column.type}" for name, column in zip(names, self.rows.types, strict=True)]
        signed = difference.kind == "signed"
        listed = ", ".join([*columns, "net bigint"] if signed else columns)
        self.rows.output.execute(f"create temp table gdq_in ({listed}) on commit drop")
        self._made.append(_IN)
        self._copy(difference, _IN)
        if signed:
            self._made.append(NETTED_ROWS)
            query = f"select *, {row_image_sql(names)} as image from {_IN}"
            make_temporary_table(rows.sql, NETTED_ROWS.removeprefix("pg_temp."), query)
            return rows.change(difference)
        # the target's type of each column: it does not know the source's domains and enums
        kinds = {column.name: column.type for column in self.rows.types}
        keys = tuple(dataclasses.replace(key, array_type=f"{kinds[key.column]}[]") for key in difference.keys)
        return rows.change(dataclasses.replace(difference, rows=f"select {', '.join(names)} from {_IN}", keys=keys))

    def clear(self) -> None:
        """Drop the temporary tables, so that another view can be refreshed in the target's same transaction."""
        if self._made:
            self.rows.sql.run(f"drop table {', '.join(self._made)}")
            self._made.clear()

    def _copy(self, difference: Difference, into: str) -> int:
        # the SELECT may still have to compute the rows
        full = difference.kind == "full"
        with nullcontext() if full else self.computation.computing():
            computed = self.computation.sql
            rows = f"({computed.select(difference.rows)})"
            return copy_rows(computed.connection, rows, self.rows.output, into, moved=self._tell_moved()).rows

    def _tell_moved(self) -> Callable[[int], None]:
        """What adds up the rows that are written, and tells them."""
        written = 0

        def moved(rows: int) -> None:
            nonlocal written
            written += rows
            self.computation.task.tell("writing", written)

        return moved


def folded_columns(connection: Connection[Any], columns: Sequence[tuple[str, int, str]]) -> set[str]:
    """Columns, of (name, type oid, type) each, that a target elsewhere keeps as text and so may compare differently.

    Enums are not among them: their labels are equal exactly when the texts are.
    """
    query = "select oid from pg_catalog.pg_type where oid = any (%s::oid[]) and typtype = 'e'"
    enums = {oid for (oid,) in connection.execute(query, [[oid for _, oid, _ in columns]])}
    return {name for name, oid, kind in columns if text_elsewhere(oid, kind) and oid not in enums}
