"""What `gdq switchover` says where there is nothing to do, where a side is lost, and the way out by SQL."""

from __future__ import annotations

import pytest

from gdq.consumers.switchover.switch import SwitchOptions, switch_steps
from gdq.errors import GdqError
from gdq.installer.install import install
from tests.support.programs import gdq
from tests.switchover.conftest import Pair

pytestmark = pytest.mark.server

_SESSIONS = """
select pg_terminate_backend(pid) from pg_stat_activity
 where datname = current_database() and application_name like 'gdq:%'"""


@pytest.fixture
def prepared(pair: Pair) -> Pair:
    pair.open_shop()
    pair.done("switchover", "--prepare")
    return pair


def failed(pair: Pair, command: str, *options: str, back: bool = False) -> str:
    """What a command says that fails."""
    done = pair.gdq(command, *options, back=back)
    assert done.returncode == 1, done.stdout + done.stderr
    return done.stderr


def test_nothing_to_switch_back(prepared: Pair) -> None:
    told = failed(prepared, "replicate", back=True)
    assert told.startswith("Error: the application writes to this target (its switchover is prepared, and no switch")
    for options in ([], ["--check"]):
        told = failed(prepared, "switchover", "--back", *options)
        assert told.startswith("Error: there is nothing to switch back: no switch was made, the application writes to")
        assert f"/{prepared.old.name}\nHint: gdq switchover shop mirror --to ... makes one, without --back." in told


def test_a_switch_that_was_made_already(prepared: Pair) -> None:
    """Once more is no error, so that scripts may repeat it; --check says where the application writes."""
    for back, writes_at in (([], prepared.new), (["--back"], prepared.old)):
        prepared.done("switchover", *back)
        assert prepared.done("switchover", *back).stderr.splitlines() == ["already switched"]
        told = failed(prepared, "switchover", *back, "--check")
        assert told.startswith("Error: the switch was made: the application writes to")
        assert f"/{writes_at.name} since the switch of 2" in told
        assert "Hint: The same command with --back, or without it, says" in told
        prepared.done("replicate", back=not back)


@pytest.mark.parametrize("side", ["source", "target"])
def test_a_server_that_is_lost_amid_a_switch(prepared: Pair, side: str) -> None:
    steps = switch_steps(prepared.old.su_dsn, prepared.new.su_dsn, "shop", "mirror", SwitchOptions())
    while next(steps) != "writers wait":
        pass
    place = prepared.old if side == "source" else prepared.new
    prepared.run_su(place, _SESSIONS)
    with pytest.raises(GdqError, match=f"the connection to the {side} .*/{place.name}.* was lost: "):
        next(steps)
    prepared.run(prepared.old, "insert into orders (n) values (1)")
    prepared.done("switchover")


def test_the_target_is_lost_when_the_switch_is_made(prepared: Pair) -> None:
    steps = switch_steps(prepared.old.su_dsn, prepared.new.su_dsn, "shop", "mirror", SwitchOptions())
    while next(steps) != "switched":
        pass
    prepared.run_su(prepared.new, _SESSIONS)
    with pytest.raises(GdqError, match=f"none yet: .*; the target .*/{prepared.new.name}.* was lost"):
        next(steps)
    assert failed(prepared, "switchover", "--check").startswith(
        "Error: a switch is half done: no database takes writes"
    )
    prepared.done("switchover")
    prepared.run(prepared.new, "insert into orders (n) values (1)")


def test_the_end_where_a_side_cannot_be_reached(prepared: Pair) -> None:
    lost = ("switchover", "shop", "mirror", "--to", "host=127.0.0.1 port=1 dbname=gone", "--end")
    done = gdq(*lost, dsn=prepared.old.su_dsn)
    assert done.returncode == 1
    assert done.stderr.startswith("Error: connection failed: ")
    assert done.stderr.splitlines()[0].endswith("refused (the target; nothing was changed)")
    assert (
        "Hint: If that database is gone for good, end the switchover in the other one alone: drop function"
        in done.stderr
    )
    prepared.done("switchover")

    # the new database first; the old one refuses
    prepared.run_su(prepared.old, f"alter database {prepared.old.name} set default_transaction_read_only = on")
    told = failed(prepared, "switchover", "--end")
    assert f"/{prepared.new.name}, and not in " in told
    assert f"/{prepared.old.name}: cannot execute " in told
    assert "Hint: Run it again. If that database is gone for good" in told
    with prepared.old.connect("su") as su:
        su.execute("set default_transaction_read_only = off")
        su.execute(f"alter database {prepared.old.name} reset default_transaction_read_only".encode())
    assert prepared.done("switchover", "--end").stderr == "ended the switchover of mirror\n"
    assert prepared.done("switchover", "--end").stderr == "already gone: switchover of mirror\n"
    prepared.run(prepared.old, "insert into orders (n) values (1)")


def test_the_way_out_by_sql_and_another_switchover(prepared: Pair) -> None:
    """A side that has forgotten the switchover counts the same turns as the other one again."""
    prepared.done("switchover")
    prepared.done("switchover", "--back")
    prepared.run_su(prepared.old, "drop function gdq_target.fence() cascade", "drop table gdq_target.switchover")
    prepared.run(prepared.old, "insert into orders (n) values (7)")
    prepared.done("replicate")
    assert failed(prepared, "switchover").startswith("Error: the databases are not prepared for the switchover")
    prepared.done("switchover", "--prepare")
    turns = "select turns from gdq_target.switchover"
    assert prepared.rows(prepared.old, turns) == prepared.rows(prepared.new, turns)
    prepared.done("switchover")
    prepared.run(prepared.new, "update orders set n = 8 where n = 7")
    prepared.done("replicate", back=True)
    query = "select t::text from orders t order by 1"
    assert prepared.rows(prepared.old, query) == prepared.rows(prepared.new, query)


def test_a_schema_that_the_role_may_not_use(pair: Pair) -> None:
    for place in (pair.old, pair.new):
        pair.run(place, "create schema stock", "create table stock.part (id int primary key)")
    pair.run(pair.old, "select gdq.create_queue('shop')", "select gdq.add_table('shop', 'stock.part')")
    pair.run_su(pair.new, "revoke all on schema stock from public", f"grant create on database {pair.new.name} to app")
    for command in (("replicate",), ("switchover", "--check")):
        done = gdq(command[0], "shop", "mirror", "--to", pair.new.app_dsn, *command[1:], dsn=pair.old.su_dsn)
        assert done.returncode == 1
        assert done.stderr.startswith("Error: role app may not use schema stock of the target\nHint: Say there: grant")


def test_prepared_where_gdq_is_another_roles(pair: Pair) -> None:
    """What is installed already is left as it is."""
    pair.open_shop()
    install(pair.new.dsn)
    told = pair.done("switchover", "--prepare").stderr
    assert "gdq is installed in the target" in told
    owner = "select nspowner::regrole::text from pg_namespace where nspname = 'gdq'"
    assert pair.rows(pair.new, owner) == [("gdq_owner",)]
    pair.done("switchover")
