"""Mirrors in an object store: what a lake in a folder does, and the errors that only a store has."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyiceberg.catalog
import pytest
import yaml
from pyarrow import fs
from pyiceberg.utils.config import Config

from gdq.consumers.lake.files import ArrowDifference
from gdq.consumers.lake.open import open_lake
from gdq.consumers.lake.table import LakeTable
from gdq.consumers.views.target import StoredPosition, TargetState
from gdq.errors import GdqError, RefreshConflict
from gdq.plan.table import WEIGHT_COLUMN
from gdq.view.lake_name import lake_name
from tests.mirror.conftest import KINDS, Lake, plain_strings
from tests.mirror.test_chunked_load import TABLES as LARGE_TABLES
from tests.mirror.test_chunked_load import load, make, patch_sizes
from tests.mirror.test_kills import TABLES, kill_often
from tests.support.loose_store import loose_store
from tests.support.object_store import OPEN_BUCKET, ObjectStore
from tests.support.page import blocks
from tests.support.server import Database

PAGE = "docs/lake.md"


@dataclass(frozen=True, slots=True)
class StoredLake(Lake):
    """A lake in a bucket; an Iceberg one in the catalog `prod`, a file of the folder, with its tables in the bucket."""

    variables: tuple[tuple[str, str], ...] = ()
    bucket: str = ""

    @property
    def target(self) -> str:
        return "iceberg:prod" if self.kind == "iceberg" else f"{self.kind}:s3://{self.bucket}/copy"

    @property
    def env(self) -> dict[str, str]:
        return dict(self.variables)

    def read(self, table: str) -> pa.Table:
        if self.kind == "parquet":
            (text,) = (block.text for block in blocks(PAGE) if block.file == "newest.py")
            scope: dict[str, Any] = {"__name__": "newest"}
            exec(compile(text, "newest.py", "exec"), scope)
            rows: pa.Table = scope["newest"](f"s3://{self.bucket}/copy/{table}")
            return rows
        if self.kind == "delta":
            from deltalake import DeltaTable, QueryBuilder

            found = DeltaTable(f"s3://{self.bucket}/copy/{table}", storage_options={"allow_http": "true"})
            return plain_strings(
                pa.table(QueryBuilder().register("lake", found).execute("select * from lake").read_all())
            )
        from pyiceberg.catalog import load_catalog

        with load_catalog("prod", **{"s3.endpoint": self.env["AWS_ENDPOINT_URL"]}) as catalog:
            return catalog.load_table(table).scan().to_arrow()


@pytest.fixture(params=KINDS)
def stored(
    request: pytest.FixtureRequest,
    db: Database,
    tmp_path: Path,
    object_store: ObjectStore,
    monkeypatch: pytest.MonkeyPatch,
) -> StoredLake:
    """A lake of each kind in a bucket, with its environment, which this process has, too."""
    bucket = object_store.bucket()
    (text,) = (block.text for block in blocks(PAGE) if block.file == ".pyiceberg.yaml")
    catalog = yaml.safe_load(text.replace("/srv/catalog", str(tmp_path)).replace("s3://bucket", f"s3://{bucket}"))
    named = {f"PYICEBERG_CATALOG__PROD__{name.upper()}": value for name, value in catalog["catalog"]["prod"].items()}
    env = object_store.env | (named if request.param == "iceberg" else {})
    for name, value in env.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(pyiceberg.catalog, "_ENV_CONFIG", Config())  # read when the process began
    lake = StoredLake(db, tmp_path, request.param, tuple(env.items()), bucket)
    lake.run("select gdq.create_queue('shop')")
    return lake


def test_changes(stored: StoredLake) -> None:
    stored.run(
        "create table orders (id int primary key, name text, amount numeric(10, 2), at timestamptz)",
        "insert into orders select i, 'n' || i, i / 4.0, now() from generate_series(1, 500) i",
        "create table bare (n int)",
    )
    stored.capture("orders", "bare")
    stored.mirror("public")
    stored.same("public.orders", "public.bare")
    for statements in (
        ("update orders set amount = 1 where id % 9 = 0", "insert into bare values (1), (1), (null)"),
        ("update orders set id = -id where id < 20", "delete from orders where id > 480", "delete from bare"),
        ("truncate orders", "insert into orders values (1, 'x', 2, null)", "insert into bare values (7)"),
        ("alter table orders add more text default 'm'", "insert into orders (id) values (2)", "delete from bare"),
    ):
        stored.run(*statements)
        stored.mirror("public")
        stored.same("public.orders", "public.bare")


def test_a_load_in_chunks(stored: StoredLake, monkeypatch: pytest.MonkeyPatch) -> None:
    """Large tables: the load is stopped and goes on, and leaves nothing behind."""
    patch_sizes(monkeypatch.setattr)
    make(stored)
    calls: list[None] = []

    def stops() -> bool:
        calls.append(None)
        return len(calls) > 5

    load(stored, stops)
    stored.run("update keyed set n = 77 where b < 100", "delete from keyed where b = 3")
    said = load(stored, lambda: False)
    assert any("its load goes on after" in line for line in said)
    stored.bring_up(*LARGE_TABLES)
    stored.same(*LARGE_TABLES)
    system, path = fs.FileSystem.from_uri(f"s3://{stored.bucket}")
    found = system.get_file_info(fs.FileSelector(path, recursive=True))
    assert not [info.path for info in found if info.is_file and "_gdq_load" in info.path]


@pytest.mark.parametrize("rounds", [1, pytest.param(5, marks=pytest.mark.long)])
def test_killed_at_random(stored: StoredLake, rounds: int) -> None:
    kill_often(stored, random.Random(rounds), None, lambda: stored.same(*TABLES), rounds)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"bucket": "no-such-bucket"}, "bucket"),
        ({"AWS_SECRET_ACCESS_KEY": "wrong"}, "signature"),
        ({"AWS_ACCESS_KEY_ID": "nobody"}, "access key id"),
        ({"AWS_ENDPOINT_URL": "http://127.0.0.1:1"}, "connect"),
    ],
)
def test_a_store_that_refuses(stored: StoredLake, change: dict[str, str], said: str) -> None:
    """One line and a hint; no consumer is left behind that would hold the log, and the next start finds what was."""
    stored.run("create table orders (id int primary key)", "insert into orders values (1)")
    stored.capture("orders")
    bucket = change.get("bucket", stored.bucket)
    env = {name: value.replace(stored.bucket, bucket) for name, value in (stored.env | change).items()}
    refused = replace(stored, variables=tuple(env.items()), bucket=bucket).command("public")
    assert (refused.returncode, refused.stdout) == (1, "")
    error, *hint = refused.stderr.splitlines()
    assert error.startswith("Error: ")
    assert said in error.lower().replace("accesskey", "access key")
    assert "\x1b" not in error
    assert [line[:46] for line in hint] == ["Hint: Credentials, region and endpoint of S3 c"]
    assert stored.ask("select count(*) from gdq.consumer_info('shop')") == [(0,)]
    stored.mirror("public")
    stored.same("public.orders")


def opened(stored: StoredLake) -> LakeTable:
    name = lake_name(f"{stored.kind}:s3://{stored.bucket}/table")
    assert name is not None
    return open_lake(name, "mirror copy", "mark")


def at(position: str) -> StoredPosition:
    return StoredPosition("mark", "target", "", position)


def rows_of(*numbers: int, before: Callable[[], object] = lambda: None) -> ArrowDifference:
    """A full load; `before` is called when the table has been read and the rows are asked for."""
    schema = pa.schema([("n", pa.int64())])

    def rows() -> Iterator[pa.RecordBatch]:
        # this one may be a thread of Delta's library, which takes no call of its own
        with ThreadPoolExecutor() as others:
            others.submit(before).result()
        yield pa.RecordBatch.from_pylist([{"n": number} for number in numbers], schema)

    return ArrowDifference("full", schema, rows)


@pytest.mark.parametrize("stored", ["delta", "parquet"], indirect=True)
def test_two_writers(stored: StoredLake) -> None:
    """Of two commits onto one version, the first among them, one fails, and the other's rows stay."""
    ours, theirs = opened(stored), opened(stored)
    with pytest.raises(RefreshConflict):
        ours.commit(rows_of(1, before=lambda: theirs.commit(rows_of(2), None, at("1"))), None, at("2"))
    assert [row["n"] for batch in ours.scan() for row in batch.to_pylist()] == [2]
    with pytest.raises(RefreshConflict):
        ours.commit(rows_of(3, before=lambda: theirs.commit(rows_of(4), at("1"), at("2"))), at("1"), at("3"))
    assert [row["n"] for batch in ours.scan() for row in batch.to_pylist()] == [4]
    assert ours.state().stored == at("2")


