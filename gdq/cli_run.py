"""The commands that read a queue or keep it going: ticker, consume, peek."""

from __future__ import annotations

import contextlib
import importlib
import logging
import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import click

from gdq.cli_base import Failure, Stop, dsn_option, fields, json_option, print_rows, session

log = logging.getLogger(__name__)

if TYPE_CHECKING:
    from psycopg import Connection

    from gdq.consumer import Handler


@click.command()
@click.option("--once", is_flag=True, help="End when nothing is due.")
@click.option("--interval", type=click.FloatRange(min=0.001), default=0.05, show_default=True, metavar="SECONDS")
@dsn_option
def ticker(once: bool, interval: float, dsn: str | None) -> None:
    """Take ticks and maintain the logs of all queues, until SIGTERM."""
    from gdq import ticker as tickers  # noqa: PLC0415
    from gdq.conninfo import connect  # noqa: PLC0415

    if once:
        with session(dsn, autocommit=True) as connection:
            tickers.tick_all(connection)
            tickers.maintain_all(connection)
        return
    stop = Stop()
    tickers.run(lambda: connect(dsn, application_name="gdq ticker"), interval_seconds=interval, stop=stop.sleep)


@click.command()
@click.argument("queue")
@click.argument("consumer")
@click.argument("handler", default="printer", metavar="[HANDLER]")
@click.option("--once", is_flag=True, help="Force a tick, handle all up to it, end.")
@click.option("--json", "as_json", is_flag=True, help="Print events as JSON lines: what happens without a handler.")
@dsn_option
def consume(queue: str, consumer: str, handler: str, *, once: bool, as_json: bool, dsn: str | None) -> None:
    """Hand the batches of a consumer to a handler; without one print every event as a line of JSON, then the
    sequences of each batch.

    HANDLER is module:function or a name in gdq.consumers. It is called as handler(connection, events) in the
    transaction that finishes the batch: what it writes there is written exactly once.

    \b
    Example: gdq consume orders mirror shop.mirror:apply
    """
    from gdq.conninfo import connect  # noqa: PLC0415
    from gdq.consumer import Consumer  # noqa: PLC0415
    from gdq.consumers.printer import print_sequences  # noqa: PLC0415
    from gdq.ticker import reconnecting  # noqa: PLC0415

    if as_json and handler != "printer":
        raise click.UsageError("--json prints the events itself and takes no handler")
    function = _load_handler(handler)
    stop = Stop()

    def work(connection: Connection[Any]) -> None:
        for batch in Consumer(connection, queue, consumer).batches(once=once, stop=stop):
            with _handler_errors(handler):
                function(connection, batch.events())
                if handler == "printer":
                    print_sequences(batch.sequences())

    try:
        reconnecting(lambda: connect(dsn, application_name=f"gdq:{queue}/{consumer}"), work, stop.sleep)
    except KeyboardInterrupt:
        raise Failure("interrupted: the batch at hand was rolled back") from None


@click.command()
@click.argument("queue")
@click.argument("consumer", required=False)
@click.option("--limit", type=click.IntRange(min=1), default=20, show_default=True, help="At most so many events.")
@json_option
@dsn_option
def peek(queue: str, consumer: str | None, limit: int, as_json: bool, dsn: str | None) -> None:
    """Show the events that a consumer gets next, without consuming them.

    Without CONSUMER: from the consumer that is furthest behind. Takes a tick, so that all that is committed shows.
    """
    from gdq.consumer import peek as peek_events  # noqa: PLC0415
    from gdq.source import Event  # noqa: PLC0415

    with session(dsn, autocommit=True) as connection:
        events = peek_events(connection, queue, consumer, limit=limit)
    print_rows(events, fields(Event), as_json=as_json)


@contextlib.contextmanager
def _handler_errors(name: str) -> Iterator[None]:
    """Log an error of the handler's own with its traceback and end; those of gdq and the server pass through."""
    import psycopg  # noqa: PLC0415

    from gdq.errors import GdqError  # noqa: PLC0415

    try:
        yield
    except (psycopg.Error, GdqError, OSError):
        raise
    except Exception as error:
        log.exception("handler %s failed, the batch is rolled back", name)
        raise Failure(f"handler {name}: {type(error).__name__}: {error}") from error


def _load_handler(name: str) -> Handler:
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
    handler: Handler = loaded
    return handler
