"""Literals of SQL text that mean something else where standard_conforming_strings is off: '\\d' is 'd' there.

E'\\\\d' means the same everywhere. The text of a function is read under the settings of the session that calls it, so
no literal of gdq has a backslash but those that begin with E.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

# Where no literal is looked for, and literals. Text between $$ or $sql$ is SQL and is read, between $re$ a pattern.
_TOKEN = re.compile(
    r"""
    --[^\n]*
  | /\*.*?\*/
  | \$re\$.*?\$re\$
  | "(?:[^"]|"")*"
  | (?P<escaped>\b[eE]'(?:[^'\\]|''|\\.)*'(?:\s*\n\s*'(?:[^'\\]|''|\\.)*')*)
  | (?P<plain>'(?:[^']|'')*'(?:\s*\n\s*'(?:[^']|'')*')*)
    """,
    re.VERBOSE | re.DOTALL,
)


def hazardous_literals(text: str) -> Iterator[tuple[int, str]]:
    """The position and text of each literal with a backslash that does not begin with E."""
    for token in _TOKEN.finditer(text):
        if token["plain"] and "\\" in token["plain"]:
            yield token.start(), token["plain"]
