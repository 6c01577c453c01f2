"""SQL scripts as lists of statements, with what psql's own commands do to them."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path


@dataclass(frozen=True, slots=True)
class Statement:
    """One SQL statement; `data`: the rows of COPY ... FROM STDIN as its text, None for another statement."""

    text: str
    data: str | None = None


@dataclass(frozen=True, slots=True)
class Scope:
    """Statements that are run one after the other over tables of their own. `suite` and `origin`: where they stand."""

    suite: str
    origin: str
    statements: list[Statement] = field(default_factory=list)


_TOKEN = re.compile(
    r"""(?P<line>--[^\n]*)
      | (?P<block>/\*)
      | (?P<estring>\b[eE]'(?:[^'\\]|\\.|'')*')
      | (?P<string>'(?:[^']|'')*')
      | (?P<name>"(?:[^"]|"")*")
      | (?P<dollar>\$(?P<tag>[A-Za-z_\x80-\uffff][\w\x80-\uffff]*)?\$)
      | (?P<variable>(?<!:):(?:'\w+'|"\w+"|[A-Za-z_]\w*))
      | (?P<word>[A-Za-z_][\w$]*)
      | (?P<other>.)""",
    re.VERBOSE | re.DOTALL,
)
_COPY_IN = re.compile(r"\s*copy\b.*\bfrom\s+std(?:in|out)\b", re.IGNORECASE | re.DOTALL)
_SEND = {"g", "gx", "gset", "gexec", "gdesc", "crosstabview", "watch", "bind"}


class ScriptReader:
    """Splits a psql script. `variables`: psql's variables and, for \\getenv, the environment."""

    def __init__(self, text: str, variables: Mapping[str, str] | None = None) -> None:
        self.text = text.replace("\r\n", "\n")
        self.variables = dict(variables or {})
        self.at = 0

    def statements(self) -> Iterator[Statement]:
        """The statements in order; a statement that psql's commands end is one too."""
        kept: list[str] = []
        depth = atomic = 0
        while self.at < len(self.text):
            if self.text[self.at] == "\\":
                sent = self._command()
                if sent and "".join(kept).strip():
                    yield Statement("".join(kept).strip())
                if sent:
                    kept, depth, atomic = [], 0, 0
                continue
            token, kind = self._token()
            if kind == "word":
                atomic = _atomic_depth(atomic, token.lower(), kept)
            depth += (token in "([") - (token in ")]") if kind == "other" else 0
            if token == ";" and kind == "other" and depth <= 0 and not atomic:
                text = "".join(kept).strip()
                kept, depth = [], 0
                if text:
                    yield Statement(text, self._copied() if _COPY_IN.match(text) else None)
                continue
            kept.append(token)
        if "".join(kept).strip():
            yield Statement("".join(kept).strip())

    def _token(self) -> tuple[str, str]:
        """The next token and its kind; comments are left out."""
        match = _TOKEN.match(self.text, self.at)
        assert match is not None
        kind, token = str(match.lastgroup), match.group()
        kind = "dollar" if kind == "tag" else kind
        self.at = match.end()
        if kind == "line":
            return "", kind
        if kind == "block":
            self._skip_comment()
            return " ", kind
        if kind == "dollar":
            end = self.text.find(token, self.at)
            end = len(self.text) if end < 0 else end + len(token)
            token, self.at = token + self.text[self.at : end], end
        if kind == "variable":
            token = self._variable(token)
        return token, kind

    def _skip_comment(self) -> None:
        depth = 1
        while depth and self.at < len(self.text):
            match = re.compile(r"/\*|\*/").search(self.text, self.at)
            if match is None:
                self.at = len(self.text)
                return
            depth += 1 if match.group() == "/*" else -1
            self.at = match.end()

    def _variable(self, token: str) -> str:
        name = token[1:].strip("'\"")
        if name not in self.variables:
            return token
        value = self.variables[name]
        if token[1] == "'":
            return "'" + value.replace("'", "''") + "'"
        return '"' + value.replace('"', '""') + '"' if token[1] == '"' else value

    def _command(self) -> bool:
        """Go past one command of psql; true if it ends the statement before it."""
        if self.text.startswith("\\;", self.at):
            self.at += 2
            return True
        end = self.text.find("\n", self.at)
        end = len(self.text) if end < 0 else end
        line = self.text[self.at + 1 : end]
        words = line.replace(";", " ").split()
        self.at = end
        if not words:
            return False
        if words[0] == "set" and len(words) > 1:
            self.variables[words[1]] = "".join(self._word(word) for word in words[2:])
        if words[0] == "getenv" and len(words) > 2 and words[2] in self.variables:
            self.variables[words[1]] = self.variables[words[2]]
        if words[0] == "copy" and re.search(r"\bfrom\s+stdin\b", line, re.IGNORECASE):
            self._copied()
        return words[0] in _SEND

    def _word(self, word: str) -> str:
        if word.startswith(":"):
            return self.variables.get(word[1:].strip("'\""), "")
        return word.strip("'")

    def _copied(self) -> str:
        """The rows after COPY ... FROM STDIN, up to their end."""
        start = self.text.find("\n", self.at) + 1
        match = re.compile(r"^\\\.[ \t]*$", re.MULTILINE).search(self.text, start)
        end, self.at = (len(self.text), len(self.text)) if match is None else (match.start(), match.end())
        return self.text[start:end]


def _atomic_depth(depth: int, word: str, before: list[str]) -> int:
    """How deep BEGIN ATOMIC and its CASE are after this word."""
    if word == "atomic" and "".join(before[-4:]).split()[-1:] in (["begin"], ["BEGIN"]):
        return 1
    if depth and word == "case":
        return depth + 1
    return depth - 1 if depth and word == "end" else depth


def split_sql(text: str, variables: Mapping[str, str] | None = None) -> list[Statement]:
    """The statements of a psql script."""
    return list(ScriptReader(text, variables).statements())


def read_text(path: Path) -> str:
    """The text of a file in whatever encoding it has."""
    return path.read_bytes().decode("utf-8", errors="replace")
