"""The data source gdq as a stream: every change once, from checkpoint to checkpoint, or a clear error."""

from __future__ import annotations

import itertools
import json
import re
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import pytest
from psycopg import sql
from pyspark.errors import StreamingQueryException

from gdq.conninfo import conninfo_without_password
from gdq.consumer import Consumer
from gdq.consumers.spark.stream import LIMITS_BATCHES
from gdq.source import Position
from gdq.typed.pgtypes import column_type
from tests.spark.test_stream_reader import every_type
from tests.support.spark import QUEUE, SPARK_MARKS, Shop
from tests.support.waiting import SECONDS

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession
    from pyspark.sql.streaming.query import StreamingQuery

pytestmark = SPARK_MARKS

Row = tuple[Any, ...]
Result = TypeVar("Result")

PAGE = Path(__file__).parent.parent.parent / "docs" / "spark.md"


@dataclass(slots=True)
class Sink:
    """Keeps the rows of each batch under its number: one that comes again replaces itself."""

    batches: dict[int, list[Row]] = field(default_factory=dict)
    at: Callable[[int], None] = lambda _: None

    def __call__(self, data: DataFrame, number: int) -> None:
        self.batches[number] = [tuple(row) for row in data.collect()]
        self.at(number)

    @property
    def rows(self) -> list[Row]:
        return [row for rows in self.batches.values() for row in rows]


@dataclass(frozen=True, slots=True)
class Stream:
    """Runs of one stream over public.orders, each from the checkpoint on."""

    spark: SparkSession
    dsn: str
    checkpoint: Path
    sink: Sink

    def start(self, *, now: bool = True, **options: Any) -> StreamingQuery:
        given = {"dsn": self.dsn, "queue": QUEUE, "table": "orders", "consumer": "lake", **options}
        data = self.spark.readStream.format("gdq").options(**given).load()
        writer = data.writeStream.foreachBatch(self.sink).option("checkpointLocation", str(self.checkpoint))
        return (writer.trigger(availableNow=True) if now else writer.trigger(processingTime="0 seconds")).start()

    def run(self, **options: Any) -> list[Row]:
        """Read what there is; all that has been read so far."""
        assert begun(lambda: self.start(**options).awaitTermination(SECONDS))
        return self.sink.rows


def begun(stream: Callable[[], Result]) -> Result:
    """Run a stream, again where a busy machine took longer to start its process than the ten seconds Spark allows."""
    while True:
        try:
            return stream()
        except StreamingQueryException as error:
            if "Python worker failed to connect back" not in str(error):
                raise


@pytest.fixture
def stream(shop: Shop, spark: SparkSession, tmp_path: Path) -> Iterator[Stream]:
    """The stream of the consumer lake; the consumer "history" sees the same changes."""
    shop.capture("orders")
    for name in ("lake", "history"):
        shop.execute(f"select gdq.register_consumer('{QUEUE}', %s)", name)
    # Spark 4.1 ends a run after one batch without this, which after a crash is the one that comes again
    spark.conf.set("spark.sql.streaming.triggerAvailableNowWrapper.enabled", "true")
    with conninfo_without_password(shop.db.dsn) as dsn:
        yield Stream(spark, dsn, tmp_path / "checkpoint", Sink())


def history(shop: Shop) -> Counter[Row]:
    """What a consumer of events gets: kind, number and some columns of every image."""
    seen: Counter[Row] = Counter()
    with Consumer(shop.db.dsn, QUEUE, "history") as consumer:
        for batch in consumer.batches(once=True):
            for event in batch.events():
                for kind, image in (("preimage", event.old), ("postimage", event.new)):
                    if image is not None:
                        name = f"update_{kind}" if event.op == "update" else event.op
                        seen[name, event.id, image["id"], image["note"], image["n"]] += 1
    return seen


def streamed(rows: list[Row]) -> Counter[Row]:
    kind, number, key, note, n = 0, 3, 4, 11, 8
    return Counter((row[kind], row[number], row[key], row[note], row[n]) for row in rows)


