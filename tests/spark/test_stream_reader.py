"""What a stream may not pass over stops it, in one line that says how to go on. The reader, without a session."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import psycopg
import pytest
from psycopg import sql

from gdq.consumers.spark.reader import GdqReader
from gdq.consumers.spark.source import GdqDataSource
from gdq.consumers.spark.stream import LIMITS_BATCHES, GdqStreamReader, stream_reader
from gdq.errors import DivergedPosition, EraEnded, GdqError, ResyncRequired, TruncatedPosition
from gdq.source import Position
from tests.capture.test_types import SAMPLES
from tests.support.spark import QUEUE, Shop

pytestmark = pytest.mark.spark

CURE = "register the consumer anew, and start the stream with a new checkpoint"
COLUMNS = ["_change_type", "ev_id", "id", "n"]


@contextmanager
def reading(shop: Shop, names: Sequence[str] = COLUMNS, **options: str) -> Iterator[GdqStreamReader]:
    given = {"dsn": shop.db.dsn, "queue": QUEUE, "table": "orders", "consumer": "lake", **options}
    reader = stream_reader(given, names)
    try:
        yield reader
    finally:
        reader.stop()


def tick(shop: Shop) -> dict[str, Any]:
    """A tick, as the offset of a checkpoint."""
    ((position, table),) = shop.execute(
        f"select gdq.tick_position('{QUEUE}', gdq.force_tick('{QUEUE}')), 'orders'::regclass::oid::bigint"
    )
    return {"position": position, "table": table}


def rows(reader: GdqStreamReader, start: dict[str, Any], end: dict[str, Any]) -> list[tuple[Any, ...]]:
    return [
        tuple(row.values())
        for part in reader.partitions(start, end)
        for batch in reader.read(part)
        for row in batch.to_pylist()
    ]


def standing(shop: Shop) -> str:
    ((position,),) = shop.execute(f"select gdq.position('{QUEUE}', 'lake')")
    return str(position)


def test_batches_between_offsets(taken: Shop) -> None:
    with reading(taken) as reader:
        start = reader.initialOffset()
        taken.execute("insert into orders (id, n) values (1001, 5)")
        middle = tick(taken)
        taken.execute("update orders set n = 6 where id = 1001")
        end = tick(taken)
        first = rows(reader, start, middle)
        assert first == [("insert", first[0][1], 1001, 5)]
        later = rows(reader, middle, end)
        assert [(kind, n) for kind, _, _, n in later] == [("update_preimage", 5), ("update_postimage", 6)]
        assert sorted(rows(reader, start, end)) == sorted(first + later)
        assert rows(reader, end, end) == []


def test_images_and_columns(taken: Shop) -> None:
    """A delete has its key, and an update no preimage; the schema has no other columns."""
    given = {"dsn": taken.db.dsn, "queue": QUEUE, "table": "orders", "consumer": "lake", "columns": "n"}
    names = [part.split()[0].strip("`") for part in GdqDataSource(given).schema().split(", ")]
    assert names == ["_change_type", "_commit_version", "_commit_timestamp", "ev_id", "id", "n"]
    with reading(taken, images="new", columns="n") as reader:
        start = reader.initialOffset()
        taken.execute("insert into orders (id, n) values (1001, 5); update orders set n = 6 where id = 1001")
        taken.execute("delete from orders where id = 1001")
        found = sorted(rows(reader, start, tick(taken)), key=lambda row: row[1])
    assert [(kind, *values) for kind, _, *values in found] == [
        ("insert", 1001, 5),
        ("update_postimage", 1001, 6),
        ("delete", 1001, None),
    ]


def every_type(shop: Shop) -> tuple[list[str], str, sql.Composed]:
    """A captured table `kinds` with a column for every type; their names, those to read as text, and a row's values."""
    known = shop.execute("select typname from pg_type where typnamespace = 'pg_catalog'::regnamespace")
    kinds = [(f'pg_catalog."{name}"', SAMPLES[name]) for (name,) in known if SAMPLES.get(name) is not None]
    kinds += [("numeric(20,3)", "12345678901234567.125"), ("int[]", "{1,null}"), ("mood", "ok")]
    names = [f"c{number}" for number in range(len(kinds))]
    assert len(kinds) > 60
    shop.execute("create type mood as enum ('sad', 'ok')")
    columns = ", ".join(f"{name} {kind}" for name, (kind, _) in zip(names, kinds, strict=True))
    shop.execute(f"create table kinds (id int primary key, {columns})")
    shop.capture("kinds")
    homeless = [f'pg_catalog."{name}"' for name in ("numeric", "money", "time", "timetz", "interval")]
    as_text = ",".join(name for name, (kind, _) in zip(names, kinds, strict=True) if kind in homeless)
    return names, as_text, sql.SQL(", ").join(sql.Literal(value) for _, value in kinds)


