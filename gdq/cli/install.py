"""The commands that install gdq in a database, upgrade it and remove it."""

from __future__ import annotations

import click

from gdq.cli.base import command_session, dsn_option, retry_locked, sql_option, talk
from gdq.consumers.refresh.new_view import compile_views
from gdq.consumers.slot.slot import slot_info
from gdq.installer import install as installer


@click.command()
@dsn_option
@sql_option
def install_command(dsn: str | None, as_sql: bool) -> None:
    """Install gdq in the database, or upgrade it."""
    if as_sql:
        click.echo(installer.install_script(), nl=False)
        return
    result = installer.install(dsn)
    if result.changed:
        with command_session(dsn, autocommit=True) as connection:
            compile_views(connection)
    for notice in result.notices:
        talk(notice)
    talk(
        "format of captured tables: typed, as the event triggers follow DDL"
        if result.event_triggers
        else "format of captured tables: json, as no event triggers follow DDL: capture takes 1.3 to 1.4 x the time of"
        " typed, and logs whole rows: also in mode pk, without columns, exclude and where"
    )
    talk(f"{'installed' if result.changed else 'already at'} {result.revision}")


@click.command()
@dsn_option
@sql_option
@click.option("--yes", is_flag=True, help="Do not ask.")
def uninstall_command(dsn: str | None, as_sql: bool, yes: bool) -> None:
    """Remove gdq with all queues and logs. The tables stay as they are; slots stay too, and their names are printed."""
    if as_sql:
        click.echo(installer.uninstall_script(), nl=False)
        return
    if not yes:
        click.confirm("Remove gdq with all its queues, consumers and unread changes?", abort=True, err=True)
    talk(
        "uninstalled"
        if retry_locked(dsn, installer.uninstall, any_version=True)
        else "already gone: gdq is not installed here"
    )
    with command_session(dsn, autocommit=True) as connection:
        slots = [one.slot_name for one in slot_info(connection)]
    if slots:
        talk(f"slots are still there and keep the write-ahead log: drop them with gdq drop-slot: {', '.join(slots)}")


@click.command("create-event-triggers")
@dsn_option
def create_event_triggers_command(dsn: str | None) -> None:
    """Create the event triggers that keep capture in step with DDL.

    Most servers allow this only to a superuser: connect as one, after `gdq install`.
    """
    with command_session(dsn) as connection:
        made = installer.create_event_triggers(connection)
    talk("created event triggers" if made else "already on: the event triggers of gdq")
