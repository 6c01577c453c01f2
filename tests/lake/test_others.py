"""Lake tables that others write to: compactions are harmless, changed rows are found, refreshes do not overtake."""

from __future__ import annotations

import dataclasses
import shutil
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import pyarrow as pa
import pytest
from pyiceberg.catalog import Catalog
from pyiceberg.table import Table

from gdq.consumers.lake import delta as lake_delta
from gdq.consumers.lake import iceberg as lake_iceberg
from gdq.consumers.lake.files import ArrowDifference
from gdq.consumers.lake.iceberg import IcebergLake
from gdq.consumers.refresh.refresher import Refresher
from gdq.consumers.refresh.view_refresh import RefreshPoint
from gdq.errors import RefreshConflict
from gdq.view.view import view_info
from tests.support.lake import Lakes
from tests.support.view_grammar import SHAPES

BAG = SHAPES["bag"].query
MORE = "insert into fact select k, grp, label, qty + 1, price from fact limit 3; delete from fact where qty = 2"
_WRITERS = {"delta": lake_delta, "iceberg": lake_iceberg}


def move(lakes: Lakes) -> None:
    """What a refresh does that finds no changes."""
    lake = lakes.open("bag")
    stored = lake.state().stored
    assert stored is not None
    schema = next(iter(lake.scan())).schema
    lake.commit(ArrowDifference("none", schema), stored, dataclasses.replace(stored, plan="another"))


def compact(lakes: Lakes) -> None:
    from deltalake import DeltaTable

    assert DeltaTable(str(lakes.folder / "bag")).optimize.compact()["numFilesRemoved"] > 1


def add(lakes: Lakes) -> None:
    """A row comes that gdq has not written."""
    row = next(iter(lakes.open("bag").scan())).slice(0, 1)
    if lakes.kind == "delta":
        from deltalake import write_deltalake

        write_deltalake(lakes.folder / "bag", row, mode="append")
    else:
        with iceberg(lakes) as (_, table):
            assert table is not None
            table.append(pa.Table.from_batches([row]))


def iceberg(lakes: Lakes) -> AbstractContextManager[tuple[Catalog | None, Table | None]]:
    (info,) = view_info(lakes.shop.connection, "bag")
    assert info.lake is not None
    return IcebergLake(info.lake, "bag", info.source).opened()


def take(lakes: Lakes) -> None:
    """Rows go that gdq has written."""
    if lakes.kind == "delta":
        from deltalake import DeltaTable

        DeltaTable(str(lakes.folder / "bag")).delete("qty is not null")
    elif lakes.kind == "parquet":
        next((lakes.folder / "bag" / "current").glob("*.parquet")).unlink()
    else:
        with iceberg(lakes) as (_, table):
            assert table is not None
            table.delete("qty is not null")


def meanwhile(lakes: Lakes, monkeypatch: pytest.MonkeyPatch, what: Callable[[Lakes], None]) -> None:
    """Let another do something after the refresh has read the table and before its commit, once."""
    module = _WRITERS[lakes.kind]
    healthy = module.rewrite_data_files

    def rewrite(*arguments: Any) -> Any:
        monkeypatch.setattr(module, "rewrite_data_files", healthy)
        what(lakes)
        return healthy(*arguments)

    monkeypatch.setattr(module, "rewrite_data_files", rewrite)


def test_overtaken(lakes: Lakes) -> None:
    """A refresh whose position another one has moved gives up and changes nothing."""

    def at(point: RefreshPoint) -> None:
        if point == "ticked" and lakes.open("bag").state().stored is not None:
            move(lakes)

    lakes.view("bag", BAG)
    with Refresher(lakes.shop.db.dsn, at=at) as refresher:
        refresher.refresh("bag")
        before = lakes.rows("bag")
        lakes.shop.execute(MORE)
        with pytest.raises(RefreshConflict):
            refresher.refresh("bag")
    assert lakes.rows("bag") == before


@pytest.mark.parametrize("lakes", ["delta", "iceberg"], indirect=True)
def test_overtaken_in_the_commit(lakes: Lakes, monkeypatch: pytest.MonkeyPatch) -> None:
    lakes.view("bag", BAG)
    with Refresher(lakes.shop.db.dsn) as refresher:
        refresher.refresh("bag")
        before = lakes.rows("bag")
        lakes.shop.execute(MORE)
        meanwhile(lakes, monkeypatch, move)
        with pytest.raises(RefreshConflict):
            refresher.refresh("bag")
        assert lakes.rows("bag") == before
        assert refresher.refresh("bag").reason == "the plan has changed"  # as move() leaves it
        meanwhile(lakes, monkeypatch, add)
        # rows that only come would fit onto any version
        lakes.shop.execute("insert into fact (k) values (1)")
        result = refresher.refresh("bag")
        assert result.reason is not None
        assert result.reason.startswith("the target was changed by another: ")
        assert lakes.equal("bag", BAG)


@pytest.mark.parametrize("lakes", ["delta"], indirect=True)
@pytest.mark.parametrize("between", [False, True])
def test_compaction(lakes: Lakes, monkeypatch: pytest.MonkeyPatch, between: bool) -> None:
    """Its files hold the same rows: the refresh goes on from them, and doubles nothing."""
    lakes.view("bag", BAG)
    with Refresher(lakes.shop.db.dsn) as refresher:
        refresher.refresh("bag")
        for change in ("insert into fact (k) values (1)", MORE):
            lakes.shop.execute("insert into fact (k) values (2)")
            refresher.refresh("bag")
            lakes.shop.execute(change)
            if between:
                compact(lakes)
            else:
                meanwhile(lakes, monkeypatch, compact)
            assert refresher.refresh("bag").action == "delta"
            assert lakes.equal("bag", BAG)


def test_changed_by_another(lakes: Lakes) -> None:
    """Rows that another has changed are not built upon, even when nothing else has changed; nor is a missing table."""
    lakes.view("bag", BAG)
    with Refresher(lakes.shop.db.dsn) as refresher:
        refresher.refresh("bag")
        take(lakes)
        result = refresher.refresh("bag")
        assert result.action == "full"
        assert result.reason is not None
        assert result.reason.startswith("the target was changed by another: ")
        assert lakes.equal("bag", BAG)
        shutil.rmtree(lakes.folder / ("w" if lakes.kind == "iceberg" else "bag"))
        assert refresher.refresh("bag").reason == "the target table is gone"
        assert lakes.equal("bag", BAG)
