"""The statements of few changes: those that net a table's log rows into arrays, and the one that applies the arrays.

    with gdq_delta_1 as (select ... from unnest($1::int[], $2::bigint[]) ...), gdq_rows_1 as (select ...),
         gdq_out as (...), gdq_deleted as (delete from target ...), gdq_inserted as (insert into target ...)
    select ...

The text of the statement depends on the view and the changed tables alone, so each session plans it once.
"""

from __future__ import annotations

import re
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Self

from gdq.consumers.views.change_source import LogColumn, LoggedRows
from gdq.consumers.views.difference import row_image_sql
from gdq.consumers.views.kept_state import KeptSums, KeptTop, kept_beside
from gdq.consumers.views.netting import as_part, netted_images_sql, netted_rows_sql, part_hint
from gdq.consumers.views.row_deletion import found_rows_sql
from gdq.consumers.views.signals import ManyRows, NeedsFull, NeedsTables
from gdq.consumers.views.state_parts import numbered, refused_sql, short_sql, shown_rows, state_parts
from gdq.consumers.views.target_rows import TargetRows
from gdq.errors import PlanError
from gdq.plan.postgres import ChangePlan, PostgresPlan
from gdq.plan.steps import NO_NUMBER, SignedOutcome
from gdq.plan.table import WEIGHT_COLUMN, UsedTable
from gdq.sql_text import literal, quote

# Changes of one table in the log that count as few, bytes of their netted columns as they are stored, and as text; and
# rows of the view that they may change.
FEW, FEW_BYTES, _SENT_BYTES, ROWS_MAX = 1000, 2**20, 2**23, 4000

# What a plan with more than one statement reads.
_NO_PART = re.compile(r"\bpg_temp\b|\bgdq_(?:keys|null|old|any)_\d+\b")

# One row, of which PostgreSQL expects 300, as it does not know the variable.
_MANY = ", (select from generate_series(1, gdq_one) limit 300) as gdq_thousands"

RESULT = "expected bigint, deleted bigint, inserted bigint, refused boolean, many boolean"

# Statements by what they are made of.
_KNOWN_MAX = 1000
_known: dict[Hashable, str] = {}


@dataclass(frozen=True, slots=True)
class Netted:
    """The netted changes of one table: `rows` of them, with one array, as text, for each of `columns` and the weight.

    `number`: the table's in the plan.
    """

    number: int
    table: UsedTable
    columns: tuple[LogColumn, ...]
    rows: int
    arrays: tuple[str, ...]

    @classmethod
    def of(cls, number: int, table: UsedTable, rows: LoggedRows, found: Sequence[Any]) -> Self | None:
        """The changes from a row of netting_sql(); None if they are many, or large."""
        seen, netted, small, *arrays = found
        if seen > FEW or not small:
            return None
        columns = {column.name: column for column in rows.columns}
        return cls(
            number, table, tuple(columns[name] for name in table.logged), netted, tuple(arrays) if netted else ()
        )

    @property
    def name(self) -> str:
        return f"gdq_delta_{self.number}"

    def select(self, arrays: Sequence[str], *, many: bool = False) -> str:
        """SELECT of the changes from these arrays in SQL.

        It has the text of whole rows where a table without a key is to be found by it. `many`: a plan that is kept
        expects thousands of changes, in place of the ten elements that PostgreSQL expects of an array.
        """
        types = [*(column.element for column in self.columns), "bigint"]
        typed = ", ".join(f"{array}::{kind}[]" for array, kind in zip(arrays, types, strict=True))
        names = [*(quote(column.name) for column in self.columns), quote(WEIGHT_COLUMN)]
        # a value that passed through text is cast back
        casts = [
            f"{'' if c.element == c.type else f'::{c.type}'}{f' collate {c.collation}' if c.collation else ''}"
            for c in self.columns
        ]
        shown = [f"d.{name}{cast} as {name}" for name, cast in zip(names, [*casts, ""], strict=True)]
        select = f"select {', '.join(shown)} from unnest({typed}) as d({', '.join(names)}){_MANY if many else ''}"
        if self.table.key:
            return select
        return f"select *, {row_image_sql(self.table.logged)} as __image from ({select}) as d"

    def literal(self) -> str:
        """The same from literals."""
        return self.select([literal(array) for array in self.arrays])


