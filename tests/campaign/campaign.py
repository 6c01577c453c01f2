"""One run: programs under a supervisor, a fault after the other, then the end and the verdicts."""

from __future__ import annotations

import random
import sys
import time
from contextlib import ExitStack
from dataclasses import dataclass

from tests.campaign import faults_network, faults_programs, faults_server
from tests.campaign.faults_rare import promote
from tests.campaign.field import FAULTS, Fault, Field
from tests.campaign.recovery import Beat, Recovery
from tests.campaign.stage import Stage, pooler, programs
from tests.campaign.supervisor import Supervisor
from tests.campaign.verdict import Verdict, committed_changes, judge
from tests.campaign.writers import KINDS

MODULES = (faults_network, faults_programs, faults_server)

_DRAIN_SECONDS = 900.0
_WARM_SECONDS = 120.0
_SMALL_RATE = 25.0
_PROMOTED_AFTER = 0.75  # of the time: what needs the first server's disks or a slot comes before


@dataclass
class Outcome:
    """What a run gave. `manual`: consumers that did not go on by themselves."""

    seed: int
    changes: int
    beats: list[Beat]
    verdicts: list[Verdict]
    manual: list[str]
    stubborn: list[str]
    exits: dict[str, dict[int, int]]
    memory: dict[str, int]
    skipped: dict[str, str]
    drained_seconds: float


class Campaign:
    """Runs on a stage; close() ends its programs."""

    def __init__(self, stage: Stage, seed: int, rate: float, pause: float, only: str) -> None:
        self.stage = stage
        self.seed = seed
        self.rng = random.Random(seed)
        self.rate = rate
        self.pause = pause
        self.faults = [fault for fault in FAULTS if only in fault.kind]
        self.promotes = only in "promotion of a standby"
        self.recovery = Recovery(stage)
        self.supervisor = Supervisor(stage.logs, stage.environment())
        self._opened = ExitStack()
        self.field = Field(stage, self.supervisor, self.rng, self.recovery, self._opened)

    def run(self, seconds: float) -> Outcome:
        self._start()
        started = time.monotonic()
        promotion: list[Fault] = [Fault("promotion of a standby", promote)] if self.promotes else []
        for one in self._in_turn():
            spent = time.monotonic() - started
            if spent >= seconds:
                break
            if promotion and spent >= seconds * _PROMOTED_AFTER:
                self._strike(promotion.pop())
            self._strike(one)
            time.sleep(self.rng.uniform(0.2, self.pause))
        return self._finish()

    def close(self) -> None:
        self.supervisor.stop()
        self._opened.close()

    def _start(self) -> None:
        bouncer = self._opened.enter_context(pooler(self.stage))
        if bouncer is None:
            self.field.skipped["PgBouncer"] = "not found: the members connect directly"
        for name, command in programs(self.stage, bouncer).items():
            self.supervisor.add(name, command)
        self.supervisor.start()
        self.recovery.start()
        first = self.recovery.beat("start")
        if not self.recovery.wait(first, _WARM_SECONDS):
            raise AssertionError(f"before any fault: {sorted(first.waiting)} show nothing")
        writer = [sys.executable, "-m", "tests.campaign.writers"]
        started = time.time()
        for kind in KINDS:
            arguments = [kind, str(self.seed * 10 + KINDS.index(kind)), self.stage.app_dsn, str(self.stage.folder)]
            rate = self.rate if kind == "bulk" else _SMALL_RATE
            self.supervisor.add(f"writer-{kind}", [*writer, *arguments, str(rate), str(started)])
        time.sleep(3)

    def _in_turn(self) -> list[Fault]:
        """Every kind once before any comes again; thousands, more than any run has time for."""
        chosen: list[Fault] = []
        while len(chosen) < 5000:
            some = list(self.faults)
            self.rng.shuffle(some)
            chosen += some
        return chosen

    def _strike(self, one: Fault) -> None:
        struck_at = time.monotonic()
        detail = one.strike(self.field)
        if detail is None:
            return
        beat = self.recovery.beat(one.kind, detail, struck_at)
        late = [f"{old.number}: {', '.join(sorted(old.waiting))}" for old in self.recovery.beats[-40:-1] if old.waiting]
        print(
            f"{time.strftime('%H:%M:%S')} {beat.number:3} {one.kind} ({detail}), {beat.healed_at - struck_at:.1f} s"
            + (f"; waiting since {late[0]}" if late else ""),
            flush=True,
        )

    def _finish(self) -> Outcome:
        names = [name for name in self.supervisor.programs if name.startswith("writer")]
        exits = {name: program.exits for name, program in self.supervisor.programs.items()}
        held = dict(self.supervisor.programs)
        self.supervisor.end(*names)
        with self.field.connected() as su:
            for (gid,) in su.execute("select gid from pg_prepared_xacts").fetchall():
                su.execute(f"commit prepared '{gid}'".encode())
        if self.stage.clock is not None:
            # retries come by the clock: after a step back they would wait for as long
            self.stage.clock.write_text("+0s\n")
        started = time.monotonic()
        last = self.recovery.beat("end")
        print(f"{time.strftime('%H:%M:%S')} faults are over, the consumers catch up", flush=True)
        manual = []
        if not self.recovery.wait(last, _DRAIN_SECONDS):
            manual = sorted(last.waiting)
        elif not self._retries_came(started + _DRAIN_SECONDS):
            manual = ["retries of the members"]
        drained = time.monotonic() - started
        self.recovery.stop()
        self.supervisor.stop()
        with self.stage.connect() as su:
            changes = committed_changes(su)
            kept = su.execute("select to_regclass('seen.slot_audit') is not null").fetchone()
        verdicts = judge(self.stage, slot=not (kept and kept[0]))
        return Outcome(
            self.seed,
            changes,
            self.recovery.beats,
            verdicts,
            manual,
            self.supervisor.stubborn,
            {name: dict(counts) for name, counts in exits.items()},
            {name: program.memory_bytes for name, program in held.items()},
            self.field.skipped,
            drained,
        )

    def _retries_came(self, deadline: float) -> bool:
        """Wait until no change is put aside any more."""
        while True:
            with self.field.connected() as su:
                if su.execute("select count(*) from gdq.retry_info('q', 'crew')").fetchone() == (0,):
                    return True
            if time.monotonic() > deadline:
                return False
            time.sleep(0.5)
