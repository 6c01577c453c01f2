"""`gdq compare` on a database of others: the tables of pgbench, written by an application that knows nothing of gdq."""

from __future__ import annotations

import json
import random
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import psycopg
import pytest

from gdq.call import try_while_locked
from gdq.consumers.compare import attach
from gdq.consumers.compare.recommend import recommend
from gdq.consumers.compare.run import run_compare
from gdq.consumers.slot.slot import slot_info
from gdq.embedded.server import EmbeddedServer
from gdq.errors import GdqError
from gdq.installer.install import install
from tests.support.compare_figures import at, measured
from tests.support.html_page import Page
from tests.support.programs import gdq, start_gdq
from tests.support.server import PASSWORD, Database, chosen_binaries
from tests.support.waiting import SECONDS, until

pytestmark = pytest.mark.server

TABLES = "pgbench_accounts,pgbench_tellers,pgbench_history"

SCHEMA = """
    create table pgbench_branches (bid int primary key, bbalance int, filler char(88)) with (fillfactor = 100);
    create table pgbench_tellers (tid int primary key, bid int, tbalance int, filler char(84)) with (fillfactor = 100);
    create table pgbench_accounts (aid int primary key, bid int, abalance int, filler char(84))
      partition by range (aid);
    create table pgbench_accounts_1 partition of pgbench_accounts for values from (minvalue) to (501);
    create table pgbench_accounts_2 partition of pgbench_accounts for values from (501) to (maxvalue);
    create table pgbench_history (tid int, bid int, aid int, delta int, mtime timestamp, filler char(22));
    insert into pgbench_tellers select i, 1, 0 from generate_series(1, 10) i;
    insert into pgbench_accounts select i, 1, 0, '' from generate_series(1, 1000) i"""


@pytest.fixture
def bank(db: Database) -> Iterator[psycopg.Connection[Any]]:
    """The database of an application; nothing of a run is left in it at the end."""
    with db.connect("su") as su:
        su.execute(SCHEMA)
        su.execute("alter table pgbench_history add id bigint generated always as identity primary key")
        su.execute("grant select, insert, update on all tables in schema public to app")
        su.execute("grant trigger on all tables in schema public to gdq_owner")
        before = state(su)
        yield su
        assert state(su) == before


def state(connection: psycopg.Connection[Any]) -> list[tuple[Any, ...]]:
    """All that a run could leave."""
    query = """
        select 'slot', slot_name::text from pg_replication_slots where database = current_database()
        union all select 'publication', pubname::text from pg_publication
        union all select 'trigger', tgname::text from pg_trigger where not tgisinternal
        union all select 'queue', queue_name from gdq.queue
        union all select 'relation', c.oid::regclass::text from pg_class c
         where c.relnamespace::regnamespace::text not in ('pg_toast', 'pg_catalog') and c.relpersistence <> 't'
        union all select 'identity', c.oid::regclass::text || c.relreplident::text from pg_class c
         where c.relname ~ '^pgbench' and c.relkind in ('r', 'p')
        union all select 'schema', nspname::text from pg_namespace where nspname !~ '^pg_(toast_)?temp'
        order by 1, 2"""
    return connection.execute(query).fetchall()


@contextmanager
def working(db: Database) -> Iterator[dict[str, int]]:
    """The application at work: transfers, as pgbench makes them."""
    over, done, failed = threading.Event(), {"transactions": 0}, []

    def work() -> None:
        draw = random.Random(5)
        try:
            with db.connect("app", autocommit=False) as app:
                while not over.is_set():
                    aid, tid, delta = draw.randint(1, 1000), draw.randint(1, 10), draw.randint(-5, 5)
                    app.execute("update pgbench_accounts set abalance = abalance + %s where aid = %s", [delta, aid])
                    app.execute("update pgbench_tellers set tbalance = tbalance + %s where tid = %s", [delta, tid])
                    app.execute("insert into pgbench_history values (%s, 1, %s, %s, now())", [tid, aid, delta])
                    app.commit()
                    done["transactions"] += 1
                    over.wait(0.002)
        except BaseException as error:
            failed.append(error)

    thread = threading.Thread(target=work)
    thread.start()
    try:
        yield done
    finally:
        over.set()
        thread.join()
    assert not failed


