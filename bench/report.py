"""Medians, ratios and the verdict."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from statistics import mean, median, quantiles
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table

from bench.contenders import BASE, CONTENDERS, GDQ_FULL, GDQ_PK, PGQ_BACKUP, PGQ_PLAIN, Contender
from bench.measure import CLIENTS, OPERATIONS, Run, Statement

CAPTURING = tuple(contender for contender in CONTENDERS if contender is not BASE)

_PLAIN: dict[str, Any] = {"box": box.SIMPLE_HEAD, "title_justify": "left", "title_style": ""}

# What gdq promises: its cost over that of the PgQ trigger which records the same.
LIMITS = ((GDQ_FULL, PGQ_BACKUP, 0.5), (GDQ_PK, PGQ_PLAIN, 0.4))


@dataclass(frozen=True, slots=True)
class Verdict:
    """One promise: the ratio of two costs (medians), its quartiles over the rounds, and the limit."""

    contender: Contender
    rival: Contender
    ratio: float
    low: float
    high: float
    limit: float

    @property
    def met(self) -> bool:
        return self.ratio <= self.limit


class Costs:
    """Cost of capture: microseconds and bytes of WAL a row over the table without trigger."""

    def __init__(self, measured: Iterable[Statement], rows: int) -> None:
        self._seconds: dict[tuple[Contender, str], list[float]] = {}
        self._wal: dict[tuple[Contender, str], list[float]] = {}
        for one in measured:
            key = (one.contender, one.operation)
            self._seconds.setdefault(key, []).append(one.seconds * 1e6 / rows)
            self._wal.setdefault(key, []).append(one.wal / rows)

    def time(self, contender: Contender, operation: str) -> float:
        return median(self._seconds[contender, operation]) - median(self._seconds[BASE, operation])

    def wal(self, contender: Contender, operation: str) -> float:
        return median(self._wal[contender, operation]) - median(self._wal[BASE, operation])

    def mean_time(self, contender: Contender) -> float:
        return mean(self.time(contender, operation) for operation in OPERATIONS)

    def mean_wal(self, contender: Contender) -> float:
        return mean(self.wal(contender, operation) for operation in OPERATIONS)

    def by_round(self, contender: Contender) -> list[float]:
        """The mean cost of each round, against the same round of the table without trigger."""
        pairs = [
            [mine - base for mine, base in zip(self._seconds[contender, op], self._seconds[BASE, op], strict=True)]
            for op in OPERATIONS
        ]
        return [mean(costs) for costs in zip(*pairs, strict=True)]

    def verdict(self, contender: Contender, rival: Contender, limit: float) -> Verdict:
        ratio = self.mean_time(contender) / self.mean_time(rival)
        rounds = [mine / its for mine, its in zip(self.by_round(contender), self.by_round(rival), strict=True)]
        low, _, high = quantiles(rounds, n=4, method="inclusive") if len(rounds) > 1 else [rounds[0]] * 3
        return Verdict(contender, rival, ratio, low, high, limit)

    def verdicts(self) -> list[Verdict]:
        return [self.verdict(*limit) for limit in LIMITS]


def rate_ratio(runs: Sequence[Run], contender: Contender, clients: int) -> float:
    """One-row transactions a second against those without trigger: ratio of the medians."""

    def rate(whose: Contender) -> float:
        return median(run.rate for run in runs if run.contender == whose and run.clients == clients)

    return rate(contender) / rate(BASE)


def as_dict(costs: Costs, runs: Sequence[Run], about: dict[str, Any]) -> dict[str, Any]:
    """Everything that `show` prints, for `--json`."""
    return {
        "about": about,
        "cost": {
            contender.name: {
                "microseconds": {op: round(costs.time(contender, op), 3) for op in OPERATIONS},
                "mean_microseconds": round(costs.mean_time(contender), 3),
                "wal_bytes": {op: round(costs.wal(contender, op), 1) for op in OPERATIONS},
                "one_row_rate": {str(c): round(rate_ratio(runs, contender, c), 3) for c in CLIENTS} if runs else None,
            }
            for contender in CAPTURING
        },
        "verdicts": [
            {
                "contender": verdict.contender.name,
                "rival": verdict.rival.name,
                "ratio": round(verdict.ratio, 3),
                "quartiles": [round(verdict.low, 3), round(verdict.high, 3)],
                "limit": verdict.limit,
                "met": verdict.met,
            }
            for verdict in costs.verdicts()
        ],
    }


def show(console: Console, costs: Costs, runs: Sequence[Run], about: dict[str, Any]) -> None:
    """Print the tables and the verdict."""
    for name, value in about.items():
        console.print(f"{name}: {value}", highlight=False, soft_wrap=True)
    console.print(_statement_table(costs, about["rows"]))
    if runs:
        console.print(_run_table(runs))
    for verdict in costs.verdicts():
        console.print(
            f"{'met' if verdict.met else 'MISSED'}: {verdict.contender.name} costs {verdict.ratio:.2f} of"
            f" {verdict.rival.name}; limit {verdict.limit}"
            f" (quartiles of the rounds {verdict.low:.2f} to {verdict.high:.2f})",
            highlight=False,
            soft_wrap=True,
        )


def _statement_table(costs: Costs, rows: int) -> Table:
    table = Table(title=f"us a row over no trigger, statements of {rows:,} rows, medians", **_PLAIN)
    table.add_column("capture")
    for title in (*OPERATIONS, "mean", "of PgQ's", "WAL bytes"):
        table.add_column(title, justify="right")
    for contender in CAPTURING:
        rival = next((its for mine, its, _ in LIMITS if mine is contender), None)
        table.add_row(
            contender.name,
            *(f"{costs.time(contender, operation):.2f}" for operation in OPERATIONS),
            f"{costs.mean_time(contender):.2f}",
            f"{costs.mean_time(contender) / costs.mean_time(rival):.2f}" if rival else "",
            f"{costs.mean_wal(contender):.0f}",
        )
    return table


def _run_table(runs: Sequence[Run]) -> Table:
    table = Table(title="One-row transactions a second: ratio to no trigger, medians", **_PLAIN)
    table.add_column("capture")
    for clients in CLIENTS:
        table.add_column(f"{clients} client{'s' if clients > 1 else ''}", justify="right")
    for contender in CAPTURING:
        table.add_row(contender.name, *(f"{rate_ratio(runs, contender, clients):.2f}" for clients in CLIENTS))
    return table
