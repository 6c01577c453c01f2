"""The parts of a plan of engine spark: what is read of each table, how it is joined, and what is kept of a row."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from gdq.sql_text import quote

Role = Literal["inner", "padded", "exists", "absent"]


@dataclass(frozen=True, slots=True)
class LeafRead:
    """What is read of one item of FROM: `columns` are names and PostgreSQL's expressions over the alias.

    `role`: how it is joined. `own`: for all roles but inner the expressions that are its key in that join.
    """

    alias: str
    table: str
    role: Role
    where: str
    columns: tuple[tuple[str, str], ...]
    own: tuple[str, ...] = ()

    def render(self, relation: str, weights: str, condition: str = "") -> str:
        """The statement that PostgreSQL runs on `relation`, SQL that may stand in FROM; `weights` are its n and o."""
        listed = "".join(f"{sql} as {name}, " for name, sql in self.columns)
        conditions = " and ".join(f"({part})" for part in (self.where, condition) if part)
        where = f" where {conditions}" if conditions else ""
        return f"select {listed}{weights} from {relation} as {quote(self.alias)}{where}"


@dataclass(frozen=True, slots=True)
class Edge:
    """An equality between two leaves: by it changes of one are followed to rows of the other.

    `left` is the leaf whose join it belongs to, when that is an outer, semi or anti join.
    """

    left: tuple[str, str]
    right: tuple[str, str]


@dataclass(frozen=True, slots=True)
class Branch:
    """One SELECT of the view. `spark`: the joined rows, columns v1, v2, ... and w, over the relations gdq_<alias>.

    `values`: name, leaf and PostgreSQL's expression of each v. `items` and `where`: what PostgreSQL computes of them.
    """

    leaves: tuple[LeafRead, ...]
    edges: tuple[Edge, ...]
    spark: str
    values: tuple[tuple[str, str, str], ...]
    items: tuple[str, ...]
    where: str

    @property
    def bare(self) -> bool:
        """Whether the items are the values themselves, so that Spark may group by them."""
        return not self.where and all(item in {name for name, _, _ in self.values} for item in self.items)


@dataclass(frozen=True, slots=True)
class Detail:
    """A GROUP BY whose groups are computed anew from the values in them, which are kept with how often they occur.

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
