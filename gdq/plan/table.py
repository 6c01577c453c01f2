"""What the planner is given: the schema of captured tables."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from gdq.sql_text import quote

# The column of signed rows: how often a row came or, below zero, went.
WEIGHT = "__gdq_weight"


@dataclass(frozen=True, slots=True)
class TableColumn:
    """A column of a captured table. `type` as format_type() prints it.

    `images`: the log holds its old and its new value. `key`: it is part of the table's key. `folded`: its collation
    takes different values for equal.
    """

    name: str
    type: str
    key: bool = False
    images: bool = True
    folded: bool = False


@dataclass(frozen=True, slots=True)
class TableSchema:
    """A captured table: all its columns in order, and the mode in which they are logged."""

    schema: str
    name: str
    mode: Literal["full", "pk"]
    columns: tuple[TableColumn, ...]

    @property
    def qualified(self) -> str:
        """Schema and name, quoted."""
        return f"{quote(self.schema)}.{quote(self.name)}"

    @property
    def key(self) -> tuple[str, ...]:
        """Names of the key columns, none when the table has no key."""
        return tuple(column.name for column in self.columns if column.key)

    def column(self, name: str) -> TableColumn | None:
        """The column of that name, None when there is none."""
        return next((column for column in self.columns if column.name == name), None)
