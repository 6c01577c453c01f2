"""Mirrors whose large tables Spark copies and changes: as without Spark, by turns with it, whatever is killed."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import pyarrow as pa
import pytest
from pyiceberg.catalog import load_catalog

from gdq.consumers.mirror.mirror import Mirror
from gdq.consumers.mirror.state import History
from gdq.errors import GdqError
from tests.mirror.conftest import KINDS, Lake
from tests.mirror.test_history import Replay
from tests.support.lake_spark import Job, jars, spark_job
from tests.support.server import Database

pytestmark = [pytest.mark.spark, pytest.mark.timeout(1200)]

# All tables are large, and a task reads two blocks. Answers with the kinds of Spark's commits.
_JOB = """
import json, os, sys, traceback
from gdq.consumers.mirror import spark_tables
from gdq.consumers.mirror.mirror import Mirror
from gdq.consumers.spark import jobs, session

session._SETTINGS |= {"spark.master": sys.argv[2]} | json.loads(os.environ.get("SETTINGS", "{}"))
jobs.PARTITION_BYTES, spark_tables.LARGE_BYTES = 2**14, -1
commit, kinds = spark_tables.SparkTables._commit, []

def counted(self, change, move):
    rows = commit(self, change, move)
    kinds.append(change.kind)
    return rows

spark_tables.SparkTables._commit = counted
for line in sys.stdin:
    order, said, error = json.loads(line), [], None
    kinds.clear()
    try:
        with Mirror(sys.argv[1], "shop", "copy", words=["public"], spark=True, tell=said.append, **order) as mirror:
            list(mirror.run())
    except Exception as one:
        traceback.print_exc()
        error = f"{type(one).__name__}: {one}"
    print(json.dumps({"kinds": kinds, "said": said, "error": error}), flush=True)
