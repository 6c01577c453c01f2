"""Slots and the processes that read them."""

from __future__ import annotations

from typing import Any

import psycopg

from gdq.consumers.slot.slot import create_slot, drop_slot
from tests.support.waiting import until


def prepare(connection: psycopg.Connection[Any]) -> None:
    connection.execute("create table item (id int primary key, name text, n int)")
    connection.execute("alter table item replica identity full")
    connection.execute("create table copied (source text, id int)")
    create_slot(connection, "q", "c", ["public.item"])


def drop_when_free(connection: psycopg.Connection[Any], consumer: str) -> None:
    """Drop a slot whose reader's end the server has maybe not noticed."""
    until(lambda: reader_of(connection) is None)
    drop_slot(connection, "q", consumer)


def reader_of(connection: psycopg.Connection[Any]) -> int | None:
    found = connection.execute("select active_pid from pg_replication_slots where slot_name = 'gdq_q_c'").fetchone()
    return found[0] if found else None
