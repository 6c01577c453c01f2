"""What PostgreSQL's own tests of logical replication (src/test/subscription) do, with tables applied side by side."""

from __future__ import annotations

import pytest

from tests.replica.conftest import Pair, count
from tests.support.programs import gdq

pytestmark = pytest.mark.server

WORKERS = ("--apply-workers", "3")

# So many rows that the next table is staged meanwhile.
MANY = 2000


@pytest.fixture
def tables(pair: Pair) -> Pair:
    """A pair with three large tables, which have been copied."""
    for name in ("one", "test_tab", "two"):
        pair.make(f"create table {name} (a int primary key, b text)")
        pair.run(f"insert into {name} select i, md5(i::text) from generate_series(1, {MANY}) i")
    pair.capture("one", "test_tab", "two")
    pair.apply(*WORKERS)
    return pair


def beside(pair: Pair) -> None:
    """Changes of the other tables, so that workers are there."""
    pair.run("update one set b = 'new'", "update two set b = a::text where a > 100", "delete from two where a < 50")


def test_columns_that_come_in_savepoints_and_go(tables: Pair) -> None:
    """019_stream_subxact_ddl_abort, 017: only what was not rolled back has come."""
    beside(tables)
    tables.run(
        """begin;
           insert into test_tab select i, 'x' from generate_series(3001, 3500) i;
           alter table test_tab add column c int;
           savepoint s1;
           insert into test_tab select i, 'x', -i from generate_series(3501, 4000) i;
           alter table test_tab add column d int;
           savepoint s2;
           insert into test_tab select i, 'x', -i, 2 * i from generate_series(4001, 4500) i;
           alter table test_tab add column e int;
           savepoint s3;
           alter table test_tab drop column c;
           insert into test_tab select i, 'x', 2 * i, 3 from generate_series(4501, 5000) i;
           rollback to s1;
           insert into test_tab select i, 'x', i from generate_series(3501, 4000) i;
           commit""",
        "update test_tab set c = 1 where a % 3 = 0",
    )
    beside(tables)
    tables.apply(*WORKERS)
    tables.same("one", "test_tab", "two")
    tables.run("update test_tab set c = a where a < 1500")
    beside(tables)
    tables.apply(*WORKERS)
    tables.same("one", "test_tab", "two")


def test_large_transactions_with_savepoints(tables: Pair) -> None:
    """016_stream_subxact, 018_stream_subxact_abort: nested, released and rolled back."""
    parts = []
    for number in range(1, 8):
        low = 10_000 * number
        parts.append(
            f"""savepoint s{number};
            insert into test_tab select i, 'x' from generate_series({low}, {low + 499}) i;
            update test_tab set b = b || '{number}' where a % {number + 1} = 0;
            delete from test_tab where a % 7 = {number}"""
        )
    tables.run(f"begin; {'; '.join(parts)}; rollback to s6; release s3; delete from test_tab where a % 11 = 0; commit")
    beside(tables)
    tables.apply(*WORKERS)
    tables.same("one", "test_tab", "two")


def test_a_prepared_transaction_outlives_the_program(tables: Pair) -> None:
    """022_twophase_cascade, 023_twophase_stream: with savepoints that were rolled back, and rows of two tables."""
    name = f"{tables.source.name} large"
    tables.run(
        f"""begin; insert into test_tab select i, 'x' from generate_series(5001, 7000) i; savepoint s;
            update one set b = 'rolled back'; rollback to s; update one set b = 'prepared' where a % 2 = 0;
            delete from test_tab where a % 3 = 0; prepare transaction '{name}'""",
        "update two set b = 'before'",
        "update one set b = 'other' where a % 2 = 1",
    )
    tables.apply(*WORKERS)
    tables.same("one", "test_tab", "two")
    tables.run("update two set b = 'between'")
    tables.apply(*WORKERS)
    tables.run(f"commit prepared '{name}'")
    tables.apply(*WORKERS)
    tables.same("one", "test_tab", "two")


def test_rewrites_between_the_rows(tables: Pair) -> None:
    """006_rewrite: types and defaults that rewrite the table in a transaction that also writes."""
    beside(tables)
    tables.run(
        """begin; insert into test_tab values (9001, 'a'); alter table test_tab add c int not null default 0;
           alter table test_tab alter b type varchar(100); insert into test_tab values (9002, 'b', 1); commit""",
        "alter table test_tab alter c type bigint",
        "update test_tab set c = 10000000000 where a < 1000",
    )
    tables.apply(*WORKERS)
    tables.same("one", "test_tab", "two")
    beside(tables)
    tables.run("update test_tab set c = 1 where a < 1400")
    tables.apply(*WORKERS)
    tables.same("one", "test_tab", "two")


def test_a_schema_is_renamed_and_its_name_is_taken(fed: Pair) -> None:
    """100_bugs: rows before and after stand in one transaction; the table of the name is another one then."""
    pair = fed
    pair.run("create schema sch1", "create table sch1.t1 (c1 int primary key)", "insert into sch1.t1 values (0)")
    pair.capture("sch1.t1")
    pair.apply("--create")
    pair.run(
        """begin; insert into sch1.t1 values (1); alter schema sch1 rename to sch2; create schema sch1;
           create table sch1.t1 (c1 int primary key); insert into sch1.t1 values (2); insert into sch2.t1 values (3);
           commit"""
    )
    pair.apply("--create")
    pair.same("sch2.t1")
    pair.capture("sch1.t1")
    pair.run("insert into sch1.t1 values (4)", "update sch2.t1 set c1 = -c1")
    pair.apply("--create")
    pair.same("sch1.t1", "sch2.t1")


