"""docs/benchmarks-lake.md, from results."""

from __future__ import annotations

from statistics import median

from bench.figures import Goal, ratio
from bench.report import table
from bench.results import Results

SPOOL_PART = "spool"
SPOOL, SLOTS = "gdq spool", "slots"
CATCH_UP, LIVE = "catching up", "1,000 changes/s"
_SPOOL_MOST = 0.15

MIRROR_PART = "mirror"
MIRROR, SPARK, COPIED = "gdq mirror", "Spark", "COPY into nothing"
LOAD, CHURN = "first load, {}", "0.1 % churn, {}, {}"
RELAY_PART = "relay"
RELAY, DEBEZIUM, PRODUCER = "gdq relay", "Debezium", "a producer of ready-made records"
GATHERED, STEADY = "catching up to Kafka", "1,000 changes/s to Kafka"
_FASTER = {"first load": 1.5, "0.1 % churn": 3.0}

_HEAD = """\
# Benchmarks of spools, mirrors and relays

What leaves the server for files, lake tables and brokers, beside other ways to the same. The page is written by
`python -m bench.spool --only-write --write docs/benchmarks-lake.md` from measurements of `python -m bench.spool`,
`python -m bench.mirror` and `python -m bench.relay`. All took turns with the same work on one machine. Figures are
medians of the rounds, or ratios of them with the quartiles of the rounds in brackets. Times measured on a shared
machine mean little elsewhere; their ratios mean more. A load above the number of processors is that of other programs
too, and one round is a hint.

{about}
"""

_SPOOL = """\
The same changes for many readers: one `gdq spool` whose Parquet files all of them read, or a slot for each, read by
`pg_recvlogical -f /dev/null` (pgoutput in binary, replica identity full). Microseconds of processor time an event and
reader. The server's is that of all its processes but the session that writes to the table. The clients' is that of
`gdq spool` with its readers, which have every column as Arrow; pg_recvlogical does not look into what it gets.
The steady rate is measured after three seconds of it. A ticker is at work then, and a part of the server's time."""

_MIRROR = """\
A first load reads a table of rows of about 180 bytes into an empty lake table: `gdq mirror`, and Spark's read by JDBC
in partitions by ranges of the key, `fetchsize` 10,000, written in the same format. COPY in binary sends the same rows
to a program that throws them away: the limit of what reads a whole table in one stream. For the churn 0.1 % of the
rows change, spread over the table or over its last twentieth: of ten changes eight are updates. `gdq mirror` takes
them from its queue, nets them, and applies them; Spark reads them by JDBC from a table that has them ready, one row
for each key, and runs MERGE INTO. All seconds of gdq are those of the whole program with its start, those of Spark are
without it: its session has done the same with few rows before. After each step both lake tables were compared with
the source. Processor seconds are those of the server and of the programs."""

_RELAY = """\
Changes of a table of a queue, and of one like it with a slot, to topics of three partitions on one broker: `gdq relay`,
and Debezium's connector in a worker of Kafka Connect (pgoutput, replica identity full, `poll.interval.ms=10`, all else
as it comes). Both send Debezium's envelope as JSON without schemas. gdq sends each batch in a transaction of Kafka that
holds its position, so that each change is there once; Debezium sends at least once. Catching up: records a second,
from the first that is in a topic to the last; the start of neither is counted. The third line is the limit: records
of 700 bytes that are ready, sent by the same client as gdq's in transactions of 10,000. Steady: milliseconds from the
begin of a transaction of 20 rows to a reader of committed records, 50 transactions a second; a ticker is at work for
gdq. Processor time is that of the programs, without the server's and the broker's."""


def page(results: Results) -> str:
    """The page of the documentation: the parts that were measured."""
    known = dict(results.about)
    if loads := [values["load"] for values in results.samples.values() if "load" in values]:
        known["load while measuring"] = f"{median(loads):.0f} (median), {max(loads):.0f} (most)"
    for part in (SPOOL_PART, MIRROR_PART, RELAY_PART):
        rounds = {key[3] for key in results.samples if key[0] == part}
        known |= {part: f"{known[part]}, {len(rounds)} round{'' if len(rounds) == 1 else 's'}"} if part in known else {}
    about = "\n".join(["| | |", "|---|---|", *(f"| {name} | {value} |" for name, value in known.items())])
    parts = [_HEAD.format(about=about), "## Goals", "", *_goals(results), ""]
    if any(results.names(SPOOL_PART, 1)):
        parts += ["## A spool beside slots", "", _SPOOL, "", *_spool(results)]
    if any(results.names(MIRROR_PART, 1)):
        parts += ["## Mirrors beside Spark", "", _MIRROR, "", *_mirror(results)]
    if any(results.names(RELAY_PART, 1)):
        parts += ["## Relays to Kafka beside Debezium", "", _RELAY, "", *_relay(results)]
    return "\n".join(parts).rstrip("\n") + "\n"