def test_measures_both_paths(db: Database, bank: psycopg.Connection[Any], tmp_path: Path) -> None:
    written = tmp_path / "page.html"
    with working(db) as done:
        options = ["--tables", TABLES, "--seconds", "4", "--json", "--report", str(written)]
        found = gdq("compare", *options, dsn=db.su_dsn)
    assert (found.returncode, found.stderr) == (0, f"wrote {written}\n")
    figures = json.loads(found.stdout)
    events = figures["queue"]["events"]
    assert events == figures["slot"]["events"]
    assert {table: list(ops) for table, ops in events.items()} == {
        "public.pgbench_accounts": ["update"],
        "public.pgbench_tellers": ["update"],
        "public.pgbench_history": ["insert"],
    }
    counts = {count for ops in events.values() for count in ops.values()}
    assert counts == {figures["queue"]["transactions"]} == {figures["slot"]["transactions"]}
    assert 20 < min(counts) < done["transactions"]
    assert "" not in figures["difference_counts"]
    assert figures["difference_counts"]["`old` of an update or delete"] >= figures["old_missing"] == 2 * min(counts)
    for path in ("queue", "slot"):
        latency = figures[path]["latency"]
        assert 0 < latency["p50"] <= latency["p99"] <= latency["max"]
        assert sum(count for _, count in latency["histogram"]) == latency["transactions"] > 5
        kept = measured(figures, f"{path}.retained_per_second", figures[path]["retained_per_second"])
        assert figures[path]["retained_bytes"] > kept * 0.5 > 0
        assert figures[path]["catch_up_seconds"] > 0
    # the slot's latency is not that of a tick; the queue's has one
    assert figures["queue"]["latency"]["p50"] > figures["slot"]["latency"]["p50"]
    alone, _, idle = figures["phases"]
    assert [phase["name"] for phase in figures["phases"]] == ["slot alone", "both read", "nobody reads"]
    assert all(phase["changes"] == 3 * phase["transactions"] > 0 for phase in figures["phases"][1:])
    assert alone["wal_bytes"] > 0
    assert 50 < measured(figures, "log_bytes_per_change", figures["log_bytes_per_change"]) < 1000
    assert set(figures["queue"]["cpu_seconds"]) == {"consumer"}
    assert set(figures["slot"]["cpu_seconds"]) == {"consumer", "walsender"}
    for path in ("queue", "slot"):
        for process, seconds in figures[path]["cpu_seconds"].items():
            assert measured(figures, f"{path}.cpu_seconds.{process}", seconds) > 0
    assert 0 < figures["noise"]["queue.latency"] < 1
    assert next(iter(figures)) == "recommendation"
    assert idle["end"] <= max(sample["at"] for sample in figures["samples"]) + 0.5
    assert figures["recommendation"]["choice"] in ("queue", "slot", "either")
    looked = Page(written.read_text(encoding="utf-8"))
    assert looked.plots == 3
    assert looked.lines == ["queue", "slot"] * 2
    wanted = ["public.pgbench_accounts update", "latency p99", "both read", figures["recommendation"]["text"]]
    assert all(text in looked.text for text in [*wanted, "CPU of the server, reading", f"{min(counts):,}"])


def test_finds_what_the_queue_did_not_get(db: Database, bank: psycopg.Connection[Any]) -> None:
    """Triggers do not fire in replica role. With the old rows nothing is left that the slot lacks."""

    def write() -> None:
        with db.connect("su") as su:
            su.execute("set session_replication_role = replica")
            su.execute("update pgbench_accounts set abalance = 7 where aid = 77")

    with working(db):
        tables = ["pgbench_accounts", "pgbench_tellers"]
        figures = run_compare(db.su_dsn, tables, 1.5, replica_identity_full=True, tell=at("both read", write))
    assert figures.difference_counts[""] == 1
    (text,) = figures.differences
    assert "missing in queue" in text
    assert "'aid': 77" in text
    assert figures.slot.total == figures.queue.total + 1
    assert (figures.old_missing, figures.new_partial) == (0, 0)
    found = recommend(figures)
    assert (found.choice, found.reasons) == ("unknown", [])


