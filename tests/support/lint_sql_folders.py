"""`make lint`: the files of sql/ stand where a reader looks for them, and calls between folders go one way.

Checked are text and names alone, without a server:

- a function calls functions of its own folder and of the folders before, never of a later one (SQL_FOLDERS)
- a function that users may execute is in the file of its name; HELPERS are the exceptions
- lines, functions and files keep to their limits
- no literal means something else where standard_conforming_strings is off
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from gdq.installer.version import SQL_FOLDERS, function_files
from tests.support.literals import hazardous_literals

COLUMNS = 120
LINES_OF_A_FUNCTION = 100
LINES_OF_A_FILE = 250

# Granted because SQL that gdq generates calls them in the session of a user: they stand with what generates it.
HELPERS = {"event_triggers_on", "row_fits", "row_is_whole", "row_has_all", "segment_is", "table_name"}

_START = re.compile(r"^create or replace (?:function|procedure) gdq\.(\w+)", re.MULTILINE)
_CALL = re.compile(r"gdq\.(\w+)\(")
# What a hint or a message tells the reader to call is no call.
_TALK = re.compile(
    r"hint = ''[^']*''|raise \w+ '(?:[^']|'')*'"
    r"|(?:hint|detail) =\s*(?:case .*? then |format\(|concat\()?(?:\s*'(?:[^']|'')*')+",
    re.DOTALL,
)


@dataclass(frozen=True, slots=True)
class Function:
    """One function of sql/: its file, its text from its CREATE to the next one's header, and its number of lines."""

    name: str
    file: Path
    text: str
    lines: int

    @property
    def folder(self) -> str:
        """The folder that the file is in."""
        return self.file.parent.name

    def calls(self) -> set[str]:
        """The names behind `gdq.` and before a parenthesis, but for comments and for what errors tell."""
        code = "\n".join(
            line.partition("-- ")[0] for line in self.text.splitlines() if not line.startswith("comment on")
        )
        return set(_CALL.findall(_TALK.sub("", code))) - {self.name}


def functions() -> list[Function]:
    """All functions of sql/."""
    return [function for file in function_files() for function in _functions_of(file)]


def _functions_of(file: Path) -> Iterator[Function]:
    text = file.read_text(encoding="utf-8")
    starts = [match.start() for match in _START.finditer(text)]
    for start, end in zip(starts, [*starts[1:], len(text)], strict=True):
        part = text[start:end]
        match = _START.match(part)
        assert match
        body = part[: part.index("comment on function")] if "comment on function" in part else part
        yield Function(match[1], file, part, body.count("\n"))


def _granted(found: dict[str, Function]) -> set[str]:
    """The names of functions that roles of gdq may execute."""
    lists = re.findall(r"'\{?([a-z_,\s]+)\}?'", found["granted"].text)
    return {name for part in lists for name in re.split(r"[,\s]+", part)} & set(found)


def faults() -> Iterator[str]:
    """What breaks the rules, a line each."""
    found = {function.name: function for function in functions()}
    for function in found.values():
        yield from _faults_of_calls(function, found)
        if function.lines > LINES_OF_A_FUNCTION:
            yield f"{function.file}: {function.name} has {function.lines} lines, {LINES_OF_A_FUNCTION} at most"
    for name in sorted(_granted(found) - HELPERS):
        if found[name].file.stem != name:
            yield f"{found[name].file}: {name} is public and belongs into {name}.sql"
    known = function_files()
    for file in known:
        yield from _faults_of_text(file)
    for file in set(known[0].parent.parent.rglob("*.sql")) - set(known):
        yield f"{file}: in no folder of SQL_FOLDERS"


def _faults_of_calls(function: Function, found: dict[str, Function]) -> Iterator[str]:
    for name in sorted(function.calls() & set(found)):
        if SQL_FOLDERS.index(found[name].folder) > SQL_FOLDERS.index(function.folder):
            yield f"{function.file}: {function.name} calls {name} of the later folder {found[name].folder}"


def _faults_of_text(file: Path) -> Iterator[str]:
    lines = file.read_text(encoding="utf-8").splitlines()
    if len(lines) > LINES_OF_A_FILE:
        yield f"{file}: {len(lines)} lines, {LINES_OF_A_FILE} at most"
    text = "\n".join(lines)
    for at, literal in hazardous_literals(text):
        yield f"{file}:{text.count(chr(10), 0, at) + 1}: {literal} has a backslash and does not begin with E"
    for number, line in enumerate(lines, start=1):
        if len(line) > COLUMNS:
            yield f"{file}:{number}: {len(line)} columns, {COLUMNS} at most"


def main() -> int:
    """Print the faults; 1 when there are any."""
    found = list(faults())
    for fault in found:
        print(fault)
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
