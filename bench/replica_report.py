"""docs/benchmarks-replica.md, from results."""

from __future__ import annotations

from statistics import median
from typing import Literal

from bench.figures import Goal, Ratio, ratio
from bench.replica_sides import BINARY, BUILT_IN, EACH, GDQ, GDQ_WORKERS
from bench.report import table
from bench.results import Results

PART = "replica"
COPY, LAG = "copy", "lag at 1,000 changes/s"
DUMP, GDQ_TICKER = "pg_dump | psql", "gdq, beside a ticker"
Kind = Literal["catch-up", "copy", "lag"]

# What is written before catching up: the procedure, and the rows of a transaction.
WORK = {
    "one-row transactions": ("mixed", 1),
    "50-row transactions": ("mixed", 50),
    "ten changes a row": ("repeated", 50),
}
_GOALS = {"one-row transactions": 3.0, "50-row transactions": 1.5, "ten changes a row": 5.0, COPY: 1.0}
_MEGABYTES_MAX = 300

_HEAD = """\
# Benchmarks of replicas

`gdq replicate` beside PostgreSQL's own logical replication, and beside `pg_dump | psql` for copies. The page is written
by `python -m bench.replica --only-write --write docs/benchmarks-replica.md` from measurements of
`python -m bench.replica`. All took turns with the same work on one machine; source and target, on servers of their own,
were compared after each turn. Figures are medians of the rounds, or ratios of them with the quartiles of the rounds in
brackets. Times measured on a shared machine mean little elsewhere; their ratios mean more.

{about}

- built-in: one publication and subscription of all tables, with the defaults of PostgreSQL 18: `streaming = parallel`,
  and `synchronous_commit = off` in the target, while gdq waits for the disk there.
- built-in, binary: with `binary = true` as well.
- {each}: two publications and subscriptions, so that two workers apply.
  The target is no state of the source then, until both have caught up.
- {workers}: with `--apply-workers 2`. Each table is at a tick then, two of them for a moment at different ones.
"""

_CATCH_UP = """\
Changes gathered while nothing was applied. Seconds from the start of `gdq replicate`, or of the subscription, until the
last change was to be seen in the target. Rows have about 180 bytes, in two tables of as many rows as there are changes.
Of ten transactions five update, three insert and two delete; or each row of a tenth of the tables is updated ten times.
Processor seconds are those of all processes that replicate, on both sides; on a busy machine they tell more than
seconds. Those of gdq include 0.4 s in which its program starts. They are looked at five times a second, so that a
little is missed at the end."""
_COPY = """\
Seconds until two tables were copied into empty ones with their primary keys: by gdq and by built-in
replication with two workers, by pg_dump and psql as one stream. Before that a ticker has looked after gdq's log, as
vacuum has after the tables."""
_LAG = """\
Milliseconds from a commit until another session sees its rows in the target. Transactions of 20 rows are committed at
random moments, 50 a second if the machine can. The replica takes ticks itself, as soon as there are changes; beside a
ticker a change waits for half of 100 ms in the mean. Then it waits for a batch of all that came; built-in replication
sends each transaction at once."""
_PROCESSES = """\
The most MB that a process had of its own, in any round. Buffers that processes of a server share are not counted."""


def page(results: Results) -> str:
    """The page of the documentation."""
    known = dict(results.about)
    if loads := [values["load"] for values in results.samples.values() if "load" in values]:
        known["load while measuring"] = f"{median(loads):.0f} (median), {max(loads):.0f} (most)"
    about = "\n".join(["| | |", "|---|---|", *(f"| {name} | {value} |" for name, value in known.items())])
    parts = [_HEAD.format(about=about, each=EACH, workers=GDQ_WORKERS), "## Goals", "", *_goals(results), ""]
    if any(case in WORK for case in results.names(PART, 1)):
        parts += ["## Catching up", "", _CATCH_UP, ""]
        for case in WORK:
            parts += _times(results, case)
    if COPY in results.names(PART, 1):
        parts += ["## First copy", "", _COPY, "", *_times(results, COPY)]
    if LAG in results.names(PART, 1):
        parts += ["## Lag at 1,000 changes a second", "", _LAG, "", *_lags(results)]
    return "\n".join([*parts, "## Memory", "", _PROCESSES, "", *_processes(results)]) + "\n"


def goals(results: Results) -> list[Goal]:
    """How many times faster than the fastest peer gdq is to be, and was."""
    found = []
    for case, aim in _GOALS.items():
        rounds = {who: results.rounds(PART, case, who, "rate") for who in results.names(PART, 2)}
        peers = [(who, rates) for who, rates in rounds.items() if rates and not who.startswith(GDQ)]
        for who, rates in peers:
            found.append(Goal(f"{case}: beside {who}", ratio(rounds.get(GDQ, {}), rates), aim, aim, least=True))
    return found


def _goals(results: Results) -> list[str]:
    rows = [[_cell(goal.what), f"{goal.aim:g}", str(goal.ratio or ""), goal.verdict] for goal in goals(results)]
    return table(["times faster", "goal", "found", ""], rows)


def _times(results: Results, case: str) -> list[str]:
    rows = []
    base = results.rounds(PART, case, BUILT_IN, "rate")
    for who in (GDQ, GDQ_WORKERS, BUILT_IN, BINARY, EACH, DUMP):
        seconds, rates, cpu = (results.rounds(PART, case, who, name) for name in ("seconds", "rate", "cpu"))
        if seconds:
            beside: Ratio | str = ratio(rates, base) or ""
            figures = [f"{median(seconds.values()):.1f}", f"{median(rates.values()):,.0f}", str(beside)]
            rows.append([_cell(who), *figures, f"{median(cpu.values()):.1f}" if any(cpu.values()) else ""])
    head = ["", "seconds", "rows/s", "times faster than built-in", "processor seconds"]
    return [f"{case}:", "", *table(head, rows), ""] if rows else []


def _lags(results: Results) -> list[str]:
    rows = []
    for who in (GDQ, GDQ_TICKER, BUILT_IN, BINARY):
        found = [results.rounds(PART, LAG, who, name) for name in ("made", "p50", "p99")]
        if found[0]:
            made, p50, p99 = (median(one.values()) for one in found)
            rows.append([who, f"{made:.0f}", f"{p50:.1f}", f"{p99:.1f}"])
    return [*table(["", "made/s", "p50, ms", "p99, ms"], rows), ""]


def _processes(results: Results) -> list[str]:
    most: dict[tuple[str, str], dict[str, float]] = {}
    cases = list(results.names(PART, 1))
    for (_, case, who, _), values in results.samples.items():
        for kind, size in values.get("megabytes", {}).items():
            row = most.setdefault((who, kind), {})
            row[case] = max(row.get(case, 0), size)
    rows = [[f"{who}: {kind}", *(_told(row.get(case)) for case in cases)] for (who, kind), row in sorted(most.items())]
    return table(["", *cases], rows)


def _cell(text: str) -> str:
    """A text in a table of Markdown."""
    return text.replace("|", "\\|")


def _told(megabytes: float | None) -> str:
    if megabytes is None:
        return ""
    return f"{megabytes:.0f}" if megabytes < _MEGABYTES_MAX else f"**{megabytes:.0f}**"
