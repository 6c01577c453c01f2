"""spark-submit gdq/consumers/mirror/__main__.py QUEUE SCHEMA --target ...: `gdq mirror` with --engine spark."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from gdq.cli import main as gdq


def main(arguments: Sequence[str]) -> None:
    """Run `gdq mirror --engine spark` with these arguments."""
    gdq(["mirror", "--engine", "spark", *arguments])


if __name__ == "__main__":
    main(sys.argv[1:])
