"""The command that sends a consumer's events on: relay."""

from __future__ import annotations

import contextlib
import logging
import re
from datetime import timedelta
from pathlib import Path
from typing import Any

import click
from psycopg import Connection

import gdq.batch_loop
import gdq.ticker
from gdq.cli import base
from gdq.cli.consumer import register_from_now
from gdq.cli.queue_command import queue_command
from gdq.consumers.relay.relay import RETRY_DELAY, Relay
from gdq.consumers.relay.sink import open_sink
from gdq.errors import SinkUnavailable
from gdq.source import MAX_EVENTS

log = logging.getLogger(__name__)

# Seconds between two tries while the receiver takes nothing.
_PAUSE_MIN, _PAUSE_MAX = 1.0, 60.0


@queue_command("relay")
@click.argument("consumer")
@click.argument("address")
@click.option("--once", is_flag=True, help="Send everything committed so far, then exit (forces a tick).")
@click.option("--register", is_flag=True, help="Register the consumer first, unless it is: it gets changes from now.")
@click.option(
    "--form",
    type=click.Choice(["json", "cloudevents", "debezium"]),
    default="json",
    show_default=True,
    help="The form of what is sent.",
)
@click.option("--tombstones", is_flag=True, help="With --form debezium: a record without a value after each delete.")
@click.option(
    "--key",
    "keys",
    metavar="TABLE=C1,C2",
    multiple=True,
    help="The key of a table's events, in place of its primary key. May be repeated.",
)
@click.option("--set", "given", metavar="NAME=VALUE", multiple=True, help="A setting of the sink. May be repeated.")
@click.option(
    "--settings",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    help="A file of settings, NAME=VALUE in each line: for passwords, which --set would show to others.",
)
@click.option(
    "--retry-delay",
    type=base.Seconds(0.001),
    default=RETRY_DELAY.total_seconds(),
    show_default=True,
    metavar="SECONDS",
    help="The pause before an event that was refused is tried again; doubled each time, up to an hour.",
)
@click.option(
    "--max-events",
    type=click.IntRange(min=1),
    default=MAX_EVENTS,
    show_default=True,
    metavar="N",
    help="Join ticks into batches of at most this many events; a single tick is never divided.",
)
@base.dsn_option
def relay_command(
    queue: str,
    consumer: str,
    address: str,
    *,
    once: bool,
    register: bool,
    form: Any,
    tombstones: bool,
    keys: tuple[str, ...],
    given: tuple[str, ...],
    settings: Path | None,
    retry_delay: float,
    max_events: int,
    dsn: str | None,
) -> None:
    """Send a consumer's events on to a web hook or another receiver.

    ADDRESS is the receiver: http:// or https:// for a web hook, nats:// or tls:// for NATS JetStream,
    kafka:// for Kafka. Places such as {table} and {key} in it are filled in for each event.

    Events of one key arrive in their order. One that is refused is tried again later, and only its key waits. While the
    receiver takes nothing at all the command waits, too; with --once it fails.

    \b
    Example: gdq relay shop hooks 'https://hooks.example/{table}' --form cloudevents --settings hooks.txt
    """
    if tombstones and form != "debezium":
        raise click.UsageError("--tombstones needs --form debezium")
    columns = {table: base.split_names(names) or [] for table, names in _pairs(keys, "--key").items()}
    options = (_file_settings(settings) if settings else {}) | _pairs(given, "--set")
    stop = base.StopSignals()

    def work(connection: Connection[Any]) -> None:
        nonlocal register
        if register:
            register_from_now(connection, queue, consumer, None)
            register = False  # made anew after somebody unregistered it, the consumer would miss changes silently
        with gdq.Consumer(connection, queue, consumer, max_events=max_events) as reader:
            _send_batches(reader, relay, once=once, stop=stop)

    with contextlib.closing(open_sink(address, options)) as sink:
        relay = Relay(
            sink, queue, consumer, form=form, keys=columns, tombstones=tombstones,
            retry_delay=timedelta(seconds=retry_delay),
        )  # fmt: skip
        name = gdq.batch_loop.application_name(queue, consumer)
        try:
            gdq.ticker.reconnecting(lambda: stop.connect(dsn, name), work, stop.sleep)
        except KeyboardInterrupt:
            raise base.Interrupted("interrupted: the batch at hand was rolled back") from None


def _send_batches(reader: gdq.Consumer, relay: Relay, *, once: bool, stop: base.StopSignals) -> None:
    """Send all batches; while the receiver takes nothing, wait outside of a transaction."""
    pause = _PAUSE_MIN
    while True:
        try:
            with contextlib.closing(reader.batches(once=once, stop=stop)) as batches:
                for batch in batches:
                    relay.send(batch)
                    pause = _PAUSE_MIN
        except SinkUnavailable as error:
            if once:
                raise
            seconds = pause if error.wait_seconds is None else error.wait_seconds
            log.warning("%s: trying again in %g s", error, seconds)
            pause = min(pause * 2, _PAUSE_MAX)
            if stop.sleep(seconds):
                return
        else:
            return


def _pairs(given: tuple[str, ...], option: str) -> dict[str, str]:
    found = {}
    for text in given:
        name, equals, value = text.partition("=")
        if not name or not equals:
            raise click.BadParameter(f"{text!r} is not NAME=VALUE", param_hint=option)
        found[name.strip()] = value.strip()
    return found


def _file_settings(path: Path) -> dict[str, str]:
    lines = [line.strip() for line in path.read_text(encoding="utf-8").splitlines()]
    return _pairs(tuple(line for line in lines if line and not re.match("[#;]", line)), "--settings")
