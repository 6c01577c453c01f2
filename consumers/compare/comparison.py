"""Compares the events of a queue with those of a slot that saw the same changes.

    comparison = Comparison(rule_tables(connection, ["public.orders"]))
    for difference in comparison.differences(queue_events, slot_events):
        if difference.rule is None:
            print(difference)

The changes of a table in one transaction are compared as a multiset, the changes of one key as an exact sequence, in
one transaction and over all. A difference is explained by a rule of gdq.consumers.compare.rules, or it is an error.
"""

from __future__ import annotations

import itertools
import json
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from gdq.consumers.compare.rules import Mismatch, RuleTable, rules_of
from gdq.source import Event

# Number of last changed keys whose order over transactions is checked.
_MAX_KEYS = 1_000_000
# Up to this many comparisons the longest alignment is searched; with more, each change is paired with the next fitting.
_MAX_ALIGNMENT = 10_000

_ROWS = ("insert", "update", "delete")
_UNKNOWN = RuleTable()


@dataclass(slots=True)
class _Arriving:
    """The events of one transaction that have arrived from both sides."""

    xid: int
    queue: list[Event] = field(default_factory=list)
    slot: list[Event] = field(default_factory=list)
    number: int | None = None
    """The transaction's place in the order of commits, once the slot has sent it completely."""
    owed: Counter[tuple[str | None, str]] = field(default_factory=Counter)
    """By table and operation, the slot's number of events minus the queue's."""

    def complete(self) -> bool:
        """True if the slot has sent the whole transaction, and the queue at least as many events of each kind."""
        return self.number is not None and not any(count > 0 for count in self.owed.values())


@dataclass(frozen=True, slots=True)
class _Pair:
    queue: Event
    slot: Event


