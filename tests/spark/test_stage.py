"""The staging table that Spark's tasks write: tries that Spark does not count leave nothing, whenever they end."""

from __future__ import annotations

import pytest

from tests.support.server import Database
from tests.support.spark import SPARK_MARKS

pytestmark = SPARK_MARKS


def test_only_tries_that_count(db: Database) -> None:
    import pyarrow as pa

    from gdq.consumers.spark.stage import StageWriter

    rows = pa.RecordBatch.from_pydict({"c1": ["a", None]})
    with db.connect() as owner:
        owner.execute("create schema gdq_target; create unlogged table gdq_target.stage (c1 text, attempt text)")
        writer = StageWriter(db.dsn, "stage")
        counted, _, empty = (writer.write(iter(given)) for given in ([rows], [rows], []))
        writer.commit([counted, empty, None])
        found = owner.execute("select c1, attempt from gdq_target.stage order by 1").fetchall()
        assert found == [("a", counted.name), (None, counted.name)]
        with pytest.raises(Exception, match="violates check constraint"):
            writer.write(iter([rows]))
        assert owner.execute("table gdq_target.stage").rowcount == 2
        owner.execute("drop table gdq_target.stage; create table gdq_target.stage (c1 text, attempt text)")
        writer.write(iter([rows]))
        writer.commit([])
        assert owner.execute("table gdq_target.stage").rowcount == 0