def consumer_tick(shop: Shop) -> int:
    ((tick,),) = shop.execute(f"select last_tick from gdq.consumer_info('{QUEUE}') where consumer_name = 'lake'")
    return int(tick)


class Crash(Exception):  # noqa: N818 (it is what happens to the sink)
    """The sink dies."""


def test_crash_and_restart_give_every_change_once(shop: Shop, stream: Stream) -> None:
    """The sink dies when it has a batch that the checkpoint does not know to be done: it comes again as it was."""
    started_at = consumer_tick(shop)
    for step in range(3):
        shop.execute(f"update orders set n = n + 1 where id < 100; delete from orders where id = {step + 7}")
        shop.execute(
            f"insert into orders (id, note) select i, 'late' from generate_series({step + 1}001, {step + 1}020) i"
        )
        before = {number: sorted(map(str, rows)) for number, rows in stream.sink.batches.items()}

        def at(number: int, last: int = step) -> None:
            if number == last < 2:
                raise Crash

        stream.sink.at = at
        if step < 2:
            with pytest.raises(Exception, match="Crash"):
                stream.run()
        else:
            stream.run()
        assert {number: sorted(map(str, stream.sink.batches[number])) for number in before} == before
        # batch number `step` has been planned, which proves that the one before it is done, and no more
        assert consumer_tick(shop) == (ended_at(stream, step - 1) if step else started_at)
        shop.keep_house()
    assert len(stream.sink.batches) == 3
    assert streamed(stream.sink.rows) == history(shop)


def ended_at(stream: Stream, number: int) -> int:
    """The tick at which a batch ended, from the checkpoint."""
    offset = json.loads((stream.checkpoint / "offsets" / str(number)).read_text().splitlines()[-1])
    return Position.parse(offset["position"]).tick


@pytest.mark.long  # the reader alone is asked in test_stream_reader
def test_every_type_reaches_spark_as_in_the_batch_reader(shop: Shop, stream: Stream) -> None:
    """Their Spark types are those of docs/types.md, and all that Spark makes of the values is the same."""
    names, as_text, values = every_type(shop)
    start = Position.parse(shop.execute(f"select gdq.position('{QUEUE}', 'lake')")[0][0]).snapshot
    shop.connection.execute(sql.SQL("insert into kinds values (1, {})").format(values))
    shop.execute("update kinds set id = 2; insert into kinds (id) values (3); delete from kinds where id = 2")
    options = {"dsn": stream.dsn, "queue": QUEUE, "table": "kinds", "as_text": as_text}
    now = shop.execute("select pg_current_snapshot()::text")[0][0]
    batch = stream.spark.read.format("gdq").options(**options, **{"from": start, "to": now}).load()
    streaming = stream.spark.readStream.format("gdq").options(**options, consumer="lake").load()
    assert streaming.schema == batch.schema
    assert len(names) > 60
    assert streaming.columns[4:] == ["id", *names]
    shown = {field.name: field.dataType.simpleString() for field in streaming.schema}
    columns = shop.execute(
        """select a.attname, format_type(a.atttypid, a.atttypmod), a.atttypid >= 16384 from pg_attribute a
            where a.attrelid = 'kinds'::regclass and a.attnum > 0"""
    )
    for name, kind, own in columns:
        told = column_type(kind, own, column=name, unsupported="text").spark
        assert (name, shown[name]) == (name, told)
    found = stream.run(table="kinds", as_text=as_text)
    assert len(found) == 5
    assert sorted(map(str, found)) == sorted(str(tuple(row)) for row in batch.collect())


@pytest.mark.skipif(not LIMITS_BATCHES, reason="Spark 4.1 does not limit batches")
def test_max_events_divides_what_there_is(shop: Shop, stream: Stream) -> None:
    for number in range(6):
        shop.execute(f"update orders set n = {number} where id <= 10")
        shop.execute(f"select gdq.force_tick('{QUEUE}')")
    stream.run(max_events=20)
    assert [len(rows) for rows in stream.sink.batches.values() if rows] == [40, 40, 40]
    assert streamed(stream.sink.rows) == history(shop)


