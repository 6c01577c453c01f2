"""A fault campaign: writers, consumers of every kind, and faults; then each change is looked for at each consumer.

    make campaign SECONDS=720 SEED=1 PG=18

Exit code 0 if nothing was lost, doubled, invented or out of order, and nobody had to help; else 1.
"""

from __future__ import annotations

import argparse
import os
import random
import shutil
import signal
import sys
import tempfile
import time
from pathlib import Path

from tests.campaign.campaign import Campaign
from tests.campaign.report import write_report
from tests.campaign.stage import set_up


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.campaign")
    parser.add_argument("--seconds", type=float, default=720, help="how long faults strike")
    parser.add_argument("--seed", type=int, default=None, help="chooses faults and writes; printed")
    parser.add_argument("--pg", type=int, default=18, help="PostgreSQL's major version")
    parser.add_argument("--rate", type=float, default=3000, help="changes per second that the writers aim at")
    parser.add_argument("--pause", type=float, default=3.0, help="longest pause between two faults, in seconds")
    parser.add_argument("--only", default="", help="only kinds of faults that contain this text")
    parser.add_argument("--folder", type=Path, default=None, help="keep logs and the report there")
    given = parser.parse_args()
    seed = given.seed if given.seed is not None else random.SystemRandom().randrange(10**6)
    folder = given.folder or Path(tempfile.mkdtemp(prefix="gdq-campaign-report-"))
    for kept in ("lake", "logs"):
        shutil.rmtree(folder / kept, ignore_errors=True)
    (folder / "no_item").unlink(missing_ok=True)
    folder.mkdir(parents=True, exist_ok=True)
    print(f"seed {seed}, PostgreSQL {given.pg}, {given.seconds:.0f} s, logs in {folder}", flush=True)
    os.environ.pop("GDQ_DSN", None)
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: sys.exit("interrupted"))
    started = time.monotonic()
    with set_up(given.pg, folder) as stage:
        campaign = Campaign(stage, seed, given.rate, given.pause, given.only)
        try:
            outcome = campaign.run(given.seconds)
        finally:
            (folder / "server.log").write_bytes(stage.primary.log.read_bytes())
            campaign.close()
    return write_report(outcome, folder, time.monotonic() - started)


if __name__ == "__main__":
    sys.exit(main())