"""
TABLES = ("public.keyed", "public.bare", "public.parts")
_SCHEMA = (
    """create table keyed (id int primary key, name text, amount numeric(10, 2), price numeric, at timestamptz,
                           ratio float8, flag bool, what text[], code char(4))""",
    """insert into keyed select i, nullif('n' || i % 50, 'n7'), i / 4.0, i / 3.0,
              '2026-01-01Z'::timestamptz + i * interval '1 h',
              (array[0.1, '-0', 'NaN', null])[1 + i % 4]::float8, i % 3 = 0, array[i, -i], 'c' || i % 9
         from generate_series(1, 3000) i""",
    "create table bare (n int, name text)",
    "insert into bare select i % 40, repeat('b', i % 3) from generate_series(1, 2000) i",
    "create table parts (id int primary key, n int) partition by hash (id)",
    "create table parts_0 partition of parts for values with (modulus 2, remainder 0)",
    "create table parts_1 partition of parts for values with (modulus 2, remainder 1)",
    "insert into parts select i, 0 from generate_series(1, 2000) i",
)
_CHANGES = (
    "update keyed set amount = amount + 1, at = null where id % 9 = 0",
    "update keyed set id = -id, ratio = -ratio where id % 31 = 0",
    "delete from keyed where id % 50 = 0",
    "insert into bare values (1, 'b'), (1, 'b'), (null, null)",
    "delete from bare where ctid in (select ctid from bare where n = 3 order by ctid limit 7)",
    "update parts set id = id + 10000, n = 1 where id % 40 = 0",
)


@pytest.fixture(params=KINDS)
def made(db: Database, tmp_path: Path, request: pytest.FixtureRequest) -> Lake:
    lake = replace(Lake(db, tmp_path / "copy"), kind=request.param)
    lake.run("select gdq.create_queue('shop')", *_SCHEMA)
    lake.capture(*TABLES)
    return lake


@pytest.fixture
def job(made: Lake) -> Iterator[Job]:
    with spark_job(made.source.dsn, jars(made.kind), text=_JOB) as started:
        yield started


def bring_up(job: Job, lake: Lake, history: History | None = None) -> list[str]:
    """Mirror by Spark up to now; the kinds of its commits."""
    told = job.order(target=lake.target, history=history)
    if told["error"] is not None:
        pytest.fail(f"{told}\n{job.log.read_text()[-6000:]}")
    if history is None:
        lake.same(*TABLES)
    kinds: list[str] = told["kinds"]
    return kinds


@pytest.mark.long
def test_equal_to_the_tables(made: Lake, job: Job) -> None:
    signed = [] if made.kind == "parquet" else ["signed"]
    assert bring_up(job, made) == ["full"] * 3
    made.run(*_CHANGES)
    assert bring_up(job, made) == signed * 3
    assert bring_up(job, made) == []
    # changes that come to nothing, and TRUNCATE with rows after it
    made.run("insert into parts values (-1, 1)", "delete from parts where id = -1")
    made.run("truncate bare", "insert into bare values (5, 'x'), (5, 'x')")
    assert sorted(bring_up(job, made)) == ["full", *signed]
    # without Spark, and with it again
    made.run("update keyed set name = 'm' where id % 7 = 0", "delete from bare where ctid = '(0,1)'")
    made.bring_up("public")
    made.same(*TABLES)
    made.run(*_CHANGES)
    assert bring_up(job, made) == signed * 3
    # columns that are added, renamed, dropped, with rows of both versions in one batch
    made.run(
        "alter table keyed add column more int",
        "update keyed set more = id where id % 5 = 0",
        "alter table bare rename column name to label",
        "update bare set label = 'l' where n = 5",
        "alter table keyed drop column flag",
        "update keyed set more = 1 where id % 11 = 0",
    )
    bring_up(job, made)
    made.run("alter table parts add column fresh int default 7", "update parts set n = 9 where id % 3 = 0")
    bring_up(job, made)


@pytest.mark.long
@pytest.mark.parametrize("form", ["feed", "scd2"])
def test_histories(made: Lake, job: Job, form: History) -> None:
    """Replayed to each tick that is noted, by Spark and without it by turns."""
    history = Replay(made, [*TABLES], form)
    later = "append" if form == "feed" else "signed"

    def look(kind: str) -> None:
        """Of a feed Spark does not write what one task would read; in Parquet files it ends no versions."""
        kinds = {*bring_up(job, made, form)}
        assert kinds == (set() if made.kind == "parquet" and kind == "signed" else {kind})
        history.check()

    look("full")
    for change in _CHANGES:
        made.run(change)
        history.note()
    look(later)
    # rows that go and come in one transaction, and TRUNCATE between changes, twice
    made.run(
        """begin; delete from keyed where id % 3 = 0; insert into keyed (id, ratio) select i, -0.0
           from generate_series(3, 9, 3) i; update keyed set ratio = 0.0 where id = 6; commit""",
        "update bare set name = 'y' where n = 5",
    )
    history.note()
    made.run("truncate bare", "insert into bare values (5, 'x'), (5, 'x')")
    history.note()
    made.run("insert into bare values (6, 'z')", "truncate bare", "insert into bare values (7, 'z')")
    history.note()
    look(later)
    for changes in (["delete from bare", "truncate parts", "truncate parts"], ["truncate parts"]):
        made.run(*changes)
        history.note()
        look(later)
    made.run(*_CHANGES, "insert into parts select i, 0 from generate_series(1, 2000) i")
    history.note()
    made.bring_up("public", history=form)
    history.check()
    # what no log row tells is found by a copy, at a later tick
    made.run("truncate parts_1", *_CHANGES)
    for tables in history.known.values():
        del tables["public.parts"]
    look(later)
    # columns that are added, renamed and dropped; of those that are kept no row of the table knows
    made.run(
        "alter table keyed add column more float8",
        "update keyed set more = id where id % 5 = 0",
        "alter table bare rename column name to label",
        "update bare set label = 'l' where n = 1",
        "alter table keyed drop column ratio",
        "update keyed set more = '-0' where id % 11 = 0",
    )
    history.note()
    look(later)
    made.run(*(change.replace(", ratio = -ratio", "") for change in _CHANGES if "bare" not in change))
    history.note()
    look(later)


@pytest.mark.long
@pytest.mark.parametrize("form", [None, "feed", "scd2"])
def test_killed_while_it_commits(made: Lake, form: History | None) -> None:
    """In the first load, then in a MERGE: a new process goes on, and a reader finds each change once."""
    history = Replay(made, [*TABLES], form or "feed")
    for changes in ((), _CHANGES, ("delete from bare where n = 1", "update parts set n = n + 1")):
        made.run(*changes)
        if changes:  # the first load is at a later tick than any before it
            history.note()
        with spark_job(made.source.dsn, jars(made.kind), text=_JOB) as job:
            known = set(made.folder.rglob("*.parquet"))
            job.begin(target=made.target, history=form)
            job.kill_when(lambda known=known: bool(set(made.folder.rglob("*.parquet")) - known))  # type: ignore[misc]
        with spark_job(made.source.dsn, jars(made.kind), text=_JOB) as job:
            bring_up(job, made, form)
        if form is not None:
            history.check()


@dataclass(frozen=True, slots=True)
class _Catalog(Lake):
    """A lake in an Iceberg catalog that has a name."""

    @property
    def target(self) -> str:
        return "iceberg:prod"

    @property
    def known(self) -> dict[str, str]:
        """The catalog as pyiceberg knows it."""
        return {"uri": f"sqlite:///{self.folder}/prod.db", "warehouse": self.folder.as_uri()}

    @property
    def settings(self) -> dict[str, str]:
        """The catalog as Spark knows it."""
        options = {"catalog-impl": "org.apache.iceberg.jdbc.JdbcCatalog", "uri": f"jdbc:sqlite:{self.folder}/prod.db"}
        options |= {"warehouse": self.folder.as_uri()}
        names = {f"spark.sql.catalog.prod.{name}": value for name, value in options.items()}
        return {"spark.sql.catalog.prod": "org.apache.iceberg.spark.SparkCatalog"} | names

    def read(self, table: str) -> pa.Table:
        with load_catalog("prod", type="sql", **self.known) as catalog:
            return catalog.load_table(table).scan().to_arrow()


@pytest.mark.long
def test_in_a_catalog_with_a_name(db: Database, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lake = _Catalog(db, tmp_path, "iceberg")
    for name, value in lake.known.items():
        monkeypatch.setenv(f"PYICEBERG_CATALOG__PROD__{name.upper()}", value)
    monkeypatch.setenv("PYICEBERG_CATALOG__PROD__TYPE", "sql")
    monkeypatch.setenv("SETTINGS", json.dumps(lake.settings))
    lake.run("select gdq.create_queue('shop')", *_SCHEMA)
    lake.capture(*TABLES)
    with spark_job(db.dsn, jars("iceberg"), text=_JOB) as job:
        assert bring_up(job, lake) == ["full"] * 3
        lake.run(*_CHANGES)
        assert bring_up(job, lake) == ["signed"] * 3


def test_what_spark_does_not_mirror(db: Database, tmp_path: Path) -> None:
    Lake(db, tmp_path).run("select gdq.create_queue('shop')")
    with pytest.raises(GdqError, match="not into an object store"):
        Mirror(db.dsn, "shop", "copy", "parquet:s3://bucket/lake", ["public"], spark=True)
