"""The state beside the target of a view: what is kept of its groups, and the rows of the view that follow from it.

A state holds, for every group or every combination of values, how many rows it has and what is added up.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import psycopg

from gdq.consumers.views.computation import Make, net
from gdq.consumers.views.difference import Difference
from gdq.consumers.views.signals import Diverged, NeedsFull
from gdq.consumers.views.target import TargetRows, run, try_index
from gdq.plan.kept_state import StatePlan
from gdq.plan.spark.parts import Detail

_SUMS, _BEFORE = "pg_temp.gdq_sums", "pg_temp.gdq_before"


class Kept(Protocol):
    """The contents of a state: the columns `keys` and `numbers`; the view's rows follow by the keys `groups`."""

    @property
    def keys(self) -> Sequence[str]: ...
    @property
    def numbers(self) -> Sequence[str]: ...
    @property
    def groups(self) -> Sequence[str]: ...

    def sums(self, rows: str) -> str:
        """The SELECT of what signed rows (c1, c2, ..., w) add to the state."""

    def shown(self, state: str, touched: str) -> str:
        """The SELECT of the view's rows from the table `state`, joined as s with the groups in `touched`."""


def image_of_keys(loose: Sequence[str]) -> str:
    """A hash of how key columns are written. With it as a key too, equal keys of different text are kept apart."""
    text = f"row({', '.join(loose)})::pg_catalog.text"
    return f'pg_catalog.hashtextextended({text} collate pg_catalog."C", 0)'


@dataclass(frozen=True, slots=True)
class KeptSums:
    """The counts and sums of a GROUP BY. `loose`: groups of which equal values may be written differently.

    Such a group has a row of the state for each spelling, so that a spelling that no row has any more goes: a view may
    show what it says of the value, scale(1.00).
    """

    plan: StatePlan
    loose: Sequence[str] = ()

    @property
    def keys(self) -> Sequence[str]:
        return [*self.plan.group_columns, "image"] if self.loose else self.plan.group_columns

    @property
    def numbers(self) -> Sequence[str]:
        return self.plan.numbers

    @property
    def groups(self) -> Sequence[str]:
        # with LIMIT a row may come for another one's sake
        return () if self.plan.order or self.plan.extremes else self.plan.group_columns

    def sums(self, rows: str) -> str:
        if not self.loose:
            return self.plan.sums(rows)
        return self.plan.sums(f"(select *, {image_of_keys(self.loose)} as image from {rows} as r)", also=["image"])

    def whole(self) -> str:
        """The SELECT of the state from the tables."""
        return self.sums(self.plan.rows()) if self.loose else self.plan.whole()

    def shown(self, state: str, touched: str) -> str:
        if self.loose:
            state, touched = self._merged(state, touched), ""
        where = f" where {self.plan.having}" if self.plan.having else ""
        return f"select {', '.join(self.plan.visible)} from {state} as s{touched}{where}{self.plan.order}"

    def _merged(self, state: str, touched: str) -> str:
        """The state with one row for each group, in a spelling that does not depend on the order of its rows."""
        groups, numbers = self.plan.group_columns, self.plan.numbers
        within = ", ".join(f"s.{name}" for name in groups)
        # not the first of array_agg(): of arrays that is none
        spelled = [f"first_value(s.{name}) over (partition by {within} order by s.image) as {name}" for name in groups]
        rows = f"select {', '.join([*spelled, *(f's.{name}' for name in numbers)])} from {state} as s{touched}"
        names = [*groups, *(f"sum({name})::{'numeric' if name[0] == 's' else 'bigint'} as {name}" for name in numbers)]
        return f"(select {', '.join(names)} from ({rows}) as s group by {', '.join(groups)})"


