"""Sequences of a replica's target, set to what the source's have given out: none gives a value that is a row's."""

from __future__ import annotations

import time
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import psycopg
from psycopg import Connection

from gdq.call import scalar
from gdq.errors import GdqError
from gdq.sequence import SequenceValue
from gdq.sql_text import literal, quote, raw

# True if gdq is in the source, and the role may see what its queues publish.
_MAY_SEE = """
select coalesce((select has_schema_privilege(n.oid, 'usage') and has_function_privilege(p.oid, 'execute')
                   from pg_proc p join pg_namespace n on n.oid = p.pronamespace
                  where n.nspname = 'gdq' and p.proname = 'sequence_info'), false)"""

_PUBLISHED = "select sequence_name from gdq.sequence_info() where queue_name = %s and state <> 'dropped'"

# Seconds between two looks at which sequences are published.
_LOOK_SECONDS = 1.0


def set_sequences(target: Connection[Any], queue: str, values: Iterable[SequenceValue]) -> None:
    """Bring sequences of the target to values; GdqError if it lacks or refuses one. setval() follows no transaction."""
    for value in values:
        if value.last_value is None:
            continue
        try:
            target.execute(
                "select setval(%s::regclass, %s, %s)", [value.sequence_name, value.last_value, value.is_called]
            )
        except psycopg.errors.UndefinedTable:
            raise GdqError(
                f"the target has no sequence {value.sequence_name}",
                hint=f"Create it there, or leave it out: gdq remove-sequence {queue} {value.sequence_name}",
            ) from None
        except psycopg.errors.NumericValueOutOfRange as error:
            raise GdqError(
                f"sequence {value.sequence_name} of the target cannot have the value {value.last_value}",
                detail=error.diag.message_primary,
                hint=f"Give it the source's type and bounds there: alter sequence {value.sequence_name} ...",
            ) from error
        except psycopg.errors.InsufficientPrivilege as error:
            raise GdqError(
                f"role {target.info.user} may not set sequence {value.sequence_name} of the target",
                hint=f"Say there: grant update on sequence {value.sequence_name} to {quote(target.info.user)}",
            ) from error


@dataclass(slots=True)
class PresentSequences:
    """The sequences that a queue publishes, read as they are now: a slot sends none.

    What a transaction has taken from a sequence, it has taken before its commit.
    """

    source: Connection[Any]
    queue: str
    _names: list[str] = field(default_factory=list)
    _looked: float = float("-inf")
    _set: dict[str, SequenceValue] = field(default_factory=dict)

    def changed(self) -> list[SequenceValue]:
        """The values of those that have others than at the last call of were_set(); GdqError if one cannot be read."""
        if time.monotonic() - self._looked >= _LOOK_SECONDS:
            self._looked = time.monotonic()
            may_see = scalar(self.source, _MAY_SEE)
            self._names = [name for (name,) in self.source.execute(_PUBLISHED, [self.queue])] if may_see else []
        if not self._names:
            return []
        query = " union all ".join(f"select {literal(name)}, last_value, is_called from {name}" for name in self._names)
        try:
            values = [SequenceValue(*row) for row in self.source.execute(raw(query)).fetchall()]
        except psycopg.errors.UndefinedTable:
            self._looked = float("-inf")  # it was dropped meanwhile
            return []
        except psycopg.errors.InsufficientPrivilege as error:
            raise GdqError(
                f"a sequence that queue {self.queue} publishes cannot be read: {error.diag.message_primary}",
                hint="Grant select on it to the role that reads the source.",
            ) from error
        return [value for value in values if self._set.get(value.sequence_name) != value]

    def were_set(self, values: Iterable[SequenceValue]) -> None:
        """Note that the target has these values."""
        self._set |= {value.sequence_name: value for value in values}
