"""The page's part about endurance: a consumer that was stopped, and a snapshot that was held, queue beside slot."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from statistics import median

from bench import catch_up, held_snapshot
from bench.catch_up import PART
from bench.figures import Loss, Ratio, ratio
from bench.results import Results
from bench.steady import ROWS

_STOPPED = """\
A writer made {rate:.0f} transactions per second of {rows} rows in a table that the queue captures, and as many in a
table that a slot reads (replica identity full). The consumers of both were stopped for {time}. Then the writer
stopped, and the consumers caught up in turns, timed from the moment of connecting. `held` is the disk space kept for
them: the queue's logs, and the WAL from the slot's restart_lsn on. A slot retains the WAL of the whole server, here
also that of the queue's table and logs; the second line counts only the WAL of the slot's own table. `given back`:
the space that is left once all have caught up, the logs have rotated and the server has made a checkpoint."""

_SNAPSHOT = """\
The same writer ran for {time} with both consumers at work, while another session held a snapshot (REPEATABLE READ,
nothing written). `last over first` compares the last fifth of the time with the first. It compares events per second
of the server's processor time: that of the consumer's session, and of the ticker (with maintenance) or the slot's
sender. Latency is the time from the writer's statement to the handler; synchronous_commit is off, so the slot waits
for the WAL writer. `slot's sender` leaves out the session that stores the reader's position, one updated row per
batch, whose dead versions the snapshot keeps. `given back`: the space that is left once all was read, still under the
snapshot."""

_MB = 2**20


@dataclass(frozen=True, slots=True)
class Line:
    """A figure of both paths by round, in the table divided by `unit`.

    `less_wins`: whether the smaller one is better; None where there is nothing to win. `its`: what stands for the slot.
    """

    what: str
    queue: dict[int, float]
    slot: dict[int, float]
    less_wins: bool | None = True
    unit: float = 1
    digits: int = 1
    its: str = "slot"

    @property
    def ratio(self) -> Ratio | None:
        return ratio(self.queue, self.slot)

    @property
    def lost(self) -> bool:
        found = self.ratio
        if found is None or self.less_wins is None:
            return False
        return found.mid > 1 if self.less_wins else found.mid < 1

    def cells(self) -> list[str]:
        """The line of the table."""
        found = self.ratio
        told = "" if found is None else str(found) if len(self.queue) > 1 else f"{found.mid:.2f}"
        return [self.what, self._figure(self.queue), self._figure(self.slot), told]

    def _figure(self, values: dict[int, float]) -> str:
        return f"{median(values.values()) / self.unit:,.{self.digits}f}" if values else ""


def section(results: Results) -> list[str]:
    """The part of the page, nothing when none was measured."""
    parts = []
    for case, text, lines in (
        (catch_up.CASE, _STOPPED, stopped_lines(results)),
        (held_snapshot.CASE, _SNAPSHOT, snapshot_lines(results)),
    ):
        seconds = results.rounds(PART, case, "slot", "seconds")
        if not seconds:
            continue
        rate = median(results.rounds(PART, case, "slot", "rate").values())
        words = text.format(rate=rate, rows=ROWS, time=_time(median(seconds.values())))
        title = "### A consumer that was stopped" if case == catch_up.CASE else "### A snapshot that was held"
        head = ["", "queue", "slot", "queue over slot"]
        parts += [title, "", words, "", *_table(head, [line.cells() for line in lines if line.queue or line.slot]), ""]
        parts += [_in_words(lines), ""]
    return ["## Endurance", "", *parts] if parts else []


def losses(results: Results) -> Iterator[Loss]:
    """Where the slot does better."""
    for title, lines in (
        ("consumer stopped", stopped_lines(results)),
        ("snapshot held", snapshot_lines(results)),
    ):
        for line in lines:
            found = line.ratio
            if found is not None and line.lost:
                yield Loss(f"{title}: {line.what}", "queue", line.its, found)


def stopped_lines(results: Results) -> list[Line]:
    """What was held, given back, and how fast each caught up."""

    def both(what: str, name: str, *, less_wins: bool | None = True, unit: float = 1, digits: int = 1) -> Line:
        queue, slot = (results.rounds(PART, catch_up.CASE, path, name) for path in ("queue", "slot"))
        return Line(what, queue, slot, less_wins, unit, digits)

    def slot(name: str) -> dict[int, float]:
        return results.rounds(PART, catch_up.CASE, "slot", name)

    held = results.rounds(PART, catch_up.CASE, "queue", "held")
    return [
        both("held, MB", "held", unit=_MB),
        Line("held, MB, beside the WAL of the slot's own table", held, slot("own"), unit=_MB, its="slot's own table"),
        Line("pg_wal at most, MB", {}, slot("pg_wal"), None, _MB),
        both("given back but for, MB", "left", unit=_MB, digits=2),
        Line("pg_wal then, MB", {}, slot("pg_wal_left"), None, _MB),
        both("seconds to catch up", "catch_up"),
        both("events/s while catching up", "events_a_second", less_wins=False, digits=0),
        both("client's CPU, us an event", "client_us"),
        both("server's CPU, us an event", "server_us"),
    ]


def snapshot_lines(results: Results) -> list[Line]:
    """What slowed down, and what stayed on the disk."""

    def values(path: str, name: str) -> dict[int, float]:
        return results.rounds(PART, held_snapshot.CASE, path, name)

    def speed(path: str, less: str | None = None) -> dict[int, float]:
        """Events for a second of the server's processor time, last fifth over first."""
        first, last = values(path, "server_us_first"), values(path, "server_us_last")
        if less:
            minus = {name: values(path, f"{less}_us_{name}") for name in ("first", "last")}
            first = {number: one - minus["first"][number] for number, one in first.items()}
            last = {number: one - minus["last"][number] for number, one in last.items()}
        return {number: first[number] / one for number, one in last.items() if one > 0}

    def both(what: str, name: str, *, less_wins: bool | None = True, unit: float = 1, digits: int = 1) -> Line:
        return Line(what, values("queue", name), values("slot", name), less_wins, unit, digits)

    sender = speed("slot", "session")
    return [
        Line("last over first, server", speed("queue"), speed("slot"), less_wins=False, digits=2),
        Line("last over first, beside the slot's sender", speed("queue"), sender, False, 1, 2, "slot's sender"),
        both("server's CPU, us an event, last fifth", "server_us_last"),
        both("client's CPU, us an event, last fifth", "client_us_last"),
        both("latency p50, ms, first fifth", "p50_first", less_wins=None),
        both("latency p50, ms, last fifth", "p50_last"),
        both("latency p99, ms, first fifth", "p99_first", less_wins=None),
        both("latency p99, ms, last fifth", "p99_last"),
        both("on the disk at most, MB", "most", unit=_MB),
        both("on the disk at the end, MB", "held", unit=_MB),
        both("given back but for, MB", "left", unit=_MB, digits=2),
        both("dead rows in tables of its own", "dead", digits=0),
    ]


def _in_words(lines: Sequence[Line]) -> str:
    """Where the queue loses, in a sentence."""
    lost = [f"{line.what} ({line.ratio.mid:.2f} x)" for line in lines if line.lost and line.ratio is not None]
    return f"The queue loses: {'; '.join(lost)}." if lost else "The queue loses nowhere here."


def _time(seconds: float) -> str:
    return f"{seconds / 60:.0f} minutes" if seconds >= 120 else f"{seconds:g} seconds"


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    lines = ["| " + " | ".join(row) + " |" for row in (head, *rows)]
    return [lines[0], "|---|" + "---:|" * (len(head) - 1), *lines[1:]]