@dataclass(frozen=True, slots=True)
class KeptValues:
    """The values of a GROUP BY, with how often they occur; `loose`: keys, as of KeptSums."""

    plan: Detail
    loose: Sequence[str] = ()

    @property
    def keys(self) -> Sequence[str]:
        return [*self.plan.columns, "image"] if self.loose else self.plan.columns

    @property
    def numbers(self) -> Sequence[str]:
        return ("n",)

    @property
    def groups(self) -> Sequence[str]:
        return self.plan.columns[: self.plan.groups]

    def sums(self, rows: str) -> str:
        keys = ", ".join(self.keys)
        if self.loose:
            rows = f"(select *, {image_of_keys(self.loose)} as image from {rows} as r)"
        return f"select {keys}, sum(w)::bigint as n from {rows} as r group by {keys}"

    def shown(self, state: str, touched: str) -> str:
        if self.loose:
            state, touched = self._respelled(state, touched), ""
        having = f" having {self.plan.having}" if self.plan.having else ""
        groups = ", ".join(f"s.{name}" for name in self.groups)
        return f"select {', '.join(self.plan.visible)} from {state} as s{touched} group by {groups}{having}"

    def _respelled(self, state: str, touched: str) -> str:
        """The state with one spelling of every value of a group, which does not depend on the order of its rows."""
        groups = [f"s.{name}" for name in self.groups]
        names = ["s.n"]
        for name in self.plan.columns:
            if name in self.loose:
                within = ", ".join(groups if name in self.groups else [*groups, f"s.{name}"])
                names.append(f"first_value(s.{name}) over (partition by {within} order by s.image) as {name}")
            else:
                names.append(f"s.{name}")
        return f"(select {', '.join(names)} from {state} as s{touched})"


@dataclass(frozen=True, slots=True)
class KeptState:
    """The state of one view, in the transaction of the target's `rows`; `make` makes temporary tables there."""

    rows: TargetRows
    match: Sequence[str]
    kept: Kept
    make: Make

    def load(self, sums: str) -> Difference:
        """Make the state afresh from a SELECT of its columns; all rows of the view."""
        table, columns = self.rows.target.state, self.kept.keys
        run(self.rows.output, f"drop table if exists {table}")
        run(self.rows.output, f"create table {table} as {sums}")
        run(self.rows.output, f"alter table {table} add check (n {'>' if columns else '>='} 0)")
        if columns:
            listed = ", ".join(f"(array[{column}])" for column in columns)
            try_index(self.rows.output, f"create unique index on {table} ({listed})")
        run(self.rows.output, f"analyze {table}")
        return Difference("full", self.kept.shown(table, ""), match=tuple(self.match))

    def add(self, sums: str, after: Sequence[str] = (), refused: str = "") -> Difference:
        """Add a SELECT of the state's columns to it; the difference between the old and new rows of what it touches.

        `after`: statements that follow in the state what is no sum. NeedsFull when the condition `refused` holds for
        a sum.
        """
        columns, numbers, groups = self.kept.keys, self.kept.numbers, self.kept.groups
        some = " or ".join(f"{name} <> 0" for name in numbers)
        self.make("gdq_sums", f"select * from ({sums}) as s where {some}")
        if refused and run(self.rows.output, f"select from {_SUMS} where {refused} limit 1"):
            raise NeedsFull("NaN or infinity came into or went from a sum")
        touched = ""
        if groups:
            touched = f" join (select distinct {', '.join(groups)} from {_SUMS}) as d on {_same(groups)}"
        table, names = self.rows.target.state, ", ".join(f"c{n}" for n in range(1, len(self.rows.types) + 1))
        shown = self.kept.shown(table, touched)
        self.make("gdq_before", f"select *, -1 as w from ({shown}) as b({names})")
        added = ", ".join(f"{name} = s.{name} + d.{name}" for name in numbers)
        gone = "when matched and s.n + d.n = 0 then delete " if columns else ""
        listed = ", ".join([*columns, *numbers])
        values = ", ".join(f"d.{name}" for name in [*columns, *numbers])
        try:
            run(
                self.rows.output,
                f"merge into {table} as s using {_SUMS} as d on {_same(columns)} {gone}"
                f"when matched then update set {added} when not matched then insert ({listed}) values ({values})",
            )
        except psycopg.errors.CheckViolation as error:
            raise Diverged(f"{table} counts fewer rows than the delta takes away") from error
        for statement in after:
            run(self.rows.output, statement)
        now = f"select *, 1 as w from ({shown}) as a({names})"
        return net(self.make, self.rows.types, f"{now} union all select * from {_BEFORE}", self.match)


def _same(columns: Sequence[str]) -> str:
    """The condition that s and d are one group; arrays with a NULL each are equal."""
    return " and ".join(f"array[s.{column}] = array[d.{column}]" for column in columns) or "true"
