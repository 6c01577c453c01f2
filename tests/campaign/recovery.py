"""Beats: marked changes that every consumer must show; the time until it does is its recovery time."""

from __future__ import annotations

import threading
import time
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import psycopg

from gdq.consumers.lake.open import open_lake
from gdq.view.view import view_info
from tests.campaign.stage import CONSUMERS, FAR_VIEWS, LAKE_VIEWS, VIEWS, Stage

_LOOK_SECONDS = 0.4
_LAKE_SECONDS = 1.5
_TRY_SECONDS = 300.0


@dataclass
class Beat:
    """A beat after a fault of `kind`; `seconds`: of each consumer that has shown it."""

    number: int
    kind: str
    detail: str
    struck_at: float
    healed_at: float
    waiting: set[str]
    seconds: dict[str, float] = field(default_factory=dict)


class Recovery:
    """Makes beats, and watches who shows them."""

    def __init__(self, stage: Stage) -> None:
        self.stage = stage
        self.beats: list[Beat] = []
        self.watched = {*CONSUMERS, *VIEWS}
        self._lock = threading.Lock()
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run, name="recovery", daemon=True)
        self._lakes: dict[str, Any] = {}

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        self._over.set()
        self._thread.join()

    def beat(self, kind: str, detail: str = "", struck_at: float | None = None) -> Beat:
        """Make a beat; tried until the server takes it."""
        healed_at = time.monotonic()
        number = len(self.beats) + 1
        deadline = healed_at + _TRY_SECONDS
        while True:
            try:
                self._write(number)
                break
            except psycopg.Error:
                if time.monotonic() > deadline:
                    raise
                time.sleep(0.3)
        made = Beat(number, kind, detail, struck_at or healed_at, healed_at, set(self.watched))
        with self._lock:
            self.beats.append(made)
        return made

    def forget(self, consumer: str) -> None:
        """No longer wait for a consumer that was ended."""
        with self._lock:
            self.watched.discard(consumer)
            for beat in self.beats:
                beat.waiting.discard(consumer)

    def wait(self, beat: Beat, seconds: float, only: set[str] | None = None) -> bool:
        """Wait until all consumers, or some, have shown a beat."""
        deadline = time.monotonic() + seconds
        while beat.waiting & only if only is not None else beat.waiting:
            if time.monotonic() > deadline:
                return False
            time.sleep(0.2)
        return True

    def _write(self, number: int) -> None:
        with psycopg.connect(self.stage.app_dsn, autocommit=True) as app, app.transaction():
            app.execute("set local lock_timeout = '2s'")
            for table in ("acct", "item", "part"):
                more = ("acct, ", "-%(n)s::int, ") if table == "item" else ("", "")
                app.execute(
                    f"""with c as (insert into app.{table} ({more[0]}id, region, label)
                          select {more[1]}-%(n)s::int, -%(n)s::int, nextval('app.label')
                           where not exists (select from app.{table} where id = -%(n)s::int) returning label)
                        insert into app.audit (tbl, born) select '{table}', label from c""".encode(),
                    {"n": number},
                )

    def _run(self) -> None:
        lakes_at = 0.0
        while not self._over.wait(_LOOK_SECONDS):
            waiting = set().union(*(beat.waiting for beat in self.beats))
            if not waiting:
                continue
            shown: dict[str, set[int]] = {}
            with suppress(psycopg.Error):
                self._look_at_source(shown)
            with suppress(psycopg.Error):
                self._look_at_target(shown)
            if waiting & set(LAKE_VIEWS) and time.monotonic() - lakes_at > _LAKE_SECONDS:
                self._look_at_lakes(shown)
                lakes_at = time.monotonic()
            now = time.monotonic()
            with self._lock:
                for beat in self.beats:
                    for consumer in list(beat.waiting):
                        if beat.number in shown.get(consumer, ()):
                            beat.waiting.discard(consumer)
                            beat.seconds[consumer] = now - beat.healed_at

    def _look_at_source(self, shown: dict[str, set[int]]) -> None:
        with psycopg.connect(self.stage.dsn("postgres"), autocommit=True) as su:
            for consumer, beat in su.execute("select distinct consumer, beat from seen.beat"):
                shown.setdefault(consumer, set()).add(beat)
            self._look(su, "mirror", "seen.part", shown)
            for view in VIEWS:
                if view not in FAR_VIEWS and view not in LAKE_VIEWS:
                    self._look(su, view, f"views.{view}", shown)

    def _look_at_target(self, shown: dict[str, set[int]]) -> None:
        with psycopg.connect(self.stage.target_dsn, autocommit=True) as there:
            for consumer, beat in there.execute("select distinct consumer, beat from seen.beat"):
                shown.setdefault(consumer, set()).add(beat)
            for view in FAR_VIEWS:
                self._look(there, view, f"views.{view}", shown)

    def _look(self, connection: psycopg.Connection[Any], consumer: str, table: str, shown: dict[str, set[int]]) -> None:
        with suppress(psycopg.errors.UndefinedTable):
            query = f"select -region from {table} where region < 0"
            shown[consumer] = {beat for (beat,) in connection.execute(query.encode())}

    def _look_at_lakes(self, shown: dict[str, set[int]]) -> None:
        for view in LAKE_VIEWS:
            with suppress(Exception):  # it may be between two commits, or not there yet
                rows = lake_rows(self.stage, view, self._lakes)
                shown[view] = {-row["region"] for row in rows if row["region"] < 0}


def lake_rows(stage: Stage, view: str, known: dict[str, Any]) -> list[dict[str, Any]]:
    """What a reader of a lake table finds."""
    if view not in known:
        with psycopg.connect(stage.dsn("gdq_owner"), autocommit=True) as owner:
            known[view] = view_info(owner, view)[0]
    info = known[view]
    table = open_lake(info.lake, f"view {view}", info.source)
    return [row for batch in table.scan() for row in batch.to_pylist()]
