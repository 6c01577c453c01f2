"""Spark's data source reads in the database in which it plans."""

from __future__ import annotations

import pickle

import pytest

from gdq.consumers.spark.reader import GdqReader, reader_conninfo
from gdq.consumers.spark.stream import GdqStreamReader
from tests.support.spark import QUEUE, Shop


@pytest.mark.parametrize("variable", ["GDQ_DSN", "DATABASE_URL"])
def test_rows_come_from_the_database_of_the_plan(taken: Shop, monkeypatch: pytest.MonkeyPatch, variable: str) -> None:
    """Workers may have another environment than the driver; libpq's own variables name another server."""
    monkeypatch.setenv(variable, taken.db.dsn)
    monkeypatch.setenv("PGHOST", "/nowhere")
    reader = GdqReader({"queue": QUEUE, "table": "public.orders"}, ["id"])
    parts = reader.partitions()
    monkeypatch.delenv(variable)
    sent = pickle.loads(pickle.dumps(reader))
    assert sum(batch.num_rows for part in parts for batch in sent.read(part)) == 400


def test_a_stream_keeps_the_dsn_of_its_start(taken: Shop, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GDQ_DSN", taken.db.dsn)
    options = {"queue": QUEUE, "table": "public.orders", "consumer": "lake"}
    stream = GdqStreamReader(options, ["id"])
    monkeypatch.setenv("GDQ_DSN", "host=/nowhere")
    assert stream.conninfo == taken.db.dsn


def test_libpqs_variables_are_those_of_the_driver(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("GDQ_DSN", "DATABASE_URL", "PGSERVICE", "PGHOSTADDR", "PGPORT", "PGUSER"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("PGHOST", "there")
    monkeypatch.setenv("PGDATABASE", "shop")
    assert reader_conninfo({}) == "host=there dbname=shop"
    assert reader_conninfo({"service": "lake"}) == "service=lake"
    assert reader_conninfo({"dsn": "host=x"}) == "host=x"
