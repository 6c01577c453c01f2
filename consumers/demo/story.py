"""The story that the demo tells: events, a view in PostgreSQL, a Delta table by Spark, while writers go on."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psycopg

from gdq.consumers.demo.data import DEMO_TABLES, load_tables
from gdq.consumers.demo.events import show_events
from gdq.consumers.demo.needs import check_needs
from gdq.consumers.demo.outcome import Step, table_lines
from gdq.consumers.demo.views import BEST, CUSTOMERS, ViewStep, recompute, refresh_materialized
from gdq.consumers.demo.writers import WRITERS, DemoLoad, running_load
from gdq.consumers.refresh.refresher import Refresher
from gdq.embedded.files import PostgresBinaries
from gdq.embedded.server import EmbeddedServer
from gdq.installer.install import install
from gdq.queue import add_table, create_queue, queue_info
from gdq.units import size, span
from gdq.view.view import create_view

if TYPE_CHECKING:
    from gdq.consumers.demo.spark import DemoSpark

_QUEUE = "shop"
# All is in memory, and commits of a server that is removed afterwards need not wait for the disk.
_SETTINGS: dict[str, str | float | bool] = {
    "shared_buffers": "512MB",
    "max_wal_size": "4GB",
    "work_mem": "64MB",
    "synchronous_commit": False,
    "timezone": "UTC",
}
_NEXT = """\
Next, on a database of your own (export DATABASE_URL=postgresql://you@host/database):

  gdq install
  gdq create-queue shop
  gdq add-table shop --all

README goes on from there: `gdq register-consumer`, `gdq consume`, `gdq create-view`, `gdq refresh`."""


@dataclass(frozen=True, slots=True)
class Demo:
    """The demo. `major`: of PostgreSQL; `scale`: of TPC-H; `rounds`: refreshes of each view; `say` takes text."""

    major: int
    scale: float
    rounds: int
    spark: bool
    say: Callable[[str], None]

    def run(self) -> list[Step]:
        """Tell the story; returns what it has found. GdqError, before anything starts, if something is missing."""
        began = time.monotonic()
        binaries = check_needs(self.major, spark=self.spark)
        with ExitStack() as stack:
            folder = Path(
                stack.enter_context(tempfile.TemporaryDirectory(prefix="gdq-demo-", ignore_cleanup_errors=True))
            )
            steps = list(self._steps(stack, binaries, folder))
            self.say("Everything is removed again.")
        self.say("")
        for line in table_lines(steps):
            self.say(line)
        self.say(f"\nThe demo took {span(time.monotonic() - began)}.\n")
        self.say(_NEXT)
        return steps

    def _steps(self, stack: ExitStack, binaries: PostgresBinaries, folder: Path) -> Iterator[Step]:
        """Set up, then show one step after the other; what is started ends with `stack`."""
        self.say("Setting up: a PostgreSQL server for this demo alone, with tables of TPC-H")
        spark = self._spark(stack, folder) if self.spark else None
        server = stack.enter_context(EmbeddedServer(binaries=binaries, settings=_SETTINGS))
        conninfo = server.conninfo()
        connection = stack.enter_context(psycopg.connect(conninfo, autocommit=True))
        self._load(connection, conninfo, folder)
        keys = [key for (key,) in connection.execute("select o_orderkey from orders")]
        if spark is not None:
            self.say(f"  Spark with Delta Lake has started beside that, in {span(spark.wait())}")
        load = stack.enter_context(running_load(conninfo, keys))
        self.say(f"  {WRITERS} writers insert, change and delete orders with their lines from now on, without a pause")
        self.say(
            "\n1. Changes as events: a few lines of a table `parcel` are written, and a consumer prints each event"
        )
        yield show_events(connection, conninfo, _QUEUE, self.say)
        refresher = stack.enter_context(Refresher(conninfo))
        yield self._in_postgres(connection, refresher, load)
        if spark is None:
            self.say("\n3. A Delta table that Spark refreshes: left out (--no-spark)")
        else:
            yield self._by_spark(connection, refresher, load, folder)
        load.check()
        (info,) = queue_info(connection, _QUEUE)
        self.say(
            f"\nMeanwhile the writers made {load.transactions:,} transactions; the logs hold {size(info.log_bytes)}."
        )

    def _spark(self, stack: ExitStack, folder: Path) -> DemoSpark:
        """Spark, which starts while the tables are loaded."""
        from gdq.consumers.demo.spark import DemoSpark, connector_jars  # noqa: PLC0415 (needs the extra spark)

        spark = DemoSpark(connector_jars(self.say), folder)
        stack.callback(spark.stop)
        spark.start()
        return spark

    def _load(self, connection: psycopg.Connection[Any], conninfo: str, folder: Path) -> None:
        """The tables and gdq."""
        began = time.monotonic()
        rows = load_tables(connection, conninfo, self.scale, folder)
        listed = ", ".join(f"{table} {count:,}" for table, count in rows.items())
        version = connection.info.parameter_status("server_version")
        took = span(time.monotonic() - began)
        self.say(f"  PostgreSQL {version}; TPC-H at scale {self.scale:g} loaded in {took}: {listed} rows")
        install(conninfo)
        create_queue(connection, _QUEUE, rotation_period="5 s")
        for table in DEMO_TABLES:
            add_table(connection, _QUEUE, f"public.{table}")
        self.say("  gdq installed; from here on triggers record each change of these tables")

    def _in_postgres(self, connection: psycopg.Connection[Any], refresher: Refresher, load: DemoLoad) -> Step:
        self.say("\n2. A view inside PostgreSQL, beside REFRESH MATERIALIZED VIEW of the same query")
        self.say("  the revenue of each customer: three tables joined, and grouped")
        create_view(connection, "customers", _QUEUE, CUSTOMERS, "public.customers")
        connection.execute(f"create materialized view customers_again as {CUSTOMERS}")
        rival = partial(refresh_materialized, connection, "customers_again")
        made = ViewStep("view in PostgreSQL", "customers", "REFRESH", rival, refresher, load, self.say)
        return made.run(self.rounds)

    def _by_spark(
        self, connection: psycopg.Connection[Any], refresher: Refresher, load: DemoLoad, folder: Path
    ) -> Step:
        self.say("\n3. A Delta table that Spark refreshes, beside a full recompute by the same Spark")
        self.say("  what the customers with the best balance have ordered: three tables joined, a row for each line")
        create_view(connection, "best", _QUEUE, BEST, f"delta:{folder / 'best'}", engine="spark")
        rival = partial(recompute, refresher, "best")
        warm_up = "Spark compiles what every refresh runs"
        name = "view by Spark into Delta"
        made = ViewStep(name, "best", "recompute", rival, refresher, load, self.say, warm_up)
        return made.run(max(self.rounds // 2, 1))  # a recompute by Spark takes long


def wrong(steps: Sequence[Step]) -> list[str]:
    """The names of the steps whose results were not all what they had to be."""
    return [step.name for step in steps if not step.right]
