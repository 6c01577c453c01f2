"""Commands for groups of views that are refreshed as one."""

from __future__ import annotations

import click

import gdq
from gdq.cli.base import command_session, dsn_option, split_names, talk
from gdq.cli.listing import Shape, list_rows, listing_options


@click.command("create-group")
@click.argument("group")
@click.argument("view", nargs=-1, required=True)
@dsn_option
def create_group_command(group: str, view: tuple[str, ...], dsn: str | None) -> None:
    """Store a group of views, which are refreshed together.

    They are then refreshed in one transaction at one snapshot, and no more one by one.

    \b
    Example: gdq create-group totals by_country by_product
    """
    with command_session(dsn) as connection:
        made = gdq.create_group(connection, group, view)
    talk(f"created group {group}" if made else f"already there: group {group}")


@click.command("alter-group")
@click.argument("group")
@click.option("--add", metavar="V1,V2", help="Views to add.")
@click.option("--remove", metavar="V1,V2", help="Views to remove; they are then refreshed alone.")
@dsn_option
def alter_group_command(group: str, add: str | None, remove: str | None, dsn: str | None) -> None:
    """Add views to a group, or remove some.

    \b
    Example: gdq alter-group totals --add by_month --remove by_product
    """
    if add is None and remove is None:
        raise click.UsageError("give --add or --remove")
    with command_session(dsn) as connection:
        changed = gdq.alter_group(connection, group, add=split_names(add) or (), remove=split_names(remove) or ())
    talk(f"changed group {group}" if changed else f"already so: group {group}")


@click.command("groups")
@listing_options
@dsn_option
def groups_command(shape: Shape, dsn: str | None) -> None:
    """List groups of views with the time of their last refresh."""
    columns = ("group_name", "queue_name", "views", "last_refresh", "error")
    list_rows(dsn, gdq.group_info, row_type=gdq.GroupInfo, columns=columns, shape=shape)


@click.command("drop-group")
@click.argument("group")
@dsn_option
def drop_group_command(group: str, dsn: str | None) -> None:
    """Delete a group. Its views stay, and are refreshed one by one."""
    with command_session(dsn) as connection:
        known = gdq.drop_group(connection, group)
    talk(f"dropped group {group}" if known else f"already gone: group {group}")
