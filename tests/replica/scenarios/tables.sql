-- Partitions, rewrites and DDL. scenario.py says how this is read.

--# partitioned_in_the_source
-- 013_partition
--@ plain: t1 t2 t21 t2d td
--@ source
create table t (id int, k int, a text, primary key (id, k)) partition by list (k);
create table t1 partition of t for values in (1, 2);
create table t2 partition of t for values in (3) partition by range (id);
create table t21 partition of t2 for values from (0) to (100);
create table t2d partition of t2 default;
create table td (a text, k int not null, id int not null, gone int);
alter table td drop gone;
alter table t attach partition td default;
--@ target
create table t (id int, k int, a text, primary key (id, k));
--@ round
insert into t select i, i % 5, 'a' || i from generate_series(1, 200) i;
--@ round
update t set k = k + 1 where id < 20;
update t set id = id + 1000 where id > 180;
delete from t where k = 3 and id > 100;
update t1 set a = 'leaf';
insert into t21 values (0, 3, 'leaf');
--@ round
create table t9 partition of t for values in (99);
insert into t values (1, 99, 'new');
truncate t;
insert into t values (1, 1, 'again'), (2, 3, 'x'), (4, 77, 'd');

--# partitioned_in_the_target
--@ plain: ta tb tb0 tb1
--@ source
create table t (id int, k int, a text, primary key (id, k));
--@ target
create table t (id int, k int, a text, primary key (id, k)) partition by range (id);
create table ta (a text, id int not null, k int not null);
alter table t attach partition ta for values from (minvalue) to (50);
create table tb partition of t for values from (50) to (maxvalue) partition by hash (k);
create table tb0 partition of tb for values with (modulus 2, remainder 0);
create table tb1 partition of tb for values with (modulus 2, remainder 1);
--@ round
insert into t select i, i, 'a' from generate_series(1, 100) i;
--@ round
update t set id = 101 - id;
update t set a = 'b' where k < 10;
delete from t where k between 40 and 60;
--@ round
truncate t;
insert into t values (1, 1, 'x');

--# partitioned_differently
--@ plain: p0 p1 h0 h1 px
--@ source
create table t (id int primary key, a text) partition by range (id);
create table p0 partition of t for values from (0) to (50);
create table p1 partition of t for values from (50) to (1000);
--@ target
create table t (id int primary key, a text) partition by hash (id);
create table h0 partition of t for values with (modulus 2, remainder 0);
create table h1 partition of t for values with (modulus 2, remainder 1);
--@ round
insert into t select i, 'a' from generate_series(0, 99) i;
--@ round
update t set id = id + 50 where id between 0 and 9 and false;
update t set id = id + 100 where id < 30;
delete from t where id % 7 = 0;
--@ round
alter table t detach partition p0;
create table px partition of t for values from (0) to (50);
insert into t values (3, 'px');

--# inherited
-- Slony testinherit
--@ queue: its tables have no children
--@ both
create table t (id int primary key, a text);
create table child (b int, primary key (id)) inherits (t);
--@ round
insert into t values (1, 'p');
insert into child values (2, 'c', 5), (1, 'twice', 6);
--@ round
update t set a = 'both';
delete from only t where id = 1;
update only t set a = 'x';
insert into t values (3, 'p');
--@ round
truncate only t;
insert into t values (4, 'p');

--# rewritten_in_between
-- VACUUM FULL, CLUSTER, tablespace moves, fillfactor, toast
--@ both
create table t (id int primary key, a text, b int);
--@ round
insert into t select i, 'a', i from generate_series(1, 50) i;
delete from t where id < 10;
--@ round
update t set b = 0 where id < 20;
vacuum full t;
update t set b = 1 where id < 15;
cluster t using t_pkey;
insert into t values (99, 'z', 1);
alter table t set (fillfactor = 50);
reindex table t;
update t set a = 'u' where id = 99;
delete from t where id = 20;
analyze t;

--# columns_change_in_a_transaction
-- spec concurrent_ddl_dml, 017_stream_ddl
--@ both
create table t (id int primary key, a text, b int);
--@ round
insert into t values (1, 'a', 1), (2, 'b', 2);
--@ round
begin; update t set a = 'x' where id = 1; alter table t add c int; update t set c = 5 where id = 1; alter table t
    drop b; insert into t values (3, 'n', 6); alter table t rename a to title; update t set title = title || '!';
    commit;
begin; alter table t drop title; insert into t values (8, 8); rollback;
alter table t add b text, add d numeric(5, 1);
insert into t values (4, 'q', 7, 'again', 1.5);
--@ round
alter table t alter d type numeric(7, 1);
insert into t values (5, 'w', 8, 'z', 10000.5);
alter table t alter c type bigint;
update t set c = 10000000000 where id = 5;

--# key_changes
-- Slony testddl: the primary key's column is added, dropped, renamed
--@ both
create table t (id int primary key, a int not null unique, b text);
--@ round
insert into t values (1, 10, 'a'), (2, 20, 'b');
--@ round
alter table t rename id to number;
update t set b = 'c' where number = 1;
update t set number = 3 where number = 2;
insert into t values (4, 40, 'd');

--# constraints_come_and_go
--@ both
create table t (id int primary key, a int, b text);
--@ round
insert into t values (1, 1, 'a');
--@ round
alter table t alter a set default 5, alter b set not null;
insert into t (id, b) values (2, 'x');
alter table t add check (a < 100);
alter table t add unique (a);
update t set a = 6 where id = 2;
alter table t alter b drop not null, alter a drop default;
insert into t values (3, null, null);
alter table t alter a set statistics 10;
comment on table t is 'x';

--# views_over_tables
-- 009_matviews
--@ both
create table t (id int primary key, a int);
create materialized view m as select a from t;
create view v as select * from t;
--@ round
insert into t values (1, 1);
refresh materialized view m;
--@ round
update v set a = 2;
begin; create materialized view m2 as select * from t; insert into t values (2, 2); commit;
insert into v values (3, 3);

--# functions_in_indexes
-- 100_bugs: an index's function that needs its own search_path
--@ plain: lookup
--@ both
create table t (id int primary key, a int);
create table lookup (n int);
insert into lookup values (7);
create function f(int) returns int immutable language plpgsql as $$ begin return $1 + (select n from lookup); end
    $$;
alter function f set search_path = functions_in_indexes;
create index on t (f(a));
alter table t add check (f(a) > 0);
--@ round
insert into t values (1, 1);
--@ round
update t set a = 2;
insert into t values (2, 5);
