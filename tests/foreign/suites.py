"""PostgreSQL's regression and isolation suites, run plainly twice and once with every table captured, and compared."""

from __future__ import annotations

import re
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from gdq.embedded.files import PostgresBinaries
from tests.foreign.outputs import Difference, compare_outputs
from tests.foreign.suite_run import (
    SuiteRun,
    find_headers,
    find_isolation_tester,
    prepare_sources,
    scheduled,
)

_RUNS = ("plain", "again", "captured")
_File = Callable[[SuiteRun], str]


@dataclass(frozen=True, slots=True)
class SuiteSources:
    """A suite's folder src/test/regress, the PostgreSQL to run it on, and where headers of that may stand too."""

    regress: Path
    binaries: PostgresBinaries
    headers: Path


@dataclass(frozen=True, slots=True)
class SuiteResult:
    """What a suite gave: the names of its files, what became of the tables, and how outputs differ."""

    name: str
    files: list[str] = field(default_factory=list)
    tables: list[str] = field(default_factory=list)
    differences: list[Difference] = field(default_factory=list)

    def lines(self) -> list[str]:
        """The counts, and each difference."""
        tables = Counter(_nameless(text) for text in self.tables)
        files = {one.name for one in self.differences}
        counts = f"{len(self.files)} files, {len(self.tables)} tables, {tables['captured']} captured"
        lines = [f"{self.name}: {counts}, {len(self.differences)} differences in {len(files)} files"]
        lines += [f"{number:6}  {text}" for text, number in tables.most_common(20)]
        return lines + [str(one) for one in self.differences]


@dataclass(frozen=True, slots=True)
class Told:
    """Where a run tells what it finds, file by file. `report`: a folder for the outputs, one below it for each run."""

    line: Callable[[str], None]
    report: Path | None = None

    def outputs(self, file: str, texts: Sequence[str]) -> None:
        """Keep the outputs of a file in the report's folder."""
        for run, text in zip(_RUNS, texts, strict=True):
            if self.report is not None:
                (self.report / run).mkdir(parents=True, exist_ok=True)
                (self.report / run / f"{file}.out").write_text(text)


def run_regression(suite: SuiteSources, told: Told, names: Sequence[str] = ()) -> SuiteResult:
    """The files of src/test/regress in the order of their schedule; `names`: only these, beside what they need."""
    chosen = [name for name in scheduled(suite.regress) if not names or name in ("test_setup", *names)]
    return _compare_runs("regression", suite, told, {name: partial(SuiteRun.script, name=name) for name in chosen})


def run_isolation(suite: SuiteSources, told: Told, names: Sequence[str] = ()) -> SuiteResult | None:
    """The specs of src/test/isolation beside src/test/regress; None without the program that runs them."""
    tester = find_isolation_tester(suite.binaries)
    specs = sorted((suite.regress.parent / "isolation/specs").glob("*.spec"))
    chosen = [spec for spec in specs if not names or spec.stem in names]
    if tester is None or not chosen:
        return None
    files = {spec.stem: partial(SuiteRun.spec, path=spec, tester=tester) for spec in chosen}
    return _compare_runs("isolation", suite, told, files)


def _compare_runs(name: str, suite: SuiteSources, told: Told, files: Mapping[str, _File]) -> SuiteResult:
    """Each file on three servers in turn, so that its differences are known before the next file begins."""
    result = SuiteResult(name)
    with ExitStack() as stack:
        runs = [stack.enter_context(_started(suite, captured=run == "captured")) for run in _RUNS]
        for file, play in files.items():
            outputs = [play(run) for run in runs]
            told.outputs(file, outputs)
            found = compare_outputs(file, *outputs)
            result.files.append(file)
            result.differences.extend(found)
            told.line("\n".join([f"{file}: {len(found)} differences", *map(str, found)]))
        result.tables.extend(runs[-1].refused())
    return result


@contextmanager
def _started(suite: SuiteSources, *, captured: bool) -> Iterator[SuiteRun]:
    """A run with its own copy of the sources."""
    with tempfile.TemporaryDirectory(prefix="gdq-suite-") as folder:
        Path(folder).chmod(0o755)
        work = Path(folder) / "work"
        work.mkdir()
        prepare_sources(suite.regress, work, suite.binaries, find_headers(suite.binaries, suite.headers))
        with SuiteRun.start(suite.binaries, work, captured=captured) as run:
            yield run


def _nameless(text: str) -> str:
    """A refusal without the names in it."""
    return re.sub(r"(?:\"[^\"]*\"|\w+)\.(?:\"[^\"]*\"|\w+)|\"[^\"]*\"", "*", text)[:120]
