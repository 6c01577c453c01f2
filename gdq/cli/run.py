"""The commands that read a queue or tick it: ticker, tick, consume, peek."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from typing import Any

import click
from psycopg import Connection

import gdq.batch_loop
import gdq.ticker
from gdq.cli import base
from gdq.cli.consumer import register_from_now
from gdq.cli.handler import Handler
from gdq.cli.listing import Shape, listing_options, print_rows
from gdq.cli.queue_command import queue_command
from gdq.consumers.debezium.envelope import debezium_printer
from gdq.consumers.printer import print_events, print_sequences
from gdq.consumers.slot.source import SlotSource
from gdq.errors import GdqError
from gdq.retry import handle_each_event, settle_outcomes
from gdq.source import MAX_EVENTS, Event

log = logging.getLogger(__name__)

_DEAD_AFTER_SECONDS = 300.0

# What is done with each batch.
_HandOver = Callable[[Connection[Any], gdq.SourceBatch], None]


@click.command()
@click.option("--once", is_flag=True, help="Do what is due now, then exit.")
@click.option("--interval", type=base.Seconds(0.001), default=0.05, show_default=True, metavar="SECONDS")
@base.dsn_option
def ticker_command(once: bool, interval: float, dsn: str | None) -> None:
    """Take ticks and maintain the logs of all queues, until SIGTERM."""
    if once:
        with base.command_session(dsn, autocommit=True) as connection:
            gdq.tick_all(connection)
            gdq.maintain_all(connection)
        return
    stop = base.StopSignals()
    gdq.ticker.run_ticker(lambda: stop.connect(dsn, "gdq ticker"), interval_seconds=interval, stop=stop.sleep)


@queue_command("tick")
@base.dsn_option
def tick_command(queue: str, dsn: str | None) -> None:
    """Take a tick now and print its number."""
    with base.command_session(dsn, autocommit=True) as connection:
        number = gdq.take_tick(connection, queue)
    click.echo(number)


@queue_command("consume")
@click.argument("consumer")
@click.argument("handler", required=False)
@click.option("--once", is_flag=True, help="Process everything committed so far, then exit (forces a tick).")
@click.option("--register", is_flag=True, help="Register the consumer first, unless it is: it gets changes from now.")
@click.option("--json", "as_json", is_flag=True, help="Print events as JSON lines; the default without a handler.")
@click.option("--member", metavar="M", help="Work as this member of the consumer, beside other members.")
@click.option(
    "--dead-after",
    type=base.Seconds(),
    default=_DEAD_AFTER_SECONDS,
    show_default=True,
    metavar="SECONDS",
    help="Take over a batch whose member was not heard of for this long.",
)
@click.option(
    "--max-events",
    type=click.IntRange(min=1),
    default=MAX_EVENTS,
    show_default=True,
    metavar="N",
    help="Join ticks into batches of at most this many events; a single tick is never divided.",
)
@click.option("--each", is_flag=True, help="HANDLER takes one event: handler(connection, event).")
@click.option(
    "--retry-errors",
    type=base.Seconds(),
    metavar="SECONDS",
    help="With --each: if HANDLER fails, retry the event after this time.",
)
@click.option(
    "--source",
    type=click.Choice(["queue", "slot"]),
    default="queue",
    show_default=True,
    help="Read the queue, or the consumer's logical slot (gdq create-slot).",
)
@base.slot_wait_option
@click.option(
    "--format",
    "form",
    type=click.Choice(["gdq", "debezium"]),
    default="gdq",
    show_default=True,
    help="Print events in gdq's form, or in Debezium's envelope (gdq docs from-debezium).",
)
@click.option("--tombstones", is_flag=True, help="With --format debezium: a record without a value after each delete.")
@base.dsn_option
def consume_command(
    queue: str,
    consumer: str,
    handler: str | None,
    *,
    once: bool,
    register: bool,
    as_json: bool,
    member: str | None,
    dead_after: float,
    max_events: int,
    each: bool,
    retry_errors: float | None,
    source: str,
    slot_wait: float,
    form: str,
    tombstones: bool,
    dsn: str | None,
) -> None:
    """Hand the batches of a consumer to a handler, or print their events.

    Without HANDLER every event is a line of JSON, then the sequences of each batch.

    HANDLER is module:function. It is called as handler(connection, events) in the transaction that finishes the
    batch, so its writes there happen exactly once. To put events aside it returns a list of
    gdq.Retry(reason, delay=timedelta, event=event) and gdq.DeadLetter(reason, event=event).

    With --each it is called as handler(connection, event), in a savepoint: raising gdq.Retry or gdq.DeadLetter undoes
    its writes for that event and puts the event aside. Other errors roll the batch back; with --retry-errors they put
    the event aside too.

    \b
    Examples: gdq consume orders mirror shop.mirror:apply
              gdq consume orders mail shop.mail:send --each --retry-errors 60 --member $HOSTNAME
    """
    if source == "slot" and (each or register or member is not None):
        raise click.UsageError("--each, --register and --member need the queue: a slot has one reader and no retries")
    _check_handler(handler, as_json=as_json, each=each, retries=retry_errors is not None)
    _check_format(form, tombstones=tombstones, other=as_json or handler is not None)
    on_error = None if retry_errors is None else timedelta(seconds=retry_errors)
    if handler is None:
        hand_over = _for_printer(queue, form, has_lsn=source == "slot", tombstones=tombstones)
    else:
        hand_over = _for_handler(handler, each=each, on_error=on_error)
    cooperation: Any = {"member": member, "dead_after": timedelta(seconds=dead_after)}
    stop = base.StopSignals()

    def work(connection: Connection[Any]) -> None:
        nonlocal register
        if register:
            register_from_now(connection, queue, consumer, member)
            register = False  # made anew after somebody unregistered it, the consumer would miss changes silently
        try:
            reader: SlotSource | gdq.Consumer = (
                SlotSource(connection, queue, consumer, wait_seconds=slot_wait, pause=stop.sleep)
                if source == "slot"
                else gdq.Consumer(connection, queue, consumer, max_events=max_events, **cooperation)
            )
        except GdqError:
            if stop():
                return  # a signal came while it waited for the slot
            raise
        with reader:
            _take_batches(reader, hand_over, once=once, stop=stop)

    name = gdq.batch_loop.application_name(queue, consumer, member)
    try:
        gdq.ticker.reconnecting(lambda: stop.connect(dsn, name), work, stop.sleep)
    except KeyboardInterrupt:
        raise base.Interrupted("interrupted: the batch at hand was rolled back") from None


def _take_batches(
    reader: SlotSource | gdq.Consumer,
    hand_over: _HandOver,
    *,
    once: bool,
    stop: Callable[[], bool],
) -> None:
    """Hand over all batches; a member whose batch was taken over is rolled back and goes on with the next batch."""
    while True:
        try:
            with contextlib.closing(reader.batches(once=once, stop=stop)) as batches:
                for batch in batches:
                    hand_over(reader.connection, batch)
        except gdq.StaleBatch as error:
            if isinstance(reader, SlotSource) or reader.member is None:
                raise
            log.warning("%s: going on with the next batch", error)
        else:
            return


def _check_handler(handler: str | None, *, as_json: bool, each: bool, retries: bool) -> None:
    """UsageError for options that do not go with the handler, or need one."""
    if as_json and handler is not None:
        raise click.UsageError("--json prints the events itself and takes no handler")
    if (each and handler is None) or (retries and not each):
        raise click.UsageError("--retry-errors needs --each, and --each a handler")


def _check_format(form: str, *, tombstones: bool, other: bool) -> None:
    """UsageError for options of another format; `other`: a handler or --json is given."""
    if form == "debezium" and other:
        raise click.UsageError("--format debezium prints the events itself and takes no handler and no --json")
    if tombstones and form != "debezium":
        raise click.UsageError("--tombstones needs --format debezium")


def _for_printer(queue: str, form: str, *, has_lsn: bool, tombstones: bool) -> _HandOver:
    """Prints the events of each batch in gdq's form, or in Debezium's envelope."""
    if form == "debezium":
        envelope = debezium_printer(queue, has_lsn=has_lsn, tombstones=tombstones)
        return partial(_print, printer=envelope, sequences=False)
    return partial(_print, printer=print_events, sequences=True)


def _for_handler(name: str, *, each: bool, on_error: timedelta | None) -> _HandOver:
    """Hands each batch to the handler of this name; what the handler logs is shown from now on."""
    hand_over = partial(_hand_over, handler=Handler(name, each=each), each=each, on_error=on_error)
    base.show_all_logs()
    return hand_over


def _hand_over(
    connection: Connection[Any], batch: gdq.SourceBatch, *, handler: Handler, each: bool, on_error: timedelta | None
) -> None:
    """Hand the events of a batch to the handler, and put aside its outcomes; CommandFailure if a slot gets some."""
    events = handler.events(batch.events())
    with handler.errors():
        if not isinstance(batch, gdq.Batch):
            if handler(connection, events):
                raise base.CommandFailure(f"handler {handler.name} puts events aside: a slot has no retries")
        elif each:
            handle_each_event(batch, events, handler, on_error=on_error)
        else:
            settle_outcomes(batch, handler(connection, events))


def _print(
    connection: Connection[Any], batch: gdq.SourceBatch, *, printer: Callable[[Any, Any], Any], sequences: bool
) -> None:
    """Print the events of a batch; `sequences`: then those of the batch too."""
    printer(connection, batch.events())
    if sequences and isinstance(batch, gdq.Batch):
        print_sequences(batch.sequences())


@queue_command("peek")
@click.argument("consumer", required=False)
@click.option("--limit", type=click.IntRange(min=1), default=20, show_default=True, help="At most this many events.")
@listing_options
@base.dsn_option
def peek_command(queue: str, consumer: str | None, limit: int, shape: Shape, dsn: str | None) -> None:
    """Show the next events of a consumer without consuming them.

    Without CONSUMER: those of the consumer that is furthest behind. Takes a tick first, to show all committed events.
    """
    with base.command_session(dsn, autocommit=True) as connection:
        events = gdq.peek(connection, queue, consumer, limit=limit)
    print_rows(events, Event, ("id", "time", "op", "table", "key", "old", "new"), shape)
