"""Spools in an object store: written, killed, read and refused as in a folder."""

from __future__ import annotations

import random
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import psycopg
import pyarrow.dataset as ds
import pytest

import gdq
from tests.support.object_store import ObjectStore
from tests.support.programs import gdq as gdq_program
from tests.support.server import Database

_SETUP = """create table orders (id int primary key, note text);
    select gdq.create_queue('shop'), gdq.add_table('shop', 'orders')"""


@dataclass(frozen=True, slots=True)
class Shop:
    """A queue with the consumer "reader", which gets the changes of the spool too."""

    db: Database
    connection: psycopg.Connection[Any]
    store: ObjectStore
    bucket: str

    @property
    def folder(self) -> str:
        return f"s3://{self.bucket}/spool"

    def spool(self, *, folder: str = "", **env: str) -> subprocess.CompletedProcess[str]:
        command = ("spool", "shop", folder or self.folder, "--once", "--max-events", "100")
        return gdq_program(*command, dsn=self.db.dsn, env=self.store.env | env)

    def consumed(self) -> list[int]:
        """The numbers of the changes that a consumer gets."""
        with gdq.Consumer(self.db.dsn, "shop", "reader") as consumer:
            return sorted(event.id for batch in consumer.batches(once=True) for event in batch.events())

    def files_alone(self) -> list[int]:
        """The numbers that a program finds which reads the Parquet files by itself."""
        table = ds.dataset(f"{self.bucket}/spool/public.orders", filesystem=self.store.system, format="parquet")
        if "ev_id" not in table.schema.names:
            return []
        return sorted(table.to_table(columns=["ev_id"]).column("ev_id").to_pylist())


@pytest.fixture
def shop(db: Database, object_store: ObjectStore, monkeypatch: pytest.MonkeyPatch) -> Iterator[Shop]:
    for name, value in object_store.env.items():
        monkeypatch.setenv(name, value)
    with db.connect() as connection:
        connection.execute(_SETUP)
        yield Shop(db, connection, object_store, object_store.bucket())


def test_killed_at_random(shop: Shop) -> None:
    """Each change is in the spool once, whenever its writer is killed, and reads find none twice meanwhile."""
    chosen, over = random.Random(1), threading.Event()
    assert shop.spool().returncode == 0
    gdq.register_consumer(shop.connection, "shop", "reader")

    def write() -> None:
        with shop.db.connect() as connection:
            for number in range(10**9):
                if over.is_set():
                    return
                connection.execute("insert into orders values (%s, repeat('x', 100))", [number])
                connection.execute("update orders set note = 'y' where id = %s", [number // 2])
                connection.execute("select gdq.force_tick('shop')")
                time.sleep(0.02)  # the writer of the spool is slower

    writer = threading.Thread(target=write)
    writer.start()
    try:
        command = [sys.executable, "-m", "gdq", "spool", "shop", shop.folder, "--max-events", "100", "--every", "0"]
        for _ in range(4):
            process = subprocess.Popen([*command, "-d", shop.db.dsn], stdout=subprocess.PIPE, text=True)
            assert process.stdout is not None
            for _ in range(chosen.randint(1, 3)):
                assert process.stdout.readline()
            time.sleep(chosen.uniform(0, 0.1))
            process.send_signal(signal.SIGKILL)
            process.communicate()
            numbers = shop.files_alone()
            assert len(numbers) == len(set(numbers))
    finally:
        over.set()
        writer.join()
    assert shop.spool().returncode == 0
    expected = shop.consumed()
    assert len(expected) > 100
    assert shop.files_alone() == expected
    batches = list(gdq.open_spool(shop.folder).batches(once=True))
    with_rows = [batch.arrow("public.orders")["ev_id"] for batch in batches if batch.tables()]
    assert sorted(number for numbers in with_rows for number in numbers.to_pylist()) == expected
    rest = gdq.open_spool(shop.folder, after=str(batches[0].position)).batches(once=True)
    assert [batch.tick_to for batch in rest] == [batch.tick_to for batch in batches[1:]]


@pytest.mark.parametrize(
    ("folder", "env", "said"),
    [
        ("s3://no-such-bucket/spool", {}, "there is no bucket no-such-bucket"),
        ("", {"AWS_SECRET_ACCESS_KEY": "wrong"}, "ACCESS_DENIED"),
        ("", {"AWS_ACCESS_KEY_ID": "nobody"}, "ACCESS_DENIED"),
        ("", {"AWS_ENDPOINT_URL": "http://127.0.0.1:1"}, "connect"),
    ],
)
def test_a_store_that_refuses(shop: Shop, folder: str, env: dict[str, str], said: str) -> None:
    """One line and a hint; no consumer is left behind that would hold the log, and the next start begins the spool."""
    done = shop.spool(folder=folder, **env)
    assert (done.returncode, done.stdout) == (1, "")
    error, hint = done.stderr.splitlines()
    assert error.startswith("Error: ")
    assert said in error
    assert hint.startswith("Hint: Credentials, region and endpoint of S3 come from the environment")
    assert gdq.consumer_info(shop.connection, "shop") == []
    done = shop.spool()
    assert done.returncode == 0, done.stderr
