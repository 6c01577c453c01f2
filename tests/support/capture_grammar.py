"""What a generated capture function may hold: one static INSERT into the logs, another that announces the
change while the log is quiet, and nothing that could be hijacked.

The grammar is a whitelist over tokens: a new form of capture function fails until it is allowed here on purpose.
"""

from __future__ import annotations

import re

_TOKEN = re.compile(
    r"""\s+ | (?P<string>'(?:[^']|'')*') | (?P<quoted>"(?:[^"]|"")+") | (?P<word>[A-Za-z_]\w*) | (?P<number>\d+)
    | (?P<sign>:=|::|[(),;.]|\[|\]) | (?P<operator>[-+*/<>=~!@\#%^&|`?]+)""",
    re.VERBOSE,
)

# The words of the language, by what they may do. Whatever is not here must be a qualified name or a column.
_WORDS = frozenset(
    [
        "declare",
        "begin",
        "end",
        "if",
        "then",
        "else",
        "elsif",
        "return",
        "null",
        "insert",
        "into",
        "values",
        "perform",
        "case",
        "when",
        "is",
        "not",
        "and",
        "or",
        "true",
        "false",
        "bigint",
        "boolean",
        "row",
        "new",
        "old",
        "operator",
        "in",
        "array",
        "collate",
        # granularity statement: an INSERT from a transition table
        "select",
        "from",
        "where",
        "r",
    ]
)
_STATEMENTS = ("insert", "perform", "return", "if", "end", "elsif", "else", "declare", "begin")

# Large values that are the same in both images: variables of the function, and columns of the log.
_SAME = re.compile(r"same_\d+")

_COLUMNS = frozenset(
    [
        "ev_id",
        "ev_txid",
        "ev_time",
        "ev_op",
        "ev_origin",
        "ev_row",
        "ev_old",
        "ev_new",
        "ev_number",
        "ev_kind",
        "ev_table",
    ]
)

# What may stand before a parenthesis without being a call.
_NO_CALL = frozenset(
    ["values", "in", "and", "or", "not", "when", "if", "elsif", "then", "else", "case", "operator", "row"]
)


class NotStaticError(AssertionError):
    """The body holds something that the grammar does not allow."""


def check_capture(body: str) -> int:
    """Raise NotStaticError unless the body fits the grammar; how many INSERTs it holds."""
    tokens = _tokens(body)
    inserts = 0
    for i, (kind, text) in enumerate(tokens):
        before, after = _at(tokens, i - 1), _at(tokens, i + 1)
        qualified = before == "." and _at(tokens, i - 2) == "pg_catalog" and after == ")"
        if kind == "operator" and not (qualified or _is_whole_row(tokens, i)):
            raise NotStaticError(f"operator {text} without its schema")
        if kind == "word" and text.lower() == "insert":
            inserts += 1
            if [_at(tokens, i + n) for n in (1, 2, 3)] != ["into", "gdq_log", "."]:
                raise NotStaticError("INSERT into something else than a log")
        if kind == "word" and text.lower() == "from" and after not in ("gdq_old", "gdq_new"):
            raise NotStaticError(f"rows from {after}")
        if kind == "word" and text.lower() == "collate" and after != "pg_catalog":
            raise NotStaticError(f"collation {after}")
        if text == "::" and [after, _at(tokens, i + 2)] != ["pg_catalog", "."] and after != "bigint":
            raise NotStaticError(f"cast to {after}")
        if text == "(" and i and tokens[i - 1][0] in ("word", "quoted"):
            _check_call(tokens, i)
        if kind == "word" and before != "." and after != "." and text.lower() not in _WORDS and not _is_name(tokens, i):
            raise NotStaticError(f"{text} at token {i}")
    _check_statements(tokens)
    return inserts


def _tokens(body: str) -> list[tuple[str, str]]:
    tokens, at = [], 0
    while at < len(body):
        found = _TOKEN.match(body, at)
        if found is None:
            raise NotStaticError(f"no token at {body[at : at + 20]!r}")
        if found.lastgroup:
            tokens.append((found.lastgroup, found.group()))
        at = found.end()
    return tokens


def _at(tokens: list[tuple[str, str]], i: int) -> str:
    return tokens[i][1] if 0 <= i < len(tokens) else ""


def _check_call(tokens: list[tuple[str, str]], i: int) -> None:
    """Token i opens a parenthesis after a name: a call of pg_catalog's or of a queue's event function, or no call."""
    name, dot, schema = _at(tokens, i - 1), _at(tokens, i - 2), _at(tokens, i - 3)
    if dot == ".":
        column_list = _at(tokens, i - 4) == "into" and schema == "gdq_log"
        event = schema == "gdq_log" and re.fullmatch(r"q\d+_[a-z_]+", name)
        if not (schema == "pg_catalog" or column_list or event):
            raise NotStaticError(f"call of {schema}.{name}")
    elif name.lower() not in _NO_CALL:
        raise NotStaticError(f"call of {name} without its schema")


def _is_whole_row(tokens: list[tuple[str, str]], i: int) -> bool:
    """The star of record_out(NEW.*), record_out(OLD.*) or record_out(r.*), r being a transition table."""
    row = [_at(tokens, i + n).lower() for n in range(-4, 2)]
    return row[:2] == ["record_out", "("] and row[2] in ("new", "old", "r") and row[3:] == [".", "*", ")"]


def _is_name(tokens: list[tuple[str, str]], i: int) -> bool:
    """A log column in a column list, a variable of the function, or a transition table."""
    text = tokens[i][1]
    return (
        text in _COLUMNS
        or _SAME.fullmatch(text) is not None
        or (text in ("gdq_old", "gdq_new") and _at(tokens, i - 1).lower() == "from")
    )


def _check_statements(tokens: list[tuple[str, str]]) -> None:
    """Every statement begins with one of a few words, and none is dynamic."""
    fresh = True
    cases = 0
    for _, text in tokens:
        word = text.lower()
        if word == "case" or (word == "end" and cases):
            cases += 1 if word == "case" else -1
            continue
        if cases:
            continue
        if fresh and word not in _STATEMENTS and word != "ev_number" and not _SAME.fullmatch(word):
            raise NotStaticError(f"statement {text}")
        fresh = word in (";", "begin", "then", "else", "declare")
