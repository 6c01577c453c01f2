"""The changes of one table in a function that adds changes: one array for each column, netted."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from gdq.consumers.views.change_source import LogColumn, LoggedRows, stored_images
from gdq.consumers.views.few_statement import FEW, FEW_BYTES, Netted
from gdq.consumers.views.netting import netted_images_sql
from gdq.plan.table import WEIGHT_COLUMN, UsedTable
from gdq.sql_text import quote


@dataclass(frozen=True, slots=True)
class CompiledDelta:
    """The changes of one table: the log rows of all segments, and the variables that get their netted columns.

    `parts`: the SELECT of the rows of each segment, by the segment.
    """

    number: int
    table: UsedTable
    columns: tuple[LogColumn, ...]
    parts: Mapping[int, str]

    @property
    def _logged(self) -> Mapping[str, LogColumn]:
        return {column.name: column for column in self.columns}

    @property
    def is_logged(self) -> bool:
        """True if the log has all columns of the delta."""
        return {*self.table.logged} == {*self._logged}

    @property
    def variables(self) -> list[tuple[str, str]]:
        """Name and type of the elements of each array: a column's values, and at the end the weights."""
        kinds = [*(self._logged[name].element for name in self.table.logged), "bigint"]
        return [(f"gdq_{self.number}_{place}", kind) for place, kind in enumerate(kinds)]

    @property
    def netted(self) -> Netted:
        """The changes as FewStatement takes them."""
        logged = tuple(self._logged[name] for name in self.table.logged)
        return Netted(self.number, self.table, logged, 0, tuple(name for name, _ in self.variables))

    @property
    def select(self) -> str:
        """SELECT of one row: the changes in the log, the netted ones, are these small, and values for the variables."""
        return self._selected([*self.parts])

    def _selected(self, segments: Sequence[int]) -> str:
        """The same from these segments."""
        arrays = ", ".join(
            f"pg_catalog.array_agg(d.{quote(name)}::{kind}) as a{place}"
            for place, (name, (_, kind)) in enumerate(
                zip([*self.table.logged, WEIGHT_COLUMN], self.variables, strict=True)
            )
        )
        parts = " union all ".join(self.parts[segment] for segment in segments)
        select = parts.replace("$1", "gdq_xmax").replace("$2", "gdq_running")
        # what a wide log row has besides is not read
        images = [column.image(new) for column in self.columns for new in (False, True)]
        read = ", ".join(["ev_op", *dict.fromkeys(quote(name) for name in images if name)])
        exact = LoggedRows("", self.columns).is_exact(self.table.logged)
        net = netted_images_sql(self.table, stored_images("gdq_r", self.columns), exact=exact)
        rows = f"""with gdq_r as materialized (select {read} from ({select}) as r limit gdq_most + 1),
         gdq_s as materialized (select count(*) as n from gdq_r),"""
        few = f"select * from ({net}) as d where (select n from gdq_s) <= gdq_most"
        long = [f"d.{quote(name)}" for name in self.table.logged if not self._logged[name].is_short]
        if not long:
            # nothing has to be weighed first, so the netted rows are not stored
            return f"""{rows}
         gdq_n as ({few})
    select (select n from gdq_s), count(*), true, {arrays} from gdq_n as d"""
        size = " + ".join(f"coalesce(pg_catalog.pg_column_size({value}), 0)" for value in long)
        small = f"coalesce(sum({size}), 0) <= gdq_most * {FEW_BYTES // FEW}"
        return f"""{rows}
         gdq_n as materialized ({few}),
         gdq_z as (select count(*) as n, {small} as small from gdq_n as d),
         gdq_a as (select {arrays} from gdq_n as d where (select small from gdq_z))
    select (select n from gdq_s), gdq_z.n, gdq_z.small, gdq_a.*
      from gdq_z, gdq_a"""

    def netting(self, bit: int) -> str:
        """Statements that fill the variables and set this bit of gdq_changed; many changes end the function."""
        into = f"into gdq_seen, gdq_net, gdq_small, {', '.join(name for name, _ in self.variables)}"
        chosen = f"\n    {self.select} {into};"
        if len(self.parts) > 1:
            # mostly one segment has changes: a statement that names others opens them too, which takes longer than
            # ten rows
            alone = [
                f"if not gdq_segments && {_oids(other for other in self.parts if other != one)} then"
                f"\n      {self._selected([one])} {into};"
                for one in self.parts
            ]
            chosen = "\n    " + "\n    els".join(alone) + f"\n    else\n      {self.select} {into};\n    end if;"
        return f"""
  if gdq_segments && {_oids(self.parts)} then{chosen}
    gdq_all := gdq_all + gdq_seen;
    if gdq_seen > gdq_most or not gdq_small then
      return;
    elsif gdq_net > 0 then
      gdq_changed := gdq_changed + {bit};
      gdq_netted := gdq_netted + gdq_net;
    end if;
  end if;"""


def _oids(segments: Iterable[int]) -> str:
    return f"'{{{','.join(map(str, segments))}}}'::oid[]"
