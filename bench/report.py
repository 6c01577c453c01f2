"""docs/benchmarks.md, from results."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from statistics import median

from bench import endurance_report
from bench.contenders import BASE, GDQ_FULL, PGQ_BACKUP, PGQ_PL_PLAIN, SLONY_TRIGGER
from bench.figures import (
    Goal,
    Loss,
    bulk,
    capture_goals,
    capture_losses,
    latency_goals,
    latency_losses,
    one_row_cases,
    one_row_title,
    over_base,
    ratio,
    reading_goals,
    reading_losses,
)  # fmt: skip
from bench.latency import GOAL_TICK_MS
from bench.latency import PART as LATENCY
from bench.long_parts import PART as ALONE
from bench.measure import OPERATIONS, PART, WIDE
from bench.plot import bars
from bench.reading import PART as READING
from bench.results import Results

_HEAD = """# Benchmarks

Written by `python -m bench --write docs/benchmarks.md` from one run of `{command}`.
In that run all peers took turns on one server with the same settings. Figures are ratios of medians, with the
quartiles of the rounds in brackets. Times measured on a shared machine mean little elsewhere; their ratios mean more.
"""

_LOSSES = """\
Ratios of gdq's figure to the peer's. Ratios that are on the same side of 1 in fewer than three quarters of the rounds
are left out."""

_CAPTURE = """\
Time per row above a table without trigger, in statements of many rows, divided by that of {rival}. The
last column is the processor time of the slot's sender in the server, divided by the same time. `large value
untouched` is an UPDATE that leaves a column of 100 kB as it was. PgQ PL (PgQ's functions in PL/pgSQL) is given one
row of {share}, so bytes that are written once weigh more in its bytes per row."""

_READING = """\
All readers read the same inserts, updates and deletes of whole rows, in transactions of 1,000 rows. Figures are
ratios to `pg_recvlogical -f /dev/null` (pgoutput in binary, replica identity full). CPU is per event and consumer;
the server's CPU is that of all its processes. The output of pg_recvlogical, wal2json and PgQ (COPY of
`get_batch_events`) is not decoded; the other readers give Python events or Arrow. Spark reads one batch through the
data source `gdq`, every row and column of it, on this machine with one thread per partition, after it has read the
same batch once to warm up. Its CPU is that of its JVM and of Python's workers. Spark is measured as one consumer
only: a JVM for each of many consumers would measure the machine's memory."""

_LATENCY = """\
The time from the commit of a row to its handler: `Consumer` with a ticker of {tick} ms, and `SlotSource`. Here
synchronous_commit is on: without it a slot waits for the WAL writer, since only flushed log is sent."""


def page(results: Results, pictures: Sequence[str] = ()) -> str:
    """The page of the documentation. `pictures`: files beside it that it shows."""
    parts = [_HEAD.format(command=results.about.get("command", "python -m bench")), *_about(results)]
    parts += _goals(goals(results))
    parts += _losses(list(losses(results)))
    parts += [f"![{name}]({name})\n" for name in pictures]
    for section in (_capture, _reading, _latency, endurance_report.section, _alone):
        parts += section(results)
    parts += ["## Not measured", "", *(f"- {line}" for line in not_measured(results) or ["Nothing was left out."])]
    return "\n".join(parts) + "\n"


def goals(results: Results) -> list[Goal]:
    """All goals, with what was found."""
    return capture_goals(results) + reading_goals(results) + latency_goals(results)


def losses(results: Results) -> Iterator[Loss]:
    """All places where a peer does better."""
    yield from capture_losses(results)
    yield from reading_losses(results)
    yield from latency_losses(results)
    yield from endurance_report.losses(results)


def not_measured(results: Results) -> list[str]:
    """Peers that could not be had and parts that were not reached, in words."""
    lines = [f"{peer}: {why}" for peer, why in results.about.get("missing", {}).items()]
    return lines + [str(line) for line in results.about.get("left", [])]


def _about(results: Results) -> list[str]:
    known = {name: value for name, value in results.about.items() if name not in {"missing", "left", "command", "done"}}
    return ["| | |", "|---|---|", *(f"| {name} | {value} |" for name, value in known.items()), ""]


def _goals(found: Sequence[Goal]) -> list[str]:
    rows = []
    for goal in found:
        bound = "at least" if goal.least else "at most"
        ratio_told = str(goal.ratio) if goal.ratio else ""
        rows.append([goal.what, f"{bound} {goal.aim:g} ({goal.required:g})", ratio_told, goal.verdict])
    whys: dict[str, list[str]] = {}
    for goal in found:
        if goal.why and goal.verdict != "met" and goal.ratio is not None:
            whys.setdefault(goal.why, []).append(goal.what)
    lines = [f"- {'; '.join(whats)}: {why}" for why, whats in whys.items()]
    told = ["", "Where they are missed:", "", *lines] if lines else []
    return ["## Goals", "", *table(["ratio", "goal (required)", "found", ""], rows), *told, ""]


def _losses(found: Sequence[Loss]) -> list[str]:
    lines = ["## Where gdq loses", ""]
    if not found:
        return [*lines, "Nowhere in what was measured.", ""]
    rows = [[one.what, one.mine, one.its, str(one.ratio)] for one in found]
    return [*lines, _LOSSES, "", *table(["what", "gdq", "peer", "ratio"], rows), ""]


def _capture(results: Results) -> list[str]:
    """Time and log a row over no trigger, and rates of one-row transactions beside those without trigger."""
    who = [name for name in results.names(PART, 2) if name != BASE.name]
    if not who:
        return []
    rival = next((one.name for one in (PGQ_BACKUP, SLONY_TRIGGER, GDQ_FULL) if one.name in who), who[0])
    cases = (*OPERATIONS, WIDE)
    times, log = [], []
    for name in who:
        beside = [ratio(over_base(results, name, case, "us"), over_base(results, rival, case, "us")) for case in cases]
        mean = ratio(bulk(results, name, "us"), bulk(results, rival, "us"))
        reader = [value for op in OPERATIONS for value in results.rounds(PART, op, name, "reader_us").values()]
        base = [value for value in bulk(results, rival, "us").values() if value > 0]
        share = f"{median(reader) / median(base):.2f}" if reader and base else ""
        times.append([name, *(str(one or "") for one in (*beside[:3], mean, beside[3])), share])
        bytes_a_row = [list(over_base(results, name, case, "wal").values()) for case in cases]
        log.append([name, *(f"{round(median(values)) or 0:,}" if values else "" for values in bytes_a_row)])
    rates = []
    for name in who:
        each = [
            ratio(results.rounds(PART, case, name, "rate"), results.rounds(PART, case, BASE.name, "rate"))
            for case in one_row_cases(results)
        ]
        if any(each):
            rates.append([name, *(str(one or "") for one in each)])
    return [
        "## Capture", "",
        _CAPTURE.format(rival=rival, share=PGQ_PL_PLAIN.share), "",
        *table(["", *OPERATIONS, "mean", WIDE, "reader in the server"], times), "",
        "Bytes of WAL per row above a table without trigger:", "", *table(["", *cases], log), "",
        "Transactions of one row per second, divided by those of a table without trigger:", "",
        *table(["", *map(one_row_title, one_row_cases(results))], rates), "",
    ]  # fmt: skip


def _reading(results: Results) -> list[str]:
    """Rates and processor time beside pg_recvlogical."""
    cases, ways = (list(results.names(READING, index)) for index in (1, 2))
    if not ways:
        return []
    lines = ["## Reading", "", _READING, ""]
    titles = {"rate": "events/s of a consumer", "client_us": "client's CPU", "server_us": "server's CPU"}
    for case in cases:
        rows = []
        for way in ways:
            pairs = ([results.rounds(READING, case, one, name) for one in (way, "pg_recvlogical")] for name in titles)
            rows.append([way, *(str(ratio(*pair) or "") for pair in pairs)])
        lines += [f"{case}:", "", *table(["", *titles.values()], rows), ""]
    return lines


def _latency(results: Results) -> list[str]:
    """From commit to handler, the queue beside a slot."""

    def middle(case: str, who: str, name: str) -> str:
        values = results.rounds(LATENCY, case, who, name).values()
        return f"{median(values):.1f}" if values else ""

    rows = []
    for case in results.names(LATENCY, 1):
        paths = [f"{middle(case, path, 'made')}/s" for path in ("queue", "slot")]
        for name in ("p50", "p99"):
            pair = [results.rounds(LATENCY, case, path, name) for path in ("queue", "slot")]
            found = str(ratio(*pair) or "")
            rows.append(
                [case, " and ".join(paths), name, middle(case, "queue", name), middle(case, "slot", name), found]
            )
    if not rows:
        return []
    head = ["transactions", "made: queue and slot", "", "queue, ms", "slot, ms", "queue over slot"]
    return ["## Latency", "", _LATENCY.format(tick=GOAL_TICK_MS), "", *table(head, rows), ""]


def _alone(results: Results) -> list[str]:
    """What the programs without a peer said."""
    lines = []
    for key, values in results.samples.items():
        if key[0] == ALONE:
            missed = ", a limit of its own MISSED" if values["missed"] else ""
            lines += [f"{key[1]} (`python -m {key[2]}`{missed}):", "", "```", *values["lines"], "```", ""]
    return ["## Endurance and scale of the queue alone", "", *lines] if lines else []


def plots(results: Results) -> dict[str, str]:
    """{name: SVG} of capture and reading, where they were measured."""
    drawn = {}
    rival = PGQ_BACKUP.name
    costs = [(who, ratio(bulk(results, who, "us"), bulk(results, rival, "us"))) for who in results.names(PART, 2)]
    rows = [(who, one) for who, one in costs if one is not None and who != BASE.name]
    if rows:
        drawn["capture"] = bars(f"time a row over no trigger, beside {rival}: less is better", rows)
    for case in results.names(READING, 1):
        base = results.rounds(READING, case, "pg_recvlogical", "rate")
        rates = [(way, ratio(results.rounds(READING, case, way, "rate"), base)) for way in results.names(READING, 2)]
        rows = [(way, one) for way, one in rates if one is not None]
        if rows:
            title = f"events/s beside pg_recvlogical, {case}: more is better"
            drawn[f"reading-{case.split()[0]}"] = bars(title, rows)
    return drawn


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    """A table of Markdown."""
    lines = ["| " + " | ".join(row) + " |" for row in (head, *rows)]
    return [lines[0], "|---|" + "---:|" * (len(head) - 1), *lines[1:]]
