"""Which columns a lake table gets when its table has others, by a policy: a word for each kind of change.

Two versions of a table are compared by the numbers of their columns, which PostgreSQL gives only once. A column that is
kept although its table has it no longer is NULL in all rows that come.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import count
from typing import Self

import pyarrow as pa

from gdq.consumers.lake.columns import EvolvedColumn
from gdq.consumers.lake.table import LakeTable
from gdq.consumers.mirror.state import History
from gdq.consumers.mirror.table import MirrorTable
from gdq.consumers.views.target import StoredPosition, TargetState
from gdq.errors import GdqError

# For each kind of change the words that a policy may have, by whether the lake table is a history; the first is the
# default.
_WORDS = {
    "added": (("add", "stop"), ("add", "stop")),
    "widened": (("widen", "stop"), ("widen", "stop")),
    "renamed": (("rename", "keep", "stop"), ("rename", "keep", "stop")),
    "dropped": (("drop", "keep", "stop"), ("keep", "drop", "stop")),
    "retyped": (("copy", "stop"), ("stop", "keep")),
}
KINDS = tuple(_WORDS)


@dataclass(frozen=True, slots=True)
class ColumnPolicy:
    """The word for each kind of change of columns."""

    words: Mapping[str, str]

    @classmethod
    def parse(cls, given: Sequence[str], history: History | None) -> Self:
        """The policy that words like `dropped=keep` make; GdqError for others."""
        allowed = {kind: words[history is not None] for kind, words in _WORDS.items()}
        found = {kind: words[0] for kind, words in allowed.items()}
        for one in given:
            kind, _, word = one.partition("=")
            if kind not in allowed:
                raise GdqError(f"{one!r} names no change of columns", hint=f"Write one of {', '.join(KINDS)} with =.")
            if word not in allowed[kind]:
                of = "a history" if history else "tables as they are"
                raise GdqError(
                    f"{one!r}: {of} has no such answer to columns that are {kind}",
                    hint=f"Write {kind}= with one of {', '.join(allowed[kind])}.",
                )
            found[kind] = word
        return cls(found)

    def word(self, kind: str, table: str, column: str) -> str:
        """The word for a change of a column; GdqError if it is to stop the mirror."""
        word = self.words[kind]
        if word == "stop":
            others = [one for words in _WORDS[kind] for one in words if one not in ("stop", "copy")]
            go_on = " or ".join(dict.fromkeys(f"--on-column {kind}={one}" for one in others))
            raise GdqError(
                f'the column "{column}" of table {table} was {kind}: the mirror stops, as its lake table is as before',
                hint=f"Go on with {go_on}, or begin with another --target and --name."
                if go_on
                else "Begin with another --target and --name.",
            )
        return word


@dataclass(frozen=True, slots=True)
class Evolution:
    """The columns that a lake table gets; `anew`: those whose rows before cannot have their values, but by a copy."""

    columns: tuple[EvolvedColumn, ...]
    anew: tuple[str, ...]

    @property
    def schema(self) -> pa.Schema:
        return pa.schema([column.field for column in self.columns])


def evolution(
    table: MirrorTable, was: Mapping[int, str] | None, there: pa.Schema, own: Collection[str], policy: ColumnPolicy
) -> Evolution:
    """What becomes of a lake table's columns when its table has others.

    `was`: the numbers of the table's columns when the lake table was written, with their names; None if they are not
    known, so that names count. `there`: the lake table's columns. `own`: those that a history needs itself.
    GdqError if the policy is to stop.
    """
    now = dict(zip(table.numbers, table.schema, strict=True))
    if was is None:
        numbers = {field.name: number for number, field in now.items()}
        was = {numbers.get(name, -place): name for place, name in enumerate(there.names, 1)}
    number_of = {name: number for number, name in was.items() if name not in own}
    found = _Columns(table.name, policy, {*table.schema.names, *own})
    for old in there:
        number = number_of.get(old.name)
        field = None if number is None else now.pop(number, None)
        if field is not None:
            found.go_on(old, field)
        elif old.name in own:
            found.columns.append(EvolvedColumn(old, old.name))
        elif number is None or found.word("dropped", old) == "keep":
            found.keep(old)
    for field in now.values():
        found.word("added", field)
        found.columns.append(EvolvedColumn(field, None))
    return Evolution(tuple(found.columns), tuple(found.anew))


class _Columns:
    """The columns that a lake table gets, as they are found; `taken`: names that no kept column may have."""

    def __init__(self, table: str, policy: ColumnPolicy, taken: set[str]) -> None:
        self._table, self._policy, self._taken = table, policy, taken
        self.columns: list[EvolvedColumn] = []
        self.anew: list[str] = []

    def word(self, kind: str, column: pa.Field) -> str:
        return self._policy.word(kind, self._table, column.name)

    def go_on(self, old: pa.Field, new: pa.Field) -> None:
        """Have a column of the table with its present name and type."""
        if new.name != old.name and self.word("renamed", old) == "keep":
            self.keep(old)
        if new.type != old.type and not _widens(old.type, new.type):
            if self.word("retyped", new) == "keep":
                self.keep(old)
            self.columns.append(EvolvedColumn(new, None))
            self.anew.append(new.name)
            return
        if new.type != old.type:
            self.word("widened", new)
        self.columns.append(EvolvedColumn(new, old.name))

    def keep(self, old: pa.Field) -> None:
        """Keep a column of the lake table, with a number after its name if that is taken."""
        names = (f"{old.name}_{number}" if number else old.name for number in count())
        name = next(name for name in names if name not in self._taken)
        self._taken.add(name)
        self.columns.append(EvolvedColumn(old.with_name(name), old.name))


def bring_in_line(
    table: MirrorTable, lake: LakeTable, stored: StoredPosition, own: Collection[str], policy: ColumnPolicy
) -> tuple[MirrorTable, StoredPosition] | None:
    """Give a lake table the columns of its table, with its rows as they are, unless it has them.

    Returns the table with those that only the lake table has, and what that stands at then. None if the rows cannot be
    kept so: the lake table is another table's, or has a column that now has another type. GdqError as for evolution().
    """
    there = lake.schema()
    if table.fits(stored.plan):
        return table.keeping(there, own), stored
    was = table.numbers_of(stored.plan)
    if was is None:
        return None
    found = evolution(table, was, there, own, policy)
    if found.anew:
        return None
    moved = replace(stored, plan=table.plan)
    lake.evolve(found.columns, stored, moved)
    return table.keeping(found.schema, own), moved


def make_ready(
    table: MirrorTable, lake: LakeTable, state: TargetState, own: Collection[str], policy: ColumnPolicy
) -> tuple[MirrorTable, StoredPosition | None]:
    """Make a lake table ready for a copy; as bring_in_line(), None for what it stands at if there is no lake table.

    A history has the columns of its table then. It gets them with no position, so that it is copied if the copy does
    not come to its end.
    """
    stored = state.stored
    if stored is None:
        return table, None
    was = table.numbers_of(stored.plan) if stored.plan else None
    if table.history is None:
        if was is None:
            return table, stored
        return table.keeping(evolution(table, was, lake.schema(), own, policy).schema, own), stored
    if state.foreign is not None or not table.fits(stored.plan):
        found = evolution(table, was, lake.schema(), own, policy)
        moved = replace(stored, plan=table.plan, position="")
        lake.evolve(found.columns, stored, moved, adopt=state.foreign is not None)
        return table.keeping(found.schema, own), moved
    return table.keeping(lake.schema(), own), stored


def _widens(old: pa.DataType, new: pa.DataType) -> bool:
    """True if the lake can hold each value of a type as the same value of another."""
    if pa.types.is_decimal(old) and pa.types.is_decimal(new):
        return bool(new.scale >= old.scale and new.precision - new.scale >= old.precision - old.scale)
    if pa.types.is_integer(old) and pa.types.is_integer(new):
        return bool(old.bit_width <= new.bit_width)
    return (old, new) == (pa.float32(), pa.float64())