def test_every_type_travels_as_in_the_batch_reader(taken: Shop) -> None:
    names, as_text, values = every_type(taken)
    wanted = [*COLUMNS[:3], "_commit_version", "_commit_timestamp", *names]
    with reading(taken, wanted, table="kinds", as_text=as_text) as reader:
        start = reader.initialOffset()
        taken.connection.execute(sql.SQL("insert into kinds values (1, {})").format(values))
        taken.execute("update kinds set id = 2")
        taken.execute("insert into kinds (id) values (3)")
        ((position, oid),) = taken.execute(
            f"select gdq.tick_position('{QUEUE}', gdq.force_tick('{QUEUE}')), 'kinds'::regclass::oid::bigint"
        )
        found = rows(reader, start, {"position": position, "table": oid})
        interval = {"from": Position.parse(start["position"]).snapshot, "to": Position.parse(position).snapshot}
        batch = GdqReader({k: v for k, v in reader.options.items() if k != "consumer"} | interval, wanted)
        again = [tuple(row.values()) for p in batch.partitions() for b in batch.read(p) for row in b.to_pylist()]
        assert len(found) == 4
        assert sorted(map(str, found)) == sorted(map(str, again))
        # what Spark is told to expect is what it gets
        source = GdqDataSource(dict(reader.options))
        assert [part.split()[0].strip("`") for part in source.schema().split(", ")][4:] == ["id", *names]


def test_consumer_follows_what_the_checkpoint_has_and_never_goes_back(taken: Shop) -> None:
    with reading(taken) as reader:
        start, middle, end = reader.initialOffset(), tick(taken), tick(taken)
        assert standing(taken) == start["position"]
        reader.commit(end)
        assert standing(taken) == end["position"]
        reader.commit(middle)
        assert standing(taken) == end["position"]
        # somebody at work with the consumer: it stays for the next time
        last = tick(taken)
        with taken.db.connect(autocommit=False) as other:
            other.execute(f"select * from gdq.next_batch('{QUEUE}', 'lake')")
            reader.commit(last)
        assert standing(taken) == end["position"]
        reader.commit(last)
        assert standing(taken) == last["position"]


def test_what_the_checkpoint_needs_is_held_and_what_is_gone_is_told(taken: Shop) -> None:
    with reading(taken) as reader:
        start = reader.initialOffset()
        for _ in range(3):
            taken.execute("update orders set n = n + 1 where id = 1")
            tick(taken)
            taken.keep_house()
        end = tick(taken)
        assert len(rows(reader, start, end)) == 6
        planned = reader.partitions(start, end)
        reader.commit(end)
        for _ in range(3):
            taken.execute("update orders set n = n + 1 where id = 1")
            tick(taken)
            taken.keep_house()
        with pytest.raises(TruncatedPosition, match=CURE):
            reader.partitions(start, end)
        with pytest.raises(psycopg.DataError, match="truncated since"):
            [list(reader.read(part)) for part in planned]


def test_position_of_another_era_queue_or_lost_tail(taken: Shop) -> None:
    with reading(taken) as reader:
        start, end = reader.initialOffset(), tick(taken)
        lost = end | {
            "position": end["position"].replace(end["position"].split("/")[3], start["position"].split("/")[3])
        }
        with pytest.raises(DivergedPosition, match=f"does not know the position.*{CURE}"):
            reader.partitions(start, lost)
        taken.execute("select gdq.create_queue('other')")
        ((other,),) = taken.execute("select gdq.tick_position('other', gdq.force_tick('other'))")
        with pytest.raises(DivergedPosition, match=f"another queue or server.*{CURE}"):
            reader.partitions(start | {"position": other}, end)
        # a row that is written again is what a restore from a dump leaves
        taken.execute("update gdq.era set started_at = started_at")
        with pytest.raises(EraEnded, match="restored"):
            reader.partitions(start, end)
        taken.execute(f"select gdq.rebase('{QUEUE}')")
        with pytest.raises(EraEnded, match=f"ended at .*{CURE}"):
            reader.partitions(start, end)


