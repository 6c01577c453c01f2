"""The commands that find what is wrong and serve numbers to a monitor: doctor, metrics."""

from __future__ import annotations

import sys
from datetime import timedelta

import click

import gdq
from gdq.cli.base import Failure, Stop, connect_checked, dsn_option, fields, json_option, print_rows, session, talk


@click.command()
@click.argument("queue", required=False)
@click.option("--fix", is_flag=True, help="Mend what can be mended without making the application wait.")
@click.option(
    "--patience",
    type=click.FloatRange(min=0),
    default=60.0,
    show_default=True,
    metavar="SECONDS",
    help="Ignore problems younger than this.",
)
@json_option
@dsn_option
def doctor(queue: str | None, fix: bool, patience: float, as_json: bool, dsn: str | None) -> None:
    """Find what is wrong with capture, ticks, consumers and logs, or about to be; exit code 3 when anything is.

    Each finding says its cause and its cure; a note alone is nothing wrong. --fix captures again what has come off, and
    says what it did; what is found after that decides the exit code.
    """
    with session(dsn, autocommit=True) as connection:
        found = gdq.doctor(connection, queue, timedelta(seconds=patience))
        if fix:
            for repair in gdq.fix(connection, found):
                talk(repair.text)
            found = gdq.doctor(connection, queue, timedelta(seconds=patience))
    if as_json:
        print_rows(found, fields(gdq.Finding), as_json=True)
    else:
        for finding in found:
            click.echo(f"{finding.severity}: {finding.cause} [{finding.code}]")
            click.echo(f"  cure: {finding.cure}")
    if any(finding.severity != "note" for finding in found):
        sys.exit(3)


@click.command()
@click.argument("queue", required=False)
@click.option("--listen", default="127.0.0.1:9748", show_default=True, metavar="HOST:PORT", help="Where to serve them.")
@click.option("--once", is_flag=True, help="Print them and end; exit code 1 when the database cannot be read.")
@dsn_option
def metrics(queue: str | None, listen: str, once: bool, dsn: str | None) -> None:
    """Serve the numbers of `gdq status` to Prometheus, until SIGTERM.

    The database may come and go: gdq_up says whether it could be read.
    """
    try:
        from prometheus_client import generate_latest, start_http_server  # noqa: PLC0415

        from gdq.monitor import metrics as numbers  # noqa: PLC0415
    except ModuleNotFoundError as error:
        raise Failure(f"metrics need {error.name}", hint="pip install 'gdq[metrics]'") from error
    host, _, port = listen.rpartition(":")
    if not port.isdecimal():
        raise click.BadParameter(f"{listen!r}: want HOST:PORT", param_hint="--listen")
    collector = numbers.StatusCollector(lambda: connect_checked(dsn, "gdq metrics"), queue)
    registry = numbers.registry(collector)
    if once:
        text = generate_latest(registry).decode()
        click.echo(text, nl=False)
        collector.close()
        sys.exit(0 if f"\n{numbers.UP[0]} 1.0" in text else 1)
    stop = Stop()
    server, thread = start_http_server(int(port), host.strip("[]") or "127.0.0.1", registry)
    talk(f"metrics at http://{host}:{server.server_port}/metrics")
    while not stop():
        stop.sleep(3600)
    server.shutdown()
    server.server_close()
    thread.join()
    collector.close()
