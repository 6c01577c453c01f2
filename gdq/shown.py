"""How objects of gdq show themselves to a person: one line in a shell, a small HTML table in a notebook."""

from __future__ import annotations

import dataclasses
import html
from collections.abc import Iterable, Sequence
from typing import Any, ClassVar, TypeVar

_Row = TypeVar("_Row")

# A notebook shows this many rows at most, and of a value this many characters.
ROWS_MAX = 20
_CHARACTERS_MAX = 100


class Shown:
    """A dataclass, made with repr=False, that shows the fields named in `_shown`, or all, if they have a value.

    Values are cut off: a row's image may have megabytes. Fields that are not named, such as settings, are never shown.
    """

    __slots__ = ()
    _shown: ClassVar[str] = ""

    def __repr__(self) -> str:
        facts = (f"{name}={_cut(repr(value))}" for name, value in _facts(self) if value is not None)
        return f"{type(self).__name__}({', '.join(facts)})"

    def _repr_html_(self) -> str:
        return html_table(("", type(self).__name__), [fact for fact in _facts(self) if fact[1] is not None])


class ShownRows(list[_Row]):
    """A list of dataclasses, which a notebook shows as one table."""

    def _repr_html_(self) -> str:
        if not self:
            return html_table((), [])
        names = [name for name, _ in _facts(self[0])]
        rows = [[value for _, value in _facts(row)] for row in self[:ROWS_MAX]]
        return html_table(names, rows, more=len(self) - len(rows))


def html_table(heads: Sequence[str], rows: Iterable[Sequence[Any]], *, more: int = 0) -> str:
    """An HTML table, everything in it escaped; `more`: the number of rows that are left out."""
    lines = [f"<tr>{''.join(f'<th>{_escaped(head)}</th>' for head in heads)}</tr>"]
    lines += [f"<tr>{''.join(f'<td>{_escaped(value)}</td>' for value in row)}</tr>" for row in rows]
    note = f"<p>{more} more rows</p>" if more else "" if len(lines) > 1 else "<p>no rows</p>"
    return f"<table>{''.join(lines)}</table>{note}"


def _facts(row: Any) -> list[tuple[str, Any]]:
    """The names and values of the fields that a dataclass shows."""
    names = getattr(row, "_shown", "").split() or [field.name for field in dataclasses.fields(row)]
    return [(name, getattr(row, name)) for name in names]


def _escaped(value: Any) -> str:
    return "" if value is None else html.escape(_cut(str(value)))


def _cut(text: str) -> str:
    return text if len(text) <= _CHARACTERS_MAX else f"{text[: _CHARACTERS_MAX - 3]}..."
