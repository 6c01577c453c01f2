"""The results of bench.views as tables: on the terminal, and as a page of the documentation."""

from __future__ import annotations

import re
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from rich import box
from rich.console import Console
from rich.table import Table

from bench.views_data import GOAL_CHURN, GOAL_POSTGRES, GOAL_SPARK, Method, Results, Sample, median

_COLUMNS = (
    "view", "postgres", "s", "REFRESH s", "times faster", "CONCURRENTLY s", "rows read",
    "Spark", "s", "full s", "times faster", "rows read", "same rows",
)  # fmt: skip

# A larger share of the rows than this is named as what a refresh spends its time on.
_MANY_ROWS = 0.05
FEW_ROWS = 0.2


@dataclass(frozen=True, slots=True)
class Side:
    """One engine's refreshes of one view at one churn, beside its rival; None where nothing was measured.

    `ratio`: how many times faster than the rival, by the medians; `low` and `high` that of the rounds.
    """

    samples: list[Sample]
    seconds: float | None
    rival: float | None
    ratio: float | None
    low: float | None
    high: float | None
    share: float | None

    @property
    def did(self) -> str:
        """What the refreshes did; `no change` when the view's tables had none."""
        names = {"none": "no change", "refused": "refused"}
        return "/".join(sorted({names.get(sample.did, sample.did) for sample in self.samples})) or "not measured"

    @property
    def from_changes(self) -> bool:
        did = {sample.did for sample in self.samples}
        return "delta" in did and did <= {"delta", "none"}

    @property
    def why(self) -> str | None:
        """The reason that the refresh gave for not being one from changes."""
        return next((sample.why for sample in self.samples if sample.why), None)


@dataclass(frozen=True, slots=True)
class Line:
    """One view at one churn."""

    view: str
    churn: float
    postgres: Side
    concurrently: float | None
    spark: Side

    @property
    def equal(self) -> bool | None:
        told = [s.equal for side in (self.postgres, self.spark) for s in side.samples if s.equal is not None]
        return all(told) if told else None


def lines(results: Results, churn: float) -> list[Line]:
    """What was measured at one churn."""
    return [
        Line(
            view,
            churn,
            _side(results, view, churn, "postgres", "refresh"),
            median(results.of(view, "concurrently", churn)),
            _side(results, view, churn, "spark", "spark-full"),
        )
        for view in results.views()
    ]


def _side(results: Results, view: str, churn: float, method: Method, rival: Method) -> Side:
    mine = results.of(view, method, churn)
    theirs = results.of(view, rival, 0.0 if rival == "spark-full" else churn)
    seconds, other = median(mine), median(theirs)
    pairs = list(zip(mine, theirs, strict=False)) if len(theirs) >= len(mine) else []
    rounds = [its.seconds / own.seconds for own, its in pairs if own.seconds and its.seconds]
    full = [sample.rows_read for sample in results.of(view, "refresh", churn) if sample.rows_read]
    read = [sample.rows_read for sample in mine if sample.rows_read is not None]
    return Side(
        mine,
        seconds,
        other,
        other / seconds if seconds and other else None,
        min(rounds, default=None),
        max(rounds, default=None),
        statistics.median(read) / statistics.median(full) if read and full else None,
    )


def reasons(line: Line, fixed: tuple[float | None, float | None]) -> str:
    """Why a goal is missed, up to GOAL_CHURN, or why a refresh is slower than its rival, beyond.

    `fixed`: the seconds of the quickest refresh from changes of any view at any churn, on either engine.
    """
    told = []
    sides = (("postgres", line.postgres, GOAL_POSTGRES), ("Spark", line.spark, GOAL_SPARK))
    for (name, side, goal), least in zip(sides, fixed, strict=True):
        limit = goal if line.churn <= GOAL_CHURN else 1
        if side.ratio is None or side.ratio < limit:
            told += [f"{name}: {reason}" for reason in _reason(side, limit, least)]
    return "; ".join(told)


