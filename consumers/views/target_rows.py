"""The rows of a target in PostgreSQL, changed by the difference of one refresh."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from psycopg import Connection, sql

from gdq.consumers.views.difference import NETTED_ROWS, Difference, KeySet
from gdq.consumers.views.progress import Progress
from gdq.consumers.views.row_deletion import delete_netted_rows
from gdq.consumers.views.target import Target, TargetColumn
from gdq.owner_sql import OwnerSql
from gdq.sql_text import is_null, quote


@dataclass(frozen=True, slots=True)
class TargetRows:
    """Rows of `target`, changed in the transaction of `output`; `types`: the target's columns; `tell`: the progress."""

    output: Connection[Any]
    target: Target
    types: Sequence[TargetColumn]
    tell: Progress

    @property
    def sql(self) -> OwnerSql:
        """Runs SQL over the target, as the view's owner."""
        return OwnerSql(self.output, self.target.owner)

    @property
    def columns(self) -> str:
        """The target's columns as a list in SQL."""
        return ", ".join(quote(column.name) for column in self.types)

    def change(self, difference: Difference) -> int:
        """Apply a difference, a signed one from the table NETTED_ROWS; returns the rows deleted plus the rows inserted.

        Diverged if rows to delete are missing.
        """
        if difference.kind == "none":
            return 0
        self.target.hold(self.output)
        if difference.kind == "signed":
            names = [column.name for column in self.types]
            deleted = delete_netted_rows(self.sql, self.target.table, names, difference.match)
            return deleted + self._insert(self._came())
        if difference.kind == "replace":
            where = " and ".join(self._among(key) for key in difference.keys)
            return self.sql.run(f"delete from {self.target.table} where {where}") + self._insert(difference.rows)
        deleted = self.target.empty(self.output, self.types)
        inserted = self.target.fill(self.output, lambda: self._load(difference.rows))
        self.loaded(difference)
        return deleted + inserted

    def loaded(self, difference: Difference) -> None:
        """Create the index and the statistics of a target that was loaded in full."""
        self.tell("indexing")
        indexed = ", ".join(quote(column) for column in difference.match)
        self.target.make_index(self.output, indexed)
        self.sql.run(f"analyze {self.target.table}")

    def _load(self, rows: str) -> int:
        with self.tell.counted(self.sql, self.target.table, rows) as told:
            return self._insert(told)

    def _insert(self, rows: str) -> int:
        return self.sql.run(f"insert into {self.target.table} ({self.columns}) {rows}")

    def _came(self) -> str:
        names = ", ".join(f"c{n}" for n in range(1, len(self.types) + 1))
        return f"select {names} from {NETTED_ROWS}, generate_series(1, net) where net > 0"

    def _among(self, key: KeySet) -> str:
        name = quote(key.column)
        among = f"{name} = any ({sql.Literal(key.array).as_string(self.output)}::{key.array_type})"
        return f"({among} or {is_null(name)})" if key.null else among
