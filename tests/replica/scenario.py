"""What PostgreSQL's, Slony's and Londiste's own tests put their replication through, as scenarios for gdq's replicas.

They stand in scenarios/*.sql. Each one has a name after `--#`, which is the schema where its statements run, and parts
after `--@`. A line that is not indented begins a statement, which is a transaction of its own:

    both, source, target   what is run there before capture
    round                  statements in the source, followed by a run of the replica
    needs                  a condition in the source, without which the scenario is left out
    queue                  why no slot can feed the tables
    plain                  tables that are not captured
    own                    columns that the target computes, or whose equal values have another text there
    shown                  a query of the target, and the rows that it gives in the end
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from pathlib import Path

_FOLDER = Path(__file__).parent / "scenarios"


@dataclass(slots=True)
class Scenario:
    """Tables of both databases, then rounds of statements in the source."""

    name: str
    both: list[str] = field(default_factory=list)
    source: list[str] = field(default_factory=list)
    target: list[str] = field(default_factory=list)
    rounds: list[list[str]] = field(default_factory=list)
    needs: str = "true"
    queue: str = ""
    plain: list[str] = field(default_factory=list)
    own: list[str] = field(default_factory=list)
    shown: str = ""
    rows: list[str] = field(default_factory=list)


def read_scenarios(group: str) -> list[Scenario]:
    """The scenarios of a file."""
    text = (_FOLDER / f"{group}.sql").read_text(encoding="utf-8")
    return [_read(*part.split("\n", 1)) for part in re.split(r"^--# ", text, flags=re.MULTILINE)[1:]]


def _read(name: str, text: str) -> Scenario:
    scenario = Scenario(name)
    for part in re.split(r"^--@ ", text, flags=re.MULTILINE)[1:]:
        head, _, body = part.partition("\n")
        kind, _, value = head.partition(": ")
        comments = [line.removeprefix("-- ") for line in body.splitlines() if line.startswith("-- ")]
        lines = "\n".join(line for line in body.splitlines() if line and not line.startswith("-- "))
        statements = re.split(r"\n(?! )", lines) if lines else []
        match kind:
            case "round":
                scenario.rounds.append(statements)
            case "both" | "source" | "target":
                getattr(scenario, kind).extend(statements)
            case "needs" | "queue":
                setattr(scenario, kind, value)
            case "plain" | "own":
                getattr(scenario, kind).extend(value.split())
            case "shown":
                scenario.shown, scenario.rows = lines, comments
            case _:
                raise ValueError(f"scenario {name}: what is {kind}?")
    return scenario
