"""A Delta Lake table that Spark fills by MERGE of the connector delta-spark.

The commit's userMetadata holds the position. The table's state holds the number of the view's last commit as an
application transaction: if two refreshes write the same number, one of them fails or finds it written.
Delta lets a MERGE succeed after other commits that do not touch its rows. So a commit names the version that it was
computed onto, and every reader of the table's state looks for other commits in between.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

import pyarrow as pa

from gdq.consumers.lake.delta import DELTA_STATE_KEY, DeltaLake, FoundDelta
from gdq.consumers.lake.files import ArrowDifference
from gdq.consumers.spark.lake_merge import (
    SparkCommitConflict,
    SparkDifference,
    commit_conflicts,
    merge_into,
    writer_session,
)
from gdq.consumers.views.signals import Diverged
from gdq.consumers.views.target import StoredPosition
from gdq.errors import RefreshConflict
from gdq.view.lake_name import LakeName

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

_SETTINGS = {
    "spark.sql.catalog.spark_catalog": "org.apache.spark.sql.delta.catalog.DeltaCatalog",
    # the type of timestamps that all other readers of Parquet expect
    "spark.sql.parquet.outputTimestampType": "TIMESTAMP_MICROS",
    "spark.databricks.delta.schema.autoMerge.enabled": "false",
    # tasks that read the table's state, which happens often
    "spark.databricks.delta.snapshotPartitions": "4",
}
_METADATA = "spark.databricks.delta.commitInfo.userMetadata"
_APPLICATION, _NUMBER = "spark.databricks.delta.write.txnAppId", "spark.databricks.delta.write.txnVersion"


class SparkDeltaWriter:
    """Writes the table `name` of an `owner`; `owner` and `source` as in open_lake()."""

    def __init__(self, spark: SparkSession, name: LakeName, owner: str, source: str) -> None:
        self._lake = DeltaLake(name, owner, source)
        self.session = writer_session(spark, tuple(_SETTINGS.items()))

    def rows(self) -> DataFrame:
        return self.session.read.format("delta").load(self._lake.name.place)

    def commit(self, change: SparkDifference, stored: StoredPosition | None, new: StoredPosition) -> int:
        lake = self._lake

        def attempt() -> int:
            found = lake.find()
            lake.check(found.state, stored, change.kind)
            with commit_conflicts(), self._marked(found, new):
                rows = self._write(found, change) if change.kind in ("full", "append") else self._merge(found, change)
            if not rows and change.kind in ("signed", "replace"):
                return lake.commit(ArrowDifference("none", change.schema), stored, new)
            self._check(found, new)
            return rows

        return lake.commit_onto(SparkCommitConflict, attempt)

    @contextmanager
    def _marked(self, found: FoundDelta, new: StoredPosition) -> Iterator[None]:
        """Mark the block's commit with its number, its position and the version that it was computed onto."""
        version = -1 if found.table is None else found.table.version()
        mark = self._lake.mark(found.number + 1, new) | {"onto": version}
        for name, value in (
            (_METADATA, json.dumps({DELTA_STATE_KEY: mark})),
            (_APPLICATION, self._lake.application),
            (_NUMBER, str(found.number + 1)),
        ):
            self.session.conf.set(name, value)
        yield

    def _check(self, before: FoundDelta, new: StoredPosition) -> None:
        """Raise unless the commit is there, without foreign changes since the version that it was computed onto."""
        found = self._lake.find()
        if found.number != before.number + 1 or found.state.stored != new:
            raise RefreshConflict(f"another refresh of {self._lake.owner} has moved its position meanwhile")
        if found.state.foreign is not None:
            raise Diverged(found.state.foreign)

    def _write(self, found: FoundDelta, change: SparkDifference) -> int:
        """Commit all rows, or further ones; returns the rows deleted plus the rows inserted."""
        before = 0 if found.table is None else self._lake.rows(found.table)
        writer = change.named_rows(self.session).write.format("delta")
        if change.kind == "append":
            self._check_columns(found, change)
            writer.mode("append").save(self._lake.name.place)
        else:
            writer.mode("errorifexists" if found.table is None else "overwrite")
            writer.option("overwriteSchema", "true").save(self._lake.name.place)
        table = self._lake.find().table
        after = 0 if table is None else self._lake.rows(table)
        return after - before if change.kind == "append" else after + before

    def _check_columns(self, found: FoundDelta, change: SparkDifference) -> None:
        if found.table is None:
            raise Diverged(f"{self._lake.name} is gone")
        if pa.schema(found.table.schema().to_arrow()).remove_metadata() != change.schema:
            raise Diverged(f"the columns of {self._lake.name} are others")

    def _merge(self, found: FoundDelta, change: SparkDifference) -> int:
        self._check_columns(found, change)
        place = self._lake.name.place.replace("`", "``")
        return merge_into(self.session, change, f"delta.`{place}`")