@pytest.mark.parametrize("workers", [(), WORKERS])
def test_a_copy_that_a_row_of_the_target_stops(pair: Pair, workers: tuple[str, ...]) -> None:
    """004_sync: it goes on when that is gone, with what has changed meanwhile."""
    pair.make("create table tab_rep (a int primary key)")
    pair.run("insert into tab_rep select generate_series(1, 20)")
    pair.there("insert into tab_rep values (7)")
    pair.capture("tab_rep")
    failed = pair.replicate(*workers)
    assert failed.returncode == 1
    assert "table public.tab_rep of the target has rows already" in failed.stderr
    pair.run("insert into tab_rep values (21)", "delete from tab_rep where a = 3")
    pair.there("delete from tab_rep")
    pair.apply(*workers)
    pair.same("tab_rep")
    pair.run(
        "create table tab_rep_next (a) as select generate_series(1, 10)", "alter table tab_rep_next add primary key (a)"
    )
    pair.capture("tab_rep_next")
    missing = pair.replicate(*workers)
    assert missing.returncode == 1
    assert "tab_rep_next" in missing.stderr.splitlines()[0]
    pair.there("create table tab_rep_next (a int primary key)")
    pair.apply(*workers)
    pair.same("tab_rep", "tab_rep_next")


def test_rows_that_are_in_the_way_of_several_keys(tables: Pair) -> None:
    """035_conflicts: an inserted row, and an updated one, and one in a partition of the target."""
    tables.run(
        *(f"create table conf_{name} (a int primary key, b int unique, c int unique)" for name in ("tab", "tab_2"))
    )
    tables.there(
        "create table conf_tab (a int primary key, b int unique, c int unique)",
        "create table conf_tab_2 (a int primary key, b int, c int, unique (a, b)) partition by range (a)",
        "create table conf_tab_2_p1 partition of conf_tab_2 for values from (minvalue) to (100)",
    )
    tables.capture("conf_tab", "conf_tab_2")
    tables.apply()
    tables.there(
        "insert into conf_tab values (2, 2, 2), (3, 3, 3), (4, 4, 4)", "insert into conf_tab_2 values (55, 2, 3)"
    )
    tables.run("insert into conf_tab values (2, 3, 4)")
    beside(tables)
    failed = tables.replicate(*WORKERS)
    assert failed.returncode == 1
    assert "multiple_unique" in failed.stderr
    with tables.target.connect("su") as su:
        assert count(su, "select count(*) from one where b = 'new'") == 0, "nothing of the batch is there"
    tables.there("truncate conf_tab")
    tables.apply(*WORKERS)
    tables.run("insert into conf_tab values (5, 5, 5)")
    tables.apply(*WORKERS)
    tables.there("insert into conf_tab values (6, 6, 6), (7, 7, 7), (8, 8, 8)")
    tables.run("update conf_tab set a = 6, b = 7, c = 8 where a = 5", "insert into conf_tab_2 values (55, 2, 3)")
    failed = tables.replicate(*WORKERS)
    assert failed.returncode == 1
    assert "multiple_unique" in failed.stderr
    tables.apply(*WORKERS, "--on-conflict", "apply")
    tables.same("one", "test_tab", "two", "conf_tab", "conf_tab_2")


def test_sequences_of_many_kinds(pair: Pair) -> None:
    """036_sequences: names in quotes, sequences that come later, other increments, one that cannot hold the value."""
    pair.make("create table t (a bigint primary key)")
    pair.make("""create sequence "regress'quote" """)
    for place, options in ((pair.source, "as bigint"), (pair.target, "as smallint increment 7 cache 5")):
        with place.connect() as connection:
            connection.execute(f"create sequence s1 {options}".encode())
    pair.capture("t")
    pair.run(
        "select gdq.add_sequence('shop', 's1')",
        """select gdq.add_sequence('shop', '"regress''quote"')""",
        """insert into t select nextval('s1') + nextval('"regress''quote"') from generate_series(1, 100)""",
    )
    pair.apply(*WORKERS)
    with pair.target.connect("su") as su:
        assert count(su, "select last_value from s1") == 100
        assert count(su, """select last_value from "regress'quote" """) == 100
    pair.make("create sequence s2")
    pair.run("select nextval('s2')", "select gdq.add_sequence('shop', 's2')", "insert into t values (-1)")
    pair.run("select setval('s1', 40000)", "insert into t values (-2)")
    failed = pair.replicate(*WORKERS)
    assert failed.returncode == 1
    assert failed.stderr.startswith("Error: sequence public.s1 of the target cannot have the value 40000")
    pair.there("alter sequence s1 as int maxvalue 1000000")
    pair.apply(*WORKERS)
    pair.same("t")
    with pair.target.connect("su") as su:
        assert count(su, "select last_value from s1") == 40000
        assert count(su, "select last_value from s2") == 1
        su.execute("alter sequence s2 owner to postgres; grant create on schema public to app")
        su.execute(f'grant create on database {pair.target.name} to app; grant all on t, s1, "regress\'quote" to app')
        su.execute("grant all on schema gdq_target to app; grant all on all tables in schema gdq_target to app")
    pair.run("select nextval('s2')", "insert into t values (-3)")
    done = gdq("replicate", "shop", "mirror", "--to", pair.target.app_dsn, "--triggers", "fire", dsn=pair.source.dsn)
    assert done.stderr == (
        "Error: role app may not set sequence public.s2 of the target\n"
        'Hint: Say there: grant update on sequence public.s2 to "app"\n'
    )