def test_checkpoint_of_another_table_and_a_consumer_that_was_moved(taken: Shop) -> None:
    with reading(taken) as reader:
        start, end = reader.initialOffset(), tick(taken)
        with pytest.raises(GdqError, match=f"another table than orders: .*{CURE}"):
            reader.partitions(start | {"table": 1}, end)
        with pytest.raises(GdqError, match='consumer "lake" or the option "from" was moved forward'):
            reader.partitions(end, start)


GAPS = {
    "truncate orders": "was truncated",
    "alter table orders add extra int": "was altered",
    "alter table orders add extra int default 7": "was altered",
    "alter table orders drop note": "was altered",
}


@pytest.mark.parametrize("statement", GAPS)
def test_gap_stops_the_stream_or_is_a_row(taken: Shop, statement: str) -> None:
    with reading(taken) as reader, reading(taken, gaps="rows") as passing:
        start = reader.initialOffset()
        taken.execute("insert into orders (id, n) values (1001, 5)")
        taken.execute(statement)
        taken.execute("update orders set n = 6 where id = 1001; insert into orders (id, n) values (1002, 7)")
        end = tick(taken)
        with pytest.raises(ResyncRequired, match=f'{GAPS[statement]}.*{CURE}, or .* gaps="rows"'):
            reader.partitions(start, end)
        found = sorted(rows(passing, start, end), key=lambda row: row[1])
        kinds = [kind for kind, *_ in found]
        assert kinds[0] == "insert"
        assert kinds[-1] == "insert"
        assert {"truncate", "ddl", "resync"} & set(kinds[1:-1])
        # where the next batch begins, it is over
        later = tick(taken)
        assert rows(reader, end, later) == []


def test_change_of_a_type_is_an_error_in_any_case(taken: Shop) -> None:
    with reading(taken, gaps="rows") as reader:
        start = reader.initialOffset()
        taken.execute("insert into orders (id, n) values (1001, 5)")
        taken.execute("alter table orders alter n type bigint")
        taken.execute("insert into orders (id, n) values (1002, 5)")
        end = tick(taken)
        with pytest.raises(GdqError, match="other types since the stream was started"):
            reader.partitions(start, end)
    with reading(taken, gaps="rows") as again, pytest.raises(GdqError, match=f"changed the type of .*n.*{CURE}"):
        again.partitions(start, end)


def test_while_capture_is_off_there_is_no_going_on(taken: Shop) -> None:
    with reading(taken, gaps="rows") as reader:
        start = reader.initialOffset()
        with taken.connection.transaction():
            taken.execute("set transaction isolation level repeatable read")
            taken.execute("alter table orders add extra int")
        taken.execute("insert into orders (id, n) values (1001, 5)")
        end = tick(taken)
        with pytest.raises(ResyncRequired, match=f"has a gap in its capture.*{CURE}$"):
            reader.partitions(start, end)
        taken.keep_house()
        taken.execute("insert into orders (id, n) values (1002, 5)")
        kinds = [kind for kind, *_ in sorted(rows(reader, start, tick(taken)), key=lambda row: row[1])]
        assert set(kinds[:-1]) == {"resync"}
        assert kinds[-1] == "insert"


def test_streams_that_could_lose_something_are_refused(taken: Shop) -> None:
    refused = {
        "absent": "not registered",
        "narrow": "does not take table public.orders",
        "skipping": "skips origins",
    }
    taken.execute("create table other (id int primary key)")
    taken.capture("other", origin=True)
    taken.execute(f"select gdq.register_consumer('{QUEUE}', 'narrow', tables => '{{other}}')")
    taken.execute(f"select gdq.register_consumer('{QUEUE}', 'skipping', skip_origin => '{{elsewhere}}')")
    for consumer, message in refused.items():
        with reading(taken, consumer=consumer) as reader, pytest.raises(Exception, match=message):
            reader.initialOffset()
    with pytest.raises(GdqError, match="gaps"):
        stream_reader({"queue": QUEUE, "table": "orders", "consumer": "lake", "gaps": "skip"}, COLUMNS)
    with pytest.raises(GdqError, match='"consumer"'):
        stream_reader({"queue": QUEUE, "table": "orders"}, COLUMNS)
    with pytest.raises(GdqError, match="readStream"):
        GdqDataSource({"queue": QUEUE, "table": "orders", "consumer": "lake"}).reader(None)  # type: ignore[arg-type]


