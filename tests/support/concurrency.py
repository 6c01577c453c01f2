"""What consumers got, checked against a history that the same transactions wrote by a trigger of its own.

`Scene` is a database with captured tables and their history; `Stream` collects what one consumer applied; `check`
raises Violation for every way in which a queue can be wrong.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, NamedTuple

import psycopg
from psycopg.types.json import Jsonb

from tests.support.server import Database

TABLES = ("acct", "item", "part")

SCHEMA = """
create table acct (id integer primary key, label bigint not null, pad text);
create table item (id integer primary key, label bigint not null, pad text);
create table part (id integer, region integer, label bigint not null, primary key (id, region))
  partition by list (region);
create table part_0 partition of part for values in (0);
create table part_1 partition of part for values in (1, 2);
create sequence label;
create table history (
  seq bigint generated always as identity, txid bigint not null default txid_current(), tbl text, op text,
  old_key text, old_label bigint, new_key text, new_label bigint);
create function note_history() returns trigger language plpgsql as $$
declare
  o jsonb := case when tg_op <> 'INSERT' then to_jsonb(old) end;
  n jsonb := case when tg_op <> 'DELETE' then to_jsonb(new) end;
  old_key text := concat_ws('/', o->>'id', o->>'region');
  new_key text := concat_ws('/', n->>'id', n->>'region');
begin
  if tg_argv[0] = 'item' and tg_op = 'UPDATE' and old_key <> new_key then
    insert into history (tbl, op, old_key, old_label) values (tg_argv[0], 'delete', old_key, (o->>'label')::bigint);
    insert into history (tbl, op, new_key, new_label) values (tg_argv[0], 'insert', new_key, (n->>'label')::bigint);
  else
    insert into history (tbl, op, old_key, old_label, new_key, new_label)
    values (tg_argv[0], lower(tg_op), nullif(old_key, ''), (o->>'label')::bigint,
            nullif(new_key, ''), (n->>'label')::bigint);
  end if;
  return null;
