"""The command `gdq`: a module for each noun, whose commands parse, call one function of the library, and print.

Shared modules: sections (all commands), base (options, output, connections), queue_command (the argument QUEUE),
listing (tables, --wide, --json), names (completion, suggestions), handler, lazy_group, progress, terminal. A command
may call every package of gdq and gdq.consumers. Only the script `gdq`, python -m gdq and
python -m gdq.consumers.refresh call gdq.cli.
"""

from __future__ import annotations

import logging
import sys

import click

from gdq import __version__
from gdq.cli.lazy_group import LazyGroup
from gdq.cli.sections import SECTIONS
from gdq.cli.terminal import escape_unknown_letters, printable


class _Lines(logging.Formatter):
    """Formats a record for a terminal."""

    def format(self, record: logging.LogRecord) -> str:
        return printable(super().format(record), lines=True)


class _Logfmt(logging.Formatter):
    """Formats a record as one line of key=value pairs, for a log collector."""

    def format(self, record: logging.LogRecord) -> str:
        message = super().format(record).replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
        message = printable(message)
        return f'time={self.formatTime(record, "%Y-%m-%dT%H:%M:%S%z")} level={record.levelname.lower()} msg="{message}"'


@click.group(
    cls=LazyGroup,
    sections=SECTIONS,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110},
)
@click.version_option(__version__, prog_name="gdq")
@click.option("-v", "--verbose", is_flag=True, help="Log more.")
@click.option("--quiet", is_flag=True, help="Print errors only.")
@click.option("--debug", is_flag=True, help="Show the traceback of an error.")
@click.option("-d", "--dsn", metavar="CONNINFO", help="The connection, before or after the command.")
def main(verbose: bool, quiet: bool, debug: bool, dsn: str | None) -> None:  # noqa: ARG001 (dsn: from the context)
    """A queue of row changes inside PostgreSQL, and the consumers that read it.

    Exit codes: 0 done or already done, 1 failed, 2 wrong usage, 3 a check found a problem,
    130 interrupted.
    """
    escape_unknown_letters()
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(_Lines("%(levelname)s: %(message)s") if sys.stderr.isatty() else _Logfmt())
    level = logging.DEBUG if verbose or debug else logging.ERROR if quiet else logging.INFO
    logger = logging.getLogger("gdq")
    logger.handlers[:] = [handler]
    logger.setLevel(level)
    # psycopg tells of what fails while a connection is given up: after Ctrl-C that is no news
    logging.getLogger("psycopg").setLevel(level if verbose or debug else logging.ERROR)
