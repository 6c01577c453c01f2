"""A campaign of kills against a replica: between two servers, under writers, DDL, TRUNCATE and rotations of the logs.

    python -m tests.campaign.replicas --kills 200 --seed 1 --pg 18

After every kill the supervisor starts again what ended, and nobody else helps. As soon as the replica has applied
further batches its target is compared with the source as of the target's position, both ways. Exit code 0 if every
comparison was equal, and the replica went on after every kill.

    python -m tests.campaign.replicas --kills 20 --copy-rows 20000000

kills the first copy of a large table instead, spread over the copy. Exit code 0 if no kill has lost a part of it, no
process had more than 300 MB of its own, and all rows are equal in the end.

    python -m tests.campaign.replicas --whole --kills 200 --copy-kills 20 --copy-rows 20000000

does both, each half with one session that applies and half with two. Each run ends with a table: what was killed, and
what the replica was at.
"""

from __future__ import annotations

import argparse
import os
import random
import sys
import tempfile
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

from tests.campaign.replica_stage import ReplicaStage, set_up
from tests.campaign.replica_strikes import Session, Striker
from tests.campaign.replica_writer import Writer

_PAUSE_SECONDS = 1.5  # longest time between a batch and the next kill: any moment of the batches after it
_MEMORY_MAX = 300 * 2**20
_COPY_ROWS = 20_000_000


@dataclass(frozen=True)
class Part:
    """One run. `copy_rows`: of the table whose first copy is what is killed; 0: batches are."""

    kills: int
    copy_rows: int
    apply_workers: int


@dataclass
class Tally:
    """What was killed, how often, and while which session of the replica was at work at which statement."""

    struck: Counter[tuple[str, str]] = field(default_factory=Counter)
    statements: Counter[str] = field(default_factory=Counter)
    compared: int = 0
    complaints: list[str] = field(default_factory=list)

    @property
    def kills(self) -> int:
        return sum(self.struck.values())

    def note(self, name: str, session: Session | None) -> str:
        """Count a kill; how it is told."""
        step = session.step if session else "idle"
        self.struck[name, step] += 1
        self.statements[session.statement if session else "idle"] += 1
        return f"{name} ({step}{f', {session.statement}' if session else ''})"

    def add(self, other: Tally) -> None:
        self.struck += other.struck
        self.statements += other.statements
        self.compared += other.compared
        self.complaints += other.complaints

    def lines(self) -> list[str]:
        """A table: what was killed, by the session that was at work then."""
        steps = sorted({step for _, step in self.struck})
        width = max((len(step) for step in steps), default=0) + 2
        found = [f"{'':40}" + "".join(f"{step:>{width}}" for step in (*steps, "all"))]
        for name in sorted({name for name, _ in self.struck}):
            row = [self.struck[name, step] for step in steps]
            found.append(f"{name:40}" + "".join(f"{number:>{width}}" for number in (*row, sum(row))))
        sums = [sum(n for (_, one), n in self.struck.items() if one == step) for step in steps]
        found.append(f"{'all':40}" + "".join(f"{number:>{width}}" for number in (*sums, sum(sums))))
        words = ", ".join(f"{word} {number}" for word, number in self.statements.most_common())
        return [*found, f"by statement: {words}"]