@dataclass(frozen=True, slots=True)
class FewStatement:
    """The statement that brings the target `rows` of a view up to few netted changes of its tables."""

    plan: PostgresPlan
    rows: TargetRows

    def planned(self, changed: Sequence[str]) -> ChangePlan | None:
        """The plan after changes of these tables, if all of it can be one statement."""
        if self.plan.full:
            return None
        try:
            changes = self.plan.plan_changes(changed)
        except PlanError:
            return None
        if not isinstance(changes.outcome, SignedOutcome) or any(step.kind != "delta" for step in changes.steps):
            return None
        texts = [changes.outcome.rows, *(step.sql for step in changes.steps)]
        if any(_NO_PART.search(as_part(text)) for text in texts):
            return None
        return changes

    def is_suited(self, logged: Iterable[LoggedRows]) -> bool:
        """True if all values can be sent as arrays."""
        if not all(column.is_flat for rows in logged for column in rows.columns):
            return False
        return "pg_temp" not in self.plan.query

    @property
    def kept(self) -> KeptSums | KeptTop | None:
        """What is kept beside the target."""
        return kept_beside(self.plan, self.rows.target.state)

    @property
    def cut(self) -> str:
        """The statement that comes after this one, which nothing waits for; empty for none."""
        return self.kept.cut() if isinstance(self.kept, KeptTop) else ""

    def text(self, netted: Sequence[Netted], changes: ChangePlan) -> str:
        """The statement for these changes, with a parameter for each array; written once."""
        plan, target = self.plan, self.rows.target
        columns = tuple((one.number, one.columns) for one in netted)
        key = (plan.fingerprint(), plan.schemas, changes, columns, target.table, target.state, tuple(self.rows.types))
        if key not in _known:
            if len(_known) >= _KNOWN_MAX:
                _known.clear()
            _known[key] = self.written(netted, changes, [f"${n}" for n in range(1, _arrays_of(netted) + 1)])
        return _known[key]

    def written(
        self, netted: Sequence[Netted], changes: ChangePlan, arrays: Sequence[str], rows_max: str = str(ROWS_MAX)
    ) -> str:
        """The statement, with these arrays in SQL. `rows_max`: the most rows of the view that it may change, in SQL."""
        left = iter(arrays)
        parts = {one.name: one.select([next(left) for _ in one.arrays]) for one in netted}
        parts |= {as_part(step.name): as_part(step.sql) for step in changes.steps if step.kind == "delta"}
        assert isinstance(changes.outcome, SignedOutcome)
        return self.applied(parts, changes.outcome, rows_max)

    def applied(self, parts: Mapping[str, str], outcome: SignedOutcome, rows_max: str) -> str:
        """The statement over these parts of its WITH, of which `outcome` names one."""
        kept, width, rows = self.kept, len(self.rows.types), as_part(outcome.rows)
        if kept is None:
            shown = f"select {', '.join([*numbered(width), 'w'])} from {rows} as r"
        else:
            parts = {**parts, **state_parts(kept, self.rows.target.state, rows)}
            shown = shown_rows(kept, self.rows.target.state, self.rows.target.table, self.rows.columns, width)
        parts = {**parts, **self._target_parts(shown, rows_max)}
        written = ", ".join(f"{name} as {part_hint(name)}({part})" for name, part in parts.items())
        # after a function was replaced the text is another, as a session's plan may hold a value of the old one
        return (
            f"/* {self.plan.fingerprint()} */ "
            f"with {written} select (select n from gdq_expected), (select count(*) from gdq_deleted), "
            f"(select count(*) from gdq_inserted), {refused_sql(kept)}, "
            f"not (select few from gdq_size) or {short_sql(kept)}"
        )

    def _target_parts(self, rows: str, rows_max: str) -> dict[str, str]:
        """The parts that change the target. All rows that went go before the first comes: a key may be unique."""
        table, types = self.rows.target.table, self.rows.types
        found = found_rows_sql(table, [column.name for column in types], self.plan.match, "gdq_few")
        names = ", ".join(numbered(len(types)))
        return {
            "gdq_out": netted_rows_sql(types, rows),
            # a plan for few rows may look through the whole target for each
            "gdq_size": f"select count(*) <= {rows_max} as few from gdq_out",
            "gdq_few": "select * from gdq_out where (select few from gdq_size)",
            "gdq_expected": "select coalesce(-sum(net), 0)::bigint as n from gdq_out where net < 0",
            "gdq_gone": f"select ctid from ({found}) as f where copy <= n",
            "gdq_deleted": f"""
                delete from {table}
                 where ctid = any (array(select ctid from gdq_gone
                                          where (select count(*) from gdq_gone) = (select n from gdq_expected)))
                returning 1""",
            "gdq_inserted": f"""
                insert into {table} ({self.rows.columns})
                select {names} from gdq_few, generate_series(1, net)
                 where net > 0 and (select count(*) from gdq_deleted) >= 0
                returning 1""",
        }

    def changed(self, row: Sequence[Any]) -> int:
        """The rows deleted plus inserted, from the statement's row; NeedsFull, NeedsTables if they must not stand."""
        expected, deleted, inserted, refused, many = row
        if refused:
            raise NeedsFull(NO_NUMBER)
        if many:
            raise ManyRows
        if deleted != expected:
            raise NeedsTables
        return int(deleted + inserted)


def _arrays_of(netted: Sequence[Netted]) -> int:
    return sum(len(one.arrays) for one in netted)


def netting_sql(table: UsedTable, rows: LoggedRows) -> str:
    """SELECT of one row: the changes seen in the log, the netted ones, are they small, and their columns as arrays.

    No more than a few changes are looked at, and no large values are read.
    """
    values = [f"d.{quote(name)}" for name in table.logged]
    size = " + ".join(f"coalesce(pg_catalog.pg_column_size({value}), 0)" for value in values) or "0"
    values.append(f"d.{quote(WEIGHT_COLUMN)}")
    names = [f"a{n}" for n in range(len(values))]
    arrays = ", ".join(f"array_agg({value})::text as {name}" for name, value in zip(names, values, strict=True))
    length = " + ".join(f"coalesce(octet_length(a.{name}), 0)" for name in names)
    shown = ", ".join(f"case when fits.small then a.{name} end" for name in names)
    net = netted_images_sql(table, rows.images, exact=rows.is_exact(table.logged))
    return f"""
        with seen as materialized (
               select count(*) as n from (select from ({rows.select}) as r limit {FEW + 1}) as r),
             net as materialized (select * from ({net}) as d where (select n from seen) <= {FEW}),
             sized as (select count(*) as n, coalesce(sum({size}), 0) <= {FEW_BYTES} as small from net as d),
             a as (select {arrays} from net as d where (select small from sized))
        select (select n from seen), sized.n, sized.small and fits.small, {shown}
          from sized, a, lateral (select {length} <= {_SENT_BYTES} as small) as fits"""
