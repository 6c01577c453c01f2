"""Pushes the changes of a queue to browsers as server-sent events.

    pip install gdq fastapi uvicorn
    uvicorn live:app --timeout-graceful-shutdown 5

GDQ_QUEUE names the queue (shop), GDQ_CONSUMER the consumer (live), which is registered at the start. Each process needs
a consumer of its own, since each pushes all changes to its own browsers. A browser gets the changes from its connection
on: it opens the stream first, and then loads the page's rows.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field

import psycopg
from fastapi import FastAPI, Response
from fastapi.responses import StreamingResponse

import gdq

log = logging.getLogger("uvicorn.error")

QUEUE = os.environ.get("GDQ_QUEUE", "shop")
CONSUMER = os.environ.get("GDQ_CONSUMER", "live")

# A browser that is further behind is cut off; it connects again by itself.
MAX_WAITING = 1000

# Proxies close streams that are silent.
SILENCE_SECONDS = 15.0

RETRY_SECONDS = 5.0


@dataclass
class Feed:
    """The browsers that listen, and whether changes arrive at all."""

    connected: bool = False
    listeners: set[asyncio.Queue[str | None]] = field(default_factory=set)

    def publish(self, kind: str, data: object) -> None:
        """Send one event to all browsers."""
        text = f"event: {kind}\ndata: {json.dumps(data, ensure_ascii=False)}\n\n"
        for listener in list(self.listeners):
            if listener.qsize() >= MAX_WAITING:
                self.listeners.discard(listener)
                listener.put_nowait(None)
            else:
                listener.put_nowait(text)

    async def stream(self) -> AsyncIterator[str]:
        """The events for one browser."""
        listener: asyncio.Queue[str | None] = asyncio.Queue()
        self.listeners.add(listener)
        try:
            yield ": connected\n\n"
            while True:
                try:
                    text = await asyncio.wait_for(listener.get(), SILENCE_SECONDS)
                except TimeoutError:
                    text = ": nothing new\n\n"
                if text is None:
                    return
                yield text
        finally:
            self.listeners.discard(listener)


feed = Feed()


def register(*, anew: bool = False) -> None:
    """Register the consumer from now on, unless there is one; `anew`: also if there is one."""
    with gdq.connect(autocommit=True) as connection:
        if anew:
            gdq.unregister_consumer(connection, QUEUE, CONSUMER)
        gdq.register_consumer(connection, QUEUE, CONSUMER)


async def consume() -> None:
    """Publish the changes of all batches; returns if the connection is lost, or changes are missing."""
    try:
        await asyncio.to_thread(register)
        async with gdq.AsyncConsumer(None, QUEUE, CONSUMER) as consumer:
            feed.connected = True
            async for batch in consumer:
                async for changed in batch.events(images="new"):
                    event = changed.in_json()
                    told = {"id": event.id, "op": event.op, "table": event.table, "key": event.key, "new": event.new}
                    feed.publish("change", told)
    except gdq.ResyncRequired as error:
        log.warning("changes are missing, browsers load their rows again: %s", error)
        # in this order: what changes while a browser loads its rows is sent to it
        await asyncio.to_thread(register, anew=True)
        feed.publish("resync", None)
    except psycopg.OperationalError as error:
        log.warning("the database cannot be reached: %s", str(error).partition("\n")[0])
    finally:
        feed.connected = False


async def consume_for_ever() -> None:
    """Consume, and again after each failure."""
    while True:
        try:
            await consume()
        except (gdq.GdqError, psycopg.Error):
            log.exception("consumer %s failed", CONSUMER)
        await asyncio.sleep(RETRY_SECONDS)


@asynccontextmanager
async def lifespan(_app: FastAPI) -> AsyncIterator[None]:
    """Consume while the application runs. The batch at hand is rolled back at the end, and comes again."""
    task = asyncio.create_task(consume_for_ever())
    try:
        yield
    finally:
        task.cancel()
        with suppress(asyncio.CancelledError):
            await task


app = FastAPI(lifespan=lifespan)


@app.get("/events")
async def events() -> StreamingResponse:
    """The changes from now on. An event `change` may come twice; at `resync` load the rows again."""
    headers = {"Cache-Control": "no-store", "X-Accel-Buffering": "no"}
    return StreamingResponse(feed.stream(), media_type="text/event-stream", headers=headers)


@app.get("/health")
async def health(response: Response) -> dict[str, bool]:
    """200 while changes arrive, else 503."""
    response.status_code = 200 if feed.connected else 503
    return {"connected": feed.connected}
