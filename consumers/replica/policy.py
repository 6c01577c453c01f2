"""What a replica does about conflicts, and about rows that the target refuses.

--on-conflict gives the answer to each kind of conflict, for all tables or for one:

Policies.parse(["newest:changed_at", "update_missing=skip", "public.orders:insert_exists=error"])
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Literal

from gdq.errors import GdqError
from gdq.sql_text import quote

Kind = Literal[
    "insert_exists",
    "update_exists",
    "update_missing",
    "update_differs",
    "delete_missing",
    "delete_differs",
    "multiple_unique",
]
KINDS: tuple[Kind, ...] = Kind.__args__  # type: ignore[attr-defined]

# Kinds that are looked for only if an answer asks for it: the whole old rows travel then, and are compared.
DIFFERING: tuple[Kind, ...] = ("update_differs", "delete_differs")


@dataclass(frozen=True, slots=True)
class Answer:
    """What is done about a conflict: `error`, `apply` the remote change, `skip` it, or `newest` by a column."""

    action: Literal["error", "apply", "skip", "newest"]
    column: str = ""

    @classmethod
    def parse(cls, text: str) -> Answer:
        """An answer as it is written: error, apply, skip or newest:COLUMN."""
        action, _, column = text.partition(":")
        if action in ("error", "apply", "skip") and not column:
            return cls(action)  # type: ignore[arg-type]
        if action == "newest" and column:
            return cls("newest", column)
        raise GdqError(f'"{text}" is no answer to a conflict', hint="Write error, apply, skip or newest:COLUMN.")


_ERROR = Answer("error")

# What is done about rows that the target refuses: the replica stops, or they are put aside.
OnError = Literal["stop", "dead-letter"]


@dataclass(frozen=True, slots=True)
class Policies:
    """The answers of a replica by table and kind; None stands for all tables or all kinds.

    `on_error`: the answer to rows that the target refuses.
    """

    answers: tuple[tuple[str | None, Kind | None, Answer], ...] = ()
    on_error: OnError = "stop"

    @classmethod
    def parse(cls, texts: Sequence[str], on_error: OnError = "stop") -> Policies:
        """Answers as they are written: [TABLE:][KIND=]ANSWER or TABLE=ANSWER; GdqError for anything else."""
        answers = []
        for text in texts:
            subject, _, answer = text.rpartition("=")
            table, _, last = subject.rpartition(":")
            kind = next((kind for kind in KINDS if kind == last), None)
            if kind is None:
                table = subject
            if table and "." not in table:
                raise GdqError(
                    f'"{table}" in --on-conflict {text} is no kind of conflict, and no schema.table',
                    hint=f"The kinds are {', '.join(KINDS)}.",
                )
            answers.append((table or None, kind, Answer.parse(answer)))
        return cls(tuple(answers), on_error)

    def check_tables(self, known: Collection[str]) -> None:
        """GdqError for a table that the replica does not have."""
        for table, _, _ in self.answers:
            if table is not None and table not in known:
                raise GdqError(f"--on-conflict names {table}, which the replica does not have")

    def of(self, table: str, columns: Collection[str]) -> dict[Kind, Answer]:
        """The answers for a table, the most special one for each kind; kinds that are not looked for are left out."""
        found: dict[Kind, Answer] = {kind: _ERROR for kind in KINDS if kind not in DIFFERING}
        # from the most general to the most special; of equals the last counts
        for of_table, of_kind, answer in sorted(self.answers, key=lambda one: (one[0] is not None, one[1] is not None)):
            if of_table not in (None, table):
                continue
            general = KINDS if answer.action == "newest" else [kind for kind in KINDS if kind not in DIFFERING]
            found |= dict.fromkeys(general if of_kind is None else (of_kind,), answer)
        for answer in found.values():
            if answer.action == "newest" and answer.column not in columns:
                raise GdqError(
                    f"table {table} has no column {quote(answer.column)}, by which conflicts would be decided",
                    hint=f"Give another answer for the table: --on-conflict '{table}=...'",
                )
        return found
