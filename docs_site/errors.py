"""The page "From error message to cure", made of the errors and hints in the code."""

from __future__ import annotations

import ast
import re
from collections import defaultdict
from pathlib import Path

import psycopg

from gdq.errors import ServerError

ROOT = Path(__file__).parent.parent

_RAISE = re.compile(r"raise exception\s+('(?:[^']|'')*'.*?);\n", re.DOTALL)
# One literal of SQL, or several that the server puts together.
_LITERAL = r"('(?:[^']|'')*'(?:\s*(?:\|\|)?\s*'(?:[^']|'')*')*)"

_HEAD = """# From error message to cure

Errors of gdq with their hints, from the code. `...` stands for names and numbers. The server raises the first ones, by
SQLSTATE; the library and the commands raise the others. `gdq doctor` finds problems that raise no error, each with its
cure: [Doctor](monitoring.md#doctor).
"""


def errors_page() -> str:
    """All errors that have a hint, and gdq's own SQLSTATEs with their classes."""
    lines = [_HEAD, "## SQLSTATEs of gdq", "", "| SQLSTATE | Python | meaning |", "|---|---|---|"]
    lines += [
        f"| {error.sqlstate} | `gdq.{error.__name__}` | {_cell(error.__doc__ or '')} |"
        for error in ServerError.__subclasses__()
    ]
    for code, found in sorted(_of_sql().items()):
        lines += ["", f"## {code}", "", *_table(found)]
    lines += ["", "## Library and commands", "", *_table(_of_python()), ""]
    return "\n".join(lines)


def _table(found: set[tuple[str, str]]) -> list[str]:
    rows = [f"| {_cell(message)} | {_cell(hint)} |" for message, hint in sorted(found)]
    return ["| message | cure |", "|---|---|", *rows]


def _of_sql() -> dict[str, set[tuple[str, str]]]:
    """Messages and hints of RAISE in sql/, by SQLSTATE."""
    found: dict[str, set[tuple[str, str]]] = defaultdict(set)
    for path in (ROOT / "sql").rglob("*.sql"):
        for statement in _RAISE.findall(path.read_text(encoding="utf-8")):
            says = re.match(_LITERAL, statement)
            hint = re.search(r"hint = (?:format\()?" + _LITERAL, statement)
            code = re.search(r"errcode = '(\w+)'", statement)
            if says and hint and re.search(r"\w", message := _text(says[1])):
                found[_sqlstate(code[1] if code else "raise_exception")].add((message, _text(hint[1])))
    return found


def _sqlstate(code: str) -> str:
    """GDQ02, or the number and the name of one of PostgreSQL's conditions."""
    if code.startswith("GDQ"):
        (name,) = (error.__name__ for error in ServerError.__subclasses__() if error.sqlstate == code)
        return f"{code}: {name}"
    error = getattr(psycopg.errors, code.title().replace("_", ""), None)
    return f"{error.sqlstate}: {code}" if error else code


def _of_python() -> set[tuple[str, str]]:
    """Messages and hints of errors that Python raises."""
    found = set()
    for folder in ("gdq", "consumers"):
        for path in (ROOT / folder).rglob("*.py"):
            for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
                if isinstance(node, ast.Call) and node.args:
                    hint = next((word.value for word in node.keywords if word.arg == "hint"), None)
                    code = isinstance(node.func, ast.Name) and node.func.id == "PlanError"
                    message = _python_text(node.args[-1 if code else 0])
                    cure = hint and _python_text(hint)
                    if message and cure:
                        found.add((message, cure))
    return found


def _python_text(node: ast.expr) -> str | None:
    match node:
        case ast.Constant(value=str(text)):
            return text
        case ast.JoinedStr(values=values):
            return "".join(_python_text(value) or "..." for value in values)
    return None


def _text(literal: str) -> str:
    """Literals of SQL as a reader sees them; a % or %I stands for a name."""
    text = "".join(part.replace("''", "'") for part in re.findall(r"'((?:[^']|'')*)'", literal))
    return re.sub(r"%(?:\d+\$)?[sIL]|%", "...", text)


def _cell(text: str) -> str:
    """A cell of a table: nothing in it is Markdown."""
    return re.sub(r"([\\`*_<>|\[\]#])", r"\\\1", " ".join(text.split()))
