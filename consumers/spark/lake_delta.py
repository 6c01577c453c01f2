"""A Delta Lake table that Spark fills, by MERGE of the connector delta-spark.

The position is in the commit's userMetadata, and the number of the view's commit in the table's state, as an
application transaction: of two refreshes that make the same number one fails, or finds it made. Delta lets a MERGE
follow commits that do not touch its rows, so the commit names the version that it was computed onto; what others have
committed in between is looked at afterwards, and by whoever reads the table's state.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

import pyarrow as pa

from gdq.consumers.lake.delta import KEY, DeltaLake, Found
from gdq.consumers.lake.files import ArrowDifference
from gdq.consumers.lake.table import check_state, commit_onto
from gdq.consumers.spark.lake_merge import CommitConflict, SparkDifference, conflicts, merge_into, own_session
from gdq.consumers.views.signals import Diverged
from gdq.consumers.views.target import StoredPosition
from gdq.errors import RefreshConflict
from gdq.view.view import ViewInfo

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

_SETTINGS = {
    "spark.sql.catalog.spark_catalog": "org.apache.spark.sql.delta.catalog.DeltaCatalog",
    # times as every other reader of Parquet has them
    "spark.sql.parquet.outputTimestampType": "TIMESTAMP_MICROS",
    "spark.databricks.delta.schema.autoMerge.enabled": "false",
    # the state of the table, which is read again and again, in as many tasks
    "spark.databricks.delta.snapshotPartitions": "4",
}
_METADATA = "spark.databricks.delta.commitInfo.userMetadata"
_APPLICATION, _NUMBER = "spark.databricks.delta.write.txnAppId", "spark.databricks.delta.write.txnVersion"


class DeltaWriter:
    """Writes the target of one view."""

    def __init__(self, spark: SparkSession, view: ViewInfo) -> None:
        assert view.lake is not None
        self._lake = DeltaLake(view.lake, view.view_name, view.source)
        self._session = own_session(spark, tuple(_SETTINGS.items()))

    def commit(self, change: SparkDifference, stored: StoredPosition | None, new: StoredPosition) -> int:
        lake = self._lake

        def attempt() -> int:
            found = lake.find()
            check_state(lake.name, lake.view, found.state, stored, change.kind)
            with conflicts(), self._marked(found, new):
                rows = self._load(found, change) if change.kind == "full" else self._merge(found, change)
            if not rows and change.kind != "full":
                return lake.commit(ArrowDifference("none", change.schema), stored, new)
            self._check(found, new)
            return rows

        return commit_onto(lake.name, CommitConflict, attempt)

    @contextmanager
    def _marked(self, found: Found, new: StoredPosition) -> Iterator[None]:
        """Let the commit made in the block say what it is."""
        version = -1 if found.table is None else found.table.version()
        mark = self._lake.mark(found.number + 1, new) | {"onto": version}
        for name, value in (
            (_METADATA, json.dumps({KEY: mark})),
            (_APPLICATION, self._lake.application),
            (_NUMBER, str(found.number + 1)),
        ):
            self._session.conf.set(name, value)
        yield

    def _check(self, before: Found, new: StoredPosition) -> None:
        """Whether the commit is there, and nobody has changed rows between it and what it was computed onto."""
        found = self._lake.find()
        if found.number != before.number + 1 or found.state.stored != new:
            raise RefreshConflict(f'another refresh of view "{self._lake.view}" has moved its position meanwhile')
        if found.state.foreign is not None:
            raise Diverged(found.state.foreign)

    def _load(self, found: Found, change: SparkDifference) -> int:
        before = 0 if found.table is None else self._lake.rows(found.table)
        change.rows.createOrReplaceGlobalTempView("gdq_rows")
        rows = change.named(self._session.sql("select * from global_temp.gdq_rows"))
        writer = rows.write.format("delta").option("overwriteSchema", "true")
        writer.mode("errorifexists" if found.table is None else "overwrite").save(self._lake.name.place)
        after = self._lake.find().table
        return before + (0 if after is None else self._lake.rows(after))

    def _merge(self, found: Found, change: SparkDifference) -> int:
        if found.table is None:
            raise Diverged(f"{self._lake.name} is gone")
        if pa.schema(found.table.schema().to_arrow()).remove_metadata() != change.schema:
            raise Diverged(f"the columns of {self._lake.name} are others")
        place = self._lake.name.place.replace("`", "``")
        return merge_into(self._session, change, f"delta.`{place}`")
