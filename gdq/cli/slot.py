"""Commands for the slots of consumers that read the write-ahead log instead of the queue."""

from __future__ import annotations

import click
from psycopg.errors import DuplicateObject, ObjectInUse

from gdq.cli.base import Failure, dsn_option, fields, json_option, print_rows, session, talk
from gdq.consumers.slot import slot


@click.command("create-slot")
@click.argument("queue")
@click.argument("consumer")
@click.argument("tables", nargs=-1, metavar="[SCHEMA.TABLE]...")
@click.option("--two-phase", is_flag=True, help="Have prepared transactions sent when they are prepared.")
@dsn_option
def create_slot(queue: str, consumer: str, tables: tuple[str, ...], two_phase: bool, dsn: str | None) -> None:
    """Create a logical slot for a consumer, read by `gdq consume --source slot`; or for the view of that name, read by
    `gdq refresh --source slot`.

    The tables are published as gdq_QUEUE, and named with the first slot only. Old images take REPLICA IDENTITY FULL.
    Needs wal_level logical and a role with REPLICATION. The slot keeps the server's write-ahead log until it is read
    or dropped.
    """
    name = slot.slot_name(queue, consumer)
    with session(dsn, autocommit=True) as connection:
        try:
            slot.create_slot(connection, queue, consumer, tables, two_phase=two_phase)
        except DuplicateObject:
            if not any(one.slot_name == name and one.publication for one in slot.slot_info(connection)):
                raise
            talk(f"already there: slot {name}")
            return
    talk(f"created slot {name}: it keeps the write-ahead log until it is read, or dropped by gdq drop-slot")


@click.command("drop-slot")
@click.argument("queue")
@click.argument("consumer")
@dsn_option
def drop_slot(queue: str, consumer: str, dsn: str | None) -> None:
    """Drop the slot of a consumer, and the queue's publication with the last one."""
    with session(dsn, autocommit=True) as connection:
        try:
            known = slot.drop_slot(connection, queue, consumer)
        except ObjectInUse as error:
            hint = "End its reader first; if its program is gone, pg_terminate_backend() ends it."
            raise Failure(str(error.diag.message_primary), hint=hint) from error
    name = slot.slot_name(queue, consumer)
    talk(f"dropped slot {name}" if known else f"already gone: slot {name}")


@click.command("slots")
@json_option
@dsn_option
def slots(as_json: bool, dsn: str | None) -> None:
    """List the slots of gdq with the write-ahead log that they keep, and what their publication leaves out."""
    with session(dsn, autocommit=True) as connection:
        rows = slot.slot_info(connection)
    print_rows(rows, fields(slot.SlotInfo), as_json=as_json)
