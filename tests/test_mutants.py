"""Each defect of tests/mutants, put into a sound queue, is found by the schedule that its file names."""

from __future__ import annotations

from pathlib import Path

import pytest

import tests.schedules_control
import tests.schedules_retry  # noqa: F401 (both add their own)
from tests.concurrency import Violation
from tests.fix_server import Database
from tests.schedules import play

# Fails when the text to replace is not there: a mutant never passes for having changed nothing.
MUTATE = """
create function pg_temp.mutate(function text, old text, new text) returns void language plpgsql as $$
declare
  source text := pg_get_functiondef(function::regproc);
begin
  if strpos(source, old) = 0 then
    raise exception 'function % holds no %', function, old;
  end if;
  execute replace(source, old, new);
end $$
"""

MUTANTS = sorted((Path(__file__).parent / "mutants").glob("*.sql"))


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda path: path.stem)
def test_defect_is_found(db: Database, mutant: Path) -> None:
    text = mutant.read_text()
    schedule = text.splitlines()[0].removeprefix("-- schedule: ")
    with db.connect() as owner:
        owner.execute(MUTATE)
        owner.execute(text.encode())
    with pytest.raises(Violation):
        play(db, schedule)
