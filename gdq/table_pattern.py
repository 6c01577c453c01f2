"""Patterns of table names, read as psql's \\dt reads them: `*` is any text, `?` any character."""

from __future__ import annotations

import re
from dataclasses import dataclass

from gdq.errors import GdqError

# A quoted part, in which a quote is written twice, or a single character.
_PIECE = re.compile(r'"(?P<quoted>(?:[^"]|"")*)"|(?P<plain>.)', re.DOTALL)


@dataclass(frozen=True, slots=True)
class TablePattern:
    """A pattern of table names. `text`: as it was given; `schema`: None for tables that the search_path finds."""

    text: str
    schema: re.Pattern[str] | None
    name: re.Pattern[str]

    def matches(self, schema: str, name: str, *, visible: bool) -> bool:
        """True for a table of this schema and name; `visible`: the search_path finds the table by its name alone."""
        found = visible if self.schema is None else self.schema.fullmatch(schema)
        return bool(found) and self.name.fullmatch(name) is not None


def is_pattern(text: str) -> bool:
    """True if a name has `*` or `?` outside double quotes."""
    return any(piece["plain"] in ("*", "?") for piece in _PIECE.finditer(text))


def table_pattern(text: str) -> TablePattern:
    """The pattern that a text stands for; GdqError if it has more parts than schema and name, or an open quote."""
    parts = [""]
    for piece in _PIECE.finditer(text):
        plain = piece["plain"]
        match plain:
            case None:
                parts[-1] += re.escape(piece["quoted"].replace('""', '"'))
            case ".":
                parts.append("")
            case "*" | "?":
                parts[-1] += ".*" if plain == "*" else "."
            case '"':
                raise GdqError(f"pattern {text} has a quote that does not end")
            case _:
                parts[-1] += re.escape(plain.lower())
    if len(parts) > 2:
        raise GdqError(f"pattern {text} has too many dots", hint="Write SCHEMA.TABLE, each with * and ? as needed.")
    *schema, name = (re.compile(part, re.DOTALL) for part in parts)
    return TablePattern(text, schema[0] if schema else None, name)