end $$;
create trigger history after insert or update or delete on acct for each row execute function note_history('acct');
create trigger history after insert or update or delete on item for each row execute function note_history('item');
create trigger history after insert or update or delete on part for each row execute function note_history('part');
select gdq.create_queue('q', ticker_max_lag => '10 ms', rotation_period => '20 ms');
select gdq.add_table('q', 'acct');
select gdq.add_table('q', 'item', mode => 'pk', include => '{label}');
select gdq.add_table('q', 'part');
"""

# The same columns for the typed rows of a table in full mode and of one in pk mode; a row has both images.
TYPED = {
    "acct": "select ev_id, ev_txid, ev_op, old_id::text, old_label, new_id::text, new_label from ({}) r",
    "item": """select ev_id, ev_txid, ev_op, case when ev_op <> 'I' then key_id::text end, old_label,
                      case when ev_op <> 'D' then key_id::text end, new_label from ({}) r""",
    "part": """select ev_id, ev_txid, ev_op, old_id || '/' || old_region, old_label,
                      new_id || '/' || new_region, new_label from ({}) r""",
}
OPS = {"I": "insert", "U": "update", "D": "delete"}


class Violation(AssertionError):  # noqa: N818 (it is what the check found, not an error of the check)
    """The queue lost, doubled, invented, split or reordered changes."""


class Snapshot(NamedTuple):
    """A pg_snapshot: transactions below `xmax` that are not in `xip` count as finished."""

    xmax: int
    xip: frozenset[int]

    @classmethod
    def parse(cls, text: str) -> Snapshot:
        _, xmax, xip = text.split(":")
        return cls(int(xmax), frozenset(int(x) for x in xip.split(",") if x))

    def sees(self, txid: int) -> bool:
        return txid < self.xmax and txid not in self.xip

    def is_after(self, other: Snapshot) -> bool:
        return self.xmax >= other.xmax and not any(other.sees(x) for x in self.xip)


class Change(NamedTuple):
    """One change of one row. Every version of a row has a label of its own."""

    txid: int
    tbl: str
    op: str
    old_key: str | None
    old_label: int | None
    new_key: str | None
    new_label: int | None


class Applied(NamedTuple):
    """A batch that a consumer finished, with its changes in the order of delivery."""

    tick_from: int
    tick_to: int
    snapshot_from: Snapshot
    snapshot_to: Snapshot
    changes: list[Change]


@dataclass(slots=True)
class Stream:
    """What one consumer applied, whichever of its workers did it."""

    start: Snapshot
    applied: list[Applied] = field(default_factory=list)
    read: dict[int, list[Change]] = field(default_factory=dict)

    def note_read(self, batch_id: int, changes: list[Change]) -> None:
        """Reading a batch again, also by another worker, gives the same rows in the same order."""
        first = self.read.setdefault(batch_id, changes)
        if first != changes:
            raise Violation(
                f"batch {batch_id} was read as {len(first)} and then as {len(changes)} changes: "
                f"{Counter(first) - Counter(changes)} / {Counter(changes) - Counter(first)}"
            )


State = dict[tuple[str, str], int]


def replay(changes: Iterable[Change], state: State) -> State:
    """Apply changes in order. Each must start from the version of its row that the one before left."""
    for change in changes:
        if change.old_key is not None:
            found = state.pop((change.tbl, change.old_key), None)
            if found != change.old_label:
                raise Violation(f"order: {change} follows version {found} of its row")
        if change.new_key is not None:
            if (change.tbl, change.new_key) in state:
                raise Violation(f"order: {change} meets version {state[change.tbl, change.new_key]} of its row")
            assert change.new_label is not None
            state[change.tbl, change.new_key] = change.new_label
    return state


def check_ticks(ticks: Sequence[Snapshot]) -> None:
    """The snapshots of ticks, in the order of their ids, never go back."""
    for number, (earlier, later) in enumerate(pairwise(ticks)):
        if not later.is_after(earlier):
            raise Violation(f"tick {number + 1} went back from {earlier} to {later}")


def check_stream(stream: Stream, history: Sequence[Change]) -> None:
    """Every batch holds exactly the transactions that ended between its two ticks, each whole, each row in order."""
    applied = sorted(stream.applied, key=lambda batch: batch.tick_to)
    if not applied:
        raise Violation("nothing was delivered")
    if applied[0].snapshot_from != stream.start:
        raise Violation(f"the first batch starts at {applied[0].snapshot_from}, not at {stream.start}")
    for one, two in pairwise(applied):
        if (one.tick_to, one.snapshot_to) != (two.tick_from, two.snapshot_from):
            raise Violation(f"the batch to tick {one.tick_to} is followed by one from {two.tick_from} to {two.tick_to}")
    borders = [stream.start, *(batch.snapshot_to for batch in applied)]
    state = replay((change for change in history if stream.start.sees(change.txid)), {})
    due: dict[int, Counter[Change]] = defaultdict(Counter)
    place: dict[int, int] = {}
    for change in history:
        if change.txid not in place:
            # the first border that sees it; borders are ordered, as check_ticks says
            place[change.txid] = bisect_left(borders, True, key=lambda border, x=change.txid: border.sees(x))  # type: ignore[misc]
        due[place[change.txid]][change] += 1
    for number, batch in enumerate(applied, 1):
        got = Counter(batch.changes)
        if got != due[number]:
            raise Violation(
                f"batch to tick {batch.tick_to}: lost {list((due[number] - got).elements())[:3]}, "
                f"too much {list((got - due[number]).elements())[:3]}"
            )
        replay(batch.changes, state)
    if due[len(borders)]:
        raise Violation(f"{due[len(borders)].total()} changes were never delivered")


def delivered(stream: Stream) -> list[Change]:
    return [change for batch in sorted(stream.applied, key=lambda b: b.tick_to) for change in batch.changes]


class Scene:
    """A database with three captured tables, in full and pk mode and partitioned, and their history."""

    def __init__(self, db: Database) -> None:
        self.db = db
        self.streams: dict[str, Stream] = {}
        self.probes: list[tuple[Snapshot, State]] = []
        with db.connect() as owner:
            owner.execute(SCHEMA)

    def register(self, owner: psycopg.Connection[Any], consumer: str) -> Stream:
        owner.execute("select gdq.register_consumer('q', %s)", [consumer])
        row = owner.execute(
            """select p.snapshot::text from gdq.position p join gdq.subscription using (subscription_id)
                 join gdq.consumer using (consumer_id) where consumer_name = %s order by batch_no limit 1""",
            [consumer],
        ).fetchone()
        assert row
        self.streams[consumer] = Stream(Snapshot.parse(row[0]))
        return self.streams[consumer]

    def contents(self, connection: psycopg.Connection[Any]) -> State:
        """All tables as the connection sees them."""
        rows = connection.execute(
            """select 'acct', id::text, label from acct union all select 'item', id::text, label from item
               union all select 'part', id || '/' || region, label from part"""
        )
        return {(tbl, key): label for tbl, key, label in rows}

    def probe(self, connection: psycopg.Connection[Any]) -> None:
        """Keep the tables as one snapshot sees them."""
        with connection.transaction():
            connection.execute("set transaction isolation level repeatable read")
            row = connection.execute("select pg_current_snapshot()::text").fetchone()
            assert row
            self.probes.append((Snapshot.parse(row[0]), self.contents(connection)))

    def check(self, connection: psycopg.Connection[Any]) -> list[Change]:
        """Violation unless every consumer got everything right; the history."""
        ticks = connection.execute("select snapshot::text from gdq.tick where not refresh order by tick_id")
        check_ticks([Snapshot.parse(row[0]) for row in ticks])
        history = [
            Change(*row)
            for row in connection.execute(
                "select txid, tbl, op, old_key, old_label, new_key, new_label from history order by seq"
            )
        ]
        for stream in self.streams.values():
            check_stream(stream, history)
            before = [change for change in history if stream.start.sees(change.txid)]
            every = before + delivered(stream)
            if replay(every, {}) != self.contents(connection):
                raise Violation("the replayed state differs from the tables")
            for snapshot, contents in self.probes:
                if replay((change for change in every if snapshot.sees(change.txid)), {}) != contents:
                    raise Violation(f"the state replayed up to {snapshot} differs from what the tables held")
        return history


def next_batch(
    connection: psycopg.Connection[Any], consumer: str, max_events: int = 50_000
) -> tuple[int, str, Applied] | None:
    """A consumer's next batch: its id and token, and where it lies."""
    row = connection.execute(
        """select batch_id, token::text, tick_from, tick_to, snapshot_from::text, snapshot_to::text
             from gdq.next_batch('q', %s, %s)""",
        [consumer, max_events],
    ).fetchone()
    if row is None:
        return None
    batch_id, token, tick_from, tick_to, snapshot_from, snapshot_to = row
    return batch_id, token, Applied(tick_from, tick_to, Snapshot.parse(snapshot_from), Snapshot.parse(snapshot_to), [])


