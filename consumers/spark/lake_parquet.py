"""A folder of Parquet versions that Spark fills: its tasks write the files, which the next version then has.

Only whole versions and further files: what takes rows away is the matter of the process that knows all files.
"""

from __future__ import annotations

import shutil
from typing import TYPE_CHECKING

from gdq.consumers.lake.parquet import ParquetLake
from gdq.consumers.spark.lake_merge import SparkDifference, writer_session
from gdq.consumers.views.target import StoredPosition
from gdq.view.lake_name import LakeName

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

# The type of timestamps that all other readers of Parquet expect.
_SETTINGS = (("spark.sql.parquet.outputTimestampType", "TIMESTAMP_MICROS"),)


class SparkParquetWriter:
    """Writes the table `name` of an `owner`; `owner` and `source` as in open_lake()."""

    def __init__(self, spark: SparkSession, name: LakeName, owner: str, source: str) -> None:
        self._lake = ParquetLake(name, owner, source)
        self.session = writer_session(spark, _SETTINGS)

    def rows(self) -> DataFrame:
        # a version stays as it is while the next one is made
        return self.session.read.parquet(self._lake.current.as_uri())

    def commit(self, change: SparkDifference, stored: StoredPosition | None, new: StoredPosition) -> int:
        assert change.kind in ("full", "append")
        self._lake.check(self._lake.state(), stored, change.kind)
        written = self._lake.folder_for_files()
        try:
            change.named_rows(self.session).write.parquet(written.as_uri())
            return self._lake.commit_files(written, change.kind, stored, new)
        finally:
            shutil.rmtree(written, ignore_errors=True)
