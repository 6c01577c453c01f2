"""Commands for groups of views that are refreshed as one."""

from __future__ import annotations

import click

import gdq
from gdq.cli.base import dsn_option, fields, json_option, list_rows, names, session, talk


@click.command("create-group")
@click.argument("group")
@click.argument("view", nargs=-1, required=True)
@dsn_option
def create_group(group: str, view: tuple[str, ...], dsn: str | None) -> None:
    """Store a group of views: refreshed at one snapshot, moved in one transaction, none of them alone.

    \b
    Example: gdq create-group totals by_country by_product
    """
    with session(dsn) as connection:
        made = gdq.create_group(connection, group, view)
    talk(f"created group {group}" if made else f"already there: group {group}")


@click.command("alter-group")
@click.argument("group")
@click.option("--add", metavar="V1,V2", help="Views to put into it.")
@click.option("--remove", metavar="V1,V2", help="Views to take out; they are refreshed by themselves then.")
@dsn_option
def alter_group(group: str, add: str | None, remove: str | None, dsn: str | None) -> None:
    """Change which views are in a group.

    \b
    Example: gdq alter-group totals --add by_month --remove by_product
    """
    if add is None and remove is None:
        raise click.UsageError("want --add or --remove")
    with session(dsn) as connection:
        changed = gdq.alter_group(connection, group, add=names(add) or (), remove=names(remove) or ())
    talk(f"changed group {group}" if changed else f"already so: group {group}")


@click.command("groups")
@dsn_option
@json_option
def groups(dsn: str | None, as_json: bool) -> None:
    """List groups of views and when they were refreshed."""
    list_rows(dsn, gdq.group_info, columns=fields(gdq.GroupInfo), as_json=as_json)


@click.command("drop-group")
@click.argument("group")
@dsn_option
def drop_group(group: str, dsn: str | None) -> None:
    """Forget a group; its views stay, and are refreshed one by one."""
    with session(dsn) as connection:
        known = gdq.drop_group(connection, group)
    talk(f"dropped group {group}" if known else f"already gone: group {group}")
