"""PostgreSQL's regression and isolation suites, run plainly twice and once with every table captured, and compared."""

from __future__ import annotations

import re
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
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

Outputs = dict[str, str]
_Runner = Callable[[SuiteRun], tuple[Outputs, list[str]]]


@dataclass(frozen=True, slots=True)
class SuiteSources:
    """A suite's folder src/test/regress, the PostgreSQL to run it on, and where headers of that may stand too."""

    regress: Path
    binaries: PostgresBinaries
    headers: Path


@dataclass(frozen=True, slots=True)
class SuiteResult:
    """What a suite gave. `outputs`: of the plain run, the second plain run and the captured one, by file."""

    name: str
    outputs: tuple[Outputs, Outputs, Outputs]
    refused: list[str]
    differences: list[Difference] = field(default_factory=list)

    def lines(self) -> list[str]:
        """The counts, and each difference."""
        tables = Counter(_nameless(text) for text in self.refused)
        files = {one.name for one in self.differences}
        counts = f"{len(self.outputs[0])} files, {sum(tables.values())} tables, {tables['captured']} captured"
        lines = [f"{self.name}: {counts}, {len(self.differences)} differences in {len(files)} files"]
        lines += [f"{number:6}  {text}" for text, number in tables.most_common(20)]
        return lines + [str(one) for one in self.differences]

    def write(self, folder: Path) -> None:
        """Write the outputs into a folder, one below it for each run."""
        for name, outputs in zip(("plain", "again", "captured"), self.outputs, strict=True):
            below = folder / self.name / name
            below.mkdir(parents=True, exist_ok=True)
            for file, text in outputs.items():
                (below / f"{file}.out").write_text(text)


def run_regression(suite: SuiteSources, tell: Callable[[str], None], names: Sequence[str] = ()) -> SuiteResult:
    """The files of src/test/regress in the order of their schedule; `names`: only these, beside what they need."""
    chosen = [name for name in scheduled(suite.regress) if not names or name in ("test_setup", *names)]
    return _thrice("regression", suite, tell, lambda run: run.regression(chosen))


def run_isolation(suite: SuiteSources, tell: Callable[[str], None], names: Sequence[str] = ()) -> SuiteResult | None:
    """The specs of src/test/isolation beside src/test/regress; None without the program that runs them."""
    tester = find_isolation_tester(suite.binaries)
    specs = sorted((suite.regress.parent / "isolation/specs").glob("*.spec"))
    chosen = [spec for spec in specs if not names or spec.stem in names]
    if tester is None or not chosen:
        return None
    return _thrice("isolation", suite, tell, lambda run: run.isolation(chosen, tester))


def _thrice(name: str, suite: SuiteSources, tell: Callable[[str], None], runner: _Runner) -> SuiteResult:
    outputs: list[Outputs] = []
    refused: list[str] = []
    for captured in (False, False, True):
        with _work_folder(suite) as work:
            found, refused = runner(SuiteRun(suite.binaries, work, captured, tell))
        outputs.append(found)
    result = SuiteResult(name, (outputs[0], outputs[1], outputs[2]), refused)
    for file, plain in outputs[0].items():
        result.differences.extend(compare_outputs(file, plain, outputs[1][file], outputs[2][file]))
    return result


@contextmanager
def _work_folder(suite: SuiteSources) -> Iterator[Path]:
    """A copy of the sources by a name that is the same in each run, as outputs may show it."""
    with tempfile.TemporaryDirectory(prefix="gdq-suite-") as folder:
        Path(folder).chmod(0o755)
        work = Path(folder) / "work"
        work.mkdir()
        prepare_sources(suite.regress, work, suite.binaries, find_headers(suite.binaries, suite.headers))
        yield work


def _nameless(text: str) -> str:
    """A refusal without the names in it."""
    return re.sub(r"(?:\"[^\"]*\"|\w+)\.(?:\"[^\"]*\"|\w+)|\"[^\"]*\"", "*", text)[:120]
