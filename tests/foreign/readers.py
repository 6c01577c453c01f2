"""Files of other projects' suites, read as scopes: psql scripts, sqllogictest files, planner cases, tests in Rust."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from pathlib import Path

from tests.foreign.scripts import Scope, Statement, read_text, split_sql

_SLT_RECORD = re.compile(r"^(statement|query)\b(.*)$")
_SLT_LOOP = re.compile(r"^(halt|onlyif|skipif|sleep|control|connection|hash-threshold|subtest|system|user|db)\b")


def read_psql(suite: str, path: Path, variables: Mapping[str, str] | None = None) -> list[Scope]:
    """A psql script as one scope."""
    return [Scope(suite, path.name, split_sql(read_text(path), variables))]


def read_logic_test(suite: str, path: Path) -> list[Scope]:
    """A sqllogictest file with the files that it includes, as one scope."""
    return [Scope(suite, f"{path.parent.name}/{path.name}", list(_logic_statements(path, 0)))]


def _logic_statements(path: Path, depth: int) -> Iterator[Statement]:
    """The statements of records `statement ...` and `query ...`; results, up to an empty line, are left out."""
    lines = read_text(path).splitlines()
    at = 0
    while at < len(lines):
        line = lines[at].strip()
        at += 1
        include = re.match(r"include\s+(\S+)", line)
        # a pattern includes whole folders, whose files are read by themselves
        if include and depth < 5 and "*" not in include.group(1) and (path.parent / include.group(1)).is_file():
            yield from _logic_statements(path.parent / include.group(1), depth + 1)
        if not _SLT_RECORD.match(line):
            continue
        kept: list[str] = []
        while at < len(lines) and lines[at].strip() and lines[at].strip() != "----":
            kept.append(lines[at])
            at += 1
        while at < len(lines) and lines[at].strip():
            at += 1
        yield from split_sql("\n".join(kept))


def read_planner_cases(suite: str, path: Path) -> list[Scope]:
    """A file of cases in YAML, each with SQL and the cases that come before it; each case is a scope."""
    known: dict[str, tuple[list[str], str]] = {}
    scopes = []
    for number, case in enumerate(re.split(r"^- ", read_text(path), flags=re.MULTILINE)[1:], 1):
        fields = _yaml_fields(case)
        before = [word.strip("-, []") for word in re.split(r"[\n,]", fields.get("before", "")) if word.strip("-, []")]
        sql = fields.get("sql", "")
        known[fields.get("id", f"#{number}")] = before, sql
        text = "".join(f"{one};\n" for one in [*_texts_before(known, before), sql])
        scopes.append(Scope(suite, f"{path.name}#{number}", split_sql(text)))
    return scopes


def _texts_before(known: Mapping[str, tuple[list[str], str]], names: list[str]) -> Iterator[str]:
    for name in names:
        earlier, sql = known.get(name, ([], ""))
        yield from _texts_before(known, [one for one in earlier if one != name])
        yield sql


def _yaml_fields(case: str) -> dict[str, str]:
    """The fields of one case: a value on the line, a block of lines after `|`, or a list."""
    fields: dict[str, str] = {}
    name = ""
    for line in case.splitlines():
        match = re.match(r"(?:  )?(\w+):(?: +(.*))?$", line)
        if match:
            name, value = match.group(1), (match.group(2) or "").strip()
            fields[name] = "" if re.fullmatch(r"[|>][-+]?", value) else value.strip("'\"")
        elif name:
            fields[name] += f"\n{line}"
    return fields


# Rust: a function, its string literals, and what is called with them.
_RUST_FUNCTION = re.compile(r"^\s*(?:pub )?(?:async )?fn (\w+)", re.MULTILINE)
_RUST_STRING = re.compile(
    r'(?<!\w)r(?P<hash>#*)"(?P<raw>.*?)"(?P=hash)|"(?P<plain>(?:[^"\\]|\\.)*)"|//[^\n]*', re.DOTALL
)
_RUST_ESCAPES = {"n": "\n", "t": "\t", '"': '"', "\\": "\\", "0": "\0", "r": "\r", "'": "'"}
_SQL_START = re.compile(
    r"\s*(select|with|values|table|create|insert|update|delete|alter|drop|truncate|copy|analyze|set)\b", re.IGNORECASE
)


def read_rust_tests(suite: str, path: Path) -> list[Scope]:
    """Each function of a Rust file as a scope of the SQL in its strings."""
    text = read_text(path)
    starts = [(match.start(), match.group(1)) for match in _RUST_FUNCTION.finditer(text)]
    scopes = []
    for (start, name), end in zip(starts, [*[at for at, _ in starts[1:]], len(text)], strict=True):
        statements: list[Statement] = []
        for match in _RUST_STRING.finditer(text, start, end):
            literal = match.group("raw")
            if literal is None and match.group("plain") is not None:
                literal = _rust_unescaped(match.group("plain"))
            if literal is not None and _SQL_START.match(literal):
                statements += split_sql(literal)
        if statements:
            scopes.append(Scope(suite, f"{path.name}:{name}", statements))
    return scopes


def _rust_unescaped(text: str) -> str:
    joined = re.sub(r"\\\n\s*", "", text)
    return re.sub(r"\\(.)", lambda match: _RUST_ESCAPES.get(match.group(1), match.group()), joined)