def goals(results: Results) -> list[Goal]:
    """What was to be reached, and was."""
    return [*spool_goals(results), *mirror_goals(results)]


def spool_goals(results: Results) -> list[Goal]:
    """The server's processor time beside slots."""
    found = []
    for case in results.names(SPOOL_PART, 1):
        mine, its = (results.rounds(SPOOL_PART, case, who, "server_us") for who in (SPOOL, SLOTS))
        what = f"server's processor time, {case}: a spool beside slots"
        found.append(Goal(what, ratio(mine, its), _SPOOL_MOST, _SPOOL_MOST))
    return found


def mirror_goals(results: Results) -> list[Goal]:
    """How many times faster than Spark."""
    found = []
    for case in results.names(MIRROR_PART, 1):
        mine, its = (results.rounds(MIRROR_PART, case, who, "seconds") for who in (MIRROR, SPARK))
        aim = _FASTER[case.partition(",")[0]]
        found.append(Goal(f"times faster than Spark, {case}", ratio(its, mine), aim, aim, least=True))
    return found


def _goals(results: Results) -> list[str]:
    rows = []
    for goal in goals(results):
        bound = "at least" if goal.least else "at most"
        rows.append([goal.what, f"{bound} {goal.aim:g} x", str(goal.ratio or ""), goal.verdict])
    return table(["", "goal", "found", ""], rows)


def _spool(results: Results) -> list[str]:
    rows = []
    for case in results.names(SPOOL_PART, 1):
        base = results.rounds(SPOOL_PART, case, SLOTS, "server_us")
        for who in (SPOOL, SLOTS):
            names = ("server_us", "ticker_us", "client_us", "seconds")
            server, ticks, client, seconds = (results.rounds(SPOOL_PART, case, who, name) for name in names)
            if server:
                figures = [f"{median(one.values()):.2f}" for one in (server, ticks, client)]
                row = [f"{case}: {who}", figures[0], str(ratio(server, base) or ""), *figures[1:]]
                rows.append([*row, f"{median(seconds.values()):.1f}"])
    return [*table(["", "server, us", "beside slots", "of it the ticker", "clients, us", "seconds"], rows), ""]


def _mirror(results: Results) -> list[str]:
    rows = []
    for case in results.names(MIRROR_PART, 1):
        base = results.rounds(MIRROR_PART, case, SPARK, "seconds")
        for who in (MIRROR, SPARK, COPIED):
            seconds, cpu = (results.rounds(MIRROR_PART, case, who, name) for name in ("seconds", "cpu"))
            if seconds:
                figures = [f"{median(seconds.values()):.1f}", str(ratio(base, seconds) or "")]
                rows.append([f"{case}: {who}", *figures, f"{median(cpu.values()):.1f}"])
    return [*table(["", "seconds", "times faster than Spark", "processor seconds"], rows), ""]


def _relay(results: Results) -> list[str]:
    rates, delays = [], []
    base = results.rounds(RELAY_PART, GATHERED, DEBEZIUM, "rate")
    for who in (RELAY, DEBEZIUM, PRODUCER):
        rate, cpu = (results.rounds(RELAY_PART, GATHERED, who, name) for name in ("rate", "cpu_us"))
        if rate:
            figures = [f"{median(rate.values()):,.0f}", str(ratio(rate, base) or ""), f"{median(cpu.values()):.0f}"]
            rates.append([who, *figures])
        p50, p99, cpu = (results.rounds(RELAY_PART, STEADY, who, name) for name in ("p50", "p99", "cpu_us"))
        if p50:
            delays.append([who, *(f"{median(one.values()):.0f}" for one in (p50, p99, cpu))])
    gathered = table(["catching up", "records/s", "beside Debezium", "processor time, us a record"], rates)
    steady = table(["at 1,000 changes/s", "p50, ms", "p99, ms", "processor time, us a record"], delays)
    return [*gathered, "", *steady, ""]