@pytest.mark.parametrize("stored", ["delta", "parquet"], indirect=True)
def test_a_store_without_conditional_puts(
    stored: StoredLake, object_store: ObjectStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    lake = opened(replace(stored, bucket=f"{OPEN_BUCKET}/{stored.bucket}"))
    with loose_store(object_store.endpoint, overwrites=True) as endpoint:
        monkeypatch.setenv("AWS_ENDPOINT_URL", endpoint)
        with pytest.raises(GdqError, match=r"If-None-Match.* one would be lost"):
            lake.commit(rows_of(1), None, at("1"))
    left = fs.FileSelector(f"{OPEN_BUCKET}/{stored.bucket}", recursive=True, allow_not_found=True)
    assert not [info for info in object_store.system.get_file_info(left) if info.is_file]


@pytest.mark.parametrize(
    ("stored", "loses"),
    [("delta", "_delta_log/00000000000000000001.json"), ("parquet", "_gdq/v00000002.json")],
    indirect=["stored"],
)
def test_a_commit_whose_answer_is_lost(
    stored: StoredLake, loses: str, object_store: ObjectStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The store has made the commit, and says that it failed: the rows are there, and no file of theirs is gone."""
    lake = opened(replace(stored, bucket=f"{OPEN_BUCKET}/{stored.bucket}"))
    signed = pa.RecordBatch.from_pylist([{"n": 2, WEIGHT_COLUMN: 1}, {"n": 1, WEIGHT_COLUMN: -1}])
    change = ArrowDifference("signed", rows_of().schema, lambda: iter([signed]))
    with loose_store(object_store.endpoint, loses=loses) as endpoint:
        monkeypatch.setenv("AWS_ENDPOINT_URL", endpoint)
        lake.commit(rows_of(1), None, at("1"))
        with pytest.raises(RefreshConflict):
            lake.commit(change, at("1"), at("2"))
        assert lake.state() == TargetState(at("2"))
        assert [row["n"] for batch in lake.scan() for row in batch.to_pylist()] == [2]
