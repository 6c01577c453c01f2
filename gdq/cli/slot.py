"""Commands for logical slots: consumers and views with a slot read the write-ahead log instead of the queue."""

from __future__ import annotations

import click
from psycopg.errors import DuplicateObject, ObjectInUse

from gdq.cli.base import CommandFailure, command_session, dsn_option, talk
from gdq.cli.listing import Shape, listing_options, print_rows
from gdq.cli.queue_command import queue_command
from gdq.consumers.slot import slot

_SLOT_COLUMNS = ("slot_name", "publication", "active", "retained_bytes", "lag_bytes", "lost", "narrowed")


@queue_command("create-slot")
@click.argument("consumer")
@click.argument("tables", nargs=-1, metavar="[SCHEMA.TABLE]...")
@click.option("--two-phase", is_flag=True, help="Send prepared transactions when they are prepared.")
@dsn_option
def create_slot_command(queue: str, consumer: str, tables: tuple[str, ...], two_phase: bool, dsn: str | None) -> None:
    """Create a logical slot for a consumer or a view.

    It is read by `gdq consume --source slot`, or by `gdq refresh --source slot` where CONSUMER is the name of a view.

    Name the tables with a queue's first slot only: they are published as gdq_QUEUE. Old images need REPLICA IDENTITY
    FULL. Needs wal_level logical and a role with REPLICATION. The slot keeps the server's write-ahead log until it is
    read or dropped.
    """
    name = slot.slot_name(queue, consumer)
    with command_session(dsn, autocommit=True) as connection:
        try:
            slot.create_slot(connection, queue, consumer, tables, two_phase=two_phase)
        except DuplicateObject:
            if not any(one.slot_name == name and one.publication for one in slot.slot_info(connection)):
                raise
            talk(f"already there: slot {name}")
            return
    talk(f"created slot {name}: it keeps the write-ahead log until it is read, or dropped by gdq drop-slot")


@queue_command("drop-slot")
@click.argument("consumer")
@dsn_option
def drop_slot_command(queue: str, consumer: str, dsn: str | None) -> None:
    """Drop a consumer's slot, and with the last slot the queue's publication."""
    with command_session(dsn, autocommit=True) as connection:
        try:
            known = slot.drop_slot(connection, queue, consumer)
        except ObjectInUse as error:
            hint = "End its reader first; if its program is gone, pg_terminate_backend() ends it."
            raise CommandFailure(str(error.diag.message_primary), hint=hint) from error
    name = slot.slot_name(queue, consumer)
    talk(f"dropped slot {name}" if known else f"already gone: slot {name}")


@click.command("slots")
@listing_options
@dsn_option
def slots_command(shape: Shape, dsn: str | None) -> None:
    """List gdq's slots with the write-ahead log that they keep.

    Also named are changes that their publication leaves out.
    """
    with command_session(dsn, autocommit=True) as connection:
        rows = slot.slot_info(connection)
        if slot.is_standby(connection):
            talk("this server is a standby: the slots of its primary are listed there, not here")
    print_rows(rows, slot.SlotInfo, _SLOT_COLUMNS, shape)
