"""Commands for replicas: tables of another PostgreSQL that are kept equal to captured tables."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from functools import partial

import click

from gdq.cli import base
from gdq.cli.base import CommandFunction
from gdq.cli.follow import keep_following
from gdq.cli.listing import Shape, listing_options, print_rows
from gdq.cli.progress import shown_progress
from gdq.cli.queue_command import queue_command
from gdq.cli.terminal import printable
from gdq.conninfo import connect
from gdq.consumers.replica.conflicts import ConflictInfo, conflict_info
from gdq.consumers.replica.copy_workers import WORKERS
from gdq.consumers.replica.definition_follow import OnDdl
from gdq.consumers.replica.held_replicas import is_fed_by_slot
from gdq.consumers.replica.origin import TakenOrigin
from gdq.consumers.replica.policy import OnError
from gdq.consumers.replica.replica import AppliedBatch, Replica
from gdq.consumers.replica.replica_info import ReplicaInfo, replica_info
from gdq.consumers.replica.rights import rights_told
from gdq.consumers.replica.skip import SkipInfo, skip_info
from gdq.consumers.replica.slot.slot_replica import SlotReplica
from gdq.consumers.replica.source_tables import source_tables
from gdq.consumers.replica.table import OnTriggers
from gdq.consumers.replica.table_copy import CHUNK_ROWS
from gdq.consumers.replica.table_ddl import OnDrop
from gdq.consumers.slot.replication import lsn_text
from gdq.json_text import json_text
from gdq.lock_waits import told_waits

_BATCH_COLUMNS = (
    "replica_name",
    "tick",
    "tables",
    "inserted",
    "updated",
    "deleted",
    "conflicts",
    "dead_letters",
    "seconds",
)
_REPLICA_COLUMNS = (
    "replica_name",
    "queue_name",
    "tables",
    "state",
    "tick",
    "updated_at",
    "lag",
    "unread_events",
    "conflicts",
    "dead_letters",
)
_CONFLICT_COLUMNS = (
    "conflict_id",
    "replica_name",
    "table_name",
    "kind",
    "key",
    "local",
    "remote",
    "noted_at",
    "resolution",
)
_SKIP_COLUMNS = ("replica_name", "table_name", "changes", "events", "tick_from", "tick_to", "skipped_at")


def to_option(command: CommandFunction) -> CommandFunction:
    """--to, for every command that connects to a target."""
    return click.option("--to", "target", required=True, metavar="CONNINFO", help="The target's connection.")(command)


def triggers_option(command: CommandFunction) -> CommandFunction:
    """--triggers, for every command that writes into the tables of a target."""
    return click.option(
        "--triggers",
        type=click.Choice(["refuse", "fire"]),
        default="refuse",
        show_default=True,
        help="For triggers of the target that this role cannot keep from firing: refuse such tables, or let them fire.",
    )(command)


@queue_command("replicate")
@click.argument("name")
@to_option
@click.option(
    "--source",
    type=click.Choice(["queue", "slot"]),
    default="queue",
    show_default=True,
    help="slot: read the changes from the replica's logical slot (gdq create-slot QUEUE NAME TABLES).",
)
@base.slot_wait_option
@click.option(
    "--tables",
    metavar="T1,T2",
    help="At the first start: only these captured tables. With --source slot, at each start: only these published "
    "tables. Default: all.",
)
@click.option("--create", is_flag=True, help="Make tables that the target lacks, also later ones.")
@click.option("--overwrite", is_flag=True, help="Replace the rows that a target table has before its first copy.")
@click.option("--no-copy", is_flag=True, help="At the first start: the target has the rows of its tables already.")
@click.option(
    "--origin",
    type=click.Choice(["any", "none"]),
    default="any",
    show_default=True,
    help="Bring changes of any origin but the target, or only those that no replica has brought.",
)
@click.option("--copy-again", metavar="T1,T2", help="Replace the copies of these tables.")
@click.option(
    "--on-drop",
    type=click.Choice(["keep", "drop"]),
    default="keep",
    show_default=True,
    help="What becomes of a table of the target that is dropped in the source.",
)
@click.option(
    "--on-ddl",
    type=click.Choice(["keep", "follow", "require"]),
    default="keep",
    show_default=True,
    help="Indexes, constraints, defaults and NOT NULL of the target: keep them as they are, or have them follow the "
    "source's; require: stop if the target refuses one.",
)
@click.option(
    "--on-conflict",
    multiple=True,
    metavar="ANSWER",
    help="For rows of the target that are not as expected: error (default), apply, skip or newest:COLUMN; for one kind "
    "KIND=ANSWER, for one table TABLE=ANSWER or TABLE:KIND=ANSWER. May be repeated.",
)
@click.option(
    "--on-error",
    type=click.Choice(["stop", "dead-letter"]),
    default="stop",
    help="For rows that the target refuses, as by a CHECK: stop (default), or put them aside as dead letters.",
)
@triggers_option
@click.option(
    "--workers",
    type=click.IntRange(1, 64),
    default=WORKERS,
    show_default=True,
    help="Tables, and parts of large ones, that are copied at once.",
)
@click.option(
    "--chunk-rows",
    type=click.IntRange(1),
    default=CHUNK_ROWS,
    show_default=True,
    help="Tables with more rows are copied so many rows at a time.",
)
@click.option(
    "--apply-workers",
    type=click.IntRange(1, 64),
    default=1,
    show_default=True,
    help="Tables whose changes are applied at once. With more than 1 each commits by itself, one just after the other.",
)
@click.option("--follow", is_flag=True, help="Go on with every change, until SIGTERM or Ctrl-C.")
@listing_options
@base.dsn_option
def replicate_command(
    queue: str,
    name: str,
    *,
    target: str,
    source: str,
    slot_wait: float,
    tables: str | None,
    create: bool,
    overwrite: bool,
    no_copy: bool,
    origin: TakenOrigin,
    copy_again: str | None,
    on_drop: OnDrop,
    on_ddl: OnDdl,
    on_conflict: tuple[str, ...],
    on_error: OnError,
    triggers: OnTriggers,
    workers: int,
    chunk_rows: int,
    apply_workers: int,
    follow: bool,
    shape: Shape,
    dsn: str | None,
) -> None:
    """Bring the tables of another PostgreSQL up to the present: copy them, then apply their changes.

    \b
    Example: gdq replicate shop mirror --to postgresql://host/copy --follow
    """
    tell = base.talk_of_threads()
    show = partial(shown_progress, as_json=shape == "json", what="copy of")
    start = partial(
        _by_slot(slot_wait, on_drop, apply_workers)
        if source == "slot"
        else partial(Replica, on_drop=on_drop, apply_workers=apply_workers),
        dsn,
        target,
        queue,
        name,
        tables=base.split_table_names(tables),
        create=create,
        overwrite=overwrite,
        no_copy=no_copy,
        origin=origin,
        copy_again=base.split_table_names(copy_again) or [],
        on_conflict=on_conflict,
        on_error=on_error,
        on_ddl=on_ddl,
        triggers=triggers,
        workers=workers,
        chunk_rows=chunk_rows,
        tell=tell,
        show=show,
    )
    stop = base.StopSignals()

    def connected() -> Replica | SlotReplica:
        with stop.nothing_at_hand():
            return start()

    with told_waits(tell):
        if follow:
            keep_following(stop, connected, partial(_apply, stop=stop, as_json=shape == "json"))
            return
        with connected() as replica:
            applied = list(_batches(replica, once=True, stop=stop))
    print_rows(applied, AppliedBatch, _BATCH_COLUMNS, shape)


def _by_slot(slot_wait: float, on_drop: OnDrop, apply_workers: int) -> Callable[..., SlotReplica]:
    """Makes a replica that a slot feeds; UsageError for what only a queue has."""
    if apply_workers > 1:
        raise click.UsageError("--apply-workers needs the queue: leave --source slot out.")
    if on_drop != "keep":
        raise click.UsageError("--on-drop drop needs the queue, which has an event of it: leave --source slot out.")
    return partial(SlotReplica, slot_wait=slot_wait)


def _apply(replica: Replica | SlotReplica, *, stop: base.StopSignals, as_json: bool) -> None:
    for batch in _batches(replica, once=False, stop=stop):
        _report(batch, as_json=as_json, has_lsn=isinstance(replica, SlotReplica))


def _batches(replica: Replica | SlotReplica, *, once: bool, stop: base.StopSignals) -> Iterator[AppliedBatch]:
    """The batches of a run; an error about rights says what is lacking."""

    def tables() -> set[str]:
        known = {*replica.state.tables, *replica.state.begun}
        if isinstance(replica, Replica):
            taken = source_tables(replica.source, replica.queue, replica.name)
            known |= {table.table_name for table in taken.values()}
        return known

    with rights_told(replica.source, replica.state.connection, tables):
        yield from replica.run(once=once, stop=stop)


def _report(batch: AppliedBatch, *, as_json: bool, has_lsn: bool) -> None:
    if as_json:
        click.echo(json_text(dataclasses.asdict(batch)))
    else:
        rows = f"{batch.inserted} inserted, {batch.updated} updated, {batch.deleted} deleted"
        rows += f", {batch.conflicts} conflicts" if batch.conflicts else ""
        rows += f", {batch.dead_letters} dead letters" if batch.dead_letters else ""
        place = f"LSN {lsn_text(batch.tick)}" if has_lsn else f"tick {batch.tick}"
        click.echo(printable(f"{batch.replica_name}: {place}, {rows} in {batch.seconds:.2f} s"))


@click.command("replicas")
@to_option
@listing_options
@base.dsn_option
def replicas_command(target: str, shape: Shape, dsn: str | None) -> None:
    """List the replicas that a target holds, with their lag: in time and events, of a slot in bytes."""
    with base.command_session(dsn) as source, connect(target) as there:
        found = replica_info(source, there)
    print_rows(found, ReplicaInfo, _REPLICA_COLUMNS, shape)


@click.command("replica-conflicts")
@click.argument("name", required=False)
@to_option
@listing_options
def replica_conflicts_command(name: str | None, *, target: str, shape: Shape) -> None:
    """List the conflicts that a replica has settled, oldest first: the rows of both sides, and what was done.

    Without NAME: those of all replicas that the target holds.
    """
    with connect(target) as there:
        found = conflict_info(there, name)
    print_rows(found, ConflictInfo, _CONFLICT_COLUMNS, shape)


@queue_command("skip-replica-changes")
@click.argument("name")
@to_option
@click.option("--tick", type=int, required=True, metavar="N", help="The last tick whose changes are left out.")
@listing_options
@base.dsn_option
def skip_replica_changes_command(
    queue: str, name: str, *, target: str, tick: int, shape: Shape, dsn: str | None
) -> None:
    """Have a replica that is stopped pass over all changes up to a tick; they are counted and noted, not applied.

    The tables differ from the source's then: gdq repair-tables makes them equal again.
    """
    with Replica(dsn, target, queue, name) as replica:
        skipped = replica.skip(tick)
    print_rows(skipped, SkipInfo, _SKIP_COLUMNS, shape)


@click.command("replica-skips")
@click.argument("name", required=False)
@to_option
@listing_options
def replica_skips_command(name: str | None, *, target: str, shape: Shape) -> None:
    """List the changes that replicas were told to pass over, oldest first.

    Without NAME: those of all replicas that the target holds.
    """
    with connect(target) as there:
        found = skip_info(there, name)
    print_rows(found, SkipInfo, _SKIP_COLUMNS, shape)


@queue_command("drop-replica")
@click.argument("name")
@to_option
@base.dsn_option
def drop_replica_command(queue: str, name: str, *, target: str, dsn: str | None) -> None:
    """Delete a replica's consumer, or its slot, and its position. The tables of the target stay."""
    with connect(target) as there:
        by_slot = is_fed_by_slot(there, name)
    with (SlotReplica if by_slot else Replica)(dsn, target, queue, name) as replica:
        known = replica.drop()
    base.talk(f"dropped replica {name} of {queue}" if known else f"already gone: replica {name} of {queue}")
