"""Refreshes views of TPC-H in every way, one after the other, while the lines change."""

from __future__ import annotations

import os
import signal
import tempfile
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import psycopg

from bench.views_data import ENGINES, Key, Method, Results, Sample, by_goal
from gdq.consumers.refresh.refresher import Refresher
from gdq.embedded.server import EmbeddedServer
from gdq.errors import GdqError
from gdq.installer import install
from gdq.view.view import create_view
from tests.support import tpch

# Waits for Spark's sessions to end, which tell what they have read when they do.
_OTHERS = """select count(*) from pg_stat_activity
              where backend_type = 'client backend' and backend_start > %s and pid <> pg_backend_pid()"""


class OutOfTime(Exception):  # noqa: N818 (says what happened)
    """The bound of the run is reached."""


@dataclass(slots=True)
class ViewsRun:
    """One run on a server of its own. `wanted`: what is to be measured; `told` gets a line on what is at work.

    A database that was lost with an earlier run is made anew: results that are there are not measured again.
    """

    server: EmbeddedServer
    results: Results
    wanted: Sequence[Key]
    deadline: float
    told: Callable[[str, int], None]
    _stack: ExitStack = field(default_factory=ExitStack, init=False)
    _connection: psycopg.Connection[Any] = field(init=False)
    _refresher: Refresher = field(init=False)
    _known: set[str] = field(default_factory=set, init=False)
    _begun: dict[str, set[str]] = field(default_factory=lambda: {name: set() for name in ENGINES}, init=False)
    _live: dict[str, set[str]] = field(default_factory=lambda: {name: set() for name in ENGINES}, init=False)
    _unique: set[str] = field(default_factory=set, init=False)
    _warm: bool = field(default=False, init=False)
    _interrupted: bool = field(default=False, init=False)
    _units: list[float] = field(default_factory=list, init=False)

    def measure(self) -> None:
        """Measure what is missing. OutOfTime when the bound is reached."""
        missing = [key for key in self.wanted if key not in self.results.samples]
        if not missing:
            return
        install.install(self.server.conninfo())
        with self._stack, self._heard():
            connect = psycopg.connect(self.server.conninfo(), autocommit=True)
            self._connection = self._stack.enter_context(connect)
            self._refresher = self._stack.enter_context(Refresher(self.server.conninfo()))
            self._load()
            churns = by_goal([key.churn for key in self.wanted if key.churn])
            for number in sorted({key.round for key in missing}):
                own = [key for key in missing if key.round == number]
                for engine in ("postgres", "spark"):
                    methods = set(ENGINES[engine]) - {"refresh"}
                    views = list(dict.fromkeys(key.view for key in own if key.method in methods))
                    if views:
                        self._pass(engine, number, views, churns)

    @contextmanager
    def _heard(self) -> Iterator[None]:
        """KeyboardInterrupt for whatever Ctrl-C brings about: Spark's own errors hide it."""

        def interrupt(*_: object) -> None:
            self._interrupted = True
            raise KeyboardInterrupt

        before = signal.signal(signal.SIGINT, interrupt)
        try:
            yield
        except Exception as error:
            if self._interrupted:
                raise KeyboardInterrupt from error
            raise
        finally:
            signal.signal(signal.SIGINT, before)

    def _pass(self, engine: str, number: int, views: Sequence[str], churns: Sequence[float]) -> None:
        """All churns of one round on one engine, whose views are brought up to the present before.

        That takes Spark long: when half of the time that is left is over, those that are ready come first.
        """
        while views:
            half = (time.monotonic() + self.deadline) / 2
            ready: list[str] = []
            for view in views:
                self._in_time()
                if engine == "spark" and time.monotonic() > half:
                    break
                self._truth(view)
                if engine == "postgres":
                    self._begin_postgres(view)
                else:
                    self._begin_spark(view, number)
                ready.append(view)
            for churn in churns:
                keys = {Key(number, churn, view, way) for view in ready for way in ENGINES[engine]} & {*self.wanted}
                if keys - self.results.samples.keys():
                    self._unit(engine, number, churn, ready)
            views = views[len(ready) :]

    def _unit(self, engine: str, number: int, churn: float, views: Sequence[str]) -> None:
        self._in_time()
        self._units.append(churn)
        self.told(f"round {number}, {engine}: changing {churn:.2%} of the lines", 0)
        chosen = self._units.count(churn)
        lines = tpch.change_lines(self._connection, self.results.scale, churn, chosen, len(self._units))
        self.results.about.setdefault("lines changed", {}).setdefault(f"{churn:g}", lines)
        while self._connection.execute("select gdq.maintain()").fetchone() == (True,):
            pass
        for view in views if number % 2 else views[::-1]:
            mine: Method = "postgres" if engine == "postgres" else "spark"
            ways: list[Method] = [mine, "refresh"]
            if view not in self._live[engine]:
                ways = [] if Key(number, churn, view, "refresh") in self.results.samples else ["refresh"]
            # whoever comes first may warm the cache for the others
            for method in ways if number % 2 else ways[::-1]:
                self._take(Key(number, churn, view, method))
            if engine == "postgres":
                self._take(Key(number, churn, view, "concurrently"))
            self._compare(Key(number, churn, view, mine), view if engine == "postgres" else f"s_{view}")

    def _take(self, key: Key) -> None:
        """Measure, or only refresh what later measurements need as it is now."""
        known = key in self.results.samples or key not in self.wanted
        if known and key.method == "concurrently":
            return
        self._in_time()
        self.told(f"round {key.round}, {key.churn:.2%}: {key.view} {key.method}", 0)
        sample = self._measured(key)
        if not known:
            self.results.add(key, sample)
            self.told("", 1)

    def _measured(self, key: Key) -> Sample:
        if key.method == "refresh":
            return self._timed(lambda: self._connection.execute(f"refresh materialized view m_{key.view}".encode()))
        if key.method == "concurrently":
            if key.view not in self._unique:
                return Sample("refused", why="rows that are not unique")
            command = f"refresh materialized view concurrently c_{key.view}".encode()
            return self._timed(lambda: self._connection.execute(command))
        name = key.view if key.method == "postgres" else f"s_{key.view}"
        return self._refreshed(name, full=key.method == "spark-full")

    def _refreshed(self, name: str, *, full: bool = False) -> Sample:
        result = None

        def work() -> None:
            nonlocal result
            result = self._refresher.refresh(name, full=full)

        try:
            sample = self._timed(work)
        except Exception as error:  # whatever Spark throws is a result
            if self._interrupted:
                raise
            return Sample("failed", why=(str(error).strip() or type(error).__name__).splitlines()[0])
        assert result is not None
        # what gdq says that it has read, should a session not have told the server yet
        read = max(sample.rows_read or 0, result.rows_read or 0)
        return replace(
            sample, did=result.action, why=result.reason, kind=result.kind, delta_rows=result.delta_rows, rows_read=read
        )

    def _timed(self, work: Callable[[], object]) -> Sample:
        self._tell()
        before, load = tpch.rows_read(self._connection), os.getloadavg()[0]
        (begun,) = self._connection.execute("select clock_timestamp()").fetchone() or (None,)
        start = time.monotonic()
        work()
        seconds = time.monotonic() - start
        self._tell()
        patience = time.monotonic() + 2
        while time.monotonic() < patience and self._connection.execute(_OTHERS, [begun]).fetchone() != (0,):
            time.sleep(0.01)
        read = tpch.rows_read(self._connection) - before
        return Sample("done", round(seconds, 4), rows_read=read, load=round(load, 2))

    def _tell(self) -> None:
        """Make the sessions of refreshes tell the server what they have read, which they do once a second at most."""
        for purpose, autocommit in (("target", True), ("snapshot", False)):
            session = self._refresher.connection(purpose, self._refresher.dsn, autocommit=autocommit)
            session.execute("select pg_stat_force_next_flush()")
            session.commit()

    def _compare(self, key: Key, name: str) -> None:
        """Whether a view has the rows of REFRESH; noted in its sample."""
        sample = self.results.samples.get(key)
        if sample is None or sample.equal is not None or sample.seconds is None:
            return
        mine, theirs = f"table {name}", f"table m_{key.view}"
        query = f"select not exists (({mine} except all {theirs}) union all ({theirs} except all {mine}))"
        (equal,) = self._connection.execute(query.encode()).fetchone() or (False,)
        self.results.samples[key] = replace(sample, equal=bool(equal))
        self.results.write()

    def _in_time(self) -> None:
        if time.monotonic() > self.deadline:
            raise OutOfTime

    # the database

    def _load(self) -> None:
        self.told(f"loading TPC-H, scale {self.results.scale:g}", 0)
        with tempfile.TemporaryDirectory() as folder:
            tpch.load(self._connection, Path(folder), self.results.scale)
        self._connection.execute("select gdq.create_event_triggers(); select gdq.create_queue('bench')")
        for table in tpch.TABLES:
            self._connection.execute("select gdq.add_table('bench', %s::regclass)", [table])

    def _truth(self, view: str) -> None:
        if view not in self._known:
            self.told(f"{view}: materialized view", 0)
            self._connection.execute(f"create materialized view m_{view} as {tpch.QUERIES[view]}".encode())
            self._known.add(view)

    def _begin_postgres(self, view: str) -> None:
        """Make the view and what stands beside it, or bring it up to the present."""
        self.told(f"{view}: refreshed before the changes", 0)
        if view not in self._begun["postgres"]:
            self._begun["postgres"].add(view)
            self._beside(view)
            if self._created(view, view, "postgres"):
                self._live["postgres"].add(view)
        if view in self._live["postgres"]:
            self._refreshed(view)

    def _begin_spark(self, view: str, number: int) -> None:
        """Make the view, and compute it in full: at first as its first load."""
        self.told(f"round {number}: {view} spark-full", 0)
        if view not in self._begun["spark"]:
            self._begun["spark"].add(view)
            if not self._created(view, f"s_{view}", "spark"):
                return
            self._warm_up()
            self._live["spark"].add(view)
        if view not in self._live["spark"]:
            return
        sample = self._refreshed(f"s_{view}", full=True)
        if sample.seconds is None:
            self._live["spark"].discard(view)
            self._refused(view, ("spark", "spark-full"), sample)
            return
        key = Key(number, 0.0, view, "spark-full")
        if key not in self.results.samples:
            self.results.add(key, sample)
            self.told("", 1)

    def _beside(self, view: str) -> None:
        """A materialized view for CONCURRENTLY, which wants a unique index."""
        self._connection.execute(f"create materialized view c_{view} as {tpch.QUERIES[view]}".encode())
        columns = self._connection.execute(f"select * from m_{view} limit 0".encode()).description or ()
        names = ", ".join(column.name for column in columns)
        try:
            self._connection.execute(f"create unique index on c_{view} ({names})".encode())
        except psycopg.errors.UniqueViolation:
            return
        self._unique.add(view)

    def _created(self, view: str, name: str, engine: Any) -> bool:
        try:
            create_view(self._connection, name, "bench", tpch.QUERIES[view], f"public.{name}", engine=engine)
        except GdqError as error:
            refused = Sample("refused", why=str(error).splitlines()[0])
            self._refused(view, ("postgres",) if engine == "postgres" else ("spark", "spark-full"), refused)
            return False
        return True

    def _refused(self, view: str, methods: Collection[str], sample: Sample) -> None:
        for key in self.wanted:
            if key.view == view and key.method in methods and key not in self.results.samples:
                self.results.add(key, sample)
                self.told("", 1)

    def _warm_up(self) -> None:
        """Start Spark, and compile what every refresh there needs; once."""
        if self._warm:
            return
        self._warm = True
        self.told("starting Spark", 0)
        self._stack.callback(self._refresher.spark_run.spark.stop)
        query = "select n_name, r_name from nation join region on n_regionkey = r_regionkey"
        create_view(self._connection, "warm", "bench", query, "public.warm", engine="spark")
        for full in (False, True, True):
            self._refresher.refresh("warm", full=full)