def test_stream_of_an_unlogged_queue_is_refused(taken: Shop) -> None:
    taken.execute("select gdq.create_queue('light', unlogged => true)")
    taken.execute("select gdq.add_table('light', 'orders')")
    taken.execute("select gdq.register_consumer('light', 'lake')")
    with reading(taken, queue="light") as reader, pytest.raises(Exception, match="is unlogged"):
        reader.initialOffset()


def test_max_bytes_cuts_a_stream_off_with_an_error(taken: Shop) -> None:
    with reading(taken) as reader:
        start = reader.initialOffset()
        taken.execute("update orders set note = repeat('x', 500)")
        end = tick(taken)
        taken.keep_house()
        taken.execute("update orders set note = repeat('y', 500)")
        tick(taken)
        taken.execute(f"select gdq.set_queue('{QUEUE}', max_bytes => 65536)")
        taken.keep_house()
        with pytest.raises(TruncatedPosition, match=CURE):
            reader.partitions(start, end)
        with pytest.raises(ResyncRequired, match="must copy anew"):
            reader._next(reader._connection, None, None, None)  # type: ignore[arg-type]


def test_batches_end_where_max_events_says(taken: Shop) -> None:
    with reading(taken) as reader:
        start = reader.initialOffset()["position"]
        ends = []
        for number in range(6):
            taken.execute(f"update orders set n = n + 1 where id <= {10 if number == 3 else 2}")
            ends.append(tick(taken)["position"])

        def end(since: str, most: int | None, last: str | None = None) -> str | None:
            query = f"select gdq.stream_end('{QUEUE}', 'lake', 'orders', %s, %s, %s)"
            ((found,),) = taken.execute(query, since, most, int(last.split("/")[2]) if last else None)
            return found if found is None else str(found)

        assert end(start, None) == ends[-1]
        assert end(start, None, ends[2]) == ends[2]
        assert end(start, 5) == ends[1]
        assert end(ends[1], 5) == ends[2]
        assert end(ends[2], 5) == ends[3], "one tick that is larger"
        assert end(ends[3], 100) == ends[-1]
        assert end(ends[-1], 5) is None
        taken.execute(f"select gdq.pause('{QUEUE}', 'lake')")
        assert end(start, None) is None


@pytest.mark.skipif(LIMITS_BATCHES, reason="Spark 4.2 limits batches")
def test_max_events_needs_a_newer_spark(taken: Shop) -> None:
    with pytest.raises(GdqError, match=r"needs Spark 4\.2"):
        stream_reader({"queue": QUEUE, "table": "orders", "consumer": "lake", "max_events": "5"}, COLUMNS)


def test_lost_connection_is_made_anew(taken: Shop) -> None:
    with reading(taken) as reader:
        start = reader.initialOffset()
        taken.execute("select pg_terminate_backend(pid) from pg_stat_activity where application_name = 'gdq:q/lake'")
        assert reader.initialOffset() == start


def test_idle_table_gets_no_batch_until_it_changes(taken: Shop) -> None:
    taken.execute("create table other (id int primary key)")
    taken.capture("other")
    with reading(taken) as reader:
        reader.initialOffset()
        connection = reader._connection
        assert connection is not None
        at = reader._next(connection, None, None, None)  # the first look takes what there is
        taken.execute("insert into other values (1)")
        tick(taken)
        assert reader._next(connection, at, None, None) == at
        # where the checkpoint stands is not known: no offset may lead back to where the consumer does
        assert reader._next(connection, None, None, None).tick > at.tick
        taken.execute("update orders set n = 1 where id = 1")
        end = tick(taken)
        assert str(reader._next(connection, at, None, None)) == end["position"]
