"""The suites of other projects that stand below a folder, as tests of gdq.

`make test-foreign FOREIGN=FOLDER` runs views, regression and isolation. views: each query of a suite as a view,
churned, refreshed, compared; exit code 1 if one was wrong or gdq failed. regression, isolation: PostgreSQL's own suites
with every table captured, beside a plain run. fetch: PostgreSQL's sources from Debian into the folder. Exit code 2 if
there is nothing to run.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from dataclasses import asdict
from pathlib import Path

from gdq.embedded.files import MAJORS, find_binaries
from gdq.embedded.server import EmbeddedServer
from tests.foreign.fetch import PACKAGES, fetch_packages
from tests.foreign.material import MaterialFile, find_files, regress_folders
from tests.foreign.suites import SuiteSources, Told, run_isolation, run_regression
from tests.foreign.tally import Tally
from tests.foreign.views_run import _SETTINGS, ViewsRun


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.foreign", description=__doc__)
    parser.add_argument("what", choices=["views", "regression", "isolation", "fetch"])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--pg", type=int, choices=MAJORS, default=max(MAJORS))
    parser.add_argument("--suite", help="only this suite")
    parser.add_argument("--only", default="", help="only files whose path contains this")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--seconds", type=float, help="begin no file after this time")
    parser.add_argument("--every", type=int, default=1, help="every nth file only")
    parser.add_argument("--report", type=Path, help="views: write verdicts here, lines of JSON; suites: outputs")
    given = parser.parse_args()
    if given.what == "fetch":
        return 0 if fetch_packages(given.folder, PACKAGES, print) else 2
    if given.what != "views":
        return run_suite(given)
    files = [
        one for one in find_files(given.folder) if given.suite in (None, one.suite) and given.only in str(one.path)
    ]
    files = files[:: given.every]
    if not files:
        print(f"no suite that is known stands below {given.folder}", file=sys.stderr)
        return 2
    return run_views(files, given)


def run_views(files: list[MaterialFile], given: argparse.Namespace) -> int:
    until = None if given.seconds is None else time.monotonic() + given.seconds
    with EmbeddedServer(given.pg, settings=_SETTINGS) as server:
        run = ViewsRun(server, given.seed, lambda line: print(line, flush=True))
        try:
            tally = run.run(files, until=until)
        finally:
            write_report(run.tally, given.report)
    print(*tally.lines(), sep="\n")
    for outcome in ("refused", "full"):
        print(f"\n{outcome}:", *tally.reasons("refused" if outcome == "refused" else "full"), sep="\n")
    for verdict in tally.bad():
        print(f"\n{verdict.outcome}: {verdict.suite} {verdict.origin}: {verdict.detail}\n{verdict.query}")
    return 1 if tally.bad() else 0


def run_suite(given: argparse.Namespace) -> int:
    """PostgreSQL's suite of the server's major version, or of the nearest that stands below the folder."""
    binaries = find_binaries(given.pg)
    folders = sorted(regress_folders(given.folder), key=lambda one: f"-{given.pg}" not in str(one))
    if not folders:
        print(f"no sources of PostgreSQL stand below {given.folder}", file=sys.stderr)
        return 2
    names = [name for name in given.only.split(",") if name]
    run = run_regression if given.what == "regression" else run_isolation
    suite = SuiteSources(folders[0], binaries, given.folder)
    result = run(suite, Told(lambda line: print(line, flush=True), given.report), names)
    if result is None:
        print(f"PostgreSQL {given.pg} from {binaries.origin} has no isolationtester", file=sys.stderr)
        return 2
    print(*result.lines(), sep="\n")
    return 0


def write_report(tally: Tally, report: Path | None) -> None:
    if report is not None:
        report.write_text("".join(json.dumps(asdict(verdict)) + "\n" for verdict in tally.verdicts))


if __name__ == "__main__":
    sys.exit(main())