@pytest.mark.long
@pytest.mark.parametrize("whose", ["walsender", "gdq compare", "gdq:gdq_compare"])
def test_cleans_up_after_a_lost_connection(db: Database, bank: psycopg.Connection[Any], whose: str) -> None:
    query = """select pg_terminate_backend(pid) from pg_stat_activity where datname = current_database()
                and (backend_type = %s or application_name = %s or starts_with(application_name, %s || '/'))"""
    ended = []

    def end() -> None:
        ended.extend(bank.execute(query, [whose] * 3).fetchall())

    with pytest.raises(psycopg.OperationalError):
        run_compare(db.su_dsn, ["pgbench_accounts"], 4, tell=at("both read", end))
    assert ended == [(True,)]


@pytest.mark.long
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
def test_cleans_up_after_a_signal(db: Database, bank: psycopg.Connection[Any], number: signal.Signals) -> None:
    """A run that cannot clean up any more has its leftovers removed by the next, replica identities too."""
    bank.execute("alter table pgbench_tellers replica identity using index pgbench_tellers_pkey")
    before = state(bank)
    # triggers come after a fifth of the time; the rest is for a machine that is slow to send the signal
    options = ["--tables", TABLES, "--seconds", "60", "--replica-identity-full"]
    running = start_gdq("compare", *options, dsn=db.su_dsn)
    until(lambda: len(gdq_triggers(bank)) >= 3)
    identities = """select array_agg(distinct relreplident::text) from pg_class
                     where relname ~ '^pgbench_(acc|tel|his)' and relkind = 'r'"""
    assert bank.execute(identities).fetchone() == (["f"],)
    running.send_signal(number)
    _, told = running.communicate(timeout=SECONDS)
    if number == signal.SIGINT:
        assert (running.returncode, told) == (130, "Error: interrupted: what the run had made is removed again\n")
    else:
        until(lambda: not bank.execute("select from pg_stat_activity where application_name = 'gdq compare'").rowcount)
        assert state(bank) != before
        removed = gdq("compare", "--clean-up", dsn=db.su_dsn)
        assert removed.returncode == 0
        for what in ("queue gdq_compare with its triggers", "slot gdq_gdq_compare_db", "publication gdq_gdq_compare"):
            assert what in removed.stderr
        assert "replica identity of public.pgbench_tellers" in removed.stderr
        assert gdq("compare", "--clean-up", dsn=db.su_dsn).stderr == "already gone: no run has left anything\n"
    assert state(bank) == before
    bank.execute("alter table pgbench_tellers replica identity default")


def test_a_run_of_days_ends_at_once(db: Database, bank: psycopg.Connection[Any]) -> None:
    """Ctrl-C is heeded between two samples, which are an hour apart here."""
    running = start_gdq("compare", "--tables", TABLES, "--seconds", "400000", dsn=db.su_dsn)
    until(lambda: bank.execute("select from pg_stat_replication where application_name ~ 'gdq'").rowcount)
    running.send_signal(signal.SIGINT)
    _, told = running.communicate(timeout=SECONDS)
    assert (running.returncode, told) == (130, "Error: interrupted: what the run had made is removed again\n")


def test_full_identities_stay(db: Database, bank: psycopg.Connection[Any]) -> None:
    """Nothing is set, and no lock waited for, on a table that has what is wanted."""
    bank.execute("alter table pgbench_history replica identity full")
    with db.connect("su") as su:
        attach.attach_slot(su, ["public.pgbench_history", "public.pgbench_tellers"], identity_full=True)
        query = "select relid::regclass::text from gdq_target.compare_run where relid is not null"
        noted = su.execute(query).fetchall()
        attach.detach_all(su)
    assert noted == [("pgbench_tellers",)]
    bank.execute("alter table pgbench_history replica identity default")


def test_an_identity_whose_index_is_gone_stays_full(db: Database, bank: psycopg.Connection[Any]) -> None:
    """A clean-up that failed at it would fail for ever."""
    bank.execute("create table doc (i int not null); create unique index doc_i on doc (i)")
    bank.execute("alter table doc replica identity using index doc_i")
    with db.connect("su") as su:
        attach.attach_slot(su, ["public.doc"], identity_full=True)
        bank.execute("drop index doc_i")
        attach.detach_all(su)
    assert bank.execute("select relreplident::text from pg_class where relname = 'doc'").fetchone() == ("f",)
    bank.execute("drop table doc")


