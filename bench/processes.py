"""Processor time of processes and of those that they started, from /proc."""

from __future__ import annotations

import os
from pathlib import Path


def stat(pid: int) -> list[str]:
    """The fields of /proc/PID/stat from the state on: [1] is the parent, [11] and [12] the time in clock ticks.

    [13] and [14] are that of children which it has waited for. OSError when there is no such process.
    """
    # the name, in brackets, may hold spaces
    return Path(f"/proc/{pid}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()


def seconds_waited_for(pid: int) -> float:
    """Processor time of the children of a process that have ended and that it has waited for."""
    return sum(map(int, stat(pid)[13:15])) / os.sysconf("SC_CLK_TCK")


def seconds_below(pid: int) -> float:
    """Processor time of the processes below one that still run, with that of the children that they have waited for."""
    used: dict[int, int] = {}
    children: dict[int, list[int]] = {}
    for folder in Path("/proc").iterdir():
        if folder.name.isdecimal():
            try:
                fields = stat(int(folder.name))
            except OSError:
                continue  # it has just ended
            used[int(folder.name)] = sum(map(int, fields[11:15]))
            children.setdefault(int(fields[1]), []).append(int(folder.name))
    ticks, waiting = 0, [*children.get(pid, [])]
    while waiting:
        one = waiting.pop()
        ticks += used[one]
        waiting += children.get(one, [])
    return ticks / os.sysconf("SC_CLK_TCK")
