"""The command that alters captured tables where event triggers cannot follow."""

from __future__ import annotations

from typing import IO

import click

from gdq.cli.base import dsn_option, retry_locked, table_names, talk


@click.command("apply-ddl")
@click.argument("queue")
@click.option("-f", "--file", required=True, type=click.File(), help="File with the commands; - for stdin.")
@click.option("--lock", metavar="T1,T2", help="Lock these tables first.")
@dsn_option
def apply_ddl(queue: str, file: IO[str], lock: str | None, dsn: str | None) -> None:
    """Run DDL and keep capture in step with it, in one transaction.

    The way to alter captured tables where event triggers are refused. Tries again while writers hold a table.

    \b
    Example: gdq apply-ddl shop -f add_column.sql --lock public.orders
    """
    from gdq import ddl  # noqa: PLC0415

    text = file.read()
    count = retry_locked(dsn, lambda connection: ddl.apply_ddl(connection, queue, text, lock=table_names(lock)))
    talk(f"applied: {count} captured table(s) with new columns")
