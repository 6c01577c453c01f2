"""Ratios of medians with their spread over the rounds, the goals, and where gdq loses."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from statistics import mean, median, quantiles

from bench.contenders import (
    BASE,
    GDQ_FULL,
    GDQ_PK,
    GDQ_STATEMENT,
    PGQ_BACKUP,
    PGQ_PL_BACKUP,
    PGQ_PL_PLAIN,
    PGQ_PLAIN,
    SLONY_TRIGGER,
    SLOT_CONSUMED,
    SLOT_CONSUMED_FULL,
    Contender,
)  # fmt: skip
from bench.latency import GOAL_TICK_MS
from bench.latency import PART as LATENCY
from bench.measure import OPERATIONS, PART, WIDE
from bench.reading import PART as READING
from bench.reading import case_name
from bench.results import Results
from bench.spark_reader import PARTITIONS

Rounds = Mapping[int, float]

# Why goals are missed where they are.
WHY_CAPTURE = "the rest is PostgreSQL's own work: calling the trigger, the INSERT of the logged row, its WAL."
WHY_ARROW = (
    "a consumer gets typed columns. The server makes twenty of each change and the driver decodes them, about a"
    " microsecond each, while pg_recvlogical throws away its input. Compared with a slot"
    " whose rows are decoded to Arrow too: {}."
)
WHY_SPARK = "on two processors the server, the JVM and Python's workers share what one partition leaves idle."
WHY_MANY = (
    "the server makes rows anew for each consumer, as it decodes them anew for each slot. Here each slot wants all"
    " changes in the log; otherwise a slot also decodes changes that its publication leaves out."
)
WHY_LATENCY = (
    "a change waits for half a tick in the mean, then for the commit of that tick, for the notification that wakes the"
    " consumer, and for the statement that fetches the batch. A slot's changes are sent when they are committed."
)


# Beyond it the divisor is next to nothing.
_ENORMOUS = 100


@dataclass(frozen=True, slots=True)
class Ratio:
    """The ratio of two medians, and the quartiles of the ratios of the rounds."""

    mid: float
    low: float
    high: float

    @property
    def above(self) -> bool:
        """Above 1, in three quarters of the rounds too."""
        return min(self.mid, self.low) > 1

    @property
    def below(self) -> bool:
        """Below 1, in three quarters of the rounds too."""
        return max(self.mid, self.high) < 1

    def __str__(self) -> str:
        if self.mid >= _ENORMOUS:
            return f"over {_ENORMOUS}"
        # without -0.00
        mid, low, high = (f"{round(value, 2) + 0:.2f}" for value in (self.mid, self.low, self.high))
        return f"{mid} ({low} to {high})"


@dataclass(frozen=True, slots=True)
class Goal:
    """What gdq wants: `ratio` not above `aim`, and by no means above `required`; or not below them, if `least`.

    `ratio` is None where it was not measured. `why`: what keeps it from being met, where it is not.
    """

    what: str
    ratio: Ratio | None
    aim: float
    required: float
    least: bool = False
    why: str = ""

    @property
    def verdict(self) -> str:
        if self.ratio is None:
            return "not measured"
        for limit, word in ((self.aim, "met"), (self.required, "required met, goal missed")):
            if self.ratio.mid >= limit if self.least else self.ratio.mid <= limit:
                return word
        return "MISSED"


@dataclass(frozen=True, slots=True)
class Loss:
    """Where a peer does better: `ratio` of gdq's figure to the peer's is above 1, or below for rates."""

    what: str
    mine: str
    its: str
    ratio: Ratio


def ratio(mine: Rounds, its: Rounds) -> Ratio | None:
    """The ratio of two medians; None without common rounds, or where the divisor is lost in the noise."""
    common = [number for number in mine if number in its and its[number] > 0]
    if not common or median(its.values()) <= 0:
        return None
    each = [mine[number] / its[number] for number in common]
    low, _, high = quantiles(each, n=4, method="inclusive") if len(each) > 1 else each * 3
    return Ratio(median(mine.values()) / median(its.values()), low, high)


def over_base(results: Results, who: str, case: str, name: str) -> dict[int, float]:
    """What capture costs a row: of each round, over the same round of the table without trigger."""
    base = results.rounds(PART, case, BASE.name, name)
    return {r: value - base[r] for r, value in results.rounds(PART, case, who, name).items() if r in base}


def bulk(results: Results, who: str, name: str) -> dict[int, float]:
    """The same, the mean of INSERT, UPDATE and DELETE."""
    each = [over_base(results, who, operation, name) for operation in OPERATIONS]
    return {number: mean(one[number] for one in each) for number in each[0] if all(number in one for one in each)}


# Contenders of gdq, each with those that record as much.
RIVALS: tuple[tuple[Contender, tuple[Contender, ...]], ...] = (
    (GDQ_FULL, (PGQ_BACKUP, PGQ_PL_BACKUP, SLONY_TRIGGER, SLOT_CONSUMED_FULL)),
    (GDQ_PK, (PGQ_PLAIN, PGQ_PL_PLAIN, SLONY_TRIGGER, SLOT_CONSUMED)),
    (GDQ_STATEMENT, (PGQ_BACKUP, SLONY_TRIGGER, SLOT_CONSUMED_FULL)),
)


def capture_goals(results: Results) -> list[Goal]:
    """The goals of bulk statements."""

    def beside(mine: Contender, its: Contender, aim: float, required: float) -> Goal:
        found = ratio(bulk(results, mine.name, "us"), bulk(results, its.name, "us"))
        return Goal(f"capture in bulk: {mine.name} beside {its.name}", found, aim, required, why=WHY_CAPTURE)

    return [
        beside(GDQ_FULL, PGQ_BACKUP, 0.45, 0.5),
        beside(GDQ_PK, PGQ_PLAIN, 0.35, 0.4),
        beside(GDQ_STATEMENT, PGQ_BACKUP, 0.2, 0.3),
        *(beside(mine, SLONY_TRIGGER, 1, 1) for mine in (GDQ_FULL, GDQ_PK, GDQ_STATEMENT)),
    ]


def capture_losses(results: Results) -> Iterator[Loss]:
    """Whatever a peer writes in less time, in less log, or at a higher rate."""
    names = {"us": "time", "wal": "WAL"}
    for mine, rivals in RIVALS:
        for its in rivals:
            for case in (*OPERATIONS, WIDE):
                for name, word in names.items():
                    own = over_base(results, mine.name, case, name)
                    theirs = over_base(results, its.name, case, name)
                    found = ratio(own, theirs)
                    if found is not None and found.above:
                        yield Loss(f"{case}: {word} a row", mine.name, its.name, found)
            for case in one_row_cases(results):
                rates = (results.rounds(PART, case, who.name, "rate") for who in (mine, its))
                found = ratio(*rates)
                if found is not None and found.below:
                    yield Loss(f"{one_row_title(case)}: transactions/s", mine.name, its.name, found)


def one_row_cases(results: Results) -> list[str]:
    """The cases of one-row transactions that were measured."""
    return sorted(
        (case for case in results.names(PART, 1) if case.startswith("one-row")),
        key=lambda case: (case.split()[2], int(case.split()[1])),
    )


def one_row_title(case: str) -> str:
    """Such a case in words."""
    _, clients, commit = case.split()
    return f"{clients} client{'' if clients == '1' else 's'}, synchronous_commit {commit}"


# Ways of gdq, each with those that give as much; nobody looks into what the programs read.
READING_RIVALS = {
    "gdq events": ("PgQ get_batch_events", "pg_recvlogical", "slot events", "wal2json"),
    "gdq Arrow": ("PgQ get_batch_events", "pg_recvlogical", "slot Arrow", "wal2json"),
    **dict.fromkeys(PARTITIONS, ("pg_recvlogical",)),
}


def reading_goals(results: Results) -> list[Goal]:
    """One batch to Arrow, more of it with more partitions, and many consumers: 16, or the most that were measured."""

    def beside(case: str, name: str, who: str = "gdq Arrow", whose: str = "pg_recvlogical") -> Ratio | None:
        mine, its = (results.rounds(READING, case, way, name) for way in (who, whose))
        return ratio(mine, its)

    one, two, _ = PARTITIONS
    many = max((int(case.split()[0]) for case in results.names(READING, 1)), default=1)
    many = many if many > 1 else 16
    return [
        Goal(
            "events/s: gdq Arrow beside pg_recvlogical, one consumer",
            beside(case_name(1), "rate"),
            3,
            2.5,
            least=True,
            why=WHY_ARROW.format(beside(case_name(1), "rate", whose="slot Arrow")),
        ),
        Goal(f"events/s: {two}, beside {one}", beside(case_name(1), "rate", two, one), 1, 1, least=True, why=WHY_SPARK),
        Goal(
            f"server's processor time: {many} of gdq Arrow beside {many} slots",
            beside(case_name(many), "server_us"),
            0.25,
            0.25,
            why=WHY_MANY,
        ),
    ]


def reading_losses(results: Results) -> Iterator[Loss]:
    """Whatever a peer reads faster, or with less processor time of the client or the server."""
    names = {"rate": "events/s", "client_us": "client's processor time", "server_us": "server's processor time"}
    for mine, rivals in READING_RIVALS.items():
        for its in rivals:
            for case in results.names(READING, 1):
                for name, word in names.items():
                    found = ratio(results.rounds(READING, case, mine, name), results.rounds(READING, case, its, name))
                    if found is not None and (found.below if name == "rate" else found.above):
                        yield Loss(f"reading, {case}: {word}", mine, its, found)


def latency_goals(results: Results) -> list[Goal]:
    """The median not above the slot's and half a tick, at each rate."""
    goals = []
    for case in results.names(LATENCY, 1):
        slot = {number: p50 + GOAL_TICK_MS / 2 for number, p50 in results.rounds(LATENCY, case, "slot", "p50").items()}
        found = ratio(results.rounds(LATENCY, case, "queue", "p50"), slot)
        what = f"latency at {case}: p50 of the queue beside the slot's and half a tick"
        goals.append(Goal(what, found, 1, 1, why=WHY_LATENCY))
    return goals


def latency_losses(results: Results) -> Iterator[Loss]:
    """Where a change is with its handler sooner by a slot."""
    for case in results.names(LATENCY, 1):
        for name in ("p50", "p99"):
            found = ratio(results.rounds(LATENCY, case, "queue", name), results.rounds(LATENCY, case, "slot", name))
            if found is not None and found.above:
                yield Loss(f"latency at {case}: {name}", "queue", "slot", found)
