"""An earlier tick at which a chunked copy arrives: its tables are taken back there from where they were copied."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from psycopg import Connection

from gdq.call import scalar
from gdq.consumer import consumer_info
from gdq.consumers.copy.chunk_table import describe_table
from gdq.consumers.views.change_source import log_columns
from gdq.errors import GdqError, mapped_errors
from gdq.qualified_sql import qualified
from gdq.source import Position

_EVENT = qualified("""
select e.tbl, e.kind from gdq.delta_events(%s, %s::pg_snapshot, pg_current_snapshot(),
                                           %s::text[]::pg_catalog.regclass[]) e
 where e.kind <> 'message' limit 1""")


@dataclass(frozen=True, slots=True)
class Goal:
    """The tick at which a copy is to arrive; `position` is that of whoever has read up to there."""

    tick: int
    position: str

    @property
    def snapshot(self) -> str:
        return Position.parse(self.position).snapshot

    def is_after(self, snapshot: str) -> bool:
        """True if the tick is later than another snapshot of this server: these are in one order."""
        return _order(self.snapshot) > _order(snapshot)

    def refuse_event(self, table: str, kind: str) -> GdqError:
        """The error for what happened to a table after the tick and is no change of its rows."""
        return GdqError(
            f"table {table} cannot be taken back to tick {self.tick}: there was a {kind} after it",
            hint="Choose a later tick.",
        )


def find_goal(control: Connection[Any], queue: str, tick: int, tables: Sequence[str], consumer: str | None) -> Goal:
    """The tick of that number; GdqError if tables cannot be taken back there, or if the consumer has read past it."""
    with mapped_errors():
        position = scalar(control, qualified("select gdq.tick_position(%s, %s)"), queue, tick)
        if position is None:
            raise GdqError(f'queue "{queue}" has no tick {tick}, or does not keep it any more')
        goal = Goal(tick, position)
        for info in consumer_info(control, queue):
            if info.consumer_name == consumer and info.last_tick is not None and info.last_tick > tick:
                raise GdqError(
                    f'consumer "{consumer}" is at tick {info.last_tick}, past tick {tick}',
                    hint="Choose its own tick or a later one, or another consumer.",
                )
        for table in tables:
            check = qualified("select gdq.check_captured(%s, %s::pg_catalog.regclass, %s::pg_snapshot)")
            scalar(control, check, queue, table, goal.snapshot)
            describe_table(control, queue, table).check_images(log_columns(control, queue, table))
        event = control.execute(_EVENT, [queue, goal.snapshot, list(tables)]).fetchone()
    if event is not None:
        table, kind = event
        raise goal.refuse_event(table, kind)
    return goal


def _order(snapshot: str) -> tuple[int, int]:
    """Snapshots of one server by age: the later one sees more transactions."""
    _, xmax, running = snapshot.split(":")
    return int(xmax), -len([xid for xid in running.split(",") if xid])
