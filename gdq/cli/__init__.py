"""The command `gdq`: a module for each noun, whose commands parse, call one function of the library, and print.

Shared modules: base (options, output, connections), lazy_group, progress, terminal. A command may call every package of
gdq and gdq.consumers. Only the script `gdq`, python -m gdq and python -m gdq.consumers.refresh call gdq.cli.
"""

from __future__ import annotations

import logging
import sys

import click

from gdq import __version__
from gdq.cli.lazy_group import LazyGroup
from gdq.cli.terminal import printable

# The module of each command: the function create_queue_command of gdq/cli/queue.py is `gdq create-queue`.
MODULES = {
    "compare": ["compare"],
    "consumer": ["register-consumer", "unregister-consumer", "consumers", "members", "seek", "set-tables", "resynced"],
    "era": ["rebase", "position", "check-position"],
    "group": ["create-group", "alter-group", "groups", "drop-group"],
    "install": ["install", "uninstall", "create-event-triggers"],
    "message": ["insert-event"],
    "monitor": ["doctor", "metrics"],
    "queue": ["create-queue", "set-queue", "drop-queue", "queues", "pause", "resume"],
    "refresh": ["refresh", "verify-view"],
    "retry": ["retries", "set-retry-limit", "dead-letters", "replay-dead-letters", "purge-dead-letters"],
    "run": ["ticker", "tick", "consume", "peek"],
    "sequence": ["add-sequence", "remove-sequence", "sequences"],
    "slot": ["create-slot", "drop-slot", "slots"],
    "status": ["status"],
    "table": ["add-table", "alter-table", "remove-table", "tables", "apply-ddl"],
    "view": ["create-view", "alter-view", "views", "view-history", "drop-view", "explain-view"],
}


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
    modules=MODULES,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110},
)
@click.version_option(__version__, prog_name="gdq")
@click.option("-v", "--verbose", is_flag=True, help="Log more.")
@click.option("-q", "--quiet", is_flag=True, help="Print errors only.")
@click.option("--debug", is_flag=True, help="Show the traceback of an error.")
def main(verbose: bool, quiet: bool, debug: bool) -> None:  # noqa: ARG001 (read from the context)
    """A queue of row changes inside PostgreSQL, and the consumers that read it.

    Exit codes: 0 done or already done, 1 failed, 2 wrong usage, 3 a check found a problem.
    """
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(_Lines("%(levelname)s: %(message)s") if sys.stderr.isatty() else _Logfmt())
    level = logging.DEBUG if verbose else logging.ERROR if quiet else logging.INFO
    logger = logging.getLogger("gdq")
    logger.handlers[:] = [handler]
    logger.setLevel(level)