class Comparison:
    """Compares two streams of events, or parts of them one after the other.

    `tables`: from rule_tables(). `plugin`: the slot's output plugin, one of SLOT_PLUGINS. `used` counts differences by
    rule, `errors` those without one, `events` the events by side ("queue", "slot") and operation.
    Incomplete transactions and the last million keys are kept in memory.
    """

    def __init__(self, tables: Mapping[str, RuleTable] | None = None, plugin: str = "pgoutput") -> None:
        self._tables = tables or {}
        self._rules = rules_of(plugin)
        self.used: Counter[str] = Counter()
        self.errors = 0
        self.events: dict[str, Counter[str]] = {"queue": Counter(), "slot": Counter()}
        self._pending: dict[int, _Arriving] = {}
        self._commits = 0
        self._newest_start = (0, 0)
        self._chains: OrderedDict[tuple[str, str], list[tuple[int, int, int]]] = OrderedDict()

    def differences(self, queue: Iterable[Event], slot: Iterable[Event]) -> Iterator[Mismatch]:
        """Yield all differences, with or without rule, as soon as a transaction is complete on both sides.

        `queue` gives the events of whole transactions, perhaps interleaved; `slot` one transaction after the other.
        Both are read alternately. Transactions with fewer events in the queue are compared at the end. Call it again
        with the events that follow; a transaction must not be divided between calls.
        """
        sides = (iter(queue), iter(slot))
        ended = [False, False]
        open_one: _Arriving | None = None
        while not all(ended):
            event = None if ended[0] else next(sides[0], None)
            ended[0] = event is None
            if event is not None:
                yield from self._settle(self._add(event, "queue"))
            event = None if ended[1] else next(sides[1], None)
            ended[1] = event is None
            if open_one is not None and (event is None or event.xid % 2**32 != open_one.xid):
                self._commits += 1
                open_one.number = self._commits
                yield from self._settle(open_one)
                open_one = None
            if event is not None:
                open_one = self._add(event, "slot")
        for one in list(self._pending.values()):
            yield from self._compare(one)

    def _add(self, event: Event, side: str) -> _Arriving:
        self.events[side][event.op] += 1
        xid = event.xid % 2**32
        one = self._pending.setdefault(xid, _Arriving(xid))
        (one.queue if side == "queue" else one.slot).append(event)
        if event.op in (*_ROWS, "truncate"):
            one.owed[self._table(event), event.op] += 1 if side == "slot" else -1
        return one

    def _settle(self, one: _Arriving) -> Iterator[Mismatch]:
        if one.complete():
            yield from self._compare(one)

    def _compare(self, one: _Arriving) -> Iterator[Mismatch]:
        self._pending.pop(one.xid, None)
        pairs: list[_Pair] = []
        sides = self._grouped(one.queue), self._grouped(one.slot)
        for group in {**sides[0], **sides[1]}:
            yield from self._compare_group(one, group, sides[0].get(group, []), sides[1].get(group, []), pairs)
        places = {id(event): place for place, event in enumerate(one.slot)}
        order = {id(event): place for place, event in enumerate(one.queue)}
        pairs.sort(key=lambda pair: places[id(pair.slot)])
        for before, after in itertools.pairwise(pairs):
            if order[id(before.queue)] > order[id(after.queue)]:
                yield self._found("order in a transaction", one.xid, after)
        if pairs and one.number is not None:
            start = min(event.id for event in one.queue)
            if one.number > self._newest_start[0] and start < self._newest_start[1]:
                yield self._found("order of transactions", one.xid, pairs[0])
            self._newest_start = max(self._newest_start, (one.number, max(start, self._newest_start[1])))
            yield from self._compare_order(one.xid, one.number, pairs)

    def _compare_group(
        self, one: _Arriving, group: tuple[str, str], queue: list[Event], slot: list[Event], pairs: list[_Pair]
    ) -> Iterator[Mismatch]:
        """Compare the events of one key, or of a table without keys."""
        matched, only_queue, only_slot = _align(queue, slot, self._fits, ordered=bool(group[1]))
        for ours in list(only_queue):
            theirs = next((event for event in only_slot if event.op == ours.op and ours.op in _ROWS), None)
            if theirs is None:
                continue
            only_queue.remove(ours)
            only_slot.remove(theirs)
            pair = _Pair(ours, theirs)
            if self._fits(ours, theirs):
                yield self._found("order of one key", one.xid, pair)
            else:
                matched.append(pair)
        for pair in matched:
            for difference in _differences(pair, one.xid):
                yield self._explained(difference)
        pairs += matched
        for event in only_queue:
            alone = not any(self._table(other) == self._table(event) for other in one.slot)
            missing = Mismatch("missing in slot", one.xid, event.table, event.key, event, None, alone=alone)
            yield self._explained(missing)
        for event in only_slot:
            table = self._table(event)
            alone = not any(self._table(other) == table and other.op in _ROWS for other in one.queue)
            missing = Mismatch("missing in queue", one.xid, event.table, event.key, None, event, alone=alone)
            yield self._explained(missing)

    def _compare_order(self, xid: int, number: int, pairs: list[_Pair]) -> Iterator[Mismatch]:
        """Check that the queue numbered changes of one key by several transactions in the order of the commits."""
        spans: dict[tuple[str, str], tuple[int, int, _Pair]] = {}
        for pair in pairs:
            group, number_of = self._group(pair.queue), pair.queue.id
            if group[1]:
                low, high, _ = spans.get(group, (number_of, number_of, pair))
                spans[group] = min(low, number_of), max(high, number_of), pair
        oldest = min((one.number for one in self._pending.values() if one.number is not None), default=number)
        for group, (low, high, pair) in spans.items():
            chain = self._chains.setdefault(group, [])
            if any(low < other_high if other < number else high > other_low for other_low, other_high, other in chain):
                yield self._found("order of one key", xid, pair)
            chain.append((low, high, number))
            chain.sort(key=lambda span: span[2])
            while len(chain) > 1 and chain[1][2] < oldest:
                chain.pop(0)
            self._chains.move_to_end(group)
        while len(self._chains) > _MAX_KEYS:
            self._chains.popitem(last=False)

    def _found(self, what: str, xid: int, pair: _Pair) -> Mismatch:
        return self._explained(Mismatch(what, xid, pair.queue.table, pair.queue.key, pair.queue, pair.slot))

    def _explained(self, difference: Mismatch) -> Mismatch:
        rule = self._rule(difference)
        if rule is None:
            self.errors += 1
            return difference
        self.used[rule] += 1
        return replace(difference, rule=rule)

    def _rule(self, difference: Mismatch) -> str | None:
        facts = self._tables.get(difference.table or "", _UNKNOWN)
        return next((rule.name for rule in self._rules if rule.explains(difference, facts)), None)

    def _fits(self, queue: Event, slot: Event) -> bool:
        """True if both events may be the same change."""
        return queue.op == slot.op and all(self._rule(one) for one in _image_differences(_Pair(queue, slot), 0))

    def _table(self, event: Event) -> str:
        """The table under which events are compared: for rows of a partition the root."""
        table = event.table or ""
        facts = self._tables.get(table, _UNKNOWN)
        return facts.root if facts.root and event.op in _ROWS else table

    def _group(self, event: Event) -> tuple[str, str]:
        key = self._tables.get(event.table or "", _UNKNOWN).identity_of(event)
        return self._table(event), json.dumps(key, sort_keys=True) if key else ""

    def _grouped(self, events: list[Event]) -> dict[tuple[str, str], list[Event]]:
        groups: dict[tuple[str, str], list[Event]] = {}
        for event in events:
            group = self._group(event) if event.op in _ROWS else (event.table or "", f"/{event.op}")
            groups.setdefault(group, []).append(event)
        return groups


