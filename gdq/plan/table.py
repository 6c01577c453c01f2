"""The schema of captured tables, the planner's input, and what a view uses of them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from gdq.sql_text import quote

# The column of signed rows with the number of copies inserted or, below zero, deleted.
WEIGHT_COLUMN = "__gdq_weight"

# The alias of a changed row in the condition under which it matters to a view.
FILTER_ROW = "gdq_row"


@dataclass(frozen=True, slots=True)
class TableColumn:
    """A column of a captured table. `type` as format_type() prints it.

    `images`: the log holds its old and new values. `key`: it is part of the table's key. `folded`: its collation treats
    different values as equal. `number`: its attnum, which another column of the same name does not have.
    """

    name: str
    type: str
    key: bool = False
    images: bool = True
    folded: bool = False
    number: int = 0


@dataclass(frozen=True, slots=True)
class TableSchema:
    """A captured table: all its columns in order, and its capture mode.

    `has_children`: tables inherit from it, and it is no partitioned table.
    """

    schema: str
    name: str
    mode: Literal["full", "pk"]
    columns: tuple[TableColumn, ...]
    partitioned: bool = False
    has_children: bool = False

    @property
    def qualified(self) -> str:
        """Schema and name, quoted."""
        return f"{quote(self.schema)}.{quote(self.name)}"

    @property
    def key(self) -> tuple[str, ...]:
        """Names of the key columns, empty if the table has no key."""
        return tuple(column.name for column in self.columns if column.key)

    @property
    def unlogged(self) -> tuple[TableColumn, ...]:
        """The columns whose values the log does not hold."""
        keys = self.mode == "pk"
        return tuple(column for column in self.columns if not (column.images or (keys and column.key)))

    def column(self, name: str) -> TableColumn | None:
        """The column of that name, or None."""
        return next((column for column in self.columns if column.name == name), None)


@dataclass(frozen=True, slots=True)
class UsedTable:
    """A table of the view, with the columns that the view reads and the columns of its key (may be empty).

    `looked_up`: columns by which correlated subqueries look up single rows. `passing`: condition for rows that may
    matter to the view (gdq.plan.filter). `keys_only`: the log lacks other columns, so the delta holds only the keys of
    changed rows (gdq.plan.own_key).
    """

    name: str
    columns: tuple[str, ...]
    key: tuple[str, ...]
    looked_up: tuple[str, ...] = ()
    passing: str = ""
    keys_only: bool = False

    def matter(self, images: str) -> str:
        """The rows in `images`, for FROM, that may matter to the view."""
        return f"(select * from {images} as {FILTER_ROW} where {self.passing})" if self.passing else images

    @property
    def logged(self) -> tuple[str, ...]:
        """The columns of the table's delta."""
        return self.key if self.keys_only else tuple(dict.fromkeys([*self.columns, *self.key]))
