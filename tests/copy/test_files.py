"""Copies into files: the rows of one snapshot as Parquet or Arrow, a folder that is there whole or not at all."""

from __future__ import annotations

import json
from decimal import Decimal
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.dataset as ds
import pytest

import gdq as library
from gdq.consumers.copy import pieces
from gdq.consumers.copy.file_target import folder_names
from gdq.consumers.copy.snapshot import copy_tables
from gdq.errors import GdqError, UnsupportedValue
from tests.support.programs import gdq, start_gdq
from tests.support.server import Database
from tests.support.waiting import until

pytestmark = pytest.mark.server

SHOP = """
    create schema shop;
    create type shop.mood as enum ('glad', 'sad');
    create table shop.item (id int primary key, name text, price numeric(10, 2));
    insert into shop.item select n, 'item ' || n, n / 7.0 from generate_series(1, 5000) n;
    create table shop.sale (id bigint, day date not null, note text) partition by range (day);
    create table shop.sale_1 partition of shop.sale for values from ('2026-01-01') to ('2026-02-01');
    create table shop.sale_2 partition of shop.sale for values from ('2026-02-01') to ('2026-03-01');
    insert into shop.sale select n, '2026-01-01'::date + n % 31, repeat('x', 200) from generate_series(1, 20000) n;
    create table shop.empty (id int, "Odd / name" jsonb);
    create table shop.odd (id int, mood shop.mood, moods shop.mood[], twice int generated always as (id * 2) stored,
                           cash money, exact numeric, moment timestamptz, raw bytea, pad char(4), span interval);
    insert into shop.odd (id, mood, moods, cash, exact, moment, raw, pad, span) values
      (1, 'glad', '{sad,NULL}', 1234.56, 1.00, '2026-01-01 00:00:00.000001+07', '\\x00ff', 'a', '1 day'),
      (2, null, null, null, 'NaN', null, '', null, null);
"""
ODD = [
    {"id": 1, "mood": "glad", "moods": "{sad,NULL}", "twice": 2, "cash": "$1,234.56", "exact": "1.00",
     "moment": "2025-12-31T17:00:00.000001+00:00", "raw": b"\x00\xff", "pad": "a   ", "span": "1 day"},
    {"id": 2, "mood": None, "moods": None, "twice": 4, "cash": None, "exact": "NaN",
     "moment": None, "raw": b"", "pad": None, "span": None},
]  # fmt: skip


@pytest.fixture
def shop(db: Database, monkeypatch: pytest.MonkeyPatch) -> Database:
    """The source; its larger tables are copied in several pieces."""
    monkeypatch.setattr(pieces, "PIECE_BYTES", 64 * 1024)
    with db.connect() as owner:
        owner.execute(SHOP)
    return db


def read(folder: Path, table: str, form: str = "parquet") -> pa.Table:
    return ds.dataset(folder / table, format=form).to_table()


def told(table: pa.Table) -> list[dict[str, Any]]:
    """The rows by id, with times as ISO text."""
    rows = sorted(table.to_pylist(), key=lambda row: row["id"])
    return [row | ({"moment": row["moment"].isoformat()} if row.get("moment") else {}) for row in rows]


def test_a_file_for_each_piece(shop: Database, tmp_path: Path) -> None:
    copy_tables(shop.dsn, ["shop.sale"], f"parquet:{tmp_path}/copy")
    assert len(list((tmp_path / "copy" / "shop.sale").iterdir())) > 10
    assert sorted(read(tmp_path / "copy", "shop.sale")["id"].to_pylist()) == [*range(1, 20001)]


@pytest.mark.parametrize("form", ["parquet", "arrow"])
def test_all_rows_of_one_snapshot(shop: Database, tmp_path: Path, form: str) -> None:
    """Partitions, generated columns, types that Arrow lacks, an empty table; a consumer goes on from the position."""
    assert gdq("create-queue", "q", dsn=shop.dsn).returncode == 0
    assert gdq("add-table", "q", "shop.item", "shop.odd", "shop.empty", "shop.sale", dsn=shop.dsn).returncode == 0
    folder = tmp_path / "new" / "copy"
    options = ("-q", "q", "--register", "c", "--json")
    done = gdq("snapshot", "shop.*", "--to", f"{form}:{folder}", *options, dsn=shop.dsn)
    assert done.returncode == 0, done.stderr
    copied = json.loads(done.stdout)
    assert {table["table_name"]: table["rows"] for table in copied["tables"]} == {
        "shop.item": 5000, "shop.empty": 0, "shop.odd": 2, "shop.sale": 20000,
    }  # fmt: skip
    assert told(read(folder, "shop.odd", form)) == ODD
    assert read(folder, "shop.empty", form).schema.names == ["id", "Odd / name"]
    sold = read(folder, "shop.sale", form)
    assert (sold.num_rows, len(set(sold["id"].to_pylist()))) == (20000, 20000)
    assert told(read(folder, "shop.item", form))[6] == {"id": 7, "name": "item 7", "price": Decimal("1.00")}
    manifest = json.loads((folder / "_gdq_snapshot.json").read_text())
    assert (manifest["snapshot"], manifest["position"]) == (copied["snapshot"], copied["position"])
    assert {table["table_name"]: table["folder"] for table in manifest["tables"]}["shop.odd"] == "shop.odd"
    assert [one.name for one in folder.parent.iterdir()] == ["copy"]
    with shop.connect() as owner:
        library.check_position(owner, "q", manifest["position"])
        owner.execute("insert into shop.empty values (1)")
    lines = gdq("consume", "q", "c", "--once", "--json", dsn=shop.dsn).stdout.splitlines()
    assert [json.loads(line)["table"] for line in lines] == ["shop.empty"]