class Campaign:
    """Kills on a stage, one after the other, each followed by a comparison."""

    def __init__(self, stage: ReplicaStage, writer: Writer, seed: int, patience: float) -> None:
        self.stage = stage
        self.patience = patience
        self.writer = writer
        self.rng = random.Random(seed)
        self.striker = Striker(stage, self.rng)
        self.tally = Tally()
        self.complaints = self.tally.complaints

    def run(self, kills: int) -> None:
        """Strike so often; then compare all values once the writer has ended."""
        self._await_progress("start")
        self.writer.start()
        for number in range(1, kills + 1):
            time.sleep(self.rng.uniform(0, _PAUSE_SECONDS))
            if not self.writer.alive:
                raise SystemExit("the writer ended: a statement of the application failed")
            started = time.monotonic()
            name = self.tally.note(*self.striker.strike())
            self._await_progress(f"kill {number}, {name}")
            differing = self.stage.differing_labels()
            self.tally.compared += 1
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
            goal = self.stage.copy_rows * number // (kills + 1)
            before = self._await_rows(goal, memory, f"kill {number - 1}")
            if before is None:
                raise SystemExit(f"the copy was whole before kill {number}: take more rows, or fewer kills")
            time.sleep(self.rng.uniform(0, _PAUSE_SECONDS))
            name = self.tally.note(*self.striker.strike())
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
            if time.monotonic() > since + self.patience:
                raise SystemExit(f"after {after} the copy did not go on; its log is in {self.stage.logs}")
            for what, size in self.stage.memory_bytes().items():
                memory[what] = max(memory[what], size)
            time.sleep(0.1)
        return brought

    def _await_progress(self, after: str) -> None:
        """Wait until a tick that is made now has been applied."""
        wanted = self.stage.force_tick()
        deadline = time.monotonic() + self.patience
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
    parser.add_argument("--apply-workers", type=int, default=1, help="tables that are applied at once")
    parser.add_argument("--whole", action="store_true", help="kills of batches and of copies, with 1 and 2 that apply")
    parser.add_argument("--copy-kills", type=int, default=20, help="with --whole: those of the first copy")
    parser.add_argument("--patience", type=float, default=300, help="seconds until a replica that stands is stuck")
    parser.add_argument("--folder", type=Path, default=None, help="keep logs there")
    given = parser.parse_args()
    seed = given.seed if given.seed is not None else random.SystemRandom().randrange(10**6)
    folder = given.folder or Path(tempfile.mkdtemp(prefix="gdq-replicas-"))
    folder.mkdir(parents=True, exist_ok=True)
    os.environ.pop("GDQ_DSN", None)
    print(f"seed {seed}, PostgreSQL {given.pg}, {given.kills} kills, logs in {folder}", flush=True)
    apart = (given.kills // 2, given.kills - given.kills // 2)
    copies = (given.copy_kills // 2, given.copy_kills - given.copy_kills // 2)
    parts = [Part(given.kills, given.copy_rows, given.apply_workers)]
    if given.whole:
        parts = [Part(kills, 0, number) for number, kills in enumerate(apart, 1)]
        parts += [Part(kills, given.copy_rows or _COPY_ROWS, number) for number, kills in enumerate(copies, 1)]
    whole = Tally()
    for number, part in enumerate(parts, 1):
        if part.kills:
            (logs := folder / f"part{number}").mkdir(exist_ok=True)
            whole.add(run_part(part, given.pg, seed + number - 1, logs, given.patience))
    if given.whole:
        print("all parts", *whole.lines(), sep="\n")
    return int(bool(whole.complaints))


def run_part(part: Part, major: int, seed: int, folder: Path, patience: float) -> Tally:
    """One run between two servers of its own, and its report."""
    started = time.monotonic()
    big = 0.02 if part.apply_workers == 1 else 0.3  # tables are applied at once where a batch has many rows
    with set_up(major, folder, part.copy_rows, part.apply_workers) as stage:
        writer = Writer(stage.source_dsn("app"), seed, part.copy_rows, big)
        campaign = Campaign(stage, writer, seed, patience)
        stage.start()
        try:
            if part.copy_rows:
                campaign.run_copy(part.kills)
            else:
                campaign.run(part.kills)
        finally:
            writer.stop()
            stage.stop()
    tally = campaign.tally
    print(f"\n{part}", *tally.lines(), sep="\n")
    print(f"exits of the replica by code: {dict(stage.replica_exits())}; DDL: {dict(writer.altered)}")
    for complaint in tally.complaints:
        print(f"wrong: {complaint}")
    print(
        f"seed {seed}: {tally.kills} kills, {tally.compared} comparisons, {writer.transactions} transactions, "
        f"{len(tally.complaints)} wrong, 0 manual steps; {time.monotonic() - started:.0f} s",
        flush=True,
    )
    return tally


if __name__ == "__main__":
    sys.exit(main())