def _differences(pair: _Pair, xid: int) -> Iterator[Mismatch]:
    queue, slot = pair.queue, pair.slot
    yield from _image_differences(pair, xid)
    for what in ("table", "key", "id", "xid", "time", "origin"):
        if not _same(getattr(queue, what), getattr(slot, what)):
            yield Mismatch(what, xid, queue.table, queue.key, queue, slot)


def _image_differences(pair: _Pair, xid: int) -> Iterator[Mismatch]:
    """The differences of two images, one per column, since each may have another reason."""
    queue, slot = pair.queue, pair.slot
    for what, our_image, their_image in (("old", queue.old, slot.old), ("new", queue.new, slot.new)):
        ours, theirs = our_image or {}, their_image or {}
        if (our_image is None) != (their_image is None) and not (ours or theirs):
            yield Mismatch(what, xid, queue.table, queue.key, queue, slot)
        for column in [*ours, *(name for name in theirs if name not in ours)]:
            absent = (column in ours) != (column in theirs)
            if absent or not _same(ours[column], theirs[column]):
                yield Mismatch(what, xid, queue.table, queue.key, queue, slot, (column,))


def _same(ours: Any, theirs: Any) -> bool:
    # True and 1 are two values, and so are 1 and "1".
    return type(ours) is type(theirs) and ours == theirs


def _align(
    queue: list[Event], slot: list[Event], fits: Callable[[Event, Event], bool], *, ordered: bool
) -> tuple[list[_Pair], list[Event], list[Event]]:
    """Pairs of matching events, and the events of both sides that match nothing."""
    if len(queue) == len(slot) and all(map(fits, queue, slot)):
        return list(map(_Pair, queue, slot)), [], []
    chosen = _longest(queue, slot, fits) if ordered and len(queue) * len(slot) <= _MAX_ALIGNMENT else None
    if chosen is None:
        chosen = _greedy(queue, slot, fits)
    ours, theirs = {one for one, _ in chosen}, {other for _, other in chosen}
    return (
        [_Pair(queue[one], slot[other]) for one, other in chosen],
        [event for place, event in enumerate(queue) if place not in ours],
        [event for place, event in enumerate(slot) if place not in theirs],
    )


def _greedy(queue: list[Event], slot: list[Event], fits: Callable[[Event, Event], bool]) -> list[tuple[int, int]]:
    """Pair each event with the first free event that matches."""
    left = dict(enumerate(slot))
    chosen = []
    for place, event in enumerate(queue):
        other = next((number for number, one in left.items() if fits(event, one)), None)
        if other is not None:
            chosen.append((place, other))
            del left[other]
    return chosen


def _longest(queue: list[Event], slot: list[Event], fits: Callable[[Event, Event], bool]) -> list[tuple[int, int]]:
    """The longest common subsequence, as pairs of places."""
    good = [[fits(one, other) for other in slot] for one in queue]
    best = [[0] * (len(slot) + 1) for _ in range(len(queue) + 1)]
    for one in reversed(range(len(queue))):
        for other in reversed(range(len(slot))):
            within = best[one + 1][other + 1] + 1 if good[one][other] else 0
            best[one][other] = max(within, best[one + 1][other], best[one][other + 1])
    chosen = []
    one = other = 0
    while one < len(queue) and other < len(slot):
        if good[one][other] and best[one][other] == best[one + 1][other + 1] + 1:
            chosen.append((one, other))
            one, other = one + 1, other + 1
        elif best[one + 1][other] >= best[one][other + 1]:
            one += 1
        else:
            other += 1
    return chosen
