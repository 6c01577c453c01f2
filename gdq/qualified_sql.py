"""SQL whose every operator, function and type names its schema, pg_catalog, whatever a session's search_path is.

    qualified("select oid::text from pg_catalog.pg_class where relname = %s")

gives the text with `operator(pg_catalog.=)` and `pg_catalog.text`. What runs on a caller's connection is written so:
its search_path is the caller's, and PostgreSQL takes an operator of any schema in it whose types fit better.
Sessions of gdq's own may pin the path instead: gdq.sql_text.pin_session().
"""

from __future__ import annotations

import re
from functools import lru_cache

_TOKEN = re.compile(
    r"""(?P<space>\s+|--[^\n]*) | (?P<value>E?'(?:[^']|'')*' | "(?:[^"]|"")*" | %s | %\(\w+\)s | \$\d+ | \d[\d.]*)
    | (?P<named>operator\s*\([^)]*\)) | (?P<word>[A-Za-z_]\w*) | (?P<sign>:: | => | [(),.;\[\]:])
    | (?P<operator>(?:%%|[-+*/<>=~!@\#^&|`?])+)""",
    re.VERBOSE | re.IGNORECASE,
)

# Words after which an expression, an item of FROM or a list may begin.
_BEFORE_EXPRESSION = frozenset(
    (
        *("all", "and", "any", "array", "by", "case", "distinct", "else", "exists", "filter", "from", "having", "in"),
        *("is", "join", "lateral", "limit", "not", "offset", "on", "or", "over", "partition", "returning", "select"),
        *("set", "some", "then", "union", "update", "values", "when", "where", "with"),
    )
)
# Words before a parenthesis that are no functions of pg_catalog, or name one by their syntax.
_NO_FUNCTION = frozenset(
    (
        *("all", "and", "any", "array", "as", "case", "coalesce", "conflict", "distinct", "else", "except", "exists"),
        *("extract", "filter", "from", "greatest", "group", "in", "intersect", "into", "key", "lateral", "least"),
        *("materialized", "not", "on", "or", "order", "over", "row", "select", "some", "table", "then", "union"),
        *("unique", "values", "when", "where", "with"),
    )
)
# Types that the grammar finds in pg_catalog itself.
_GRAMMAR_TYPES = frozenset(
    (
        *("bigint", "bit", "boolean", "char", "character", "dec", "decimal", "double", "float", "int", "integer"),
        *("interval", "national", "nchar", "numeric", "real", "smallint", "time", "timestamp", "varchar"),
    )
)
# Syntax that stands for an operator which the search_path decides, and has no form that names the schema.
_HIDDEN = frozenset(("between", "cast", "ilike", "in", "like", "natural", "nullif", "similar", "using"))


_Token = tuple[str, str]


@lru_cache(maxsize=1024)
def qualified(text: str) -> str:
    """SQL with the schema pg_catalog before each operator, function and type that names none.

    All operators written so have one precedence, and bind from left to right: parentheses must say what is meant.
    ValueError for syntax that cannot name a schema: IN, NULLIF, LIKE, BETWEEN, IS DISTINCT FROM, CASE x WHEN, USING.
    """
    tokens = [(found.lastgroup or "", found.group()) for found in _TOKEN.finditer(text)]
    if "".join(token for _, token in tokens) != text:
        raise ValueError(f"no SQL that can be read: {text}")
    end = ("end", "")
    places = [place for place, (kind, _) in enumerate(tokens) if kind != "space"]
    read = [end, end, *(tokens[place] for place in places), end]
    written = [token for _, token in tokens]
    assigns = False  # in the SET of an UPDATE
    for number, place in enumerate(places, 2):
        word = read[number][1].lower()
        assigns = word == "set" or (assigns and word not in ("where", "from", "returning", ";"))
        if assigns and word == "=" and read[number - 2][1].lower() in ("set", ","):
            continue
        written[place] = _qualified(read[number], read[number - 1], read[number + 1])
        if read[number][0] == "operator" and written[place] != read[number][1]:
            before = "" if tokens[place - 1][0] == "space" else " "
            after = "" if tokens[place + 1][0] == "space" else " "
            written[place] = f"{before}{written[place]}{after}"
    return "".join(written)


def _qualified(token: _Token, before: _Token, after: _Token) -> str:
    """One token, given those before and after it."""
    kind, text = token
    word, last, following = text.lower(), before[1].lower(), after[1].lower()
    begins = last in _BEFORE_EXPRESSION or last in ("(", ",", "") or before[0] in ("operator", "named")
    if kind == "operator":
        whole_row = text == "*" and (begins or last == "." or following in (",", ")", "from", ""))
        literal = text == "-" and begins and following[:1].isdigit()
        return text if whole_row or literal else f"operator(pg_catalog.{text})"
    if kind != "word" or last == ".":
        return text
    if word in _HIDDEN or (word == "distinct" and following == "from") or (word == "case" and following != "when"):
        raise ValueError(f"{text} looks up an operator by the search_path")
    is_type = last == "::" and word not in _GRAMMAR_TYPES and following != "."
    is_function = following == "(" and begins and word not in _NO_FUNCTION
    return f"pg_catalog.{text}" if is_type or is_function else text
