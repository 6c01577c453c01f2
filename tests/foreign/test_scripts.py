"""The harness of foreign suites reads scripts and finds their queries."""

from __future__ import annotations

from pathlib import Path

from tests.foreign.material import find_files
from tests.foreign.queries import step_of
from tests.foreign.readers import read_logic_test, read_planner_cases, read_rust_tests
from tests.foreign.scripts import Statement, split_sql

SCRIPT = r"""
-- a comment; with a semicolon
\set name 'Bob'
create table t (a int, b text); /* one; /* in */ another */
insert into t values (1, 'x;y'), (2, E'it\'s;');
copy t from stdin;
3	three
4	four
\.
create function f() returns int language sql begin atomic select case when true then 1 end; select 2; end;
do $body$ begin perform 1; end $body$;
select a[1:2] from t where b = :'name' \gset
select 1 \; select 2;
create rule r as on insert to t do also (select 1; select 2);
"""


def test_a_psql_script_is_split_as_psql_does() -> None:
    statements = split_sql(SCRIPT)
    assert [one.text.split()[0] for one in statements] == [
        "create", "insert", "copy", "create", "do", "select", "select", "select", "create"
    ]  # fmt: skip
    assert statements[2].data == "3\tthree\n4\tfour\n"
    assert statements[5].text == "select a[1:2] from t where b = 'Bob'"


def test_queries_are_found_in_the_statements_of_suites() -> None:
    def query(text: str) -> str:
        return " ".join(step_of(Statement(text)).query.split())

    assert query("select * from t;") == "select * from t"
    assert query("CREATE MATERIALIZED VIEW v AS SELECT a FROM t WITH NO DATA") == "SELECT a FROM t"
    assert query("create view v (x) as select a from t") == ("with named (x) as (select a from t ) select * from named")
    assert query("select s.create_immv('v', 'select ''x'' from t')") == "select 'x' from t"
    assert query("select s.create_stream_table('v', $$select a from t$$, '1m')") == "select a from t"
    assert query("explain (costs off) select a from t") == "select a from t"
    assert query("create temp table u as select a from t") == "select a from t"
    assert step_of(Statement("create temp table u (a int) on commit drop")).text == "create table u (a int) "
    assert step_of(Statement("insert into t select 1")).kind == "run"
    assert step_of(Statement("with x as (insert into t values (1) returning *) select * from x")).kind == "run"
    assert step_of(Statement("drop table t")).kind == "end"
    assert step_of(Statement("copy t from stdout")).kind == "leave"
    assert step_of(Statement("select pg_terminate_backend(1)")).kind == "leave"
    assert step_of(Statement("begin")).kind == "leave"


def test_files_of_other_forms_are_read(tmp_path: Path) -> None:
    included = tmp_path / "tables.slt.part"
    included.write_text("statement ok\ncreate table t (a int);\n")
    logic = tmp_path / "one.slt"
    logic.write_text(
        "include ./tables.slt.part\n\nquery I rowsort\nselect a\nfrom t;\n----\n1\n\nstatement error\nselect;\n"
    )
    assert [one.text for scope in read_logic_test("s", logic) for one in scope.statements] == [
        "create table t (a int)", "select a\nfrom t", "select"
    ]  # fmt: skip

    cases = tmp_path / "cases.yaml"
    cases.write_text(
        "- id: base\n  sql: |\n    create table t (a int);\n- before:\n  - base\n"
        "  sql: select a from t\n  expected:\n  - plan\n"
    )
    assert [[one.text for one in scope.statements] for scope in read_planner_cases("s", cases)] == [
        ["create table t (a int)"],
        ["create table t (a int)", "select a from t"],
    ]

    rust = tmp_path / "tests.rs"
    rust.write_text(
        'async fn one() {\n db.execute("CREATE TABLE t (a INT)").await;\n // "not this"\n'
        ' let q = "SELECT a, \\\n    \\"b\\" FROM t";\n db.run(r#"select "A" from t"#);\n say("hello");\n}\n'
    )
    assert [one.text for scope in read_rust_tests("s", rust) for one in scope.statements] == [
        "CREATE TABLE t (a INT)", 'SELECT a, "b" FROM t', 'select "A" from t'
    ]  # fmt: skip


def test_an_empty_folder_has_no_suite(tmp_path: Path) -> None:
    assert find_files(tmp_path) == []


def test_a_folder_with_a_name_is_a_suite(tmp_path: Path) -> None:
    below = tmp_path / "some/other"
    below.mkdir(parents=True)
    texts = {"suite.txt": "other\n", "setup.sql": "", "a.sql": "select 1", "b.test": "query I\nselect 2\n"}
    for name, text in texts.items():
        (below / name).write_text(text)
    files = find_files(tmp_path)
    assert [(one.suite, one.path.name, one.setup) for one in files] == [
        ("other", "a.sql", below / "setup.sql"),
        ("other", "b.test", below / "setup.sql"),
    ]
    assert [one.read()[0].statements for one in files] == [[Statement("select 1")], [Statement("select 2")]]
