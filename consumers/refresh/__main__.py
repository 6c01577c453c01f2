"""spark-submit gdq/consumers/refresh/__main__.py [--dsn CONNINFO] [--full] [VIEW...]: the command `gdq refresh`."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from gdq.cli import main as gdq


def main(arguments: Sequence[str]) -> None:
    """Run `gdq refresh` with these arguments."""
    gdq(["refresh", *arguments])


if __name__ == "__main__":
    main(sys.argv[1:])
