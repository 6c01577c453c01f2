"""Where foreign material stands below a folder: suites found by what their projects keep, file by file."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from tests.foreign.readers import read_logic_test, read_planner_cases, read_psql, read_rust_tests
from tests.foreign.scripts import Scope, Statement, read_text, split_sql

_DEPTH = 4


@dataclass(frozen=True, slots=True)
class MaterialFile:
    """A file with SQL, and how its scopes are read. `setup`: a script that its database needs first."""

    suite: str
    path: Path
    read: Callable[[], list[Scope]]
    setup: Path | None = None


def find_files(folder: Path) -> list[MaterialFile]:
    """All files of the suites below a folder that are known; empty if there are none."""
    found: list[MaterialFile] = []
    for root in _roots(folder, _DEPTH):
        for finder in (_pg_ivm, _pg_trickle, _risingwave, _postgresql, _named):
            found += finder(root)
    return found


def regress_folders(folder: Path) -> list[Path]:
    """The folders src/test/regress of PostgreSQL's sources below a folder."""
    return [root / "src/test/regress" for root in _roots(folder, _DEPTH) if (root / "src/test/regress/sql").is_dir()]


def _roots(folder: Path, depth: int) -> Iterator[Path]:
    yield folder
    if depth:
        for below in sorted(folder.iterdir()):
            if below.is_dir() and not below.is_symlink() and not below.name.startswith("."):
                yield from _roots(below, depth - 1)


def psql_variables(regress: Path) -> dict[str, str]:
    """What psql finds in its environment when a regression test runs."""
    return {"PG_ABS_SRCDIR": str(regress), "PG_LIBDIR": "$libdir", "PG_DLSUFFIX": ".so", "PG_ABS_BUILDDIR": "/tmp"}


def _pg_ivm(root: Path) -> Iterator[MaterialFile]:
    if (root / "pg_ivm.control").exists():
        for path in sorted((root / "sql").glob("*.sql")):
            yield MaterialFile("pg_ivm", path, partial(read_psql, "pg_ivm", path))


def _pg_trickle(root: Path) -> Iterator[MaterialFile]:
    if not (root / "pg_trickle.control").exists():
        return
    for path in sorted((root / "tests").glob("*.rs")):
        yield MaterialFile("pg_trickle", path, partial(read_rust_tests, "pg_trickle", path))
    for schema in sorted((root / "tests").glob("*/schema.sql")):
        yield MaterialFile("pg_trickle", schema, partial(_schema_with_queries, "pg_trickle", schema))


def _schema_with_queries(suite: str, schema: Path) -> list[Scope]:
    """A script with tables, and a query in each file of the folder `queries` beside it."""
    statements = split_sql(read_text(schema))
    for path in sorted((schema.parent / "queries").glob("*.sql")):
        statements += [Statement(one.text) for one in split_sql(read_text(path))]
    return [Scope(suite, f"{schema.parent.name}/{schema.name}", statements)]


def _risingwave(root: Path) -> Iterator[MaterialFile]:
    if not (root / "e2e_test").is_dir():
        return
    for path in sorted((root / "e2e_test").rglob("*.slt")):
        yield MaterialFile("risingwave", path, partial(read_logic_test, "risingwave", path))
    for path in sorted((root / "src/frontend/planner_test").rglob("input/*.yaml")):
        yield MaterialFile("risingwave", path, partial(read_planner_cases, "risingwave", path))


def _postgresql(root: Path) -> Iterator[MaterialFile]:
    regress = root / "src/test/regress"
    if not (regress / "sql").is_dir():
        return
    variables = psql_variables(regress)
    setup = regress / "sql/test_setup.sql"
    for path in sorted((regress / "sql").glob("*.sql")):
        if path != setup:
            yield MaterialFile("postgresql", path, partial(read_psql, "postgresql", path, variables), setup)


def _named(root: Path) -> Iterator[MaterialFile]:
    """A folder with a file `suite.txt`, whose first word is the suite's name; the script `setup.sql` comes first."""
    if not (root / "suite.txt").is_file():
        return
    name = read_text(root / "suite.txt").split()[0]
    setup = root / "setup.sql"
    readers = {".sql": read_psql, ".slt": read_logic_test, ".test": read_logic_test}
    for path in sorted(root.rglob("*.*")):
        if path.suffix in readers and path != setup:
            script = setup if setup.is_file() else None
            yield MaterialFile(name, path, partial(readers[path.suffix], name, path), script)
