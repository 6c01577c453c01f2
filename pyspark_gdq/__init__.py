"""The data source `gdq` where Spark looks for it: Spark imports each package `pyspark_*` and takes its DefaultSource.

Spark imports this in every session of a machine that has gdq, whatever the session reads, and one package that fails
hides the data sources of all others. So it loads the rest of gdq only when a data frame is made.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from pyspark.sql.datasource import DataSource, DataSourceReader, DataSourceStreamReader

if TYPE_CHECKING:
    from pyspark.sql.types import StructType

    from gdq.consumers.spark.source import GdqDataSource


class DefaultSource(DataSource):
    """Spark's data source `gdq` without spark.dataSource.register(); gdq.consumers.spark.source explains the options"""

    @classmethod
    def name(cls) -> str:
        return "gdq"

    def schema(self) -> str:
        return self._source().schema()

    def reader(self, schema: StructType) -> DataSourceReader:
        return self._source().reader(schema)

    def streamReader(self, schema: StructType) -> DataSourceStreamReader:  # noqa: N802 (Spark calls it so)
        return self._source().streamReader(schema)

    def _source(self) -> GdqDataSource:
        from gdq.extra import extra_named  # noqa: PLC0415

        with extra_named():
            from gdq.consumers.spark.source import GdqDataSource  # noqa: PLC0415
        return GdqDataSource(self.options)
