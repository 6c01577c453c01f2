"""Changes the rows of a target in PostgreSQL by a difference, in the session that holds the difference's rows."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from psycopg import Connection, sql

from gdq.consumers.views.computation import OUT, image_of
from gdq.consumers.views.difference import Difference, KeySet
from gdq.plan.table import quote
from gdq.view.target import Diverged, OutputType, Target, run


@dataclass(frozen=True, slots=True)
class TargetRows:
    """The rows of `target`, in the transaction of `output`; `types` are the target's."""

    output: Connection[Any]
    target: Target
    types: Sequence[OutputType]

    @property
    def columns(self) -> str:
        """The target's columns, for a list in SQL."""
        return ", ".join(quote(column.name) for column in self.types)

    def change(self, difference: Difference) -> int:
        """Apply a difference, a signed one from OUT; the rows deleted plus the rows inserted.

        Diverged when rows that should go are missing.
        """
        if difference.kind == "none":
            return 0
        if difference.kind == "signed":
            return self._delete(difference.match) + self._insert(self._came())
        if difference.kind == "replace":
            where = " and ".join(self._among(key) for key in difference.keys)
            return run(self.output, f"delete from {self.target.table} where {where}") + self._insert(difference.rows)
        deleted = self.target.empty(self.output, self.types)
        inserted = self.target.fill(self.output, lambda: self._insert(difference.rows))
        self.loaded(difference)
        return deleted + inserted

    def loaded(self, difference: Difference) -> None:
        """Make the index and the statistics of a target that was loaded in full."""
        indexed = ", ".join(quote(column) for column in difference.match)
        self.target.make_index(self.output, indexed, unique=False)
        run(self.output, f"analyze {self.target.table}")

    def _insert(self, rows: str) -> int:
        return run(self.output, f"insert into {self.target.table} ({self.columns}) {rows}")

    def _came(self) -> str:
        names = ", ".join(f"c{n}" for n in range(1, len(self.types) + 1))
        return f"select {names} from {OUT}, generate_series(1, net) where net > 0"

    def _among(self, key: KeySet) -> str:
        name = quote(key.column)
        among = f"{name} = any ({sql.Literal(key.array).as_string(self.output)}::{key.array_type})"
        return f"({among} or {name} is null)" if key.null else among

    def _delete(self, match: Sequence[str]) -> int:
        """Delete exactly as many equal rows as those in OUT take away."""
        row = self.output.execute(f"select coalesce(-sum(net), 0)::bigint from {OUT} where net < 0").fetchone()
        expected = int(row[0]) if row else 0
        if not expected:
            return 0
        numbers = {column.name: n for n, column in enumerate(self.types, 1)}
        pairs = [(quote(name), f"d.c{numbers[name]}") for name in match]
        some = " or ".join(f"{value} is null" for _, value in pairs)
        same = "".join(f" and t.{name} = {value}" for name, value in pairs)
        alike = "".join(f" and t.{name} is not distinct from {value}" for name, value in pairs)
        image = image_of([column.name for column in self.types], "t.")
        joined = (
            f"select t.ctid, row_number() over (partition by d.image) as copy, -d.net as n "
            f"from {self.target.table} as t join {OUT} as d on d.net < 0 and d.image = {image}"
        )
        parts = [f"{joined}{same}"] + ([f"{joined}{alike} and ({some})"] if pairs else [])
        found = " union all ".join(f"({part})" for part in parts)
        gone = f"array(select ctid from ({found}) as f where copy <= n)"
        deleted = run(self.output, f"delete from {self.target.table} where ctid = any ({gone})")
        if deleted != expected:
            raise Diverged(f"{self.target.table} held {deleted} of the {expected} rows that went")
        return deleted
