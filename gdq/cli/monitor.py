"""The commands for monitoring: doctor finds problems, metrics serves numbers."""

from __future__ import annotations

import sys
from datetime import timedelta

import click

import gdq
from gdq.cli import base
from gdq.cli.listing import print_json
from gdq.cli.names import with_commands
from gdq.cli.terminal import printable


@click.command()
@click.argument("queue", required=False)
@click.option("--fix", is_flag=True, help="Repair problems, as far as the application need not wait.")
@click.option(
    "--patience",
    type=base.Seconds(),
    default=60.0,
    show_default=True,
    metavar="SECONDS",
    help="Ignore problems younger than this.",
)
@base.json_option
@base.dsn_option
def doctor_command(queue: str | None, fix: bool, patience: float, as_json: bool, dsn: str | None) -> None:
    """Find problems of capture, ticks, consumers and logs, also approaching ones. Exit code 3 if there are any.

    Each finding gives cause and remedy; a note is not a problem. --fix restores capture and prints what it did; the
    exit code then depends on the remaining findings.
    """
    with base.command_session(dsn, autocommit=True) as connection:
        found = gdq.doctor(connection, queue, timedelta(seconds=patience))
        if fix:
            for repair in gdq.fix(connection, found):
                base.talk(repair.text)
            found = gdq.doctor(connection, queue, timedelta(seconds=patience))
    if as_json:
        print_json(found)
    else:
        for finding in found:
            click.echo(printable(f"{finding.severity}: {finding.cause} [{finding.code}]"))
            click.echo(printable(f"  cure: {with_commands(finding.cure)}"))
    if any(finding.severity != "note" for finding in found):
        sys.exit(3)


@click.command()
@click.argument("queue", required=False)
@click.option("--listen", default="127.0.0.1:9748", show_default=True, metavar="HOST:PORT", help="Where to serve them.")
@click.option("--once", is_flag=True, help="Print the numbers once; exit code 1 if the database cannot be read.")
@base.dsn_option
def metrics_command(queue: str | None, listen: str, once: bool, dsn: str | None) -> None:
    """Serve the numbers of `gdq status` to Prometheus, until SIGTERM.

    It goes on while the database is down: gdq_up tells whether the database could be read.
    """
    from prometheus_client import generate_latest, start_http_server  # noqa: PLC0415 (an extra)

    from gdq.monitor import metrics as numbers  # noqa: PLC0415 (loads prometheus_client)

    host, _, port = listen.rpartition(":")
    if not port.isdecimal():
        raise click.BadParameter(f"{listen!r}: want HOST:PORT", param_hint="--listen")
    collector = numbers.StatusCollector(lambda: base.connect_checked(dsn, "gdq metrics"), queue)
    registry = numbers.metrics_registry(collector)
    if once:
        text = generate_latest(registry).decode()
        click.echo(text, nl=False)
        collector.close()
        sys.exit(0 if f"\n{numbers.UP_METRIC[0]} 1.0" in text else 1)
    stop = base.StopSignals()
    server, thread = start_http_server(int(port), host.strip("[]") or "127.0.0.1", registry)
    base.talk(f"metrics at http://{host}:{server.server_port}/metrics")
    while not stop():
        stop.sleep(3600)
    server.shutdown()
    server.server_close()
    thread.join()
    collector.close()