@pytest.mark.long
def test_stopped_anywhere_beside_writers(shop: Shop, stream: Stream) -> None:
    done = threading.Event()

    def write() -> None:
        with shop.db.connect() as connection:
            for number in itertools.count(1):
                connection.execute("insert into orders (id, note) values (%s, 'w')", [1000 + number])
                connection.execute("update orders set n = n + 1 where id = %s", [number % 400])
                if done.is_set():
                    return

    writer = threading.Thread(target=write)
    writer.start()
    try:
        begun(lambda: stop_after(stream, 4))
    finally:
        done.set()
        writer.join()
    shop.keep_house()
    assert streamed(stream.run()) == history(shop)


def stop_after(stream: Stream, batches: int) -> None:
    query = stream.start(now=False)
    while len(stream.sink.batches) < batches:
        error = query.exception()
        if error is not None:
            raise error
        time.sleep(0.02)
    query.stop()


@pytest.mark.skipif(not PAGE.exists(), reason="an sdist has no documentation")
def test_example_of_reading_once(shop: Shop, stream: Stream) -> None:
    (example,) = re.findall(r"```python reading\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL)
    text = example.replace('service="shop", queue="shop"', f"dsn=dsn, queue={QUEUE!r}")
    shop.execute("update orders set n = n + 1 where id = 1")
    with Consumer(shop.db.dsn, QUEUE, "history") as consumer:
        for batch in consumer.batches(once=True):
            shown: dict[str, Any] = {"spark": stream.spark, "dsn": stream.dsn, "batch": batch}
            exec(text, shown)
            assert sorted(row.id for row in shown["rows"].collect()) == sorted(
                number for (number,) in shop.execute("select id from orders")
            )
            changes = {(row["_change_type"], row.id) for row in shown["changes"].collect()}
            assert changes == {("update_preimage", 1), ("update_postimage", 1)}


@pytest.mark.skipif(not PAGE.exists(), reason="an sdist has no documentation")
def test_example_in_sql(shop: Shop, stream: Stream) -> None:
    (example,) = re.findall(r"```sql reading-sql\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL)
    stream.spark.sql(example.replace("service 'shop', queue 'shop'", f"dsn '{stream.dsn}', queue '{QUEUE}'"))
    (row,) = stream.spark.sql("select count(*) as n, max(n) as most from orders_now").collect()
    assert [tuple(row)] == shop.execute("select count(*), max(n) from orders")
    stream.spark.catalog.dropTempView("orders_now")


@pytest.mark.skipif(not PAGE.exists(), reason="an sdist has no documentation")
def test_example_of_a_table_at_one_snapshot(shop: Shop, stream: Stream, tmp_path: Path) -> None:
    (example,) = re.findall(r"```python at-snapshot\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL)
    text = example.replace('service="shop", queue="shop"', f"dsn=dsn, queue={QUEUE!r}, partition_bytes='8192'")
    exec(text, {"spark": stream.spark, "dsn": stream.dsn, "folder": tmp_path})
    rows = stream.spark.read.parquet(f"{tmp_path}/orders").collect()
    assert sorted((row.id, row.n) for row in rows) == sorted(shop.execute("select id, n from orders"))


@pytest.mark.long
@pytest.mark.skipif(not PAGE.exists(), reason="an sdist has no documentation")
def test_example_of_the_documentation(shop: Shop, stream: Stream, tmp_path: Path) -> None:
    (example,) = re.findall(r"```python stream\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL)
    shop.execute("update orders set n = n + 1 where id = 1; delete from orders where id = 2")
    text = example.replace('service="shop", queue="shop"', f"dsn=dsn, queue={QUEUE!r}")
    begun(lambda: exec(text, {"spark": stream.spark, "folder": str(tmp_path), "dsn": stream.dsn}))
    rows = stream.spark.read.parquet(f"{tmp_path}/changes").drop("batch").collect()
    assert streamed([tuple(row) for row in rows]) == history(shop)
