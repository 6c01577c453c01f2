"""Brings computed rows into a target: in full, or the difference that a delta made.

The rows come from a staging table whose columns are PostgreSQL's text of a value (NULL stays NULL): c1, c2, ... and
the numbers that the plan adds.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import psycopg
from psycopg import Connection

from gdq.consumers.views.signals import Diverged
from gdq.consumers.views.target import OutputType, Target, run, try_index
from gdq.plan.table import RefreshPlan
from gdq.sql_text import quote

_KEYS = "pg_temp.gdq_keys"
_SUMS = "pg_temp.gdq_sums"


@dataclass(frozen=True, slots=True)
class Merge:
    """One application of the rows in `stage` to `target`, in the transaction of `connection`."""

    connection: Connection[Any]
    target: Target
    plan: RefreshPlan
    types: Sequence[OutputType]
    stage: str

    def full(self) -> int:
        """Replace all rows of the target, made if missing; the rows deleted plus the rows inserted."""
        run(self.connection, f"analyze {self.stage}")
        deleted = self.target.empty(self.connection, self.types)
        if self.plan.merge.rule == "state":
            self._make_state()
            self._add_sums()
        inserted = self.target.fill(self.connection, self._insert)
        self._make_index()
        return deleted + inserted

    def difference(self, keys: Iterable[Sequence[str | None]] = ()) -> int:
        """Apply a delta; the rows deleted plus the rows inserted.

        `keys` are the touched keys, in text, where the plan recomputes. Diverged when rows that should go are missing.
        """
        run(self.connection, f"analyze {self.stage}")
        if self.plan.merge.rule == "bag":
            return self._delete_copies() + self._insert()
        if self.plan.merge.rule == "state":
            self._add_sums()
            return self._delete_keys(_SUMS) + self._insert()
        if self.plan.rows is None:
            return self._delete_net() + self._insert()
        self._load_keys(keys)
        return self._delete_keys(_KEYS) + self._insert()

    def _make_index(self) -> None:
        keys = [(quote(key), key in self.plan.merge.nullable) for key in self.plan.merge.keys]
        self.target.make_index(self.connection, _indexed(keys), unique=True)

    def _make_state(self) -> None:
        state = self.target.state
        columns = [f"{name} {kind}" for name, kind in zip(self._key_names(), self._key_types(), strict=True)]
        for number in self.plan.merge.state:
            kind = "numeric" if number.spark.startswith("decimal") else "bigint"
            columns.append(f"{number.name} {kind} not null")
        run(self.connection, f"drop table if exists {state}")
        run(self.connection, f"create table {state} ({', '.join(columns)}, check (n > 0))")
        try_index(self.connection, f"create unique index on {state} ({_indexed(self._keys())})")

    def _add_sums(self) -> None:
        """Add the staged sums to the state; _SUMS then holds the touched groups.

        Groups that Spark told apart may be equal in PostgreSQL (1.0 and 1.00, case in citext), so they are added up
        once more.
        """
        names = self._key_names()
        keys = ", ".join(f"{name}::{kind} as {name}" for name, kind in zip(names, self._key_types(), strict=True))
        numbers = [number.name for number in self.plan.merge.state]
        sums = ", ".join(f"sum({name}::numeric) as {name}" for name in numbers)
        group = ", ".join(str(n) for n in range(1, len(names) + 1))
        some = " or ".join(f"sum({name}::numeric) <> 0" for name in numbers)
        run(
            self.connection,
            f"create temp table gdq_sums on commit drop as "
            f"select {keys}, {sums} from {self.stage} group by {group} having {some}",
        )
        run(self.connection, f"analyze {_SUMS}")
        columns = ", ".join([*names, *numbers])
        values = ", ".join(f"d.{name}" for name in [*names, *numbers])
        added = ", ".join(f"{name} = s.{name} + d.{name}" for name in numbers)
        try:
            run(
                self.connection,
                f"merge into {self.target.state} as s using {_SUMS} as d on {self._same('s', names)} "
                f"when matched and s.n + d.n = 0 then delete when matched then update set {added} "
                f"when not matched then insert ({columns}) values ({values})",
            )
        except psycopg.errors.CheckViolation as error:
            raise Diverged(f"{self.target.state} counts fewer rows than the delta takes away") from error

    def _delete_net(self) -> int:
        """Delete the rows whose key the net delta names; every key of an image that went must be there."""
        columns = [f"c{self._position(key)}" for key in self.plan.merge.keys]
        keys = ", ".join(
            f"{column}::{kind} as {name}"
            for column, kind, name in zip(columns, self._key_types(), self._key_names(), strict=True)
        )
        group = ", ".join(str(n) for n in range(1, len(columns) + 1))
        run(
            self.connection,
            f"create temp table gdq_keys on commit drop as "
            f"select {keys}, bool_or(w::bigint < 0) as gone from {self.stage} group by {group}",
        )
        run(self.connection, f"analyze {_KEYS}")
        row = self.connection.execute("select count(*) filter (where gone) from pg_temp.gdq_keys").fetchone()
        deleted = self._delete_keys(_KEYS)
        if row is None or deleted != row[0]:
            raise Diverged(f"{self.target.table} held {deleted} of the {row[0] if row else 0} rows that changed")
        return deleted

    def _load_keys(self, keys: Iterable[Sequence[str | None]]) -> None:
        columns = zip(self._key_names(), self._key_types(), strict=True)
        listed = ", ".join(f"{name} {kind}" for name, kind in columns)
        run(self.connection, f"create temp table gdq_keys ({listed}) on commit drop")
        with self.connection.cursor().copy("copy pg_temp.gdq_keys from stdin") as copy:
            for key in keys:
                copy.write_row(key)
        run(self.connection, f"analyze {_KEYS}")

    def _delete_keys(self, keys: str) -> int:
        columns = [quote(key) for key in self.plan.merge.keys]
        return run(
            self.connection,
            f"delete from {self.target.table} as s using {keys} as d where {self._same('s', columns)}",
        )

    def _delete_copies(self) -> int:
        """Delete exactly as many copies of each row as the delta takes away, rows compared by their text."""
        casts = ", ".join(f"c{n}::{column.type}" for n, column in enumerate(self.types, 1))
        gone = f"select row({casts})::text as image, -sum(w::bigint) as n from {self.stage} where w::bigint < 0"
        columns = ", ".join(f"t.{quote(column.name)}" for column in self.types)
        run(self.connection, f"create temp table gdq_keys on commit drop as {gone} group by 1")
        run(self.connection, f"analyze {_KEYS}")
        deleted = run(
            self.connection,
            f"delete from {self.target.table} where ctid = any (array(select ctid from "
            f"(select t.ctid, row_number() over (partition by d.image) as copy, d.n from {self.target.table} as t "
            f"join {_KEYS} as d on d.image = row({columns})::text) as copies where copy <= n))",
        )
        row = self.connection.execute("select coalesce(sum(n), 0)::bigint from pg_temp.gdq_keys").fetchone()
        if row is None or deleted != row[0]:
            raise Diverged(f"{self.target.table} held {deleted} of the {row[0] if row else 0} rows that went")
        return deleted

    def _insert(self) -> int:
        columns = ", ".join(quote(column.name) for column in self.types)
        merge = self.plan.merge
        if merge.rule == "state":
            shown = zip(merge.visible, self.types, strict=True)
            values = ", ".join(f"({expression})::{column.type}" for expression, column in shown)
            same = self._same("s", self._key_names())
            rows = f"(select s.* from {self.target.state} as s join {_SUMS} as d on {same}) as s"
        else:
            values = ", ".join(f"c{n}::{column.type}" for n, column in enumerate(self.types, 1))
            copies = ", generate_series(1, w::bigint) where w::bigint > 0" if self.plan.rows is None else ""
            rows = self.stage + copies
        return run(self.connection, f"insert into {self.target.table} ({columns}) select {values} from {rows}")

    def _keys(self) -> list[tuple[str, bool]]:
        """The key columns of state and temporary tables, and whether they may be NULL."""
        nullable = self.plan.merge.nullable
        return [(f"c{n}", key in nullable) for n, key in enumerate(self.plan.merge.keys, 1)]

    def _key_names(self) -> list[str]:
        return [name for name, _ in self._keys()]

    def _key_types(self) -> list[str]:
        types = {column.name: column.type for column in self.types}
        return [types[key] for key in self.plan.merge.keys]

    def _position(self, key: str) -> int:
        return self.plan.columns.index(key) + 1

    def _same(self, alias: str, columns: Sequence[str]) -> str:
        """The condition that `columns` of `alias` are the key in d.

        Two arrays with a NULL each are equal, and such an equality can be hashed and indexed, which IS NOT DISTINCT
        FROM cannot.
        """
        parts = []
        for column, (name, nullable) in zip(columns, self._keys(), strict=True):
            left, right = f"{alias}.{column}", f"d.{name}"
            parts.append(f"array[{left}] = array[{right}]" if nullable else f"{left} = {right}")
        return " and ".join(parts)


def _indexed(keys: Sequence[tuple[str, bool]]) -> str:
    return ", ".join(f"(array[{key}])" if nullable else key for key, nullable in keys)
