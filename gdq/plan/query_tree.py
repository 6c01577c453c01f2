"""The server's own tree of a query, read from the text of a pg_node_tree (`pg_rewrite.ev_action`).

{OPEXPR :opno 96 :args ({VAR :varno 1 ...} {CONST ...})}   gives   TreeNode("OPEXPR", {"opno": "96", "args": [...]})
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TypeAlias

TreeValue: TypeAlias = "TreeNode | str | list[TreeValue] | tuple[TreeValue, ...] | None"

_TOKEN = re.compile(r"[(){}]|(?:\\.|[^\s(){}\\])+", re.DOTALL)
_ESCAPED = re.compile(r"\\(.)", re.DOTALL)
# Names of nodes in PostgreSQL 15 that later versions call otherwise.
_RENAMED = {
    "ARRAY": "ARRAYEXPR",
    "CASE": "CASEEXPR",
    "WHEN": "CASEWHEN",
    "ROW": "ROWEXPR",
    "ROWCOMPARE": "ROWCOMPAREEXPR",
    "COALESCE": "COALESCEEXPR",
    "MINMAX": "MINMAXEXPR",
    "RTE": "RANGETBLENTRY",
}

# Kinds of items in a range table.
RTE_RELATION, RTE_SUBQUERY, RTE_JOIN, RTE_FUNCTION, RTE_VALUES, RTE_CTE, RTE_GROUP = "0", "1", "2", "3", "5", "6", "9"
# The kind of a sublink that is EXISTS.
EXISTS_SUBLINK = "0"


@dataclass(frozen=True, slots=True)
class TreeNode:
    """A node: its kind in capitals and its fields; a list of numbers begins with its letter, i, o, b or x."""

    kind: str
    fields: dict[str, TreeValue]

    def get(self, name: str) -> TreeValue:
        """A field's value; None for NULL, and for a field that this PostgreSQL does not have."""
        return self.fields.get(name)

    def text(self, name: str) -> str:
        """A field that is one word; empty for NULL."""
        value = self.fields.get(name)
        return value if isinstance(value, str) else ""

    def nodes(self, name: str) -> list[TreeNode]:
        """The nodes in a field that is a node or a list of nodes."""
        value = self.fields.get(name)
        found = value if isinstance(value, list) else [value]
        return [one for one in found if isinstance(one, TreeNode)]

    def node(self, name: str) -> TreeNode | None:
        """The node in a field."""
        return next(iter(self.nodes(name)), None)

    def numbers(self, name: str) -> list[int]:
        """A field that is a list of numbers."""
        value = self.fields.get(name)
        return [int(str(one)) for one in value[1:]] if isinstance(value, list) else []

    def flag(self, name: str) -> bool:
        """True for a field that is true."""
        return self.fields.get(name) == "true"


def parse_tree(text: str) -> TreeNode:
    """The query of a rule that has one action."""
    found = _Parser(text).value()
    if isinstance(found, list) and len(found) == 1 and isinstance(found[0], TreeNode):
        return found[0]
    raise ValueError("a view's rule has one action")


def walk_tree(value: TreeValue) -> Iterator[TreeNode]:
    """All nodes of a value, a node before those within it."""
    if isinstance(value, TreeNode):
        yield value
        for inner in value.fields.values():
            yield from walk_tree(inner)
    elif isinstance(value, list | tuple):
        for inner in value:
            yield from walk_tree(inner)


class _Parser:
    def __init__(self, text: str) -> None:
        self._tokens = _TOKEN.findall(text)
        self._place = 0

    def value(self) -> TreeValue:
        token = self._next()
        if token == "{":
            return self._node()
        if token == "(":
            return self._list()
        if token == "<>":
            return None
        if len(token) > 1 and token[0] == token[-1] == '"':
            token = token[1:-1]
        return _ESCAPED.sub(r"\1", token)

    def _next(self) -> str:
        self._place += 1
        return str(self._tokens[self._place - 1])

    def _node(self) -> TreeNode:
        kind = self._next()
        fields: dict[str, TreeValue] = {}
        while (token := self._next()) != "}":
            values = [self.value()]
            # the bytes of a constant are several words
            while not self._tokens[self._place].startswith((":", "}")):
                values.append(self.value())
            fields[token[1:]] = values[0] if len(values) == 1 else tuple(values)
        return TreeNode(_RENAMED.get(kind, kind), fields)

    def _list(self) -> list[TreeValue]:
        found: list[TreeValue] = []
        while self._tokens[self._place] != ")":
            found.append(self.value())
        self._place += 1
        return found
