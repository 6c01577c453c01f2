"""The commands that read a queue or keep it going: ticker, tick, consume, peek."""

from __future__ import annotations

import contextlib
import importlib
import logging
import sys
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any

import click
import psycopg
from psycopg import Connection

import gdq.consumer
import gdq.ticker
from gdq.cli.base import (
    Failure,
    Stop,
    connect_checked,
    dsn_option,
    fields,
    json_option,
    print_rows,
    session,
    slot_wait_option,
)
from gdq.consumers.debezium.envelope import printer
from gdq.consumers.printer import print_sequences
from gdq.consumers.slot.source import SlotSource
from gdq.errors import GdqError
from gdq.retry import Outcome, handle_each, settle
from gdq.source import Event

log = logging.getLogger(__name__)

SECONDS = click.FloatRange(min=0)
DEAD_AFTER_SECONDS = 300.0


@click.command()
@click.option("--once", is_flag=True, help="End when nothing is due.")
@click.option("--interval", type=click.FloatRange(min=0.001), default=0.05, show_default=True, metavar="SECONDS")
@dsn_option
def ticker(once: bool, interval: float, dsn: str | None) -> None:
    """Take ticks and maintain the logs of all queues, until SIGTERM."""
    if once:
        with session(dsn, autocommit=True) as connection:
            gdq.tick_all(connection)
            gdq.maintain_all(connection)
        return
    stop = Stop()
    gdq.ticker.run(lambda: connect_checked(dsn, "gdq ticker"), interval_seconds=interval, stop=stop.sleep)


@click.command()
@click.argument("queue")
@dsn_option
def tick(queue: str, dsn: str | None) -> None:
    """Take a tick now and print its number."""
    with session(dsn, autocommit=True) as connection:
        number = gdq.take_tick(connection, queue)
    click.echo(number)


@click.command()
@click.argument("queue")
@click.argument("consumer")
@click.argument("handler", default="printer", metavar="[HANDLER]")
@click.option("--once", is_flag=True, help="Process everything committed so far, then exit (forces a tick).")
@click.option("--json", "as_json", is_flag=True, help="Print events as JSON lines: what happens without a handler.")
@click.option("--member", metavar="M", help="Work as this member of the consumer, beside the others.")
@click.option(
    "--dead-after",
    type=SECONDS,
    default=DEAD_AFTER_SECONDS,
    show_default=True,
    metavar="SECONDS",
    help="Take over a batch another member has held longer than this.",
)
@click.option("--each", is_flag=True, help="HANDLER takes one event: handler(connection, event).")
@click.option(
    "--retry-errors",
    type=SECONDS,
    metavar="SECONDS",
    help="With --each: when HANDLER fails, retry the event after this time.",
)
@click.option(
    "--source",
    type=click.Choice(["queue", "slot"]),
    default="queue",
    show_default=True,
    help="Read the queue, or the consumer's logical slot (gdq create-slot).",
)
@slot_wait_option
@click.option(
    "--format",
    "form",
    type=click.Choice(["gdq", "debezium"]),
    default="gdq",
    show_default=True,
    help="Print events in gdq's form, or in Debezium's envelope (docs/from-debezium.md).",
)
@click.option("--tombstones", is_flag=True, help="With --format debezium: a record without a value after each delete.")
@dsn_option
def consume(
    queue: str,
    consumer: str,
    handler: str,
    *,
    once: bool,
    as_json: bool,
    member: str | None,
    dead_after: float,
    each: bool,
    retry_errors: float | None,
    source: str,
    slot_wait: float,
    form: str,
    tombstones: bool,
    dsn: str | None,
) -> None:
    """Hand the batches of a consumer to a handler; without one print every event as a line of JSON, then the
    sequences of each batch.

    HANDLER is module:function or a name in gdq.consumers. It is called as handler(connection, events) in the
    transaction that finishes the batch: what it writes there is written exactly once. What it returns is put aside: a
    list of gdq.Retry(reason, delay=timedelta, event=event) and gdq.DeadLetter(reason, event=event).

    With --each it is called as handler(connection, event), in a savepoint of its own: raising gdq.Retry or
    gdq.DeadLetter undoes what it did for that event and puts it aside. Other errors roll the batch back, unless
    --retry-errors puts the event aside then too.

    \b
    Examples: gdq consume orders mirror shop.mirror:apply
              gdq consume orders mail shop.mail:send --each --retry-errors 60 --member $HOSTNAME
    """
    if as_json and handler != "printer":
        raise click.UsageError("--json prints the events itself and takes no handler")
    if (each and handler == "printer") or (retry_errors is not None and not each):
        raise click.UsageError("--retry-errors needs --each, and --each a handler")
    if source == "slot" and (each or member is not None):
        raise click.UsageError("--each and --member need the queue: a slot has one reader and no retries")
    _check_format(form, tombstones=tombstones, other=as_json or handler != "printer")
    function = _debezium(queue, source, tombstones) if form == "debezium" else _load_handler(handler)
    on_error = None if retry_errors is None else timedelta(seconds=retry_errors)
    longest = timedelta(seconds=dead_after)
    stop = Stop()

    def work(connection: Connection[Any]) -> None:
        with contextlib.ExitStack() as opened:
            try:
                reader: SlotSource | gdq.Consumer = (
                    SlotSource(connection, queue, consumer, wait_seconds=slot_wait, pause=stop.sleep)
                    if source == "slot"
                    else gdq.Consumer(connection, queue, consumer, member=member, dead_after=longest)
                )
            except GdqError:
                if stop():
                    return  # while it waited for the slot
                raise
            opened.enter_context(reader)
            for batch in reader.batches(once=once, stop=stop):
                with _handler_errors(handler):
                    _hand_over(connection, batch, handler, function, on_error=on_error, each=each)
                    if handler == "printer" and form == "gdq" and isinstance(batch, gdq.Batch):
                        print_sequences(batch.sequences())

    name = gdq.consumer.application_name(queue, consumer, member)
    try:
        gdq.ticker.reconnecting(lambda: connect_checked(dsn, name), work, stop.sleep)
    except KeyboardInterrupt:
        raise Failure("interrupted: the batch at hand was rolled back") from None


