"""Sequences whose values are published with a queue's ticks, for copies that must be ready to take over."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from psycopg import Connection

from gdq.call import call, rows
from gdq.shown import Shown


@dataclass(frozen=True, slots=True)
class SequenceValue:
    """A sequence's value at the end of a batch: no transaction of the batch took a value beyond it.

    `setval(name, last_value, is_called)` brings a copy to the same state. The value is None if DDL locked the sequence
    at that tick; a later batch has it.
    """

    sequence_name: str
    last_value: int | None
    is_called: bool | None


@dataclass(frozen=True, slots=True, repr=False)
class SequenceInfo(Shown):
    """A published sequence, with its value at the last tick that published it."""

    queue_name: str
    sequence_name: str
    last_value: int | None
    is_called: bool | None
    tick: int | None
    state: Literal["ok", "dropped", "unreadable"]


def add_sequence(connection: Connection[Any], queue: str, sequence: str) -> bool:
    """Publish the value of a sequence with each tick; False if it is published already.

    psycopg.errors.InsufficientPrivilege if the owner of gdq may not read the sequence.
    """
    return bool(call(connection, "add_sequence", queue, sequence))


def remove_sequence(connection: Connection[Any], queue: str, sequence: str) -> bool:
    """Stop publishing a sequence, named as in sequence_info(); False if it was not published."""
    return bool(call(connection, "remove_sequence", queue, sequence))


def sequence_info(connection: Connection[Any], queue: str | None = None) -> list[SequenceInfo]:
    """The published sequences of all queues, or of one."""
    return rows(connection, SequenceInfo, "select * from gdq.sequence_info(%s)", queue)
