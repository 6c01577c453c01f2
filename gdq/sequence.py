"""Sequences whose values are published with the ticks of a queue, for copies that must be ready to take over."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from psycopg import Connection

from gdq.call import call, rows


@dataclass(frozen=True, slots=True)
class SequenceValue:
    """A sequence at the end of a batch: no transaction of the batch took a value beyond it.

    `setval(name, last_value, is_called)` brings a copy to the same state. None where it could not be read at that tick,
    because DDL held it: a later batch has it.
    """

    sequence_name: str
    last_value: int | None
    is_called: bool | None


@dataclass(frozen=True, slots=True)
class SequenceInfo:
    """A published sequence, with its value at the tick that published it last."""

    queue_name: str
    sequence_name: str
    last_value: int | None
    is_called: bool | None
    tick: int | None
    state: Literal["ok", "dropped", "unreadable"]


def add_sequence(connection: Connection[Any], queue: str, sequence: str) -> bool:
    """Publish the value of a sequence with each tick; False when it is published already.

    psycopg.errors.InsufficientPrivilege when the owner of gdq may not read it.
    """
    return bool(call(connection, "add_sequence", queue, sequence))


def remove_sequence(connection: Connection[Any], queue: str, sequence: str) -> bool:
    """Stop publishing a sequence, named as sequence_info() does; False when it was not published."""
    return bool(call(connection, "remove_sequence", queue, sequence))


def sequence_info(connection: Connection[Any], queue: str | None = None) -> list[SequenceInfo]:
    """The published sequences of all queues, or of one."""
    return rows(connection, SequenceInfo, "select * from gdq.sequence_info(%s)", queue)