def _check_format(form: str, *, tombstones: bool, other: bool) -> None:
    """UsageError where options of another format are given; `other`: a handler or --json is."""
    if form == "debezium" and other:
        raise click.UsageError("--format debezium prints the events itself and takes no handler and no --json")
    if tombstones and form != "debezium":
        raise click.UsageError("--tombstones needs --format debezium")


def _debezium(queue: str, source: str, tombstones: bool) -> Callable[[Any, Any], Any]:
    """The handler that prints Debezium's envelope."""
    return printer(queue, has_lsn=source == "slot", tombstones=tombstones)


def _hand_over(
    connection: Connection[Any],
    batch: gdq.SourceBatch,
    handler: str,
    function: Callable[[Any, Any], Any],
    *,
    each: bool,
    on_error: timedelta | None,
) -> None:
    """Hand the events of a batch to the handler, and put aside what it returns; Failure where that cannot be done."""
    if not isinstance(batch, gdq.Batch):
        if function(connection, batch.events()):
            raise Failure(f"handler {handler} puts events aside: a slot has no retries")
    elif each:
        handle_each(batch, batch.events(), function, on_error=on_error)
    else:
        settle(batch, function(connection, batch.events()) or ())


@click.command()
@click.argument("queue")
@click.argument("consumer", required=False)
@click.option("--limit", type=click.IntRange(min=1), default=20, show_default=True, help="At most this many events.")
@json_option
@dsn_option
def peek(queue: str, consumer: str | None, limit: int, as_json: bool, dsn: str | None) -> None:
    """Show the events that a consumer gets next, without consuming them.

    Without CONSUMER: from the consumer that is furthest behind. Takes a tick, so that all that is committed shows.
    """
    with session(dsn, autocommit=True) as connection:
        events = gdq.peek(connection, queue, consumer, limit=limit)
    print_rows(events, fields(Event), as_json=as_json)


@contextlib.contextmanager
def _handler_errors(name: str) -> Iterator[None]:
    """Log an error of the handler's own with its traceback and end; those of gdq and the server pass through."""
    try:
        yield
    except (psycopg.Error, GdqError, OSError):
        raise
    except Outcome as outcome:
        raise Failure(
            f"handler {name} raised {type(outcome).__name__}: {outcome}",
            hint="A handler of batches returns it, with event=; with --each it may be raised.",
        ) from outcome
    except Exception as error:
        log.exception("handler %s failed, the batch is rolled back", name)
        raise Failure(f"handler {name}: {type(error).__name__}: {error}") from error


def _load_handler(name: str) -> Callable[[Any, Any], Any]:
    """The function `module:function`, or `consume` of a module in gdq.consumers."""
    module, _, function = name.partition(":")
    if not function:
        module, function = f"gdq.consumers.{module}", "consume"
    elif "" not in sys.path:
        sys.path.insert(0, "")  # an installed command does not look in the current folder
    try:
        loaded = getattr(importlib.import_module(module), function)
    except (ModuleNotFoundError, AttributeError) as error:
        raise Failure(
            f"no handler {name}: {error}", hint="HANDLER is module:function, or a name in gdq.consumers."
        ) from error
    if not callable(loaded):
        raise Failure(f"handler {name} is not a function")
    handler: Callable[[Any, Any], Any] = loaded
    return handler
