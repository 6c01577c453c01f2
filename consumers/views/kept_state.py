"""The state beside a view's target: counts and sums per group, or counts per combination of values.

The view's rows follow from the state.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import psycopg

from gdq.consumers.views.difference import Difference, row_image_sql
from gdq.consumers.views.netting import MakeTable, net_signed_rows
from gdq.consumers.views.optional_index import try_index
from gdq.consumers.views.signals import Diverged, NeedsFull
from gdq.consumers.views.target_rows import TargetRows
from gdq.plan.kept_state import StatePlan
from gdq.plan.postgres import PostgresPlan
from gdq.plan.spark.parts import Detail
from gdq.plan.steps import NO_NUMBER
from gdq.plan.top import TopPlan

_SUMS, _BEFORE = "pg_temp.gdq_sums", "pg_temp.gdq_before"


def image_of_keys(loose: Sequence[str]) -> str:
    """SQL of a hash of key columns' text. As a further key it keeps equal keys of different text (1.0, 1.00) apart."""
    text = f"row({', '.join(loose)})::pg_catalog.text"
    return f'pg_catalog.hashtextextended({text} collate pg_catalog."C", 0)'


@dataclass(frozen=True, slots=True)
class KeptSums:
    """Counts and sums of a GROUP BY. `loose`: group columns whose equal values may have different texts (1.0, 1.00).

    The state has one row per text of such a group, so a text disappears with its last row: a view may show the text,
    for example by scale().
    """

    plan: StatePlan
    loose: Sequence[str] = ()

    carried: ClassVar[Sequence[str]] = ()

    @property
    def keys(self) -> Sequence[str]:
        return [*self.plan.group_columns, "image"] if self.loose else self.plan.group_columns

    @property
    def numbers(self) -> Sequence[str]:
        return self.plan.numbers

    @property
    def ranked(self) -> Sequence[str]:
        return () if self.loose else self.plan.ranked

    @property
    def groups(self) -> Sequence[str]:
        # with LIMIT, a change of one group may add or remove another group's row
        return () if self.plan.order or self.plan.extremes else self.plan.group_columns

    def sums(self, rows: str) -> str:
        if not self.loose:
            return self.plan.sums(rows)
        return self.plan.sums(f"(select *, {image_of_keys(self.loose)} as image from {rows} as r)", also=["image"])

    def whole(self) -> str:
        """SELECT of the whole state from the tables."""
        return self.sums(self.plan.rows()) if self.loose else self.plan.whole()

    def shown(self, state: str, touched: str) -> str:
        if self.loose:
            state, touched = self._merged(state, touched), ""
        where = f" where {self.plan.having}" if self.plan.having else ""
        return f"select {', '.join(self.plan.visible)} from {state} as s{touched}{where}{self.plan.order}"

    def first(self, state: str, sums: str, after: str) -> str:
        """SELECT of the rows of a view with LIMIT: of the groups of `sums` from `after`, of others from `state`.

        Of the others no more are read than the view has rows, if the state's index has their order.
        """
        names = ", ".join([*self.keys, *self.numbers])
        where = f"not exists (select from {sums} as d where {same_group(self.keys)})"
        end = ""
        if not self.loose:
            where += f" and ({self.plan.having})" if self.plan.having else ""
            end = self.plan.order
        others = f"select {names} from (select s.* from {state} as s where {where}{end}) as s"
        return self.shown(f"({others} union all select {names} from {after})", "")

    def loaded(self, state: str) -> str:
        """SELECT of all rows of the view: an empty state stands for no rows, over which a query may have some."""
        shown = self.shown(state, "")
        if not self.plan.empty:
            return shown
        rows = f"select * from ({self.plan.empty}) as q where not exists (select from {state})"
        return f"select * from ({shown}) as s union all {rows}"

    def _merged(self, state: str, touched: str) -> str:
        """The state with one row per group, in a text that does not depend on the order of the rows."""
        groups, numbers = self.plan.group_columns, self.plan.numbers
        within = ", ".join(f"s.{name}" for name in groups)
        # (array_agg())[1] does not work for arrays
        spelled = [f"first_value(s.{name}) over (partition by {within} order by s.image) as {name}" for name in groups]
        rows = f"select {', '.join([*spelled, *(f's.{name}' for name in numbers)])} from {state} as s{touched}"
        names = [*groups, *(f"sum({name})::{'numeric' if name[0] == 's' else 'bigint'} as {name}" for name in numbers)]
        return f"(select {', '.join(names)} from ({rows}) as s group by {', '.join(groups)})"


