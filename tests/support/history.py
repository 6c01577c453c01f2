"""A history of all row changes, written by a trigger of the application in the same transactions as the changes."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from tests.support.events import SCHEMA
from tests.support.server import Database

Row = tuple[Any, ...]
"""One row of gdq.get_batch()."""

ROW_OPS = ("insert", "update", "delete")


@dataclass(frozen=True, slots=True)
class Comparison:
    """What a queue's events and the history say of one table."""

    matched: int
    lost: list[Any]
    """Changes without an event that were made while capture was not recorded to be off."""
    missed: int
    """Changes without an event, or with one of fewer columns, made while capture was recorded to be off."""
    invented: list[Any]


@dataclass(slots=True)
class History:
    """The table shop.history. Its trigger `zz` fires after gdq's, and notes how far the numbers of the queue were."""

    db: Database
    queue: str = "q"
    names: list[str] = field(default_factory=list)

    def create(self) -> None:
        with self.db.connect("su") as su:
            found = su.execute("select queue_id from gdq.queue where queue_name = %s", [self.queue]).fetchone()
            assert found
            su.execute(
                f"create table {SCHEMA}.history "
                "(n bigserial, xid bigint, seq bigint, tbl text, op text, old jsonb, new jsonb)"
            )
            su.execute(f"""
                create function {SCHEMA}.note() returns trigger
                language plpgsql security definer set search_path = pg_catalog as $$
                begin
                  insert into {SCHEMA}.history (xid, seq, tbl, op, old, new)
                  select txid_current(), last_value, TG_ARGV[0], lower(TG_OP),
                         case when TG_OP <> 'INSERT' then to_jsonb(OLD) end,
                         case when TG_OP <> 'DELETE' then to_jsonb(NEW) end
                    from gdq_log.q{found[0]}_ev;
                  return null;
                end $$""")

    def watch(self, *names: str) -> None:
        """Write the history of these tables too."""
        with self.db.connect("su") as su:
            for name in names:
                su.execute(
                    f"create trigger zz after insert or update or delete on {SCHEMA}.{name} "
                    f"for each row execute function {SCHEMA}.note('{SCHEMA}.{name}')".encode()
                )
        self.names += names

    def compare(self, rows: Iterable[Row], name: str, *, keys_only: bool = False) -> Comparison:
        """The history of one table against all events that its queue has given out."""
        rows = list(rows)
        table = f"{SCHEMA}.{name}"
        with self.db.connect("su") as su:
            noted = su.execute(
                f"select xid, op, old, new, seq from {SCHEMA}.history where tbl = %s order by n".encode(), [table]
            ).fetchall()
        captured: defaultdict[Any, list[int]] = defaultdict(list)
        for ev_id, xid, _, op, tbl, key, old, new in rows:
            if tbl == table and op in ROW_OPS:
                change = (
                    _change(xid, op, key if op == "delete" else None, key) if keys_only else _change(xid, op, old, new)
                )
                captured[change].append(ev_id)
        off = _intervals(rows, table)
        lost = []
        missed: Counter[tuple[int, str]] = Counter()
        matched = 0
        for xid, op, old, new, seq in noted:
            change = (
                _change(xid, op, _key(old) if op == "delete" else None, _key(new or old))
                if keys_only
                else _change(xid, op, old, new)
            )
            if captured[change]:
                captured[change].pop()
                matched += 1
            elif _is_off(off, seq):
                missed[xid, op] += 1
            else:
                lost.append((*change, seq))
        invented = []
        partial: Counter[tuple[int, str]] = Counter()
        for change, numbers in captured.items():
            for ev_id in numbers:
                # functions that could not be replaced when capture went off write images without the new columns
                if _is_off(off, ev_id) and partial[change[:2]] < missed[change[:2]]:
                    partial[change[:2]] += 1
                else:
                    invented.append(change)
        return Comparison(matched, lost, missed.total(), invented)

    def near(self, rows: Iterable[Row], change: tuple[Any, ...]) -> str:
        """A lost or invented change, and what queue and history hold of its transaction and around its number."""
        rows = sorted(rows, key=lambda row: row[0])
        xid, number = change[0], change[4] if len(change) == 5 else None
        with self.db.connect("su") as su:
            noted = su.execute(
                f"select n, xid, seq, tbl, op, old, new from {SCHEMA}.history "
                "where xid = %(xid)s or seq between %(number)s - 10 and %(number)s + 10 order by n".encode(),
                {"xid": xid, "number": number},
            ).fetchall()
        around = [row for row in rows if row[1] == xid or (number is not None and abs(row[0] - number) <= 10)]
        switched = [row for row in rows if row[3] in ("resync", "ddl") and abs(row[0] - (number or 0)) <= 300]
        parts = {"change": [change], "history": noted, "events": around, "resync and ddl": switched}
        return "\n".join(f"{title}:\n" + "\n".join(map(str, lines)) for title, lines in parts.items())


def _key(image: dict[str, Any]) -> dict[str, Any]:
    return {"id": image["id"]}


def _change(xid: int, op: str, old: dict[str, Any] | None, new: dict[str, Any] | None) -> tuple[Any, ...]:
    return xid, op, _text(old), _text(new)


def _text(image: dict[str, Any] | None) -> str | None:
    """An image with all values as text, as JSON of gdq and of to_jsonb() differ in what is a number."""
    return None if image is None else str(sorted((k, None if v is None else str(v)) for k, v in image.items()))


def _is_off(off: list[tuple[int, float]], number: int) -> bool:
    return any(start <= number <= end for start, end in off)


def _intervals(rows: Iterable[Row], table: str) -> list[tuple[int, float]]:
    """The event numbers between which capture was off."""
    intervals: list[tuple[int, float]] = []
    for ev_id, _, _, op, tbl, _, _, new in sorted(rows, key=lambda row: row[0]):
        if op != "resync" or tbl != table:
            continue
        if new["kind"] == "disarmed" and (not intervals or intervals[-1][1] != float("inf")):
            intervals.append((ev_id, float("inf")))
        elif new["kind"] == "armed":
            intervals[-1] = (intervals[-1][0], ev_id)
    return intervals
