"""The commands for dead letters of replicas: changed rows that a target refused."""

from __future__ import annotations

import click

from gdq.cli.base import CommandFailure, talk
from gdq.cli.listing import Shape, listing_options, print_rows
from gdq.cli.replicate import to_option, triggers_option
from gdq.cli.retry import chosen_options, need_choice
from gdq.conninfo import connect
from gdq.consumers.replica.dead_letters import ReplicaDeadLetter
from gdq.consumers.replica.replay import (
    purge_replica_dead_letters,
    replay_replica_dead_letters,
    replica_dead_letters,
)
from gdq.consumers.replica.table import OnTriggers

_COLUMNS = (
    "dead_letter_id",
    "replica_name",
    "table_name",
    "operation",
    "key",
    "remote",
    "sqlstate",
    "reason",
    "tick",
    "died_at",
)


@click.command("replica-dead-letters")
@click.argument("name", required=False)
@to_option
@listing_options
def replica_dead_letters_command(name: str | None, *, target: str, shape: Shape) -> None:
    """List the changed rows that a target refused and does not have yet, oldest first.

    Without NAME: those of all replicas that the target holds.
    """
    with connect(target) as there:
        found = replica_dead_letters(there, name)
    print_rows(found, ReplicaDeadLetter, _COLUMNS, shape)


@click.command("replay-replica-dead-letters")
@click.argument("name")
@to_option
@triggers_option
@chosen_options
def replay_replica_dead_letters_command(
    name: str, *, target: str, triggers: OnTriggers, ids: tuple[int, ...], older_than: str | None, everything: bool
) -> None:
    """Bring rows that a target refused to their tables. Those that it refuses again stay dead letters."""
    need_choice(ids, older_than, everything)
    with connect(target, autocommit=True) as there:
        done = replay_replica_dead_letters(there, name, ids or None, older_than=older_than, triggers=triggers)
    talk(f"replayed {done.settled} of {name}")
    if done.refused:
        raise CommandFailure(
            f"the target refuses {done.refused} as before", hint=f"gdq replica-dead-letters {name} says why."
        )


@click.command("purge-replica-dead-letters")
@click.argument("name")
@to_option
@chosen_options
def purge_replica_dead_letters_command(
    name: str, *, target: str, ids: tuple[int, ...], older_than: str | None, everything: bool
) -> None:
    """Delete dead letters of a replica. The target's rows stay as they are, older than the source's."""
    need_choice(ids, older_than, everything)
    with connect(target, autocommit=True) as there:
        number = purge_replica_dead_letters(there, name, ids or None, older_than=older_than)
    talk(f"purged {number} of {name}")
