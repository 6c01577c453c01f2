"""Sequences of the target set ahead, so that they give no value that the source's have given."""

from __future__ import annotations

from typing import Any

from psycopg import Connection

from gdq.consumers.switchover.definitions import SEQUENCES
from gdq.consumers.switchover.pair import Pair, named_rows
from gdq.sql_text import raw

_NEXT = "s.last_value::numeric + case when s.is_called then q.seqincrement else 0 end"


def set_sequences_ahead(pair: Pair) -> int:
    """Set each sequence of the target that is behind the source's of the same name to its value; their number.

    None is set back. setval() follows no transaction.
    """
    names = {row.name for row in named_rows(pair.target, SEQUENCES)}
    names &= {row.name for row in named_rows(pair.source, SEQUENCES)}
    here, there = _values(pair.source, names), _values(pair.target, names)
    behind = 0
    for name in sorted(names):
        last, is_called, following, increment = here[name]
        if (following - there[name][2]) * increment > 0:
            pair.target.execute("select setval(%s::regclass, %s, %s)", [name, last, is_called])
            behind += 1
    return behind


def _values(connection: Connection[Any], names: set[str]) -> dict[str, tuple[int, bool, int, int]]:
    """By sequence the last value, whether it was given, the one that follows, and the increment."""
    found = {}
    for name in sorted(names):
        query = f"""select s.last_value, s.is_called, {_NEXT}, q.seqincrement
                      from {name.replace("%", "%%")} s, pg_sequence q where q.seqrelid = %s::regclass"""
        [[last, is_called, following, increment]] = connection.execute(raw(query), [name]).fetchall()
        found[name] = (last, is_called, int(following), increment)
    return found
