"""Each defect of tests/support/mutants, put into a queue, is found by the schedule or test that its file names."""

from __future__ import annotations

import importlib
import inspect
from pathlib import Path

import psycopg
import pytest

import tests.support.schedules_control
import tests.support.schedules_retry
import tests.support.schedules_rotation  # noqa: F401 (each adds its own)
from tests.support.concurrency import Violation
from tests.support.retry_shop import RetryShop
from tests.support.schedules import play
from tests.support.server import Database

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

MUTANTS = sorted((Path(__file__).parent.parent / "support" / "mutants").glob("*.sql"))


@pytest.fixture
def shop(retry_shop: RetryShop) -> RetryShop:
    """What the tests of retries call so."""
    return retry_shop


def test_every_defect_can_be_put_in(db: Database) -> None:
    """Quick, while most of the tests below are long: a change of a function that a defect names is told of at once."""
    with db.connect(autocommit=False) as owner:
        for mutant in MUTANTS:
            put_in(owner, mutant)
            owner.rollback()


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda path: path.stem)
def test_defect_is_found(db: Database, request: pytest.FixtureRequest, mutant: Path) -> None:
    kind, _, name = mutant.read_text().splitlines()[0].removeprefix("-- ").partition(": ")
    with db.connect() as owner:
        put_in(owner, mutant)
    if kind == "schedule":
        with pytest.raises(Violation):
            play(db, name)
    else:
        assert kind == "test"
        run(request, name)


def put_in(owner: psycopg.Connection, mutant: Path) -> None:
    owner.execute(MUTATE)
    owner.execute(mutant.read_text().encode())


def run(request: pytest.FixtureRequest, name: str) -> None:
    """A test module::function must fail by what it asserts; its fixtures are made after the defect."""
    module, _, function = name.partition("::")
    test = getattr(importlib.import_module(f"tests.{module}"), function)
    fixtures = {parameter: request.getfixturevalue(parameter) for parameter in inspect.signature(test).parameters}
    with pytest.raises((AssertionError, pytest.fail.Exception)):
        test(**fixtures)
