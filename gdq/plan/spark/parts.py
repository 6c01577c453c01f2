"""The parts of a plan of engine spark: reads of tables, joins, and the values that are kept."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from gdq.sql_text import quote

LeafRole = Literal["inner", "padded", "exists", "absent"]


@dataclass(frozen=True, slots=True)
class LeafRead:
    """The read of one item of FROM: `columns` are names and PostgreSQL's expressions over the alias.

    `role`: how it is joined. `own`: its key expressions in that join, for all roles but inner.
    """

    alias: str
    table: str
    role: LeafRole
    where: str
    columns: tuple[tuple[str, str], ...]
    own: tuple[str, ...] = ()

    def render(self, relation: str, weights: str, condition: str = "") -> str:
        """PostgreSQL's statement on `relation`, SQL for FROM; `weights`: its columns n and o."""
        listed = "".join(f"{sql} as {name}, " for name, sql in self.columns)
        conditions = " and ".join(f"({part})" for part in (self.where, condition) if part)
        where = f" where {conditions}" if conditions else ""
        return f"select {listed}{weights} from {relation} as {quote(self.alias)}{where}"


@dataclass(frozen=True, slots=True)
class LeafEdge:
    """An equality between two leaves, along which changes of one are followed to rows of the other.

    `left`: for an outer, semi or anti join the leaf that is joined by it.
    """

    left: tuple[str, str]
    right: tuple[str, str]


@dataclass(frozen=True, slots=True)
class Branch:
    """One SELECT of the view. `spark`: SQL of the joined rows (v1, v2, ..., w) over the relations gdq_<alias>.

    `values`: name, leaf and PostgreSQL's expression of each v. `items` and `where`: PostgreSQL computes them from v.
    """

    leaves: tuple[LeafRead, ...]
    edges: tuple[LeafEdge, ...]
    spark: str
    values: tuple[tuple[str, str, str], ...]
    items: tuple[str, ...]
    where: str

    @property
    def bare(self) -> bool:
        """True if the items are the values themselves, so that Spark may group by them."""
        return not self.where and all(item in {name for name, _, _ in self.values} for item in self.items)


@dataclass(frozen=True, slots=True)
class Detail:
    """A GROUP BY whose state keeps the values of each group with their number of rows; groups are recomputed from it.

    The state's first `groups` columns are the groups; `visible` and `having` are over the state s.
    """

    groups: int
    width: int
    visible: tuple[str, ...]
    having: str

    @property
    def columns(self) -> list[str]:
        """The state's key columns."""
        return [f"c{n}" for n in range(1, self.width + 1)]