def _reason(side: Side, limit: float, least: float | None) -> Iterator[str]:
    if side.why or not side.from_changes:
        code = re.search(r"\[([a-z-]+)\]$", side.why or "")
        if side.why:
            yield f"{side.did}, `{code[1]}`" if code else side.why
        return
    if least and side.rival and side.rival / limit < least:
        yield f"the rival takes {side.rival:.2f} s, no refresh less than {least:.2f} s"
    elif side.share is not None and side.share > _MANY_ROWS:
        yield f"reads {side.share:.0%} of the rows"
    else:
        changed = statistics.median(sample.delta_rows or 0 for sample in side.samples)
        yield f"computing {changed:,.0f} changes" if changed else "computing the changes"


def least_seconds(results: Results) -> tuple[float | None, float | None]:
    """The quickest refresh from changes, on postgres and on Spark: what a refresh costs whatever it computes."""
    found: dict[str, list[float]] = {"postgres": [], "spark": []}
    for key, sample in results.samples.items():
        if key.method in found and sample.did == "delta" and sample.seconds:
            found[key.method].append(sample.seconds)
    return min(found["postgres"], default=None), min(found["spark"], default=None)


def verdicts(all_lines: Sequence[Line]) -> Iterator[str]:
    """What one churn shows as a whole."""
    for name, goal in (("postgres", GOAL_POSTGRES), ("spark", GOAL_SPARK)):
        sides = [line.postgres if name == "postgres" else line.spark for line in all_lines]
        measured = [side for side in sides if side.samples]
        if not measured:
            continue
        changes = [side for side in measured if side.from_changes]
        ratios = [side.ratio for side in changes if side.ratio is not None]
        rival = "REFRESH" if name == "postgres" else "a full recompute on Spark"
        text = f"Engine {name}: {len(changes)} of {len(measured)} views from changes"
        if ratios:
            met, lost = sum(ratio >= goal for ratio in ratios), sum(ratio < 1 for ratio in ratios)
            text += (
                f", a median of {statistics.median(ratios):.1f} times faster than {rival} ({min(ratios):.1f} to"
                f" {max(ratios):.1f}), {met} at least {goal} times, {lost} slower than it"
            )
            few = sum(side.share is not None and side.share < FEW_ROWS for side in changes)
            text += f"; {few} read less than {FEW_ROWS:.0%} of the rows of the full query"
        yield text + "."


def cells(line: Line) -> list[str]:
    postgres, spark = line.postgres, line.spark
    return [
        line.view,
        *(postgres.did, _seconds(postgres.seconds), _seconds(postgres.rival), _ratio(postgres)),
        _seconds(line.concurrently),
        _share(postgres.share),
        *(spark.did, _seconds(spark.seconds), _seconds(spark.rival), _ratio(spark), _share(spark.share)),
        "-" if line.equal is None else "yes" if line.equal else "**NO**",
    ]


def _seconds(value: float | None) -> str:
    return "-" if value is None else f"{value:.3f}" if value < 1 else f"{value:.1f}"


def _ratio(side: Side) -> str:
    if side.ratio is None:
        return "-"
    spread = f" ({side.low:.1f}-{side.high:.1f})" if side.low is not None and side.high != side.low else ""
    return f"{side.ratio:.1f}{spread}"


def _share(value: float | None) -> str:
    return "-" if value is None else f"{value:.1%}" if value < 0.1 else f"{value:.0%}"


def show(results: Results, console: Console, missing: int) -> None:
    """Print everything."""
    fixed = least_seconds(results)
    for churn in results.churns():
        found = lines(results, churn)
        table = Table(box=box.SIMPLE_HEAD, title=_title(results, churn), title_justify="left", title_style="")
        for column in _COLUMNS:
            table.add_column(column, justify="left" if column == "view" else "right")
        for line in found:
            table.add_row(*cells(line))
        console.print(table)
        for view, reason in ((line.view, reasons(line, fixed)) for line in found):
            if reason:
                console.print(f"{view}: {reason}", highlight=False, soft_wrap=True, markup=False)
        for verdict in verdicts(found):
            console.print(verdict, highlight=False, soft_wrap=True)
    if missing:
        console.print(f"{missing} measurements are missing: the same command goes on.", soft_wrap=True)