@dataclass(frozen=True, slots=True)
class KeptValues:
    """Values of a GROUP BY, each with its number of rows; `loose`: key columns, as in KeptSums."""

    plan: Detail
    loose: Sequence[str] = ()

    carried: ClassVar[Sequence[str]] = ()
    ranked: ClassVar[Sequence[str]] = ()

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

    def loaded(self, state: str) -> str:
        """SELECT of all rows of the view."""
        return self.shown(state, "")

    def _respelled(self, state: str, touched: str) -> str:
        """The state with one text per value of a group, which does not depend on the order of the rows."""
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
class KeptTop:
    """The first rows of a query by its ORDER BY, each with its number, in the table `table`.

    All rows of the query up to the last row of the state are in the state.
    """

    plan: TopPlan
    table: str

    keys: ClassVar[Sequence[str]] = ("image",)
    numbers: ClassVar[Sequence[str]] = ("n",)
    groups: ClassVar[Sequence[str]] = ()
    ranked: ClassVar[Sequence[str]] = ()

    @property
    def carried(self) -> Sequence[str]:
        return self.plan.columns

    @property
    def _columns(self) -> str:
        return ", ".join(self.plan.columns)

    def _counted(self, rows: str) -> str:
        """SELECT of rows (c1, c2, ..., w), each once with the sum of its weights."""
        image = row_image_sql(self.plan.columns)
        return (
            f"select distinct on (image) {self._columns}, image, sum(w) over (partition by image)::bigint as n "
            f"from (select {self._columns}, w, {image} as image from {rows} as r) as r"
        )

    def sums(self, rows: str) -> str:
        """SELECT of the additions to the state: the changes up to its last row."""
        table, order = self.table, self.plan.order
        last = f"order by {order} offset (select greatest(count(*) - 1, 0) from {table})"
        both = (
            f"select {self._columns}, w, true as changed from {rows} as r "
            f"union all (select {self._columns}, 0, false from {table} {last})"
        )
        placed = f"select *, rank() over (order by {order}) as place from ({both}) as r"
        ended = f"select *, max(place) filter (where not changed) over () as last from ({placed}) as r"
        return self._counted(f"(select * from ({ended}) as r where changed and place <= last)")

    def whole(self) -> str:
        """SELECT of the whole state from the tables; rows that are equal in the order are all in or all out."""
        rows = f"select {self._columns} from ({self.plan.query}) as q({self._columns}) order by {self.plan.order}"
        return self._counted(f"(select *, 1 as w from ({rows} fetch first {self.plan.kept} rows with ties) as q)")

    def settle(self) -> list[str]:
        """Statements after a change: fill the state anew if it has too few rows, cut it if it has too many."""
        table, listed = self.table, f"{self._columns}, image, n"
        nothing = f"not exists (select from {table})"
        return [
            f"delete from {table} where (select coalesce(sum(n), 0) from {table}) < {self.plan.last}",
            f"insert into {table} ({listed}) select {listed} from ({self.whole()}) as q where {nothing}",
            self.cut(),
        ]

    def cut(self) -> str:
        """The statement that takes rows from a state with too many, which none of the view's are."""
        table, kept = self.table, self.plan.kept
        many = f"(select count(*) from {table}) > {2 * kept}"
        ranked = f"select image, rank() over (order by {self.plan.order}) as place from {table}"
        return f"delete from {table} where {many} and image in (select image from ({ranked}) as q where place > {kept})"

    def shown(self, state: str, touched: str) -> str:
        columns = ", ".join(f"s.{name}" for name in self.plan.columns[: self.plan.shown])
        count, skipped = self.plan.last - self.plan.first + 1, self.plan.first - 1
        return (
            f"select {columns} from {state} as s cross join generate_series(1, s.n){touched} "
            f"order by {self.plan.order} limit {count} offset {skipped}"
        )

    def loaded(self, state: str) -> str:
        """SELECT of all rows of the view."""
        return self.shown(state, "")


