"""What goes on beside the demo: writers that change orders and their lines, and a ticker."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import psycopg

from gdq.errors import GdqError
from gdq.ticker import run_ticker

WRITERS = 2
# Each writer rests so long after a transaction.
_REST_SECONDS = 0.1
_PATIENCE_SECONDS = 60.0

_INSERT = (
    (
        "insert into orders select %(new)s, o_custkey, 'O', o_totalprice, o_orderdate, o_orderpriority, o_clerk,"
        " o_shippriority, o_comment from orders where o_orderkey = %(old)s"
    ),
    (
        "insert into lineitem select %(new)s, l_partkey, l_suppkey, l_linenumber, l_quantity, l_extendedprice,"
        " l_discount, l_tax, 'N', 'O', l_shipdate, l_commitdate, l_receiptdate, l_shipinstruct, l_shipmode, l_comment"
        " from lineitem where l_orderkey = %(old)s"
    ),
)
_UPDATE = (
    "update lineitem set l_returnflag = 'R', l_discount = l_discount + 0.01 where l_orderkey = %(old)s",
    "update orders set o_orderpriority = '1-URGENT', o_totalprice = o_totalprice + 1 where o_orderkey = %(old)s",
    (
        "update customer set c_acctbal = c_acctbal - 1"
        " where c_custkey = (select o_custkey from orders where o_orderkey = %(old)s)"
    ),
)
_DELETE = (
    "delete from lineitem where l_orderkey = %(old)s",
    "delete from orders where o_orderkey = %(old)s",
)


@dataclass
class DemoLoad:
    """The threads that write and tick beside the demo, and the number of transactions of each writer."""

    stop: threading.Event = field(default_factory=threading.Event)
    written: list[int] = field(default_factory=lambda: [0] * WRITERS)
    errors: list[BaseException] = field(default_factory=list)

    @property
    def transactions(self) -> int:
        """The number of transactions so far."""
        return sum(self.written)

    def write(self, conninfo: str, number: int, keys: Sequence[int], fresh: int) -> None:
        """Insert, change and delete orders with their lines, one transaction each, until stopped."""
        rng = random.Random(number)
        with psycopg.connect(conninfo, autocommit=True) as connection:
            while not self.stop.wait(_REST_SECONDS):
                values = {"new": fresh, "old": rng.choice(keys)}
                with connection.transaction():
                    for statement in rng.choice((_INSERT, _UPDATE, _DELETE)):
                        connection.execute(statement, values)
                fresh += WRITERS
                self.written[number] += 1

    def tick(self, conninfo: str) -> None:
        """Take ticks and empty logs, as `gdq ticker` does, until stopped."""
        run_ticker(lambda: psycopg.connect(conninfo), stop=self.stop.wait)

    def run(self, work: Callable[..., None], *arguments: Any) -> None:
        """Body of a thread; an error in it ends the demo."""
        try:
            work(*arguments)
        except BaseException as error:
            self.errors.append(error)
            self.stop.set()

    def check(self) -> None:
        """GdqError if a thread has failed."""
        if self.errors:
            raise GdqError(f"a writer or the ticker of the demo failed: {self.errors[0]}") from self.errors[0]

    def wait_for(self, transactions: int) -> None:
        """Wait until so many more transactions are written."""
        wanted, deadline = self.transactions + transactions, time.monotonic() + _PATIENCE_SECONDS
        while self.transactions < wanted:
            self.check()
            if time.monotonic() > deadline:
                raise GdqError("the writers of the demo do not get on")
            time.sleep(0.01)


@contextmanager
def running_load(conninfo: str, keys: Sequence[int]) -> Iterator[DemoLoad]:
    """Run writers and a ticker until the block ends. `keys`: the orders."""
    load = DemoLoad()
    threads = [threading.Thread(target=load.run, args=(load.tick, conninfo))]
    for number in range(WRITERS):
        own = (conninfo, number, keys[number::WRITERS], max(keys) + 1 + number)
        threads.append(threading.Thread(target=load.run, args=(load.write, *own)))
    for thread in threads:
        thread.start()
    try:
        yield load
    finally:
        load.stop.set()
        for thread in threads:
            thread.join()