def read_events(connection: psycopg.Connection[Any], batch_id: int, token: str) -> list[Change]:
    """The row changes of a batch, by gdq.get_batch() or by gdq.get_events(), which has readers give them."""
    events = "gdq.get_batch(%s, %s)" if batch_id % 2 else "gdq.get_events(%s, %s) where retries = 0"
    query = f"""select ev_txid, tbl, op, key, old, new from (select * from {events}) e
                 where op in ('insert', 'update', 'delete')"""
    rows = connection.execute(query.encode(), [batch_id, token])
    changes = []
    for txid, tbl, op, key, old, new in rows:
        if op not in OPS.values():
            continue
        before = {**(key if op != "insert" else {}), **(old or {})} if op != "insert" else {}
        after = {**(key if op != "delete" else {}), **(new or {})} if op != "delete" else {}
        changes.append(
            Change(txid, tbl.removeprefix("public."), op, _key(before), _label(before), _key(after), _label(after))
        )
    return changes


def read_typed(connection: psycopg.Connection[Any], batch_id: int, token: str) -> list[Change]:
    """A batch by gdq.batch_sql() of every table, put in order here."""
    rows: list[tuple[int, Change]] = []
    for (tbl,) in connection.execute("select table_name from gdq.batch_tables(%s, %s)", [batch_id, token]).fetchall():
        name = tbl.removeprefix("public.")
        query = connection.execute("select gdq.batch_sql(%s, %s, %s::regclass)", [batch_id, token, tbl]).fetchone()
        assert query
        found = connection.execute(TYPED[name].format(query[0]).encode())
        rows += [(ev_id, Change(txid, name, OPS[op], *images)) for ev_id, txid, op, *images in found]
    rows.sort(key=lambda row: row[0])
    return [change for _, change in rows]


def _key(image: dict[str, Any]) -> str | None:
    return "/".join(str(image[name]) for name in ("id", "region") if name in image) or None


def _label(image: dict[str, Any]) -> int | None:
    return int(image["label"]) if image else None


def maintain(connection: psycopg.Connection[Any]) -> tuple[bool, int]:
    """One call of gdq.maintain(): whether more is due, and how many segments with rows it emptied."""
    with_rows = """select coalesce(jsonb_object_agg(s::text, pg_relation_filenode(s)), '{}')
                     from gdq.queue q, gdq.queue_segments(q.queue_id) s"""
    emptied = """select count(*) from jsonb_each_text(%s) before(log, file)
                  where pg_relation_filenode(log::regclass) <> file::oid"""
    before = connection.execute(with_rows).fetchone()
    more = connection.execute("select gdq.maintain()").fetchone()
    assert before
    assert more
    found = connection.execute(emptied, [Jsonb(before[0])]).fetchone()
    assert found
    return more[0], found[0]
