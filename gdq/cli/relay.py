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
from gdq.consumers.relay.registry import Registry
from gdq.consumers.relay.relay import RETRY_DELAY, Relay
from gdq.consumers.relay.sink import open_sink
from gdq.errors import SinkUnavailable
from gdq.source import MAX_EVENTS

log = logging.getLogger(__name__)

# Seconds between two tries while the receiver takes nothing.
_PAUSE_MIN, _PAUSE_MAX = 1.0, 60.0
# The begin of the names of the registry's settings.
_REGISTRY = "registry."


@queue_command("relay")
@click.argument("consumer")
@click.argument("address")
@click.option("--once", is_flag=True, help="Send everything committed so far, then exit (forces a tick).")
@click.option("--register", is_flag=True, help="Register the consumer first, unless it is: it gets changes from now.")
@click.option(
    "--copy", is_flag=True, help="First send the rows of tables that the consumer must copy; all, with --register."
)
@click.option(
    "--form",
    type=click.Choice(["json", "cloudevents", "debezium", "avro"]),
    default="json",
    show_default=True,
    help="The form of what is sent.",
)
@click.option(
    "--tombstones", is_flag=True, help="With --form debezium or avro: a record without a value after each delete."
)
@click.option("--registry", metavar="URL", help="With --form avro: the schema registry.")
@click.option(
    "--registry-read-only",
    is_flag=True,
    help="Look schemas up, and register none: others do so. The relay waits for it.",
)
@click.option("--as-text", metavar="C1,C2", help="With --form avro: columns to send as text.")
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
    copy: bool,
    form: Any,
    tombstones: bool,
    registry: str | None,
    registry_read_only: bool,
    as_text: str | None,
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

    With --copy a table comes first as a truncate and a read for each row; so after a resync.

    \b
    Example: gdq relay shop hooks 'https://hooks.example/{table}' --form cloudevents --settings hooks.txt
    """
    _check_form(form, registry, as_text, tombstones=tombstones)
    columns = {table: base.split_names(names) or [] for table, names in _pairs(keys, "--key").items()}
    options = (_file_settings(settings) if settings else {}) | _pairs(given, "--set")
    stop = base.StopSignals()

    def work(connection: Connection[Any]) -> None:
        nonlocal register
        if register:
            register_from_now(connection, queue, consumer, None, copy=copy)
            register = False  # made anew after somebody unregistered it, the consumer would miss changes silently
        with gdq.Consumer(connection, queue, consumer, max_events=max_events) as reader:
            _send_all(reader, relay, _Pauses(stop, once=once), copy=copy)

    known = _open_registry(registry, options, read_only=registry_read_only)
    with contextlib.closing(open_sink(address, options)) as sink:
        relay = Relay(
            sink, queue, consumer, form=form, keys=columns, tombstones=tombstones, registry=known,
            as_text=base.split_names(as_text) or [], retry_delay=timedelta(seconds=retry_delay),
        )  # fmt: skip
        name = gdq.batch_loop.application_name(queue, consumer)
        try:
            gdq.ticker.reconnecting(lambda: stop.connect(dsn, name), work, stop.sleep)
        except KeyboardInterrupt:
            raise base.Interrupted("interrupted: the batch at hand was rolled back") from None


def _check_form(form: str, registry: str | None, as_text: str | None, *, tombstones: bool) -> None:
    """UsageError for options that do not go with the form, or one that it lacks."""
    if tombstones and form not in ("debezium", "avro"):
        raise click.UsageError("--tombstones needs --form debezium or avro")
    if form != "avro" and (registry or as_text):
        raise click.UsageError("--registry and --as-text need --form avro")
    if form == "avro" and not registry:
        raise click.UsageError("--form avro needs --registry URL")


def _open_registry(url: str | None, options: dict[str, str], *, read_only: bool) -> Registry | None:
    """The schema registry; takes its settings, registry.NAME, out of the options. UsageError if it is missing."""
    if url is None:
        if read_only:
            raise click.UsageError("--registry-read-only needs --registry URL")
        return None
    names = [name for name in options if name.startswith(_REGISTRY)]
    given = {name.removeprefix(_REGISTRY): options.pop(name) for name in names}
    return Registry(url, given, read_only=read_only)


class _Pauses:
    """The pauses of a relay while the receiver takes nothing. `once`: it fails instead."""

    def __init__(self, stop: base.StopSignals, *, once: bool) -> None:
        self.stop = stop
        self.once = once
        self._next = _PAUSE_MIN

    def over(self) -> None:
        """The receiver takes something."""
        self._next = _PAUSE_MIN

    def wait(self, error: SinkUnavailable) -> bool:
        """Wait until the next try; False if the command is to end."""
        if self.once:
            raise error
        seconds = self._next if error.wait_seconds is None else error.wait_seconds
        log.warning("%s: trying again in %g s", error, seconds)
        self._next = min(self._next * 2, _PAUSE_MAX)
        return not self.stop.sleep(seconds)


def _send_all(reader: gdq.Consumer, relay: Relay, pauses: _Pauses, *, copy: bool) -> None:
    """Send all batches; `copy`: before, and when a table needs a resync, the tables that the consumer must copy."""
    if copy:
        _send_copies(reader, relay, pauses)
    while True:
        try:
            _send_batches(reader, relay, pauses)
        except SinkUnavailable as error:
            if not pauses.wait(error):
                return
        except gdq.ResyncRequired as error:
            if not copy or not (_send_copies(reader, relay, pauses) or pauses.stop()):
                raise
            log.warning("copied again: %s", error)
        else:
            return


def _send_batches(reader: gdq.Consumer, relay: Relay, pauses: _Pauses) -> None:
    """Send all batches; after an error none is open."""
    with contextlib.closing(reader.batches(once=pauses.once, stop=pauses.stop)) as batches:
        for batch in batches:
            relay.send(batch)
            pauses.over()


def _send_copies(reader: gdq.Consumer, relay: Relay, pauses: _Pauses) -> int:
    """Send the tables that the consumer must copy; returns their number. A pause keeps the copy and its snapshot."""
    copied = 0
    with contextlib.closing(reader.copies(stop=pauses.stop)) as copies:
        for copy in copies:
            log.info("copying table %s at snapshot %s", copy.table, copy.snapshot)
            while not copy.finished:
                try:
                    if not relay.send_copy(copy, stop=pauses.stop):
                        return copied
                    pauses.over()
                except SinkUnavailable as error:
                    if not pauses.wait(error):
                        return copied
            copied += 1
    return copied


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
