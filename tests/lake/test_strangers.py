"""What others set on a lake table without changing its rows: columns by number, partitions, properties, odd folders."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from pyiceberg.exceptions import CommitFailedException, ValidationError
from pyiceberg.transforms import IdentityTransform

from gdq.consumers.lake.iceberg import IcebergLake
from gdq.consumers.lake.open import _OneLineErrors
from gdq.consumers.refresh.refresher import Refresher
from gdq.errors import GdqError
from gdq.view.lake_name import lake_name
from gdq.view.view import view_info
from tests.support.lake import Lakes
from tests.support.view_grammar import SHAPES

pytestmark = pytest.mark.server

BAG = SHAPES["bag"].query


def stranger(lakes: Lakes, work: Callable[[Any], None]) -> None:
    """Let another change the view's Iceberg table."""
    (info,) = view_info(lakes.shop.connection, "bag")
    assert info.lake is not None
    with IcebergLake(info.lake, "bag", info.source).opened() as (_, table):
        work(table)


def add_again(table: Any) -> None:
    """The column that is the last one anyway, so that names and places stay."""
    kind = table.schema().find_field("price").field_type
    with table.update_schema(allow_incompatible_changes=True) as update:
        update.delete_column("price")
    with table.update_schema(allow_incompatible_changes=True) as update:
        update.add_column("price", kind)


def swap(table: Any) -> None:
    """Two columns of one type take each other's names and places."""
    order = [field.name for field in table.schema().fields]
    with table.update_schema(allow_incompatible_changes=True) as update:
        update.rename_column("price", "third")
    with table.update_schema(allow_incompatible_changes=True) as update:
        update.rename_column("label", "price")
    with table.update_schema(allow_incompatible_changes=True) as update:
        update.rename_column("third", "label")
    with table.update_schema(allow_incompatible_changes=True) as update:
        update.move_first(order[0])
        for before, name in itertools.pairwise(order):
            update.move_after(name, before)


def partition(table: Any) -> None:
    with table.update_spec() as update:
        update.add_field("label", IdentityTransform(), "k_part")


@pytest.mark.parametrize("lakes", ["iceberg"], indirect=True)
@pytest.mark.parametrize("work", [add_again, swap, partition])
def test_metadata_that_makes_no_snapshot(lakes: Lakes, work: Callable[[Any], None]) -> None:
    """The next refresh notices, without changes in between too, and a full load heals it."""
    lakes.view("bag", BAG)
    with Refresher(lakes.shop.db.dsn) as refresher:
        refresher.refresh("bag")
        for change in ("", "insert into fact (k) values (1)"):
            stranger(lakes, work)
            if change:
                lakes.shop.execute(change)
            result = refresher.refresh("bag")
            assert (result.action, str(result.reason)[:35]) == ("full", "the target was changed by another: ")
            assert lakes.equal("bag", BAG)
            lakes.shop.execute("insert into fact (k) values (2)")
            assert refresher.refresh("bag").action == "delta"
            assert lakes.equal("bag", BAG)


@pytest.mark.parametrize("lakes", ["iceberg"], indirect=True)
def test_comments_of_columns_change_nothing(lakes: Lakes) -> None:
    lakes.view("bag", BAG)

    def describe(table: Any) -> None:
        with table.update_schema() as update:
            update.update_column("price", doc="how many")

    with Refresher(lakes.shop.db.dsn) as refresher:
        refresher.refresh("bag")
        stranger(lakes, describe)
        lakes.shop.execute("insert into fact (k) values (2)")
        assert refresher.refresh("bag").action == "delta"
        assert lakes.equal("bag", BAG)


@pytest.mark.parametrize("lakes", ["delta"], indirect=True)
def test_table_that_may_only_grow(lakes: Lakes) -> None:
    """The library's refusal is told, not a race with others that were not there."""
    from deltalake import DeltaTable

    lakes.view("bag", BAG)
    with Refresher(lakes.shop.db.dsn) as refresher:
        refresher.refresh("bag")
        table = DeltaTable(str(lakes.folder / "bag"))
        table.alter.set_table_properties({"delta.appendOnly": "true"})
        lakes.shop.execute("update fact set qty = qty + 1")
        with pytest.raises(GdqError, match=r"refuses the commit: .*append") as refused:
            refresher.refresh("bag")
        assert "delta.appendOnly" in str(refused.value.hint)
        DeltaTable(str(lakes.folder / "bag")).alter.set_table_properties({"delta.appendOnly": "false"})
        assert refresher.refresh("bag").action == "delta"
        assert lakes.equal("bag", BAG)


@pytest.mark.parametrize("lakes", ["delta"], indirect=True)
def test_partitions_of_another_go_with_a_full_load(lakes: Lakes) -> None:
    from deltalake import DeltaTable, write_deltalake

    lakes.view("bag", BAG)
    with Refresher(lakes.shop.db.dsn) as refresher:
        refresher.refresh("bag")
        table = DeltaTable(str(lakes.folder / "bag"))
        rows = table.to_pyarrow_table()
        write_deltalake(table, rows, mode="overwrite", schema_mode="overwrite", partition_by=["label"])
        result = refresher.refresh("bag")
        assert (result.action, str(result.reason)[:35]) == ("full", "the target was changed by another: ")
        assert DeltaTable(str(lakes.folder / "bag")).metadata().partition_columns == []
        lakes.shop.execute("insert into fact (k) values (2)")
        assert refresher.refresh("bag").action == "delta"
        assert lakes.equal("bag", BAG)


@pytest.mark.parametrize("kind", ["delta", "parquet", "iceberg"])
@pytest.mark.parametrize("character", "#?%")
def test_folders_that_no_library_finds_again(tmp_path: Path, kind: str, character: str) -> None:
    with pytest.raises(GdqError, match="has a character that readers"):
        lake_name(f"{kind}:{tmp_path}/a{character}20b/n.t")


def test_errors_are_told_apart_by_their_classes(lakes: Lakes) -> None:
    """Errors of the format's libraries are one line; errors of the program itself stay what they are."""
    lakes.view("bag", BAG)
    lake = lakes.open("bag")
    assert isinstance(lake, _OneLineErrors)

    # as another version of the library may have it, in a module of another name
    renamed = type("Renamed", (lake.library_errors[0],), {"__module__": "elsewhere"})
    with pytest.raises(GdqError, match="two"), lake._errors():
        raise renamed("two\nlines")
    with pytest.raises(KeyError), lake._errors():
        raise KeyError("own")
    if lakes.kind == "iceberg":
        assert {CommitFailedException, ValidationError} <= set(lake.library_errors)
