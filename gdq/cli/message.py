"""The command for messages of an application: insert-event."""

from __future__ import annotations

import json
import sys
from typing import Any

import click
from psycopg.types.json import Jsonb

import gdq
from gdq.cli.base import command_session, dsn_option
from gdq.cli.queue_command import queue_command


@queue_command("insert-event")
@click.argument("kind", metavar="TYPE")
@click.argument("data")
@click.option("--extra", multiple=True, metavar="TEXT", help="Up to four more texts, in order.")
@click.option("--text", "as_text", is_flag=True, help="DATA is any text, not JSON.")
@dsn_option
def insert_event_command(
    *, queue: str, kind: str, data: str, extra: tuple[str, ...], as_text: bool, dsn: str | None
) -> None:
    """Put a message into a queue and print its number. DATA is JSON; - reads it from stdin.

    \b
    Example: gdq insert-event orders paid '{"order": 7}'
    """
    text = sys.stdin.read() if data == "-" else data
    value: Any = text
    if not as_text:
        try:
            json.loads(text)
        except ValueError as error:
            raise click.BadParameter(f"no JSON: {error}; for other text give --text", param_hint="DATA") from None
        value = Jsonb(text, dumps=str)  # unchanged: numbers must not go through a float
    with command_session(dsn) as connection:
        number = gdq.insert_event(connection, queue, kind, value, *extra)
    click.echo(number)
