"""The commands that read a queue or tick it: ticker, tick, consume, peek."""

from __future__ import annotations

import contextlib
import importlib
import logging
import sys
from collections.abc import Callable, Iterator
from datetime import timedelta
from functools import partial
from typing import Any

import click
import psycopg
from psycopg import Connection

import gdq.consumer
import gdq.ticker
from gdq.cli import base
from gdq.consumers.debezium.envelope import debezium_printer
from gdq.consumers.printer import print_sequences
from gdq.consumers.slot.source import SlotSource
from gdq.errors import GdqError
from gdq.retry import RetryOutcome, handle_each_event, settle_outcomes
from gdq.source import MAX_EVENTS, Event

log = logging.getLogger(__name__)

_DEAD_AFTER_SECONDS = 300.0


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
    gdq.ticker.run_ticker(lambda: base.connect_checked(dsn, "gdq ticker"), interval_seconds=interval, stop=stop.sleep)


@click.command()
@click.argument("queue")
@base.dsn_option
def tick_command(queue: str, dsn: str | None) -> None:
    """Take a tick now and print its number."""
    with base.command_session(dsn, autocommit=True) as connection:
        number = gdq.take_tick(connection, queue)
    click.echo(number)


@click.command()
@click.argument("queue")
@click.argument("consumer")
@click.argument("handler", default="printer", metavar="[HANDLER]")
@click.option("--once", is_flag=True, help="Process everything committed so far, then exit (forces a tick).")
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
    help="Print events in gdq's form, or in Debezium's envelope (docs/from-debezium.md).",
)
@click.option("--tombstones", is_flag=True, help="With --format debezium: a record without a value after each delete.")
@base.dsn_option
def consume_command(
    queue: str,
    consumer: str,
    handler: str,
    *,
    once: bool,
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
    """Hand the batches of a consumer to a handler; without one print every event as a line of JSON, then the
    sequences of each batch.

    HANDLER is module:function or a name in gdq.consumers. It is called as handler(connection, events) in the
    transaction that finishes the batch, so its writes there happen exactly once. To put events aside it returns a
    list of gdq.Retry(reason, delay=timedelta, event=event) and gdq.DeadLetter(reason, event=event).

    With --each it is called as handler(connection, event), in a savepoint: raising gdq.Retry or gdq.DeadLetter undoes
    its writes for that event and puts the event aside. Other errors roll the batch back; with --retry-errors they put
    the event aside too.

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
    sequences = handler == "printer" and form == "gdq"
    hand_over = partial(
        _hand_over, handler=handler, function=function, each=each, on_error=on_error, sequences=sequences
    )
    cooperation: Any = {"member": member, "dead_after": timedelta(seconds=dead_after)}
    stop = base.StopSignals()

    def work(connection: Connection[Any]) -> None:
        with contextlib.ExitStack() as opened:
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
            opened.enter_context(reader)
            _take_batches(reader, hand_over, once=once, stop=stop)

    name = gdq.consumer.application_name(queue, consumer, member)
    try:
        gdq.ticker.reconnecting(lambda: base.connect_checked(dsn, name), work, stop.sleep)
    except KeyboardInterrupt:
        raise base.CommandFailure("interrupted: the batch at hand was rolled back") from None


def _take_batches(
    reader: SlotSource | gdq.Consumer,
    hand_over: Callable[[Connection[Any], gdq.SourceBatch], None],
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


def _check_format(form: str, *, tombstones: bool, other: bool) -> None:
    """UsageError for options of another format; `other`: a handler or --json is given."""
    if form == "debezium" and other:
        raise click.UsageError("--format debezium prints the events itself and takes no handler and no --json")
    if tombstones and form != "debezium":
        raise click.UsageError("--tombstones needs --format debezium")


def _debezium(queue: str, source: str, tombstones: bool) -> Callable[[Any, Any], Any]:
    """The handler that prints Debezium's envelope."""
    return debezium_printer(queue, has_lsn=source == "slot", tombstones=tombstones)


def _hand_over(
    connection: Connection[Any],
    batch: gdq.SourceBatch,
    *,
    handler: str,
    function: Callable[[Any, Any], Any],
    each: bool,
    on_error: timedelta | None,
    sequences: bool,
) -> None:
    """Hand the events of a batch to the handler, and put aside its outcomes; CommandFailure if a slot gets some.

    `sequences`: print those of the batch too.
    """
    origin = _Origin()
    events = origin.of_gdq(batch.events())
    call = function if handler == "printer" else origin.of_handler(function)
    with _handler_errors(handler, origin):
        if not isinstance(batch, gdq.Batch):
            if call(connection, events):
                raise base.CommandFailure(f"handler {handler} puts events aside: a slot has no retries")
        elif each:
            handle_each_event(batch, events, call, on_error=on_error)
        else:
            settle_outcomes(batch, call(connection, events) or ())
        if sequences and isinstance(batch, gdq.Batch):
            print_sequences(batch.sequences())


@click.command()
@click.argument("queue")
@click.argument("consumer", required=False)
@click.option("--limit", type=click.IntRange(min=1), default=20, show_default=True, help="At most this many events.")
@base.json_option
@base.dsn_option
def peek_command(queue: str, consumer: str | None, limit: int, as_json: bool, dsn: str | None) -> None:
    """Show the next events of a consumer without consuming them.

    Without CONSUMER: those of the consumer that is furthest behind. Takes a tick first, to show all committed events.
    """
    with base.command_session(dsn, autocommit=True) as connection:
        events = gdq.peek(connection, queue, consumer, limit=limit)
    base.print_rows(events, base.field_names(Event), as_json=as_json)


class _Origin:
    """Knows which transient errors a handler's own statements had: those end the command, gdq's own do not."""

    def __init__(self) -> None:
        self._gdqs: list[BaseException] = []
        self._handlers: list[BaseException] = []

    def of_gdq(self, events: Iterator[Event]) -> Iterator[Event]:
        """The events; an error of reading them is gdq's, although it passes through the handler."""
        try:
            yield from events
        except gdq.ticker.TRANSIENT_ERRORS as error:
            self._gdqs.append(error)
            raise

    def of_handler(self, function: Callable[[Any, Any], Any]) -> Callable[[Any, Any], Any]:
        """The handler; other errors that leave it are its own."""

        def call(connection: Connection[Any], given: Any) -> Any:
            try:
                return function(connection, given)
            except gdq.ticker.TRANSIENT_ERRORS as error:
                if error not in self._gdqs:
                    self._handlers.append(error)
                raise

        return call

    def is_handlers(self, error: BaseException) -> bool:
        return error in self._handlers


@contextlib.contextmanager
def _handler_errors(name: str, origin: _Origin) -> Iterator[None]:
    """Log the handler's own errors with traceback and raise CommandFailure; gdq's and the server's pass through.

    A handler's statement that ran into a timeout would do so again: it is no reason to begin anew.
    """
    try:
        yield
    except (psycopg.Error, GdqError, OSError) as error:
        if origin.is_handlers(error):
            raise base.command_failure(error) from error
        raise
    except RetryOutcome as outcome:
        raise base.CommandFailure(
            f"handler {name} raised {type(outcome).__name__}: {outcome}",
            hint="A handler of batches returns it, with event=; with --each it may be raised.",
        ) from outcome
    except Exception as error:
        log.exception("handler %s failed, the batch is rolled back", name)
        raise base.CommandFailure(f"handler {name}: {type(error).__name__}: {error}") from error


def _load_handler(name: str) -> Callable[[Any, Any], Any]:
    """The function `module:function`, or `consume` of a module in gdq.consumers."""
    module, _, function = name.partition(":")
    if not function:
        module, function = f"gdq.consumers.{module}", "consume"
    elif "" not in sys.path:
        sys.path.insert(0, "")  # for an installed command the current folder is not on the path
    try:
        loaded = getattr(importlib.import_module(module), function)
    except (ModuleNotFoundError, AttributeError) as error:
        raise base.CommandFailure(
            f"no handler {name}: {error}", hint="HANDLER is module:function, or a name in gdq.consumers."
        ) from error
    if not callable(loaded):
        raise base.CommandFailure(f"handler {name} is not a function")
    handler: Callable[[Any, Any], Any] = loaded
    return handler
