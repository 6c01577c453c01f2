"""The demo's tables: those of TPC-H that orders are made of, generated and loaded."""

from __future__ import annotations

import subprocess
import tempfile
import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import psycopg

from gdq.consumers.demo.needs import generator

DEMO_TABLES = ("customer", "orders", "lineitem")

DEMO_SCHEMA = """
create table customer (
  c_custkey int primary key, c_name text not null, c_address text not null, c_nationkey int not null,
  c_phone text not null, c_acctbal numeric(12,2) not null, c_mktsegment text not null, c_comment text not null);
create table orders (
  o_orderkey int primary key, o_custkey int not null, o_orderstatus text not null, o_totalprice numeric(12,2) not null,
  o_orderdate date not null, o_orderpriority text not null, o_clerk text not null, o_shippriority int not null,
  o_comment text not null);
create table lineitem (
  l_orderkey int not null, l_partkey int not null, l_suppkey int not null, l_linenumber int not null,
  l_quantity numeric(6,2) not null, l_extendedprice numeric(12,2) not null, l_discount numeric(4,2) not null,
  l_tax numeric(4,2) not null, l_returnflag text not null, l_linestatus text not null, l_shipdate date not null,
  l_commitdate date not null, l_receiptdate date not null, l_shipinstruct text not null, l_shipmode text not null,
  l_comment text not null, primary key (l_orderkey, l_linenumber))"""


def load_tables(connection: psycopg.Connection[Any], conninfo: str, scale: float, folder: Path) -> dict[str, int]:
    """Create the tables and fill them, two at a time; returns the number of rows of each. `folder`: for files."""
    connection.execute(DEMO_SCHEMA)
    with tempfile.TemporaryDirectory(dir=folder) as files:
        _generate(scale, DEMO_TABLES, Path(files))

        ended = threading.Event()

        def load(table: str) -> int:
            with psycopg.connect(conninfo) as own, own.cursor() as cursor:
                with (Path(files) / f"{table}.csv").open("rb") as file, cursor.copy(_COPY.format(table)) as copy:
                    while (block := file.read(2**20)) and not ended.is_set():
                        copy.write(block)
                return cursor.rowcount

        with ThreadPoolExecutor(2) as pool:
            try:
                # the largest one first: it takes longer than the others together
                rows = dict(zip(DEMO_TABLES[::-1], pool.map(load, DEMO_TABLES[::-1]), strict=True))
            finally:
                ended.set()  # Ctrl-C does not wait for the rest
    connection.execute("create index on orders (o_custkey)")
    connection.execute("vacuum analyze")
    return {table: rows[table] for table in DEMO_TABLES}


_COPY = "copy {} from stdin (format csv, header)"


def _generate(scale: float, tables: Sequence[str], folder: Path) -> None:
    """Write the rows of TPC-H's tables as CSV."""
    command: list[str | Path] = [
        generator(),
        "csv",
        "-s",
        str(scale),
        f"--tables={','.join(tables)}",
        f"--output-dir={folder}",
    ]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
