"""A campaign of kills against a replica: between two servers, under writers, DDL, TRUNCATE and rotations of the logs.

    python -m tests.campaign.replicas --kills 200 --seed 1 --pg 18

After every kill the supervisor starts again what ended, and nobody else helps. As soon as the replica has applied
further batches its target is compared with the source as of the target's position, both ways. Exit code 0 if every
comparison was equal, and the replica went on after every kill.

    python -m tests.campaign.replicas --kills 20 --copy-rows 20000000

kills the first copy of a large table instead, spread over the copy. Exit code 0 if no kill has lost a part of it, no
process had more than 300 MB of its own, and all rows are equal in the end.
"""

from __future__ import annotations

import argparse
import os
import random
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

from tests.campaign.replica_stage import ReplicaStage, set_up
from tests.campaign.replica_strikes import STRIKES
from tests.campaign.replica_writer import Writer

_RECOVERY_SECONDS = 300.0
_PAUSE_SECONDS = 1.5  # longest time between a batch and the next kill: any moment of the batches after it


_MEMORY_MAX = 300 * 2**20


class Campaign:
    """Kills on a stage, one after the other, each followed by a comparison."""

    def __init__(self, stage: ReplicaStage, writer: Writer, seed: int) -> None:
        self.stage = stage
        self.writer = writer
        self.rng = random.Random(seed)
        self.struck: Counter[str] = Counter()
        self.compared = 0
        self.complaints: list[str] = []

    def run(self, kills: int) -> None:
        """Strike so often; then compare all values once the writer has ended."""
        self._await_progress("start")
        self.writer.start()
        for number in range(1, kills + 1):
            name, strike = self.rng.choice(STRIKES)
            time.sleep(self.rng.uniform(0, _PAUSE_SECONDS))
            if not self.writer.alive:
                raise SystemExit("the writer ended: a statement of the application failed")
            started = time.monotonic()
            strike(self.stage)
            self.struck[name] += 1
            self._await_progress(f"kill {number}, {name}")
            differing = self.stage.differing_labels()
            self.compared += 1
            if differing:
                self.complaints.append(f"kill {number}, {name}: {differing}")
            took = time.monotonic() - started
            print(f"{time.strftime('%H:%M:%S')} {number:3} {name}, {took:.1f} s {differing or ''}", flush=True)
        self.writer.stop()
        self._await_progress("the last kill")
        self.complaints += self.stage.differing_rows()

    def run_copy(self, kills: int) -> None:
        """Strike so often while the large table is copied; then compare all values once the writer has ended."""
        memory: Counter[str] = Counter()
        # the small tables come first: a first copy does not bring DDL to tables that are there
        self._await_rows(1, memory, "the start")
        self.writer.start()
        for number in range(1, kills + 1):
            name, strike = self.rng.choice(STRIKES)
            goal = self.stage.copy_rows * number // (kills + 1)
            before = self._await_rows(goal, memory, f"kill {number - 1}")
            if before is None:
                raise SystemExit(f"the copy was whole before kill {number}: take more rows, or fewer kills")
            time.sleep(self.rng.uniform(0, _PAUSE_SECONDS))
            strike(self.stage)
            self.struck[name] += 1
            after = self.stage.brought_rows()
            print(f"{time.strftime('%H:%M:%S')} {number:3} {name}: {before:,} rows, then {after or 0:,}", flush=True)
            if after is not None and after < before:
                self.complaints.append(f"kill {number}, {name}: {before} rows were there, then {after}")
        self._await_rows(self.stage.copy_rows * 2, memory, "the last kill")
        self._await_progress("the copy")
        self.writer.stop()
        self._await_progress("the last write")
        self.complaints += self.stage.differing_rows()
        self.complaints += [f"{what} had {size >> 20} MB" for what, size in memory.items() if size > _MEMORY_MAX]
        if again := self.stage.started_again():
            self.complaints.append(f"copies have started again {again} times")
        print("memory, MB: " + ", ".join(f"{what} {size >> 20}" for what, size in memory.items()), flush=True)

    def _await_rows(self, rows: int, memory: Counter[str], after: str) -> int | None:
        """Wait until parts of the copy have brought so many rows; None if the copy is whole."""
        had, since = 0, time.monotonic()
        while (brought := self.stage.brought_rows()) is not None and brought < rows:
            if brought > had:
                had, since = brought, time.monotonic()
            if time.monotonic() > since + _RECOVERY_SECONDS:
                raise SystemExit(f"after {after} the copy did not go on; its log is in {self.stage.logs}")
            for what, size in self.stage.memory_bytes().items():
                memory[what] = max(memory[what], size)
            time.sleep(0.1)
        return brought

    def _await_progress(self, after: str) -> None:
        """Wait until a tick that is made now has been applied."""
        wanted = self.stage.force_tick()
        deadline = time.monotonic() + _RECOVERY_SECONDS
        while (self.stage.applied_tick() or 0) < wanted:
            if time.monotonic() > deadline:
                raise SystemExit(f"after {after} the replica did not go on; its log is in {self.stage.logs}")
            time.sleep(0.1)


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.campaign.replicas")
    parser.add_argument("--kills", type=int, default=200)
    parser.add_argument("--seed", type=int, default=None, help="chooses kills and writes; printed")
    parser.add_argument("--pg", type=int, default=18, help="PostgreSQL's major version")
    parser.add_argument("--copy-rows", type=int, default=0, help="kill the first copy of a table of so many rows")
    parser.add_argument("--folder", type=Path, default=None, help="keep logs there")
    given = parser.parse_args()
    seed = given.seed if given.seed is not None else random.SystemRandom().randrange(10**6)
    folder = given.folder or Path(tempfile.mkdtemp(prefix="gdq-replicas-"))
    folder.mkdir(parents=True, exist_ok=True)
    os.environ.pop("GDQ_DSN", None)
    print(f"seed {seed}, PostgreSQL {given.pg}, {given.kills} kills, logs in {folder}", flush=True)
    started = time.monotonic()
    with set_up(given.pg, folder, given.copy_rows) as stage:
        writer = Writer(stage.source_dsn("app"), seed, given.copy_rows)
        campaign = Campaign(stage, writer, seed)
        stage.start()
        try:
            if given.copy_rows:
                campaign.run_copy(given.kills)
            else:
                campaign.run(given.kills)
        finally:
            writer.stop()
            stage.stop()
    for name, number in sorted(campaign.struck.items()):
        print(f"{number:4} {name}")
    print(f"exits of the replica by code: {dict(stage.replica_exits())}; DDL: {dict(writer.altered)}")
    for complaint in campaign.complaints:
        print(f"wrong: {complaint}")
    print(
        f"seed {seed}: {sum(campaign.struck.values())} kills, {campaign.compared} comparisons, {writer.transactions} "
        f"transactions, {len(campaign.complaints)} wrong, 0 manual steps; {time.monotonic() - started:.0f} s"
    )
    return int(bool(campaign.complaints))


if __name__ == "__main__":
    sys.exit(main())
