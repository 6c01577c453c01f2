"""AsyncConsumer: the contract of Consumer on asyncio, also for tasks that are cancelled."""

from __future__ import annotations

import asyncio
import threading
from datetime import timedelta
from typing import Any

import psycopg
import pytest

import gdq
from gdq import AsyncConsumer
from tests.support.consumed import consumed, insert
from tests.support.programs import gdq as gdq_command
from tests.support.server import Database
from tests.support.waiting import SECONDS, until

_LOGS = """select string_agg(format('%I.%I', n.nspname, c.relname), ', ') from pg_class c
             join pg_namespace n on n.oid = c.relnamespace where n.nspname = 'gdq_log' and c.relkind = 'r'"""


def connections(shop: Database, condition: str = "true") -> int:
    """The number of sessions of consumers in this database for which a condition holds."""
    query = f"""select from pg_stat_activity where datname = current_database()
                   and (application_name like 'gdq:q/c%' or query like '%touch_batch%')
                   and pid <> pg_backend_pid() and {condition}"""
    with shop.connect("su") as connection:
        return connection.execute(query).rowcount


async def read(consumer: AsyncConsumer, **options: Any) -> list[tuple[str, Any]]:
    """All events that are there, finished."""
    batches = consumer.batches(once=True, **options)
    return [(event.op, event.new) async for batch in batches async for event in batch.events()]


async def apply(consumer: AsyncConsumer) -> None:
    """Note each event in the table of what was seen, in the batch's transaction."""
    async for batch in consumer.batches(once=True):
        async for event in batch.events():
            await batch.connection.execute("insert into seen values (%s, %s)", [event.id, event.op])


async def with_consumer(shop: Database, use: Any) -> Any:
    async with AsyncConsumer(shop.dsn, "q", "c") as consumer:
        return await use(consumer)


def seen(shop: Database) -> tuple[int, int]:
    """The numbers of events seen, and of different ones."""
    with shop.connect() as connection:
        row = connection.execute("select count(*), count(distinct ev_id) from seen").fetchone()
    assert row is not None
    return row[0], row[1]


def test_events_come_once_in_order(shop: Database) -> None:
    insert(shop, 1, 1200)
    found = asyncio.run(with_consumer(shop, read))
    assert found == [("insert", {"id": n, "note": f"n{n}"}) for n in range(1, 1201)]
    assert asyncio.run(with_consumer(shop, read)) == []
    assert connections(shop) == 0


async def fail(consumer: AsyncConsumer) -> None:
    async for batch in consumer.batches(once=True):
        await batch.connection.execute("insert into seen values (1, 'lost')")
        raise ZeroDivisionError


def test_an_error_or_a_break_leaves_the_batch(shop: Database) -> None:
    async def use(consumer: AsyncConsumer) -> None:
        with pytest.raises(ZeroDivisionError):
            await fail(consumer)
        async for batch in consumer:
            await batch.connection.execute("insert into seen values (1, 'lost')")
            break
        assert not batch.finished
        left = consumer.batches(once=True)
        assert [event.op async for event in (await anext(left)).events()] == ["insert", "insert"]
        assert len(await read(consumer)) == 2
        with pytest.raises(StopAsyncIteration):  # its batch was rolled back, so it cannot be finished either
            await anext(left)

    insert(shop, 1, 2)
    asyncio.run(with_consumer(shop, use))
    assert seen(shop) == (0, 0)
    assert consumed(shop) == []


def test_a_batch_has_the_methods_of_the_other(shop: Database) -> None:
    async def use(consumer: AsyncConsumer) -> None:
        assert repr(consumer) == "<AsyncConsumer 'c' of queue 'q': idle>"
        async for batch in consumer.batches(once=True):
            assert repr(batch).startswith(f"<AsyncBatch {batch.id} of consumer 'c' of queue 'q': ticks")
            assert (await batch.position()).tick == batch.tick_to
            assert await batch.tables() == ["public.orders"]
            assert [version.columns for version in await batch.versions("orders")] == [["id", "note"]]
            assert await batch.sequences(changed=False) == []
            first, second, third, message = [event async for event in batch.events()]
            assert gdq.Message.of(message).data == {"order": 7}
            assert await batch.retry(first, timedelta(0))
            assert await batch.put_aside([gdq.Retry(delay=timedelta(0), event=second)]) == 1
            await batch.dead_letter(third, "no use")
            await batch.commit()
            await batch.commit()
            assert batch.finished
        [again] = [batch async for batch in consumer.batches(once=True) async for _ in batch.events()][:1]
        assert again.finished

    insert(shop, 1, 3)
    with shop.connect() as connection:
        gdq.insert_event(connection, "q", "paid", {"order": 7})
    asyncio.run(with_consumer(shop, use))
    with shop.connect() as connection:
        assert [letter.reason for letter in gdq.dead_letters(connection, "q")] == ["no use"]


def test_a_batch_that_was_taken_over_is_refused(shop: Database) -> None:
    async def use(consumer: AsyncConsumer) -> None:
        async for batch in consumer.batches(once=True):
            await batch.connection.execute("insert into seen values (1, 'lost')")
            batch.token = type(batch.token)(int=1)

    insert(shop, 1, 1)
    with pytest.raises(gdq.StaleBatch):
        asyncio.run(with_consumer(shop, use))
    assert seen(shop) == (0, 0)
    assert len(consumed(shop)) == 1


