"""Lake tables that others write to: compactions are harmless, changed rows are found, refreshes do not overtake."""

from __future__ import annotations

import dataclasses
import shutil
from collections.abc import Callable
from typing import Any

import pytest

from gdq.consumers import lake_delta, lake_iceberg
from gdq.consumers.lake_iceberg import IcebergLake
from gdq.consumers.lake_rows import LakeChange
from gdq.consumers.refresh import Point, Refresher
from gdq.target import RefreshConflict
from tests.fix_lake import Lakes
from tests.view_grammar import SHAPES

BAG = SHAPES["bag"].query
MORE = "insert into fact select k, grp, label, qty + 1, price from fact limit 3; delete from fact where qty = 2"
_WRITERS = {"delta": lake_delta, "iceberg": lake_iceberg}


def move(lakes: Lakes) -> None:
    """What a refresh does that finds no changes."""
    lake = lakes.open("bag")
    stored = lake.state().stored
    assert stored is not None
    schema = next(iter(lake.scan())).schema
    lake.commit(LakeChange("none", schema), stored, dataclasses.replace(stored, plan="another"))


def compact(lakes: Lakes) -> None:
    from deltalake import DeltaTable

    DeltaTable(str(lakes.folder / "bag")).optimize.compact()


def take(lakes: Lakes) -> None:
    """Rows go that gdq has written."""
    if lakes.kind == "delta":
        from deltalake import DeltaTable

        DeltaTable(str(lakes.folder / "bag")).delete("qty is not null")
    elif lakes.kind == "parquet":
        next((lakes.folder / "bag" / "current").glob("*.parquet")).unlink()
    else:
        lake = lakes.open("bag")
        assert isinstance(lake, IcebergLake)
        with lake._opened() as (_, table):
            assert table is not None
            table.delete("qty is not null")


def meanwhile(lakes: Lakes, monkeypatch: pytest.MonkeyPatch, what: Callable[[Lakes], None]) -> None:
    """Let another do something after the refresh has read the table and before its commit, once."""
    module = _WRITERS[lakes.kind]
    healthy = module.rewrite

    def rewrite(*arguments: Any) -> Any:
        monkeypatch.setattr(module, "rewrite", healthy)
        what(lakes)
        return healthy(*arguments)

    monkeypatch.setattr(module, "rewrite", rewrite)


def test_overtaken(lakes: Lakes) -> None:
    """A refresh whose position another one has moved gives up and changes nothing."""

    def at(point: Point) -> None:
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
        meanwhile(lakes, monkeypatch, take)
        assert refresher.refresh("bag").reason == "the plan has changed"  # so does move() leave it
        lakes.shop.execute(MORE)
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
        for _ in range(2):
            lakes.shop.execute(MORE)
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
