"""Results as JSON lines: what was measured stays, so that a run that was stopped goes on."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from bench.packages import BenchError

_Key = tuple[str, str, str, int]


@dataclass(slots=True)
class Results:
    """What was measured: values by part, case, contender and round. `about` tells of the run and of the machine.

    Each line of the file is one result or a piece of `about`, written at once.
    """

    path: Path
    size: str
    about: dict[str, Any] = field(default_factory=dict)
    samples: dict[_Key, dict[str, Any]] = field(default_factory=dict)

    @classmethod
    def read(cls, path: Path, size: str | None) -> Results:
        """The results in a file, none when there is no file. BenchError when they are of another size of run.

        `size` None takes those of any. A last line that was cut off by a crash is passed over.
        """
        lines = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
        results = cls(path, size or "")
        for number, line in enumerate(lines):
            try:
                read = json.loads(line)
            except ValueError:
                if number < len(lines) - 1:
                    raise BenchError(f"{path}: line {number + 1} is no result") from None
                path.write_text("".join(f"{one}\n" for one in lines[:-1]), encoding="utf-8")
                break
            if "about" in read:
                results.about |= read["about"]
            else:
                results.samples[read["part"], read["case"], read["who"], read["round"]] = read["values"]
        found = results.about.get("size")
        if size is not None and found not in {None, size}:
            raise BenchError(f"{path} holds a run of size {found}: name another file, or give --fresh")
        results.size = size or found or ""
        return results

    def tell(self, **about: Any) -> None:
        """Keep something about the run."""
        self.about |= about
        self._write({"about": about})

    def add(self, part: str, case: str, who: str, number: int, values: dict[str, Any]) -> None:
        """Keep one result."""
        self.samples[part, case, who, number] = values
        self._write({"part": part, "case": case, "who": who, "round": number, "values": values})

    def has(self, part: str, case: str, who: str, number: int) -> bool:
        """Whether this was measured."""
        return (part, case, who, number) in self.samples

    def rounds(self, part: str, case: str, who: str, name: str) -> dict[int, float]:
        """One value by round."""
        return {
            key[3]: float(values[name])
            for key, values in sorted(self.samples.items())
            if key[:3] == (part, case, who) and name in values
        }

    def names(self, part: str, index: int) -> Iterator[str]:
        """The cases (1) or contenders (2) of a part, in the order in which they were first measured."""
        yield from dict.fromkeys(str(key[index]) for key in self.samples if key[0] == part)

    def _write(self, line: dict[str, Any]) -> None:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with self.path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")