def test_timeout_ends_the_wait(shop: Database) -> None:
    async def use(consumer: AsyncConsumer) -> list[gdq.AsyncBatch]:
        return [batch async for batch in consumer.batches(timeout=0.1)]

    assert asyncio.run(with_consumer(shop, use)) == []


def test_it_waits_and_takes_the_ticks_itself(shop: Database) -> None:
    async def use(consumer: AsyncConsumer) -> int:
        async for batch in consumer.batches(timeout=SECONDS):
            if events := [event async for event in batch.events()]:
                return len(events)
        return 0

    writer = threading.Timer(0.3, insert, (shop, 1, 3))
    writer.start()
    assert asyncio.run(with_consumer(shop, use)) == 3
    writer.join()


def test_members_have_batches_of_their_own(shop: Database) -> None:
    async def member(name: str, dead_after: timedelta) -> tuple[AsyncConsumer, gdq.AsyncBatch]:
        consumer = AsyncConsumer(shop.dsn, "q", "c", member=name, max_events=1, dead_after=dead_after)
        await consumer.__aenter__()
        return consumer, await anext(consumer.batches())

    async def use() -> list[int]:
        members = [await member("m1", timedelta(milliseconds=300)), await member("m2", timedelta(hours=1))]
        ids = [[event.id async for event in batch.events()] for _, batch in members]
        # the first shows on a second connection that it is alive; the other has time
        await asyncio.to_thread(until, lambda: connections(shop, "query like '%touch_batch%'") == 1)
        for consumer, batch in members:
            await batch.commit()
            await consumer.__aexit__(None, None, None)
        return [number for some in ids for number in some]

    with shop.connect() as connection:
        for name in ("m1", "m2"):
            gdq.register_member(connection, "q", "c", name)
    for first in (1, 2):
        insert(shop, first, first)
        gdq_command("tick", "q", dsn=shop.dsn)
    ids = asyncio.run(use())
    assert len(ids) == len(set(ids)) == 2
    until(lambda: connections(shop) == 0)


async def work(consumer: AsyncConsumer, stage: str, blocker: psycopg.Connection[Any], reached: asyncio.Event) -> None:
    """Apply the changes, and come to a stand at a stage."""
    async with consumer:
        async for batch in consumer.batches(once=stage != "waiting"):
            if stage == "reading":
                [[logs]] = blocker.execute(_LOGS).fetchall()
                blocker.execute(f"lock table {logs} in access exclusive mode")
            async for event in batch.events():
                await batch.connection.execute("insert into seen values (%s, %s)", [event.id, event.op])
            if stage == "handling":
                reached.set()
                await asyncio.Event().wait()


async def cancel(shop: Database, source: Any, stage: str, blocker: psycopg.Connection[Any]) -> None:
    """Cancel the work at a stage."""
    reached = asyncio.Event()
    task = asyncio.create_task(work(AsyncConsumer(source, "q", "c"), stage, blocker, reached))
    if stage == "handling":
        await reached.wait()
    else:
        at = "state = 'idle' and query like '%gdq.tick_step%'" if stage == "waiting" else "wait_event_type = 'Lock'"
        await asyncio.to_thread(until, lambda: connections(shop, at) == 1)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


async def cancel_on_own(shop: Database, stage: str, blocker: psycopg.Connection[Any]) -> None:
    """Cancel the work on a connection that is given, and can be used afterwards."""
    async with await psycopg.AsyncConnection.connect(shop.dsn, application_name="gdq:q/c") as own:
        await cancel(shop, own, stage, blocker)
        assert own.info.transaction_status == psycopg.pq.TransactionStatus.IDLE
        await own.execute("select")


@pytest.mark.parametrize("stage", ["waiting", "reading", "handling", "finishing"])
@pytest.mark.parametrize("given", [False, True], ids=["dsn", "connection"])
def test_a_cancelled_task_leaves_the_batch(shop: Database, stage: str, given: bool) -> None:
    with shop.connect() as connection:
        connection.execute(
            """create function hold() returns trigger language plpgsql as
                 $$ begin perform pg_advisory_xact_lock(1); return null; end $$;
               create constraint trigger t after insert on seen deferrable initially deferred
                 for each row execute function hold()"""
        )
    if stage != "waiting":
        insert(shop, 1, 3)
    with shop.connect("su", autocommit=False) as blocker:
        if stage == "finishing":
            blocker.execute("select pg_advisory_xact_lock(1)")
        asyncio.run(cancel_on_own(shop, stage, blocker) if given else cancel(shop, shop.dsn, stage, blocker))
        blocker.rollback()
    until(lambda: connections(shop) == 0)
    if stage == "waiting":
        insert(shop, 1, 3)
    assert seen(shop) == (0, 0)
    asyncio.run(with_consumer(shop, apply))
    assert seen(shop) == (3, 3)
    assert consumed(shop) == []


def test_it_says_what_is_wrong(shop: Database) -> None:
    async def in_a_transaction() -> None:
        async with await psycopg.AsyncConnection.connect(shop.dsn) as connection:
            await connection.execute("select")
            async with AsyncConsumer(connection, "q", "c"):
                raise AssertionError

    with pytest.raises(gdq.GdqError, match="in a transaction"):
        asyncio.run(in_a_transaction())
    consumer = AsyncConsumer(shop.dsn, "q", "c")
    assert repr(consumer).endswith(": not open>")
    with pytest.raises(gdq.GdqError, match="no connection yet"):
        consumer.batches()