@pytest.mark.long
def test_clean_up_does_what_is_free(
    db: Database, bank: psycopg.Connection[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another's transaction keeps its own table only: the slot, other triggers and identities go, and it is named."""
    monkeypatch.setattr(attach, "_patiently", partial(try_while_locked, seconds=0.5))
    before = state(bank)
    tables = ["public.pgbench_tellers", "public.pgbench_history"]
    identities = "select relname::text, relreplident::text from pg_class where relname ~ '^pgbench_(tellers|history)$'"
    with db.connect("su") as su, db.connect("su") as other:
        were = dict(bank.execute(identities).fetchall())
        attach.attach_slot(su, tables, identity_full=True)
        attach.attach_queue(su, tables)
        other.execute("begin; lock pgbench_tellers in row exclusive mode")
        for _ in range(2):
            with pytest.raises(GdqError, match="not removed, as others hold the tables: ") as refused:
                attach.detach_all(su)
            assert "history" not in str(refused.value)
            assert f"process {other.info.backend_pid} " in str(refused.value.hint)
            assert slot_info(su) == []
            assert gdq_triggers(bank) == su.execute("select 'pgbench_tellers'::regclass::oid").fetchall()
            now = dict(bank.execute(identities).fetchall())
            assert now == were | {"pgbench_tellers": "f"}
        other.execute("rollback")
        attach.detach_all(su)
    assert state(bank) == before


def gdq_triggers(connection: psycopg.Connection[Any]) -> list[Any]:
    query = "select distinct tgrelid from pg_trigger where not tgisinternal and tgrelid::regclass::text ~ '^pgbench'"
    return connection.execute(query).fetchall()


def test_refuses_what_it_cannot_do(db: Database, bank: psycopg.Connection[Any]) -> None:
    bank.execute("create table keyless (i int)")
    bank.execute("create unlogged table volatile (i int primary key)")
    bank.execute("create table made (i int primary key, j int generated always as (i + 1) stored)")
    bank.execute("alter table made replica identity full")
    bank.execute("create table parted (i int) partition by list (i)")
    bank.execute("create table parted_1 partition of parted for values in (1)")
    bank.execute("create view seen as select 1 as i")
    bank.execute("create table private (i int primary key)")
    names = "keyless, volatile, made, parted, parted_1"
    bank.execute(f"grant trigger on {names} to gdq_owner")
    refusals = {
        "keyless": "table public.keyless has no replica identity: UPDATE and DELETE would fail once it is published",
        "parted": "table public.parted_1 has no replica identity: UPDATE and DELETE would fail once it is published",
        "volatile": "table public.volatile is unlogged or temporary: a slot does not see it",
        "seen": "public.seen is not a table",
        "private": "gdq has no right to put triggers on public.private",
        "nowhere": 'relation "nowhere" does not exist',
        "pgbench_tellers,public.pgbench_tellers": "a table is named twice",
    }
    if bank.info.server_version >= 180000:
        refusals["made"] = (
            "table public.made has generated columns and REPLICA IDENTITY FULL: UPDATE and DELETE would fail"
        )
    for tables, message in refusals.items():
        with pytest.raises((GdqError, psycopg.Error), match=message):
            run_compare(db.su_dsn, tables.split(","), 1)
    with pytest.raises(GdqError, match="role gdq_owner has no REPLICATION"):
        run_compare(db.dsn, ["pgbench_tellers"], 1)
    bank.execute("select gdq.create_queue('gdq_compare')")
    with pytest.raises(GdqError, match="that it did not create: queue gdq_compare"):
        run_compare(db.su_dsn, ["pgbench_tellers"], 1)
    bank.execute("select gdq.drop_queue('gdq_compare')")
    with db.connect("su") as other:
        attach.lock_attach(other)
        with pytest.raises(GdqError, match="another gdq compare is at work"):
            run_compare(db.su_dsn, ["pgbench_tellers"], 1)
    done = gdq("compare", "--tables", "keyless", dsn=db.su_dsn)
    assert (done.returncode, len(done.stderr.splitlines()), done.stdout) == (1, 2, "")
    assert gdq("compare", dsn=db.su_dsn).returncode == 2
    bank.execute(f"drop table {names.removesuffix(', parted_1')}, private; drop view seen")


def test_refuses_a_database_without_gdq(empty_db: Database) -> None:
    with pytest.raises(GdqError, match="gdq is not installed in this database"):
        run_compare(empty_db.su_dsn, ["t"], 1)


@pytest.mark.long
def test_needs_no_superuser(db: Database, bank: psycopg.Connection[Any]) -> None:
    role = f"comparing_{db.name}"
    bank.execute(f"create role {role} login replication password '{PASSWORD}'; grant {role} to postgres")
    bank.execute(f"grant create on database {db.name} to {role}; grant gdq_admin to {role}")
    bank.execute(f"alter table pgbench_tellers owner to {role}; grant create on schema public to {role}")
    try:
        with working(db):
            figures = run_compare(db.server.conninfo(role, db.name, PASSWORD), ["pgbench_tellers"], 1)
        assert figures.queue.total == figures.slot.total > 0
        with pytest.raises(GdqError, match=f"role {role} does not own table public.pgbench_history"):
            run_compare(db.server.conninfo(role, db.name, PASSWORD), ["pgbench_history"], 1)
        bank.execute(f"revoke gdq_admin from {role}")
        with pytest.raises(GdqError, match=f"role {role} is not a member of gdq_admin"):
            run_compare(db.server.conninfo(role, db.name, PASSWORD), ["pgbench_tellers"], 1)
    finally:
        bank.execute(f"reassign owned by {role} to postgres; drop owned by {role}; drop role {role}")


@pytest.mark.long
def test_refuses_a_server_without_logical_log(pytestconfig: pytest.Config) -> None:
    with EmbeddedServer(
        binaries=chosen_binaries(pytestconfig.getoption("--pg")), settings={"wal_level": "replica"}
    ) as started:
        install(started.conninfo())
        with psycopg.connect(started.conninfo(), autocommit=True) as su:
            su.execute("create table t (i int primary key)")
        done = gdq("compare", "--tables", "t", dsn=started.conninfo())
    assert done.returncode == 1
    assert done.stderr.splitlines()[0] == "Error: a slot needs wal_level logical, the server has replica"


def test_generated_columns_are_no_large_values(db: Database, bank: psycopg.Connection[Any]) -> None:
    """The queue has them and a slot does not: a rule says so, and the rows are whole all the same."""
    bank.execute("alter table pgbench_tellers add twice int generated always as (tbalance * 2) stored")
    update = "update pgbench_tellers set tbalance = 5 where tid = 1"
    figures = run_compare(db.su_dsn, ["pgbench_tellers"], 1, tell=at("both read", lambda: bank.execute(update)))
    assert figures.queue.total == figures.slot.total == 1
    assert (figures.old_missing, figures.new_partial) == (1, 0)
    assert "" not in figures.difference_counts
    bank.execute("alter table pgbench_tellers drop column twice")


@pytest.mark.parametrize(
    ("options", "code", "message"),
    [
        (["--tables", "t", "--seconds", "nan"], 2, "nan is no number of seconds"),
        (["--tables", "t", "--seconds", "inf"], 2, "inf is no number of seconds"),
        (["--tables", "t", "--report", "/nowhere/at/all.html"], 2, "no folder /nowhere/at"),
        (["--clean-up", "--tables", "t"], 2, "takes no other option"),
        (["--tables", "pgbench_tellers", "--seconds", "1", "--report", "/dev/full"], 1, "be written to /dev/full"),
    ],
)
def test_bad_options(db: Database, bank: psycopg.Connection[Any], options: list[str], code: int, message: str) -> None:
    """A page that cannot be written takes nothing of the result that was waited for."""
    done = gdq("compare", *options, dsn=db.su_dsn)
    assert done.returncode == code
    assert message in done.stderr.splitlines()[-1]
    assert ("No recommendation" in done.stdout) == (code == 1)
    with pytest.raises(GdqError, match="a run takes a second or more"):
        run_compare(db.su_dsn, ["pgbench_tellers"], 0.5)
