"""An Iceberg table that Spark fills by MERGE of the connector iceberg-spark-runtime.

A commit creates a branch at the current snapshot, and Spark writes onto the branch. Then one commit of the catalog
moves main to the branch; it fails if main has moved meanwhile. Readers see nothing before. The snapshot's properties
hold the position. The next refresh removes a branch that a killed refresh left behind.
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
from gdq.consumers.lake.iceberg import (
    ICEBERG_BRANCH,
    ICEBERG_STATE_KEY,
    IcebergLake,
    has_iceberg_columns,
)
from gdq.consumers.lake.table import ICEBERG_CATALOG
from gdq.consumers.spark.lake_merge import SparkDifference, merge_into, spark_quoted, writer_session
from gdq.consumers.views.signals import Diverged
from gdq.consumers.views.target import StoredPosition
from gdq.errors import GdqError
from gdq.view.lake_name import LakeName

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

_POSITION = f"spark.sql.iceberg.snapshot-property.{ICEBERG_STATE_KEY}"


class SparkIcebergWriter:
    """Writes the table `name` of an `owner`; `owner` and `source` as in open_lake()."""

    def __init__(self, spark: SparkSession, name: LakeName, owner: str, source: str) -> None:
        self._lake = IcebergLake(name, owner, source)
        self._catalog, settings = _catalog(spark, name)
        self.session = writer_session(spark, settings)

    def rows(self) -> DataFrame:
        return self.session.table(".".join(map(spark_quoted, self._parts)))

    @property
    def _parts(self) -> tuple[str, ...]:
        return (self._catalog, *self._lake.name.iceberg[1].split("."))

    def commit(self, change: SparkDifference, stored: StoredPosition | None, new: StoredPosition) -> int:
        lake = self._lake

        def attempt() -> int:
            with self._at(change, stored) as (table, before):
                branch = f"{ICEBERG_BRANCH}{secrets.token_hex(6)}"
                table.manage_snapshots().create_branch(before, branch).commit()
                self.session.conf.set(_POSITION, new.text)
                place = ".".join(map(spark_quoted, (*self._parts, f"branch_{branch}")))
                rows = self._written(change, table, place)
                if not rows and change.kind in ("signed", "replace"):
                    return lake.commit(ArrowDifference("none", change.schema), stored, new)
                self._publish(table.refresh(), branch, before)
                return rows

        return lake.commit_onto(CommitFailedException, attempt)

    @contextmanager
    def _at(self, change: SparkDifference, stored: StoredPosition | None) -> Iterator[tuple[Table, int]]:
        """The table and its current snapshot, checked to be at the position that the change was computed from."""
        lake = self._lake
        with lake.opened(make=change.kind == "full") as (catalog, found):
            lake.check(lake.state_of(found), stored, change.kind)
            table = found or lake.create(catalog, change.schema)
            if table.current_snapshot() is None:
                # a branch needs a snapshot to start from
                with (
                    table.transaction() as made,
                    made.update_snapshot(snapshot_properties={ICEBERG_STATE_KEY: ""}).fast_append(),
                ):
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

    def _written(self, change: SparkDifference, table: Table, place: str) -> int:
        """Write a change onto the branch at `place`; returns the rows deleted plus the rows inserted."""
        if not has_iceberg_columns(table, change.schema):
            if change.kind != "full":
                raise Diverged(f"the columns of {self._lake.name} are others")
            raise GdqError(
                f"the columns of {self._lake.name} are others, and Spark cannot replace them with the rows at once",
                hint="Drop the view and create it again.",
            )
        if change.kind in ("signed", "replace"):
            return merge_into(self.session, change, place)
        writer = change.named_rows(self.session).writeTo(place)
        before = self._count(place)
        if change.kind == "append":
            writer.append()
            return self._count(place) - before
        from pyspark.sql.functions import lit  # noqa: PLC0415 (half a gigabyte of package)

        writer.overwrite(lit(True))
        return self._count(place) + before

    def _count(self, place: str) -> int:
        return int(self.session.sql(f"select count(*) from {place}").collect()[0][0])


def _catalog(spark: SparkSession, name: LakeName) -> tuple[str, tuple[tuple[str, str], ...]]:
    """The catalog's name in Spark and the settings that define it; GdqError for a catalog that Spark does not know."""
    where = name.iceberg[0]
    # else Spark does not see what another writer has just committed
    fresh = (f"spark.sql.catalog.{where}.cache-enabled", "false")
    if not where.startswith("/"):
        if spark.conf.get(f"spark.sql.catalog.{where}", None) is None:
            hint = f"Start it with --conf spark.sql.catalog.{where}=..., the same as pyiceberg's."
            raise GdqError(f"Spark knows no catalog {where}", hint=hint)
        return where, (fresh,)
    # the catalog's database stores the name, so it must equal pyiceberg's
    options = {
        "": "org.apache.iceberg.spark.SparkCatalog",
        ".catalog-impl": "org.apache.iceberg.jdbc.JdbcCatalog",
        ".uri": f"jdbc:sqlite:{Path(where) / ICEBERG_CATALOG}",
        ".warehouse": Path(where).as_uri(),
        ".cache-enabled": "false",
    }
    return "gdq", tuple((f"spark.sql.catalog.gdq{option}", value) for option, value in options.items())
