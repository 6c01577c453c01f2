"""The schema of captured tables, the planner's input."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from gdq.sql_text import quote

# The column of signed rows with the number of copies inserted or, below zero, deleted.
WEIGHT_COLUMN = "__gdq_weight"


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
