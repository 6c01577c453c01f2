"""Queue and slot say the same of the same changes, but for what the rules explain, and the comparison sees all else.

The slot's output plugin is pgoutput; test_decoding and wal2json are put beside it where the server has them.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Iterator
from dataclasses import replace

import pytest

from gdq.consumers.compare.comparison import Comparison
from gdq.consumers.compare.rules import SLOT_PLUGINS, rules_of
from gdq.embedded.server import EmbeddedServer
from gdq.source import Event
from tests.support.server import _temporary
from tests.support.slot_pair import Compared, Pair, compare, watched
from tests.support.slot_workload import LEAVES, LOOSE, SCHEMA, TABLES, types_table, worked

pytestmark = pytest.mark.server

# Operations that each side must have seen for the run to mean something.
NEEDED = {"insert": 150, "update": 80, "delete": 25, "truncate": 3}

# The least number of uses of a rule, where it is more than one.
LEAST = {
    "`id`": 250,
    "`xid`": 250,
    "`time`": 250,
    "`old` of an update or delete": 10,
    "`new` of an update": 5,
    "DDL": 4,
    "`table` of a partition's row": 30,
    "TRUNCATE of a partitioned table": 2,
    "NULL in `old` with REPLICA IDENTITY FULL": 30,
    "NaN and Infinity in float4, float8 and numeric": 2,
    "update or delete of a table without replica identity": 3,
}


@pytest.fixture(scope="module", params=["full", "default"])
def identity(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def all_worked_on(identity: str, server: EmbeddedServer, template: str) -> Iterator[tuple[Pair, dict[str, Compared]]]:
    """The workload, once for each replica identity, and what each plugin gave of it."""
    for db in _temporary(server, template):
        with db.connect("su") as su:
            schema = [*SCHEMA, types_table(su)]
        whole = [] if identity == "default" else [*(table for table in TABLES if table != "doubled"), *LEAVES, "typed"]
        schema += [f"alter table {table} replica identity full" for table in whole]
        with watched(db, schema, [*TABLES, "typed"], others=True, unpublished=[LOOSE]) as pair:
            yield pair, worked(pair, seed=7)


@pytest.fixture(params=SLOT_PLUGINS)
def worked_on(request: pytest.FixtureRequest, all_worked_on: tuple[Pair, dict[str, Compared]]) -> tuple[Pair, Compared]:
    pair, outcomes = all_worked_on
    if request.param not in outcomes:
        pytest.skip(f"this server does not have the output plugin {request.param}")
    return pair, outcomes[request.param]


def again(outcome: Compared, queue: list[Event], slot: list[Event]) -> Compared:
    """The comparison of other events of the same tables."""
    return compare(queue, slot, outcome.tables, outcome.plugin)


def test_all_differences_are_explained(worked_on: tuple[Pair, Compared]) -> None:
    outcome = worked_on[1]
    assert outcome.errors == []
    for side, counts in outcome.comparison.events.items():
        assert {op: counts[op] for op in NEEDED if counts[op] < NEEDED[op]} == {}, side


def test_each_rule_is_used(worked_on: tuple[Pair, Compared], identity: str) -> None:
    """On a server so old that its transaction numbers have more than 32 bits."""
    outcome = worked_on[1]
    old = again(outcome, [replace(event, xid=event.xid + (3 << 32)) for event in outcome.queue], outcome.slot)
    assert old.errors == []
    needed = {rule.name: LEAST.get(rule.name, 1) for rule in rules_of(outcome.plugin)}
    needed.pop("`key`", None)  # needs an identity by an index: tests/slot/test_unbegun.py
    if identity == "default":
        needed.pop("NULL in `old` with REPLICA IDENTITY FULL", None)
    else:
        assert "`new` of an update" not in old.comparison.used
        del needed["`new` of an update"]
    assert {name: old.comparison.used[name] for name in needed if old.comparison.used[name] < needed[name]} == {}


def test_a_plugin_needs_its_own_rules(worked_on: tuple[Pair, Compared], identity: str) -> None:
    """Without one of them there are as many errors as it explained: no other rule stands in for it."""
    outcome = worked_on[1]
    own = {rule.name for rule in rules_of(outcome.plugin) if rule.plugins != SLOT_PLUGINS}
    other = next(plugin for plugin in SLOT_PLUGINS if plugin != outcome.plugin)
    missing = own - {rule.name for rule in rules_of(other)}
    lost = [one for one in outcome.differences if one.rule in missing]
    assert lost or (identity, outcome.plugin) == ("default", "test_decoding")
    assert len(compare(outcome.queue, outcome.slot, outcome.tables, other).errors) >= len(lost)


def test_replay_gives_the_tables(worked_on: tuple[Pair, Compared]) -> None:
    pair, outcome = worked_on
    seen = 0
    for table, path, rows, replayed in pair.states(outcome):
        missed = [row for row in rows if "('what', 'far')" in row] if path == "queue" else []
        left = [row for row in rows if row not in missed]
        assert (sorted({*replayed} - {*left}), sorted({*left} - {*replayed})) == ([], []), (table, path)
        assert len(replayed) == len(left)
        seen += len(rows)
    assert seen > 100


Mutation = Callable[[list[Event], random.Random], int]
"""Changes the events of one side in place and gives the least number of errors that must come of it."""


def dropped(events: list[Event], rng: random.Random) -> int:
    del events[rng.choice(_rows(events))]
    return 1


def invented(events: list[Event], rng: random.Random) -> int:
    place = rng.choice(_rows(events))
    events.insert(place, events[place])
    return 1


def wrong_old(events: list[Event], rng: random.Random) -> int:
    """Of a key column: all that a default replica identity gives."""
    place = rng.choice([place for place in _rows(events) if events[place].old and events[place].op == "delete"])
    old = events[place].old or {}
    events[place] = replace(events[place], old={**old, "id": old["id"] + 1})
    return 1


def wrong_new(events: list[Event], rng: random.Random) -> int:
    place = rng.choice([place for place in _rows(events) if events[place].new])
    new = events[place].new or {}
    column = rng.choice(sorted(new))
    events[place] = replace(events[place], new={**new, column: f"{new[column]}?"})
    return 1


def emptied(events: list[Event], rng: random.Random) -> int:
    place = rng.choice([place for place in _rows(events) if (events[place].new or {}).get("n") is not None])
    events[place] = replace(events[place], new={**(events[place].new or {}), "n": None})
    return 1


def lacking_old(events: list[Event], rng: random.Random) -> int:
    """The key: what every replica identity gives."""
    place = rng.choice([place for place in _rows(events) if events[place].old and events[place].op == "delete"])
    old = {name: value for name, value in (events[place].old or {}).items() if name != "id"}
    events[place] = replace(events[place], old=old)
    return 1


def swapped(events: list[Event], rng: random.Random) -> int:
    """Two changes of one key by one transaction."""
    pairs = _pairs(events, lambda one, other: one.xid == other.xid and one.new != other.new)
    one, other = rng.choice(pairs)
    first, second = events[one], events[other]
    events[one], events[other] = replace(second, id=first.id), replace(first, id=second.id)
    return 1


def swapped_transactions(events: list[Event], rng: random.Random) -> int:
    """Two changes of one key by two transactions; a slot has no numbers that say so but its order."""
    one, other = rng.choice(_pairs(events, lambda one, other: one.xid != other.xid))
    first, second = events[one], events[other]
    events[one], events[other] = replace(first, id=second.id), replace(second, id=first.id)
    return 1


def other_transaction(events: list[Event], rng: random.Random) -> int:
    place = rng.choice(_rows(events))
    events[place] = replace(events[place], xid=next(one.xid for one in events if one.xid != events[place].xid))
    return 2


def other_operation(events: list[Event], rng: random.Random) -> int:
    place = rng.choice([place for place in _rows(events) if events[place].op == "update"])
    events[place] = replace(events[place], op="insert")
    return 1


def _rows(events: list[Event]) -> list[int]:
    """Of tables with keys."""
    changes = ("insert", "update", "delete")
    return [place for place, event in enumerate(events) if event.op in changes and event.key and not event.origin]


def _pairs(events: list[Event], chosen: Callable[[Event, Event], bool]) -> list[tuple[int, int]]:
    rows = [place for place in _rows(events) if events[place].table == "public.noted"]
    return [
        (one, other)
        for one, other in itertools.combinations(rows, 2)
        if events[one].key == events[other].key and chosen(events[one], events[other])
    ]


BOTH = [dropped, invented, wrong_old, wrong_new, emptied, swapped, other_transaction, other_operation]


def test_wrong_old_values_are_caught(worked_on: tuple[Pair, Compared], identity: str) -> None:
    """Of columns of no key; a default replica identity gives none."""
    outcome = worked_on[1]
    updates = [place for place, event in enumerate(outcome.queue) if event.op == "update" and event.key]
    for place in random.Random(1).sample(updates, 12):
        queue = list(outcome.queue)
        event = queue[place]
        column = max(event.old or {})
        queue[place] = replace(event, old={**(event.old or {}), column: "wrong"})
        caught = len(again(outcome, queue, outcome.slot).errors)
        assert caught >= 1 or identity == "default" or event.table == "public.doubled"


@pytest.mark.parametrize(
    ("mutation", "side"),
    [
        *((one, side) for one in BOTH for side in ("queue", "slot")),
        (swapped_transactions, "queue"),
        (lacking_old, "slot"),
    ],
)
def test_each_false_event_is_caught(worked_on: tuple[Pair, Compared], mutation: Mutation, side: str) -> None:
    outcome = worked_on[1]
    for seed in range(2):
        queue, slot = list(outcome.queue), list(outcome.slot)
        least = mutation(queue if side == "queue" else slot, random.Random(seed))
        assert len(again(outcome, queue, slot).errors) >= least, seed


def test_transactions_are_compared_as_they_come(worked_on: tuple[Pair, Compared]) -> None:
    """Not when all has been read: neither side may have to fit into memory."""
    outcome = worked_on[1]
    read = 0

    def counted(events: list[Event]) -> Iterator[Event]:
        nonlocal read
        for event in events:
            read += 1
            yield event

    comparison = Comparison(outcome.tables, outcome.plugin)
    found = comparison.differences(counted(outcome.queue), counted(outcome.slot))
    first = next(one for one in found if one.what == "id")
    assert first.xid == outcome.slot[0].xid
    assert read < (len(outcome.queue) + len(outcome.slot)) / 2
    assert len(list(found)) > 250
    assert comparison.errors == 0