def _title(results: Results, churn: float) -> str:
    changed = results.about.get("lines changed", {}).get(f"{churn:g}")
    return f"{churn:.2%} of the lines changed" + (f" ({changed:,})" if changed else "")


_HEAD = """\
# Benchmarks of views

The time to bring the {views} views of TPC-H up to date after changes, each in every way, in one run. The page is
written by `python -m bench.views --write docs/benchmarks-views.md` from measurements of `python -m bench.views`.

{about}

Each round changes a share of the lines: a third is inserted with their orders, a third updated, a third deleted with
their orders. Then the round refreshes every view in every way, one after the other:

- postgres: from the changes, inside the server. Its rivals are REFRESH MATERIALIZED VIEW, and CONCURRENTLY if the
  view's rows are unique.
- Spark: from the changes, in a session that is kept. Its rival is `gdq refresh --full` in the same session, once per
  round before the changes; in the first round this is the first load.

The columns:

- postgres, Spark: `delta` is a refresh from changes; `full` is a full load, with its reason below the table;
  `no change` means that the view's tables did not change.
- s: seconds, the median of {rounds}.
- times faster: the ratio of the medians, with the least and largest ratio of the rounds.
- rows read: the rows that scans of the tables returned, by the server's statistics, as a share of those of REFRESH.
- same rows: whether both views hold the rows of REFRESH, as bags, after each refresh.

The goals at {goal:.1%} are {postgres} times faster than REFRESH and {spark} times faster than a full recompute on
Spark. The reason is below the table if a refresh misses its goal at up to {goal:.1%}, or is slower than its rival at
larger shares.
"""


def page(results: Results, missing: Sequence[str]) -> str:
    """The page of the documentation."""
    load = [sample.load for sample in results.samples.values() if sample.load]
    about = {"TPC-H": f"scale {results.scale:g}", **results.about}
    about.pop("lines changed", None)
    if load:
        about["load during"] = (
            f"{statistics.median(load):.2f} (median), {max(load):.2f} (most); the run's own is 1 to 2"
        )
    parts = [
        _HEAD.format(
            views=len(results.views()),
            about="\n".join(["| | |", "|---|---|", *(f"| {name} | {value} |" for name, value in about.items())]),
            rounds=_rounds(results),
            goal=GOAL_CHURN,
            postgres=GOAL_POSTGRES,
            spark=GOAL_SPARK,
        )
    ]
    fixed = least_seconds(results)
    for churn in results.churns():
        found = lines(results, churn)
        parts += [f"\n## {_title(results, churn)}\n", *(f"{verdict}\n" for verdict in verdicts(found))]
        parts += [_row(_COLUMNS), "|---|" + "---:|" * (len(_COLUMNS) - 1), *(_row(cells(line)) for line in found)]
        why = [(line.view, reasons(line, fixed)) for line in found]
        if any(reason for _, reason in why):
            parts += ["", "| view | why not faster |", "|---|---|", *(_row(one) for one in why if one[1])]
    if missing:
        parts += ["\n## Not measured\n", "The run ended before: " + ", ".join(missing) + "."]
    return "\n".join(parts) + "\n"


def _rounds(results: Results) -> str:
    """The number of rounds, and that on Spark where it is another."""
    rounds = results.rounds()
    spark = max((key.round for key in results.samples if key.method == "spark"), default=rounds)
    return f"{rounds} round{'' if rounds == 1 else 's'}{f' ({spark} on Spark)' if spark != rounds else ''}"


def _row(texts: Sequence[str]) -> str:
    return f"| {' | '.join(text.replace('|', chr(92) + '|') for text in texts)} |"