# What a state keeps: columns `keys` and `numbers`, columns `carried` that follow from the keys, and the keys `groups`
# that identify a view's row; `ranked` are the items of an index in the order of the view. sums(rows) is the SELECT of
# the additions to the state from signed rows (c1, c2, ..., w). shown(state, touched) is the SELECT of the view's rows
# from the table `state` as s; `touched` is a join with the changed groups or "".
KeptContents = KeptSums | KeptValues | KeptTop


def kept_beside(plan: PostgresPlan, state: str) -> KeptSums | KeptTop | None:
    """What a plan keeps in the table `state` beside the target; None for a plan without state."""
    if plan.state is not None:
        return KeptSums(plan.state, plan.state.loose)
    return KeptTop(plan.top, state) if plan.top is not None else None


def made_state(kept: KeptContents, table: str, sums: str) -> tuple[list[str], list[str]]:
    """The statements that create a state from a SELECT of its columns, and those of its optional indexes."""
    create = [f"create table {table} as {sums}", f"alter table {table} add check (n {'>' if kept.keys else '>='} 0)"]
    indexes = []
    if kept.keys:
        listed = ", ".join(f"(array[{column}])" for column in kept.keys)
        indexes.append(f"create unique index on {table} ({listed})")
    if kept.ranked:
        indexes.append(f"create index on {table} ({', '.join(kept.ranked)})")
    return create, indexes


@dataclass(frozen=True, slots=True)
class KeptState:
    """The state of one view, changed in the transaction of `rows`; `make` creates temporary tables there."""

    rows: TargetRows
    match: Sequence[str]
    kept: KeptContents
    make: MakeTable

    def load(self, sums: str) -> Difference:
        """Recreate the state from a SELECT of its columns; returns all rows of the view."""
        table = self.rows.target.state
        self.rows.target.hold(self.rows.output)
        self.rows.sql.run(f"drop table if exists {table}")
        create, indexes = made_state(self.kept, table, sums)
        for statement in create:
            self.rows.sql.run(statement)
        for index in indexes:
            try_index(self.rows.sql, index)
        self.rows.sql.run(f"analyze {table}")
        return Difference("full", self.kept.loaded(table), match=tuple(self.match))

    def add(self, sums: str, after: Sequence[str] = (), refused: str = "") -> Difference:
        """Add a SELECT of the state's columns to the state; returns the change of the view's rows.

        `after`: statements that then update columns other than counts and sums (minimum, maximum). NeedsFull if
        the condition `refused` holds for an added row.
        """
        columns, numbers, groups = self.kept.keys, self.kept.numbers, self.kept.groups
        self.rows.target.hold(self.rows.output)
        some = " or ".join(f"{name} <> 0" for name in numbers)
        self.make("gdq_sums", f"select * from ({sums}) as s where {some}")
        if refused and self.rows.sql.run(f"select from {_SUMS} where {refused} limit 1"):
            raise NeedsFull(NO_NUMBER)
        touched = ""
        if groups:
            touched = f" join (select distinct {', '.join(groups)} from {_SUMS}) as d on {same_group(groups)}"
        table, names = self.rows.target.state, ", ".join(f"c{n}" for n in range(1, len(self.rows.types) + 1))
        shown = self.kept.shown(table, touched)
        self.make("gdq_before", f"select *, -1 as w from ({shown}) as b({names})")
        added = ", ".join(f"{name} = s.{name} + d.{name}" for name in numbers)
        gone = "when matched and s.n + d.n = 0 then delete " if columns else ""
        names_in = [*columns, *self.kept.carried, *numbers]
        listed, values = ", ".join(names_in), ", ".join(f"d.{name}" for name in names_in)
        try:
            self.rows.sql.run(
                f"merge into {table} as s using {_SUMS} as d on {same_group(columns)} {gone}"
                f"when matched then update set {added} when not matched then insert ({listed}) values ({values})",
            )
        except psycopg.errors.CheckViolation as error:
            raise Diverged(f"{table} counts fewer rows than the delta takes away") from error
        for statement in after:
            self.rows.sql.run(statement)
        now = f"select *, 1 as w from ({shown}) as a({names})"
        return net_signed_rows(self.make, self.rows.types, f"{now} union all select * from {_BEFORE}", self.match)


def same_group(columns: Sequence[str]) -> str:
    """Condition that s and d are the same group; compared as arrays, because array[NULL] = array[NULL] is true."""
    return " and ".join(f"array[s.{column}] = array[d.{column}]" for column in columns) or "true"
