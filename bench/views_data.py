"""What bench.views measures, and the file that keeps it: a run that was stopped goes on from there."""

from __future__ import annotations

import json
import os
import platform
import statistics
import subprocess
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, Literal, NamedTuple

Method = Literal["postgres", "refresh", "concurrently", "spark", "spark-full"]
ENGINES: dict[str, tuple[Method, ...]] = {
    "postgres": ("postgres", "refresh", "concurrently"),
    "spark": ("refresh", "spark", "spark-full"),
}

# What the goals are for, and so measured first.
GOAL_CHURN = 0.001
GOAL_POSTGRES, GOAL_SPARK = 20, 3


class Key(NamedTuple):
    """One measurement. `churn` is 0 for a full recompute on Spark, which is made once a round."""

    round: int
    churn: float
    view: str
    method: Method


@dataclass(frozen=True, slots=True)
class Sample:
    """What one measurement gave; `seconds` None when there was nothing to measure, and `why` then says so.

    `did`: what the refresh did, `refused` or `failed`, `done` for PostgreSQL's own. `rows_read`: rows of the tables
    that the server handed out meanwhile. `equal`: whether the rows were those of REFRESH, as bags. `load`: of the
    machine, over the last minute.
    """

    did: str
    seconds: float | None = None
    why: str | None = None
    kind: str | None = None
    delta_rows: int | None = None
    rows_read: int | None = None
    equal: bool | None = None
    load: float = 0.0


class OtherSettings(Exception):  # noqa: N818 (says what happened)
    """The file holds results of another scale."""


@dataclass(slots=True)
class Results:
    """All measurements so far, in a file."""

    path: Path
    scale: float
    about: dict[str, Any] = field(default_factory=dict)
    samples: dict[Key, Sample] = field(default_factory=dict)

    @classmethod
    def read(cls, path: Path, scale: float | None = None) -> Results:
        """What the file holds; empty without a file. OtherSettings when it is of another scale than asked for."""
        if not path.exists():
            return cls(path, 0.0 if scale is None else scale)
        held = json.loads(path.read_text(encoding="utf-8"))
        if scale is not None and held["scale"] != scale:
            raise OtherSettings(f"{path} holds results of scale {held['scale']}")
        samples = {Key(**one["key"]): Sample(**one["sample"]) for one in held["samples"]}
        return cls(path, held["scale"], held["about"], samples)

    def add(self, key: Key, sample: Sample) -> None:
        """Keep a measurement; one that is there stays."""
        self.samples.setdefault(key, sample)
        self.write()

    def forget_failures(self) -> None:
        """Another run tries again what failed."""
        self.samples = {key: sample for key, sample in self.samples.items() if sample.did != "failed"}

    def write(self) -> None:
        """The file at once in whole: whatever ends the run, it holds the results so far."""
        listed = [{"key": key._asdict(), "sample": asdict(sample)} for key, sample in sorted(self.samples.items())]
        text = json.dumps({"scale": self.scale, "about": self.about, "samples": listed}, indent=1)
        self.path.parent.mkdir(parents=True, exist_ok=True)
        partial = self.path.with_suffix(".partial")
        partial.write_text(text, encoding="utf-8")
        partial.replace(self.path)

    def of(self, view: str, method: Method, churn: float) -> list[Sample]:
        """The measurements of all rounds."""
        wanted = (churn, view, method)
        return [sample for key, sample in sorted(self.samples.items()) if key[1:] == wanted]

    def churns(self) -> list[float]:
        return sorted({key.churn for key in self.samples if key.churn})

    def views(self) -> list[str]:
        return sorted({key.view for key in self.samples}, key=lambda view: int(view[1:]))

    def rounds(self) -> int:
        return max((key.round for key in self.samples), default=0)


def expected(
    queries: Sequence[str], engines: Sequence[str], spark: Sequence[str], churns: Sequence[float], rounds: int
) -> Iterator[Key]:
    """What is to be measured, in order; `spark`: the views to measure there."""
    for number in range(1, rounds + 1):
        for engine in engines:
            views = queries if engine == "postgres" else spark
            if engine == "spark":
                yield from (Key(number, 0.0, view, "spark-full") for view in views)
            for churn in by_goal(churns):
                yield from (Key(number, churn, view, m) for view in views for m in ENGINES[engine] if m != "spark-full")


def by_goal(churns: Sequence[float]) -> list[float]:
    """The churn of the goals first, then from small to large."""
    return sorted(set(churns), key=lambda churn: (churn != GOAL_CHURN, churn))


def median(samples: Sequence[Sample]) -> float | None:
    """The median of their seconds, None without any."""
    seconds = [sample.seconds for sample in samples if sample.seconds is not None]
    return statistics.median(seconds) if seconds else None


def machine() -> dict[str, Any]:
    """The hardware and versions, and the load before the run."""
    processor = platform.processor() or platform.machine()
    cpuinfo, meminfo = Path("/proc/cpuinfo"), Path("/proc/meminfo")
    if cpuinfo.exists():
        names = [line.partition(":")[2].strip() for line in cpuinfo.read_text().splitlines() if "model name" in line]
        processor = names[0] if names else processor
    memory = f", {int(meminfo.read_text().split()[1]) / 2**20:.0f} GB" if meminfo.exists() else ""
    return {
        "date": f"{datetime.now(UTC):%Y-%m-%d %H:%M} UTC",
        "hardware": f"{os.cpu_count()} x {processor}{memory}",
        "load before": round(os.getloadavg()[0], 2),
        "gdq": f"{_version('gdq')}, commit {_commit()}",
        "Python": platform.python_version(),
        "Spark": _version("pyspark"),
    }


def _version(name: str) -> str:
    try:
        return version(name)
    except PackageNotFoundError:
        return "not installed"


def _commit() -> str:
    command = ["git", "-C", str(Path(__file__).parent), "describe", "--always", "--dirty"]
    done = subprocess.run(command, check=False, capture_output=True, text=True)
    return done.stdout.strip() or "unknown"
