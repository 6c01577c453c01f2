"""An Iceberg table that Spark fills, by MERGE of the connector iceberg-spark-runtime.

A branch is made at the snapshot that was looked at, Spark writes onto that branch, and in one commit of the catalog
the table's main branch becomes it, which fails when main is no longer where it was. Until then no reader sees any of
it. The position is among the properties of the snapshot. A branch that a killed refresh has left goes at the next one.
"""

from __future__ import annotations

import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from pyiceberg.exceptions import CommitFailedException
from pyiceberg.table import Table
from pyiceberg.table.refs import MAIN_BRANCH
from pyiceberg.table.update import AssertRefSnapshotId, RemoveSnapshotRefUpdate, SetSnapshotRefUpdate

from gdq.consumers.lake.files import ArrowDifference
from gdq.consumers.lake.iceberg import BRANCH, CATALOG, KEY, IcebergLake, alike
from gdq.consumers.lake.table import check_state, commit_onto, pack
from gdq.consumers.spark.lake_merge import SparkDifference, merge_into, own_session, quoted
from gdq.consumers.views.signals import Diverged
from gdq.consumers.views.target import StoredPosition
from gdq.errors import GdqError
from gdq.view.lake_name import LakeName
from gdq.view.view import ViewInfo

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

_POSITION = f"spark.sql.iceberg.snapshot-property.{KEY}"


class IcebergWriter:
    """Writes the target of one view."""

    def __init__(self, spark: SparkSession, view: ViewInfo) -> None:
        assert view.lake is not None
        self._lake = IcebergLake(view.lake, view.view_name, view.source)
        self._catalog, settings = _catalog(spark, view.lake)
        self._session = own_session(spark, settings)

    def commit(self, change: SparkDifference, stored: StoredPosition | None, new: StoredPosition) -> int:
        lake = self._lake

        def attempt() -> int:
            with self._at(change, stored) as (table, before):
                branch = f"{BRANCH}{secrets.token_hex(6)}"
                table.manage_snapshots().create_branch(before, branch).commit()
                self._session.conf.set(_POSITION, pack(new))
                parts = (self._catalog, *lake.name.iceberg[1].split("."), f"branch_{branch}")
                place = ".".join(map(quoted, parts))
                rows = self._load(change, table, place) if change.kind == "full" else self._merge(change, table, place)
                if not rows and change.kind != "full":
                    return lake.commit(ArrowDifference("none", change.schema), stored, new)
                self._publish(table.refresh(), branch, before)
                return rows

        return commit_onto(lake.name, CommitFailedException, attempt)

    @contextmanager
    def _at(self, change: SparkDifference, stored: StoredPosition | None) -> Iterator[tuple[Table, int]]:
        """The table, and the snapshot at which it is what it was when the change was computed."""
        lake = self._lake
        with lake.opened(make=change.kind == "full") as (catalog, found):
            check_state(lake.name, lake.view, lake.state_of(found), stored, change.kind)
            table = found or lake.create(catalog, change.schema)
            if table.current_snapshot() is None:
                # a branch begins at a snapshot
                with table.transaction() as made, made.update_snapshot(snapshot_properties={KEY: ""}).fast_append():
                    pass
                table.refresh()
            snapshot = table.current_snapshot()
            if snapshot is None:
                raise AssertionError("a table without a snapshot was given one")
            yield table, snapshot.snapshot_id

    def _publish(self, table: Table, branch: str, before: int) -> None:
        after = table.refs()[branch].snapshot_id
        table.catalog.commit_table(
            table,
            (
                AssertRefSnapshotId.model_validate({"ref": MAIN_BRANCH, "snapshot-id": before}),
                AssertRefSnapshotId.model_validate({"ref": branch, "snapshot-id": after}),
            ),
            (
                SetSnapshotRefUpdate.model_validate({"ref-name": MAIN_BRANCH, "type": "branch", "snapshot-id": after}),
                RemoveSnapshotRefUpdate.model_validate({"ref-name": branch}),
            ),
        )

    def _load(self, change: SparkDifference, table: Table, place: str) -> int:
        if not alike(table, change.schema):
            raise GdqError(
                f"the columns of {self._lake.name} are others, and Spark cannot replace them with the rows at once",
                hint="Drop the view and make it anew.",
            )
        change.rows.createOrReplaceGlobalTempView("gdq_rows")
        rows = change.named(self._session.sql("select * from global_temp.gdq_rows"))
        from pyspark.sql.functions import lit  # noqa: PLC0415 (half a gigabyte of package)

        rows.writeTo(place).overwrite(lit(True))
        went = self._session.sql(f"select count(*) from {place.rpartition('.')[0]}").collect()[0][0]
        return int(went + self._session.sql(f"select count(*) from {place}").collect()[0][0])

    def _merge(self, change: SparkDifference, table: Table, place: str) -> int:
        if not alike(table, change.schema):
            raise Diverged(f"the columns of {self._lake.name} are others")
        return merge_into(self._session, change, place)


def _catalog(spark: SparkSession, name: LakeName) -> tuple[str, tuple[tuple[str, str], ...]]:
    """The catalog's name in Spark, and the settings that make it known. GdqError for one that Spark does not know."""
    where = name.iceberg[0]
    # what another writer has just committed is there
    fresh = (f"spark.sql.catalog.{where}.cache-enabled", "false")
    if not where.startswith("/"):
        if spark.conf.get(f"spark.sql.catalog.{where}", None) is None:
            hint = f"Start it with --conf spark.sql.catalog.{where}=..., the same as pyiceberg's."
            raise GdqError(f"Spark knows no catalog {where}", hint=hint)
        return where, (fresh,)
    # as the library calls it: the name is part of what the catalog's database holds
    options = {
        "": "org.apache.iceberg.spark.SparkCatalog",
        ".catalog-impl": "org.apache.iceberg.jdbc.JdbcCatalog",
        ".uri": f"jdbc:sqlite:{Path(where) / CATALOG}",
        ".warehouse": Path(where).as_uri(),
        ".cache-enabled": "false",
    }
    return "gdq", tuple((f"spark.sql.catalog.gdq{option}", value) for option, value in options.items())
