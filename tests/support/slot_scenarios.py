"""What has been hard for readers of changes, as tables and statements that a queue and a slot both watch.

The behaviours are those that the tests of other systems look for: test_decoding, subscriptions, wal2json, pglogical,
Debezium, Materialize and Slony. Each scenario has a schema of its own, named like it.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Scenario:
    """`tables` are made before capture, `script` runs after; `counts` are the changes that either side must have.

    A line of the script is one statement; "2: " before it names another session than the first. `rows`: whether the
    events' rows are compared with the tables at the end, not where DDL renames or drops columns,
    where two rows have one key for a moment, or where a table shows its children's rows.
    """

    name: str
    tables: tuple[str, ...]
    script: tuple[str, ...]
    counts: str
    rows: bool = True


T = "create table t (id int primary key, v text)"
FULL = "alter table t replica identity full"
LARGE = "(select string_agg(md5(i::text), '') from generate_series(1, 400) i)"

SCENARIOS = (
    Scenario(
        "type_between_changes",
        ("create table t (id int primary key, v varchar(5))",),
        (
            "insert into t select i, i::text from generate_series(1, 5) i",
            "alter table t alter v type text",
            "insert into t values (6, 'longer than five')",
            "update t set v = v || '!'",
            "delete from t where id < 3",
        ),
        "I6 U6 D2",
    ),
    Scenario(
        "ddl_in_a_transaction",
        ("create table t (id int primary key, v varchar(5))",),
        (
            "begin",
            "insert into t values (1, '1')",
            "alter table t alter v type varchar(20)",
            "insert into t values (2, '2')",
            "alter table t add w int",
            "insert into t values (3, '3', 3)",
            "commit",
            "vacuum full t",
            "cluster t using t_pkey",
            "insert into t values (4, '4', 4)",
        ),
        "I4",
    ),
    Scenario(
        "on_conflict",
        (T,),
        (
            "insert into t values (1, 'a')",
            "insert into t values (1, 'b'), (2, 'b') on conflict (id) do update set v = excluded.v || t.v",
            "insert into t values (1, 'c'), (3, 'c') on conflict do nothing",
            "insert into t values (1, 'd') on conflict (id) do update set v = 'no' where t.v = 'absent'",
        ),
        "I3 U1",
    ),
    Scenario(
        "merge",
        (T,),
        (
            "insert into t select i, 'a' from generate_series(1, 4) i",
            """merge into t using (values (1), (2), (9), (10)) s(id) on t.id = s.id
               when matched and s.id = 1 then delete when matched then update set v = 'm'
               when not matched and s.id = 9 then insert values (s.id, 'n') when not matched then do nothing""",
        ),
        "I5 U1 D1",
    ),
    Scenario(
        "key_updates",
        (T, "create table two (b text, a int, v text, primary key (a, b))"),
        (
            "insert into t values (1, 'a'), (2, 'b')",
            "update t set id = id + 10",
            "update t set id = id, v = 'same'",
            "insert into two values ('x', 1, 'v'), ('y', 1, 'v')",
            "update two set b = 'z' where b = 'x'",
            "update two set a = 2, v = null where b = 'y'",
            "delete from two",
        ),
        "I4 U6 D2",
    ),
    Scenario(
        "key_handed_on",
        (T,),
        (
            "insert into t values (1, 'a'), (2, 'b')",
            "begin",
            "delete from t where id = 1",
            "update t set id = 1 where id = 2",
            "insert into t values (2, 'c')",
            "update t set id = 3 where id = 1",
            "insert into t values (1, 'd')",
            "commit",
        ),
        "I4 U2 D1",
    ),
    Scenario(
        "nested_subtransactions",
        (T,),
        (
            "begin",
            *(line for i in range(40) for line in (f"savepoint s{i}", f"insert into t values ({i}, 'v')")),
            "rollback to s30",
            "release s20",
            "update t set v = 'w' where id >= 18",
            "commit",
        ),
        "I30 U12",
    ),
    Scenario(
        "subtransaction_before_its_parent",
        (T,),
        (
            "begin",
            "savepoint a",
            "savepoint b",
            "insert into t values (1, 'b')",
            "release b",
            "rollback to a",
            "insert into t values (2, 'a')",
            "release a",
            "insert into t values (3, 'top')",
            "commit",
        ),
        "I2",
    ),
    Scenario(
        "ddl_rolled_back_in_a_subtransaction",
        (T,),
        (
            "begin",
            "insert into t values (1, 'a')",
            "savepoint s",
            "alter table t add w int",
            "insert into t values (2, 'b', 2)",
            "rollback to s",
            "insert into t values (3, 'c')",
            "commit",
            "update t set v = 'd'",
        ),
        "I2 U2",
    ),
    Scenario(
        "toast_unchanged",
        (
            T,
            "alter table t alter v set storage external",
            "create table keep (id int primary key, v text, n int)",
            "alter table keep alter v set storage external",
        ),
        (
            f"insert into keep values (1, {LARGE}, 1), (2, 'small', 2)",
            "update keep set n = n + 1",
            "update keep set id = id + 10",
            f"update keep set v = {LARGE} || 'x' where id = 11",
            "delete from keep",
            f"insert into t values (1, {LARGE})",
            "update t set id = 2",
        ),
        "I3 U6 D2",
    ),
    Scenario(
        "toast_with_full_identity",
        (T, "alter table t alter v set storage external", FULL),
        (
            f"insert into t values (1, {LARGE})",
            "update t set id = 2",
            "update t set v = 'short'",
            f"update t set v = {LARGE}",
            "delete from t",
        ),
        "I1 U3 D1",
    ),
    Scenario(
        "toast_compressed",
        (T,),
        (
            "insert into t values (1, repeat('x', 500000))",
            "update t set id = 2",
            "update t set v = repeat('y', 300000)",
        ),
        "I1 U2",
    ),
    Scenario(
        "copy_with_toast",
        (T, "alter table t alter v set storage external"),
        ("copy t from stdin\n" + "".join(f"{i}\t{'long ' * 700 if i % 5 == 0 else 'short'}\n" for i in range(20)),),
        "I20",
    ),
    Scenario(
        "copy_of_null_and_escapes",
        (T,),
        ("copy t from stdin\n1\t\\N\n2\t\n3\ta\\tb\\\\c\\nd\n4\té€𝄞\n", "update t set v = 'now' where v is null"),
        "I4 U1",
    ),
    Scenario(
        "truncate_of_several",
        (T, "create table u (id serial primary key, t_id int references t)"),
        (
            "insert into t values (1, 'a')",
            "insert into u (t_id) values (1), (null)",
            "truncate u, t restart identity",
            "insert into t values (1, 'b')",
            "insert into u (t_id) values (1)",
            "truncate t cascade",
            "begin",
            "truncate u",
            "rollback",
        ),
        "I5 T4",
    ),
    Scenario(
        "truncate_among_changes",
        (T,),
        (
            "begin",
            "insert into t values (1, 'a')",
            "truncate t",
            "insert into t values (1, 'b')",
            "commit",
            "begin",
            "delete from t",
            "savepoint s",
            "truncate t",
            "rollback to s",
            "insert into t values (1, 'c')",
            "commit",
        ),
        "I3 D1 T1",
    ),
    Scenario(
        "two_phases",
        (T,),
        (
            "begin",
            "insert into t values (1, 'one')",
            "savepoint s",
            "insert into t values (2, 'undone')",
            "rollback to s",
            "prepare transaction 'scenario_one'",
            "begin",
            "insert into t values (3, 'gone')",
            "prepare transaction 'scenario_gone'",
            "insert into t values (4, 'between')",
            "rollback prepared 'scenario_gone'",
            "commit prepared 'scenario_one'",
            "update t set v = 'after'",
        ),
        "I2 U2",
    ),
    Scenario(
        "interleaved_sessions",
        (T,),
        (
            "2: begin",
            "2: insert into t values (1, 'two')",
            "3: begin",
            "3: insert into t values (2, 'three')",
            "insert into t values (3, 'one')",
            "2: insert into t values (4, 'two')",
            "3: commit",
            "update t set v = 'one' where id = 2",
            "2: update t set v = 'two' where id = 2",
            "2: commit",
            "delete from t where id = 2",
        ),
        "I4 U2 D1",
    ),
    Scenario(
        "old_snapshot_writes_late",
        (T,),
        (
            "insert into t values (1, 'a')",
            "2: begin isolation level repeatable read",
            "2: select count(*) from t",
            "insert into t values (2, 'b')",
            "2: update t set v = 'old snapshot' where id = 1",
            "insert into t values (3, 'c')",
            "2: commit",
        ),
        "I3 U1",
    ),
    Scenario(
        "ddl_beside_an_open_transaction",
        (T,),
        (
            "2: begin",
            "2: select 1",
            "alter table t add w int",
            "insert into t values (1, 'a', 1)",
            "2: insert into t values (2, 'b', 2)",
            "2: commit",
            "alter table t drop v",
            "insert into t values (3, 3)",
        ),
        "I3",
        rows=False,
    ),
    Scenario(
        "columns_dropped_and_renamed",
        ("create table t (gone int, id int primary key, also text, v text)", FULL, "alter table t drop gone"),
        (
            "insert into t values (1, 'x', 'a')",
            "alter table t drop also",
            "update t set v = 'b'",
            "alter table t rename v to w",
            "update t set w = 'c'",
            "alter table t add v int",
            "update t set v = 1",
            "delete from t",
        ),
        "I1 U3 D1",
        rows=False,
    ),
    Scenario(
        "rows_without_key",
        ("create table t (a int, b text)", FULL),
        (
            "insert into t values (1, 'x'), (1, 'x'), (2, null), (null, null)",
            "update t set b = 'y' where ctid = (select min(ctid) from t)",
            "delete from t where a = 1",
            "update t set a = 3 where a is null",
        ),
        "I4 U2 D2",
    ),
    Scenario(
        "inserts_without_identity",
        ("create table t (a int, b text)",),
        ("insert into t values (1, 'x'), (1, 'x')", "insert into t select 2, null"),
        "I3",
    ),
    Scenario(
        "user_types",
        (
            "create type mood as enum ('sad', 'it''s ok', 'happy')",
            "create type pair as (a int, b text)",
            "create domain positive as int check (value > 0)",
            "create domain pairs as pair[]",
            "create type span as range (subtype = float8)",
            """create table t (id int primary key, m mood, p pair, d positive, ds pairs, s span, ms mood[], n int[][],
                 r int4range, mr int4multirange)""",
            FULL,
        ),
        (
            """insert into t values (1, 'it''s ok', '(1,"a,b")', 5, '{"(1,x)",NULL}', '[1.5,2.5)',
                 '{sad,"it''s ok"}', '{{1,2},{3,null}}', '[1,5)', '{[1,2),[4,5)}'),
               (2, null, null, null, null, null, null, null, null, null)""",
            "update t set m = 'happy', p = '(,)', d = 7, s = 'empty', n = '{}' where id = 1",
            "alter type mood add value 'new' after 'sad'",
            "update t set m = 'new' where id = 2",
            "delete from t",
        ),
        "I2 U2 D2",
    ),
    Scenario(
        "special_values",
        (
            """create table t (id int primary key, n numeric, m numeric(12, 3), f float8, g float4, d date,
                 ts timestamp,
                 tz timestamptz, ti time, tt timetz, iv interval, mo money, b bytea, bt bit(3), j json, jb jsonb)""",
            FULL,
        ),
        (
            """insert into t values (1, 'NaN', 1.5, '-Infinity', 'NaN', 'infinity', '-infinity', 'infinity', '24:00',
                 '24:00+15:59', '-1 year 2 days -03:04:05.678', '-12.34', '\\x00ff', '101', '{"a" : 1, "a":2}', '{}'),
               (2, 'Infinity', -0.001, '-0', 1e-45, '0001-01-01 BC', '1500-02-28', '294276-12-31 23:59:59.999999Z',
                 '00:00', '00:00-15:59', '0', '0', '', '000', 'null', '"\\u00e9"')""",
            "insert into t (id, n, m, f, g) values (3, 1e50, 999999999.999, 1.7976931348623157e308, 3.4e38)",
            "update t set f = f, n = n, j = '[1,  2]'",
            "delete from t where f = '-0'",
        ),
        "I3 U3 D1",
    ),
    Scenario(
        "settings_of_sessions",
        ("create table t (id int primary key, d date, tz timestamptz, f float8, b bytea, iv interval, m money)", FULL),
        (
            "set datestyle = 'SQL, DMY'",
            "set timezone = 'Asia/Kolkata'",
            "set extra_float_digits = -10",
            "set bytea_output = escape",
            "set intervalstyle = sql_standard",
            "insert into t values (1, '28/02/2024', '28/02/2024 12:00', 0.1 + 0.2, '\\x00ff', '1 2:03:04', 1.5)",
            "set datestyle = 'German'",
            "set timezone = 'America/Caracas'",
            "update t set tz = tz + interval '1 day', f = 1 / 3.0::float8",
            "set datestyle = 'Postgres, MDY'",
            "delete from t",
        ),
        "I1 U1 D1",
    ),
    Scenario(
        "encodings_of_clients",
        ("create table t (id int primary key, v text, j jsonb, a varchar(3)[])", FULL),
        (
            "insert into t values (1, 'aé€𝄞', '{\"ключ\": \"значение\"}', '{ä€𝄞}')",
            "2: set client_encoding = 'LATIN1'",
            "2: insert into t values (2, 'ÿé¡', '{\"é\": 1}', '{é}')",
            "3: set client_encoding = 'WIN1252'",
            "3: update t set v = '€ž' where id = 2",
            "4: set client_encoding = 'EUC_JP'",
            "4: insert into t values (3, '日本語', '\"日本\"', '{日,本}')",
            "2: delete from t where id = 2",
        ),
        "I3 U1 D1",
    ),
    Scenario(
        "quoted_names",
        ('create table "Studly ""Caps"".t" ("Id.x" int primary key, "select" text, "ünï" int, "a b" int)',),
        (
            'insert into "Studly ""Caps"".t" values (1, \'a\', 2, 3)',
            'update "Studly ""Caps"".t" set "Id.x" = 2, "a b" = null',
            'delete from "Studly ""Caps"".t"',
        ),
        "I1 U1 D1",
    ),
    Scenario(
        "partitions_and_moves",
        (
            "create table t (id int, region int, v text, primary key (id, region)) partition by list (region)",
            "create table t_1 partition of t for values in (1)",
            "create table t_2 partition of t for values in (2) partition by range (id)",
            "create table t_2_low (v text, region int not null, gone int, id int not null)",
            "alter table t_2_low drop gone",
            "alter table t_2 attach partition t_2_low for values from (0) to (100)",
            "create table t_2_high partition of t_2 default",
        ),
        (
            "insert into t values (1, 1, 'a'), (2, 2, 'b'), (200, 2, 'c')",
            "update t set v = v || '!'",
            "update t set region = 2 where id = 1",
            "update t set id = 300 where id = 2",
            "insert into t_1 values (5, 1, 'leaf')",
            "update t_2_low set v = 'leaf'",
            "delete from t where region = 2",
        ),
        "I6 U4 D5",
    ),
    Scenario(
        "partition_truncated_at_its_root",
        (
            "create table t (id int primary key) partition by range (id)",
            "create table t_1 partition of t for values from (0) to (10)",
            "create table t_2 partition of t for values from (10) to (20)",
        ),
        ("insert into t values (1), (11)", "truncate t", "insert into t values (2)"),
        "I3 T1",
    ),
    Scenario(
        "many_tables_in_one_transaction",
        tuple(f"create table t{i} (id int primary key, v text)" for i in range(12)),
        ("begin", *(f"insert into t{i} values ({j}, 'v')" for j in range(2) for i in range(12)), "commit"),
        "I24",
    ),
    Scenario(
        "large_transaction",
        (T,),
        (
            "begin",
            "insert into t select i, 'row ' || i from generate_series(1, 1000) i",
            "savepoint s",
            "update t set v = 'undone'",
            "rollback to s",
            "update t set v = 'x' where id % 10 = 0",
            "delete from t where id % 20 = 0",
            "commit",
        ),
        "I1000 U100 D50",
    ),
    Scenario(
        "triggers_of_the_application",
        (
            T,
            "create table log (n int generated always as identity primary key, what text)",
            """create function before() returns trigger language plpgsql as $$ begin
                 if new.v = 'skip' then return null; end if; new.v := upper(new.v); return new; end $$""",
            """create function after() returns trigger language plpgsql security definer as $$ begin
                 insert into triggers_of_the_application.log (what) values (tg_op || coalesce(new.v, '-'));
                 return null; end $$""",
            "create trigger before before insert or update on t for each row execute function before()",
            "create trigger zafter after insert or update or delete on t for each row execute function after()",
        ),
        (
            "insert into t values (1, 'a'), (2, 'skip'), (3, 'c')",
            "update t set v = case when id = 1 then 'skip' else 'd' end",
            "delete from t",
        ),
        "I7 U1 D2",
    ),
    Scenario(
        "foreign_keys",
        (
            T,
            "create table cascaded (id int primary key, t_id int references t on delete cascade on update cascade)",
            "create table emptied (id int primary key, t_id int references t on delete set null on update cascade)",
            "create table late (id int primary key, t_id int references t deferrable initially deferred)",
        ),
        (
            "insert into t values (1, 'a'), (2, 'b')",
            "insert into cascaded values (1, 1), (2, 1), (3, 2)",
            "insert into emptied values (1, 1), (2, 2)",
            "update t set id = 10 where id = 1",
            "delete from t where id = 10",
            "begin",
            "insert into late values (1, 5)",
            "insert into t values (5, 'later')",
            "commit",
        ),
        "I9 U5 D3",
    ),
    Scenario(
        "exceptions_in_functions",
        (T,),
        (
            """do $$ begin
                 insert into t values (1, 'a');
                 begin insert into t values (2, 'b'), (1, 'twice'); exception when unique_violation then
                   insert into t values (3, 'handled'); end;
                 for i in 10..14 loop
                   begin insert into t values (i, 'x'); if i % 2 = 0 then raise 'no'; end if;
                   exception when others then null; end;
                 end loop; end $$""",
        ),
        "I4",
    ),
    Scenario(
        "procedure_that_commits",
        (T,),
        (
            """do $$ begin for i in 1..6 loop insert into t values (i, 'x');
                 if i % 3 = 0 then rollback; else commit; end if; end loop; end $$""",
        ),
        "I4",
    ),
    Scenario(
        "forms_of_statements",
        (T, "create table s (id int primary key, v text)", "create view seen as select id, v from t where id < 100"),
        (
            "insert into s values (1, 'one'), (2, 'two')",
            "with moved as (delete from s where id = 1 returning *) insert into t select * from moved",
            "insert into seen values (50, 'view')",
            "update seen set v = 'by view' where id = 50",
            "update t set v = s.v from s where s.id = 2 and t.id = 1",
            "delete from t using s where t.v = s.v",
            "begin",
            "declare c cursor for select * from t for update",
            "fetch c",
            "update t set v = 'current' where current of c",
            "commit",
        ),
        "I4 U3 D2",
    ),
    Scenario(
        "changes_that_change_nothing",
        (T,),
        (
            "insert into t values (1, 'a')",
            "update t set v = v",
            "begin",
            "select * from t for update",
            "commit",
            "update t set v = 'b' where id = 99",
            "begin",
            "insert into t values (2, 'gone')",
            "rollback",
            "create temp table scratch as select * from t",
            "insert into scratch values (7, 'temp')",
            "drop table scratch",
        ),
        "I1 U1",
    ),
    Scenario(
        "identity_by_an_index",
        (
            "create table t (id int primary key, code text not null unique, v int)",
            "alter table t replica identity using index t_code_key",
        ),
        ("insert into t values (1, 'a', 1), (2, 'b', 2)", "update t set v = 3", "update t set v = 4 where code = 'b'"),
        "I2 U3",
    ),
    Scenario(
        "defaults_and_identities",
        ("create table t (id int generated by default as identity primary key, a int default 7, b date, c serial)",),
        ("insert into t default values", "insert into t (id, a) values (50, default)", "update t set a = default"),
        "I2 U2",
    ),
    Scenario(
        "messages_among_changes",
        (T,),
        (
            "begin",
            "insert into t values (1, 'a')",
            "select gdq.insert_event('q', 'note', '{}'), pg_logical_emit_message(true, 'note', 'x')",
            "insert into t values (2, 'b')",
            "commit",
            "begin",
            "select gdq.insert_event('q', 'note', '{}'), pg_logical_emit_message(true, 'note', 'gone')",
            "rollback",
        ),
        "I2",
    ),
    Scenario(
        "same_key_again_and_again",
        (T,),
        (
            "begin",
            *["insert into t values (1, 'a')", "update t set v = v || '!'", "delete from t where id = 1"] * 5,
            "insert into t values (1, 'last')",
            "commit",
        ),
        "I6 U5 D5",
    ),
    Scenario(
        "key_column_renamed",
        (T,),
        (
            "insert into t values (1, 'a'), (2, 'b')",
            "alter table t rename id to number",
            "update t set v = 'c' where number = 1",
            "delete from t where number = 2",
        ),
        "I2 U1 D1",
        rows=False,
    ),
    Scenario(
        "inherited_tables",
        (T, "create table child (w int, primary key (id)) inherits (t)"),
        (
            "insert into t values (1, 'parent')",
            "insert into child values (2, 'child', 3)",
            "update t set v = v || '!'",
            "update only t set v = 'only'",
            "delete from t where id = 2",
        ),
        "I2 U3 D1",
        rows=False,
    ),
    Scenario(
        "deferred_keys",
        ("create table t (id int primary key deferrable initially deferred, v text)", FULL),
        (
            "insert into t values (1, 'a'), (2, 'b')",
            "begin",
            "update t set id = 3 - id",
            "commit",
            "delete from t where id = 1",
        ),
        "I2 U2 D1",
        rows=False,
    ),
)