def test_where_columns_and_text(shop: Database, tmp_path: Path) -> None:
    options = ("--where", "id < 2 -- few", "--columns", "id,moment,twice", "--as-text", "moment")
    done = gdq("snapshot", "shop.odd", "--to", f"parquet:{tmp_path}/copy", *options, dsn=shop.dsn)
    assert done.returncode == 0, done.stderr
    rows = read(tmp_path / "copy", "shop.odd").to_pylist()
    assert rows == [{"id": 1, "twice": 2, "moment": "2025-12-31 17:00:00.000001+00"}]


@pytest.mark.parametrize(
    ("options", "code", "message"),
    [
        (["shop.odd", "--columns", "id,moment"], 1, 'column "moment" of table shop.odd holds a value of timestamp'),
        (["shop.odd", "--as-text", "moments"], 1, 'table shop.odd has no column "moments"'),
        (["shop.item", "--create"], 1, "create, truncate and complete are for databases"),
        (["shop.item", "--where", "nonsense"], 1, "the condition of table shop.item is refused"),
        (["shop.item", "shop.odd", "--as-text", "moment"], 2, "--as-text are for one table: 2 are chosen"),
    ],
)
def test_what_fails_leaves_nothing(shop: Database, tmp_path: Path, options: list[str], code: int, message: str) -> None:
    with shop.connect() as owner:
        owner.execute("insert into shop.odd (id, moment) values (3, 'infinity')")
    done = gdq("snapshot", *options, "--to", f"parquet:{tmp_path}/copy", dsn=shop.dsn)
    assert (done.returncode, done.stdout) == (code, "")
    assert message in done.stderr
    assert "Traceback" not in done.stderr
    assert list(tmp_path.iterdir()) == []


def test_folders_that_are_refused(shop: Database, tmp_path: Path) -> None:
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "mine").touch()
    for place, message in ((tmp_path / "full", "is not empty"), (tmp_path / "full" / "mine" / "copy", "cannot write")):
        with pytest.raises(GdqError, match=message):
            copy_tables(shop.dsn, ["shop.item"], f"parquet:{place}")
    for name in ("", "s3://bucket/copy"):
        with pytest.raises(GdqError, match="names no folder of this machine"):
            copy_tables(shop.dsn, ["shop.item"], f"arrow:{name}")
    assert [one.name for one in tmp_path.rglob("*")] == ["full", "mine"]


def test_a_copy_that_is_killed(shop: Database, tmp_path: Path) -> None:
    """The folder is not there; the next copy to it removes what was written, and is whole."""
    beside = tmp_path / ".copy.gdq_part"
    command = ["snapshot", "shop.item", "--to", f"parquet:{tmp_path}/copy", "--where"]
    waiting = "select count(*) from pg_locks where locktype = 'advisory' and not granted and objid = 7"
    with shop.connect() as holder:
        holder.execute("select pg_advisory_lock(7)")
        running = start_gdq(*command, "pg_advisory_lock_shared(7)::text = ''", dsn=shop.dsn)
        until(lambda: holder.execute(waiting).fetchone() == (1,), "the read of the table")
        other = gdq(*command, "true", dsn=shop.dsn)
        assert (other.returncode, "another copy is writing" in other.stderr) == (1, True), other.stderr
        running.kill()
        running.communicate()
    (beside / "shop.item" / "part-00000.parquet").write_text("half a file")
    assert not (tmp_path / "copy").exists()
    assert gdq(*command, "true", dsn=shop.dsn).returncode == 0
    assert read(tmp_path / "copy", "shop.item").num_rows == 5000
    assert [one.name for one in tmp_path.iterdir()] == ["copy"]


def test_names_of_folders() -> None:
    named = folder_names(["shop.item", 'shop."A/b"', 'shop."A_b"', 'shop."a_B"', '"."."_"', "shop.größe"])
    assert named == ["shop.item", "shop.A_b", "shop.A_b_2", "shop.a_B_3", "table", "shop.größe"]


def test_arrow_of_a_table_copy(shop: Database) -> None:
    """rows() and arrow() give the same rows, those of the snapshot."""
    with shop.connect() as owner, library.copy_table(shop.dsn, "shop.odd") as copy:
        owner.execute("insert into shop.odd (id, moment) values (3, 'infinity')")
        assert told(copy.arrow(unsupported="text")) == ODD
        assert sorted(row["id"] for row in copy.rows()) == [1, 2]
        with pytest.raises(UnsupportedValue, match='column "span" has type'):
            copy.arrow(as_text=["cash", "exact"])
        batches = copy.arrow_batches(as_text=["cash", "exact", "span"])
        assert told(pa.Table.from_batches(batches)) == ODD
        with pytest.raises(GdqError, match='no column "none"'):
            copy.arrow(as_text=["none"])
    with library.copy_table(shop.dsn, "shop.odd") as copy, pytest.raises(UnsupportedValue, match='"moment" holds inf'):
        copy.arrow(unsupported="text")
    with library.copy_table(shop.dsn, "shop.sale") as copy:
        assert copy.arrow().num_rows == 20000
