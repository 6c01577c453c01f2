"""The commands that read a queue or tick it: ticker, tick, consume, peek."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterable
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
from gdq.retry import RetryOutcome, handle_each_event, settle_outcomes
from gdq.source import MAX_EVENTS, Event

log = logging.getLogger(__name__)

_DEAD_AFTER_SECONDS = 300.0

# What is done with each batch.
_HandOver = Callable[[Connection[Any], gdq.SourceBatch | gdq.CopyBatch], None]


@click.command()
@click.option("--once", is_flag=True, help="Do what is due now, then exit.")
@click.option(
    "--interval",
    type=base.Seconds(0.001),
    default=gdq.ticker.TICK_INTERVAL_SECONDS,
    show_default=True,
    metavar="SECONDS",
    help="The most between two looks for changes, if ticker_max_lag is longer.",
)
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
@click.option(
    "--copy", is_flag=True, help="First hand over the rows of tables that the consumer must copy; all, with --register."
)
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
    copy: bool,
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

    With --copy a table comes first as a truncate and a read for each row, in one transaction; so after a resync.

    With --each it is called as handler(connection, event), in a savepoint: raising gdq.Retry or gdq.DeadLetter undoes
    its writes for that event and puts the event aside. Other errors roll the batch back; with --retry-errors they put
    the event aside too.

    \b
    Examples: gdq consume orders mirror shop.mirror:apply
              gdq consume orders mail shop.mail:send --each --retry-errors 60 --member $HOSTNAME
    """
    _check_source(source, member, copy=copy, other=each or register)
    _check_handler(handler, form, as_json=as_json, each=each, retries=retry_errors is not None, tombstones=tombstones)
    if handler is None:
        hand_over = _for_printer(queue, form, has_lsn=source == "slot", tombstones=tombstones)
    else:
        hand_over = _for_handler(handler, each=each, retry_errors=retry_errors)
    cooperation: Any = {"member": member, "dead_after": timedelta(seconds=dead_after)}
    stop = base.StopSignals()

    def work(connection: Connection[Any]) -> None:
        nonlocal register
        if register:
            register_from_now(connection, queue, consumer, member, copy=copy)
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
            _take_batches(reader, hand_over, once=once, copy=copy, stop=stop)

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
    copy: bool,
    stop: Callable[[], bool],
) -> None:
    """Hand over all batches; a member whose batch was taken over is rolled back and goes on with the next batch.

    `copy`: before, and when a table needs a resync, the tables that the consumer must copy.
    """
    if copy:
        _take_copies(reader, hand_over, stop)
    while True:
        try:
            with contextlib.closing(reader.batches(once=once, stop=stop)) as batches:
                for batch in batches:
                    hand_over(reader.connection, batch)
        except gdq.StaleBatch as error:
            if isinstance(reader, SlotSource) or reader.member is None:
                raise
            log.warning("%s: going on with the next batch", error)
        except gdq.ResyncRequired as error:
            if not copy or not _take_copies(reader, hand_over, stop):
                raise
            log.warning("copied again: %s", error)
        else:
            return


def _take_copies(reader: SlotSource | gdq.Consumer, hand_over: _HandOver, stop: Callable[[], bool]) -> int:
    """Hand over the tables that the consumer must copy; returns their number."""
    copied = 0
    if isinstance(reader, gdq.Consumer):
        with contextlib.closing(reader.copies(stop=stop)) as copies:
            for copy in copies:
                log.info("copying table %s at snapshot %s", copy.table, copy.snapshot)
                hand_over(reader.connection, copy)
                copied += 1
    return copied


def _check_source(source: str, member: str | None, *, copy: bool, other: bool) -> None:
    """UsageError for options that a source, or a consumer with members, does not have; `other`: --each, --register."""
    if copy and (source == "slot" or member is not None):
        raise click.UsageError("--copy is for one reader of the queue: without --member and --source slot")
    if source == "slot" and (other or member is not None):
        raise click.UsageError("--each, --register and --member need the queue: a slot has one reader and no retries")


def _check_handler(
    handler: str | None, form: str, *, as_json: bool, each: bool, retries: bool, tombstones: bool
) -> None:
    """UsageError for options that do not go with the handler or the format, or need one."""
    if as_json and handler is not None:
        raise click.UsageError("--json prints the events itself and takes no handler")
    if (each and handler is None) or (retries and not each):
        raise click.UsageError("--retry-errors needs --each, and --each a handler")
    if form == "debezium" and (as_json or handler is not None):
        raise click.UsageError("--format debezium prints the events itself and takes no handler and no --json")
    if tombstones and form != "debezium":
        raise click.UsageError("--tombstones needs --format debezium")


def _for_printer(queue: str, form: str, *, has_lsn: bool, tombstones: bool) -> _HandOver:
    """Prints the events of each batch in gdq's form, or in Debezium's envelope."""
    if form == "debezium":
        envelope = debezium_printer(queue, has_lsn=has_lsn, tombstones=tombstones)
        return partial(_print, printer=envelope, sequences=False)
    return partial(_print, printer=print_events, sequences=True)


def _for_handler(name: str, *, each: bool, retry_errors: float | None) -> _HandOver:
    """Hands each batch to the handler of this name; what the handler logs is shown from now on."""
    on_error = None if retry_errors is None else timedelta(seconds=retry_errors)
    hand_over = partial(_hand_over, handler=Handler(name, each=each), each=each, on_error=on_error)
    base.show_all_logs()
    return hand_over


def _hand_over(
    connection: Connection[Any],
    batch: gdq.SourceBatch | gdq.CopyBatch,
    *,
    handler: Handler,
    each: bool,
    on_error: timedelta | None,
) -> None:
    """Hand the events of a batch to the handler, and put aside its outcomes."""
    events = handler.events(batch.events())
    with handler.errors():
        if not isinstance(batch, gdq.Batch):
            kind = "copy" if isinstance(batch, gdq.CopyBatch) else "slot"
            _hand_over_all(connection, events if each else [events], handler, kind)
        elif each:
            handle_each_event(batch, events, handler, on_error=on_error)
        else:
            settle_outcomes(batch, handler(connection, events))


def _hand_over_all(connection: Connection[Any], given: Iterable[Any], handler: Handler, kind: str) -> None:
    """Hand over what cannot be put aside; CommandFailure if the handler tries."""
    refused = base.CommandFailure(f"handler {handler.name} puts events aside: a {kind} has no retries")
    try:
        for one in given:
            if handler(connection, one):
                raise refused
    except RetryOutcome as outcome:
        raise refused from outcome


def _print(
    connection: Connection[Any],
    batch: gdq.SourceBatch | gdq.CopyBatch,
    *,
    printer: Callable[[Any, Any], Any],
    sequences: bool,
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
        events = [event.in_json() for event in gdq.peek(connection, queue, consumer, limit=limit)]
    print_rows(events, Event, ("id", "time", "op", "table", "key", "old", "new"), shape)
