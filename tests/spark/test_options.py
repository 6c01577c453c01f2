"""Options of the data source that cannot be meant, and columns that Spark cannot tell apart, end in one clear line.

Before any task runs: the data source itself, without a session.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest

from gdq.consumers.spark.jobs import spark_errors, worker_errors
from gdq.consumers.spark.source import GdqDataSource
from gdq.consumers.spark.stream import LIMITS_BATCHES
from gdq.errors import GdqError
from tests.support.spark import QUEUE, Shop

pytestmark = pytest.mark.spark

SNAPSHOT = "100:104:100,102"
BATCH: list[tuple[dict[str, str], str]] = [
    ({"partition_bytes": "many"}, r'"partition_bytes" .* is a whole number above 0, not \'many\''),
    ({"partition_bytes": "0"}, r'"partition_bytes" .* is a whole number above 0, not \'0\''),
    ({"partition_bytes": "-1"}, "whole number above 0"),
    ({"partition_bytes": "1e6"}, "whole number above 0"),
    ({"partition_bytes": "\u0663"}, "whole number above 0"),
    ({"from": "yesterday", "to": SNAPSHOT}, r'"from" .* is a snapshot such as .*, not \'yesterday\''),
    ({"from": SNAPSHOT, "to": "100"}, '"to" .* is a snapshot'),
    ({"from": SNAPSHOT}, '"from" .* needs the option "to"'),
    ({"to": SNAPSHOT}, '"to" .* needs the option "from"'),
    ({"keys": "1, 2"}, '"keys" .* is a JSON array of keys'),
    ({"keys": "[1]"}, '"keys" .* is a JSON array of keys'),
    ({"keys": "[[1]]"}, '"keys" .* array of texts and nulls'),
    ({"keys": '[["1"], ["1", "2"]]'}, '"keys" .* is a JSON array of keys'),
    ({"keys": '[["1", "2"]]'}, '"keys" .* has keys of 2 values, the key of .* is: id'),
    ({"keys": '[["1"]]', "from": SNAPSHOT, "to": SNAPSHOT}, '"keys" .* reads rows'),
    ({"snapshot": "'; drop table orders"}, '"snapshot" .* is the name of an exported snapshot'),
    ({"as_text": "n, nn"}, '"as_text" .* lists columns of orders, which has no nn'),
    ({"columns": "n, nn"}, '"columns" .* lists columns of orders, which has no nn'),
    ({"from": SNAPSHOT, "to": SNAPSHOT, "images": "old"}, r'"images" .* is both, new or net, not \'old\''),
    ({"images": "new"}, '"images" .* needs the option "from"'),
    ({"patition_bytes": "1"}, 'no option "patition_bytes" for spark.read: it has dsn, service'),
    ({"service": "shop"}, '"dsn" or "service", not both'),
    ({"queue": ""}, 'needs the option "queue"'),
    ({"table": ""}, 'needs the option "table"'),
]
STREAM: list[tuple[dict[str, str], str]] = [
    ({"gaps": "ignore"}, r'"gaps" .* is stop or rows, not \'ignore\''),
    ({"max_events": "all"}, '"max_events" .* is a whole number above 0'),
    ({"max_events": "0"}, '"max_events" .* is a whole number above 0'),
    ({"partition_bytes": "x"}, '"partition_bytes" .* is a whole number above 0'),
    ({"from": "tick 3"}, '"from" .* is a position'),
    ({"to": SNAPSHOT}, 'no option "to" for spark.readStream'),
    ({"images": "all"}, '"images" .* is both, new or net'),
    ({"consumer": ""}, 'needs the option "consumer"'),
]


def refused(options: dict[str, str], *, stream: bool, match: str) -> None:
    source, names = GdqDataSource(options), cast("Any", SimpleNamespace(names=["id"]))

    def plan() -> None:
        source.schema()
        if stream:
            source.streamReader(names).stop()
        else:
            source.reader(names).partitions()

    with pytest.raises(GdqError, match=match) as raised:
        plan()
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize(("options", "match"), BATCH)
def test_options_of_spark_read(taken: Shop, options: dict[str, str], match: str) -> None:
    refused({"dsn": taken.db.dsn, "queue": QUEUE, "table": "orders"} | options, stream=False, match=match)


@pytest.mark.parametrize(("options", "match"), STREAM)
def test_options_of_spark_read_stream(taken: Shop, options: dict[str, str], match: str) -> None:
    given = {"dsn": taken.db.dsn, "queue": QUEUE, "table": "orders", "consumer": "lake"} | options
    refused(given, stream=True, match=match)


def test_max_events_needs_a_spark_that_limits(taken: Shop, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gdq.consumers.spark.stream.LIMITS_BATCHES", False)
    given = {"dsn": taken.db.dsn, "queue": QUEUE, "table": "orders", "consumer": "lake", "max_events": "7"}
    if LIMITS_BATCHES:
        with pytest.raises(GdqError, match=r"max_events.* needs Spark 4\.2"):
            GdqDataSource(given).streamReader(cast("Any", SimpleNamespace(names=["id"])))


@pytest.mark.parametrize("name", ["_change_type", "_commit_version", "_commit_timestamp", "ev_id", "Ev_Id"])
def test_a_column_with_a_name_of_the_data_source(taken: Shop, name: str) -> None:
    taken.execute(f'create table named (id int primary key, "{name}" text)')
    taken.capture("named")
    given = {"dsn": taken.db.dsn, "queue": QUEUE, "table": "named"}
    assert name in GdqDataSource(given).schema()  # rows have no columns of the data source's own
    match = f"table named has a column {name}, which Spark takes for a column of the data source"
    refused(given | {"from": SNAPSHOT, "to": SNAPSHOT}, stream=False, match=match)
    refused(given | {"consumer": "lake"}, stream=True, match=match)


def test_columns_that_differ_in_case_alone(taken: Shop) -> None:
    taken.execute('create table cased (id int primary key, v text, "V" text)')
    taken.capture("cased")
    match = "table cased has a column V, which Spark takes for column v"
    refused({"dsn": taken.db.dsn, "queue": QUEUE, "table": "cased"}, stream=False, match=match)


def test_errors_go_by_their_classes() -> None:
    from py4j.protocol import Py4JError, Py4JNetworkError
    from pyspark.errors import AnalysisException, PySparkException, PySparkValueError

    class Derived(AnalysisException):
        """As those of a connector, from another module."""

    class AlikeError(Exception):
        """From a module that is called as Spark's."""

    AlikeError.__module__ = "pyspark.errors"
    spark: list[Exception] = [Derived("x"), PySparkException("x"), PySparkValueError("x"), Py4JNetworkError("x")]
    assert all(isinstance(error, spark_errors()) for error in [*spark, Py4JError("x")])
    for error in spark:
        with pytest.raises(GdqError, match="Spark failed"), worker_errors(delta=False):
            raise error
    with pytest.raises(AlikeError), worker_errors(delta=False):
        raise AlikeError
