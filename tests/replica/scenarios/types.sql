-- Types of values and of keys. scenario.py says how this is read.

--# types_of_users
-- 002_types
--@ both
create type mood as enum ('sad', 'ok', 'happy');
create domain posint as int check (value > 0);
create type pair as (a int, b text);
create domain pairdom as pair check ((value).a > 0);
create domain moods as mood[] check (cardinality(value) < 5);
create type span as range (subtype = float8);
create table t (id int primary key, m mood, ms mood[], p pair, ps pair[], d posint, pd pairdom, md moods, s span, ss
    span[], ds posint[]);
--@ round
insert into t values (1, 'sad', '{sad,ok}', (1, 'a"b'), array[(1, 'x, y'), (2, null)]::pair[], 3, (1, 'q'),
    '{happy}', '[1.5,2.5)', '{"[1,2]",empty}', '{1,2}'), (3, 'ok', '{}', (null, null), '{}', 1, (5, null), '{}',
    'empty', '{}', '{}');
insert into t values (2);
--@ round
update t set m = 'happy', p.b = 'changed', s = '(,)' where id = 1;
update t set ps[2].a = 9, md = md || 'ok'::mood where id = 1;
delete from t where id = 3;
alter type mood add value 'great' before 'happy';

--# types_of_postgresql
-- 002_types, wal2json specialvalue
--@ both
create table t (id bigint primary key, b bit varying, x text, i inet, m macaddr8, u uuid, ts tsvector, q tsquery, r
    int4range, mr nummultirange, tr tstzrange, p path, c circle, n numeric, f real, iv interval, ti timetz, d date,
    o oid, l pg_lsn, ch "char", na name, bp char(7), j jsonpath, nn numeric[], two int[][]);
--@ round
insert into t values (1, b'101', '<a/>', '10.0.0.1/8', '08:00:2b:01:02:03:04:05', gen_random_uuid(), 'a b:3A c',
    'a & !b', '[1,5)', '{[1.0,2.00],(5,)}', '[2026-01-01 0:00+05,infinity)', '[(1,2),(3,4)]', '<(1,2),3>', 'NaN',
    '-infinity', '-1 mon +2 days -03:00:01.5', '24:00:00+05:30', 'infinity', 4294967295, 'FF/0', 'x', 'n', 'bp',
    '$.a[*] ? (@ > 1)', '{1.0,NaN,NULL}', '{{1,2},{3,4}}');
insert into t values (2);
insert into t (id, n, f, d) values (3, 'infinity', 'nan', '4713-01-01 BC');
insert into t (id, n, ti, d) values (4, 1e-100, '00:00:00-15:59', '5874897-12-31');
--@ round
update t set iv = '30 days', n = 1.10, two = '[-1:0]={7,8}' where id = 1;
update t set n = 1.1 where id = 1;
delete from t where id = 3;
update t set iv = '1 mon' where id = 1;

--# keys_of_many_types
--@ both
create type mood as enum ('sad', 'ok');
create domain code as text;
create table a (id mood primary key, n int);
create table b (id code, d date, n int, primary key (d, id));
create table c (id numeric primary key, n int);
create table d (id char(5) primary key, n int);
create table e (id timestamptz primary key, n int);
create table f (id bytea primary key, n int);
create table g (id int4range primary key, n int);
create table h (id text[] primary key, n int);
create table i (id float8 primary key, n int);
create table j (id inet primary key, n int);
create type pair as (x int, y text);
create table k (id pair primary key, n int);
create table l (id interval primary key, n int);
create table m (id jsonb primary key, n int);
create table o (id boolean primary key, n int);
create table p (id xid8 primary key, n int);
--@ round
insert into a values ('sad', 1), ('ok', 2);
insert into b values ('x', '2026-01-01', 1), ('y', 'infinity', 2);
insert into c values (1.50, 1), ('NaN', 2);
insert into d values ('a', 1), ('b', 2);
insert into e values ('2026-03-29 02:30+01', 1), ('-infinity', 2);
insert into f values ('\x00', 1), ('', 2);
insert into g values ('[1,3)', 1), ('empty', 2);
insert into h values ('{a,NULL}', 1), ('{}', 2);
insert into i values ('-0', 1), (1e-300, 2);
insert into j values ('::1', 1), ('10.0.0.0/8', 2);
insert into k values ((1, 'a'), 1), ((2, null), 2);
insert into l values ('1 mon', 1), ('29 days', 2);
insert into m values ('{"a": 1.0}', 1), ('null', 2);
insert into o values (true, 1), (false, 2);
insert into p values ('1', 1), ('2', 2);
--@ round
update a set n = n + 1 where n = 1;
update b set n = n + 1 where n = 1;
update c set n = n + 1 where n = 1;
update d set n = n + 1 where n = 1;
update e set n = n + 1 where n = 1;
update f set n = n + 1 where n = 1;
update g set n = n + 1 where n = 1;
update h set n = n + 1 where n = 1;
update i set n = n + 1 where n = 1;
update j set n = n + 1 where n = 1;
update k set n = n + 1 where n = 1;
update l set n = n + 1 where n = 1;
update m set n = n + 1 where n = 1;
update o set n = n + 1 where n = 1;
update p set n = n + 1 where n = 1;
--@ round
delete from b where ctid = (select max(ctid) from b);
delete from c where ctid = (select max(ctid) from c);
delete from d where ctid = (select max(ctid) from d);
delete from e where ctid = (select max(ctid) from e);
delete from f where ctid = (select max(ctid) from f);
delete from h where ctid = (select max(ctid) from h);
delete from i where ctid = (select max(ctid) from i);
delete from j where ctid = (select max(ctid) from j);
delete from l where ctid = (select max(ctid) from l);
update i set id = 0 where n < 3;
update c set id = 1.5 where id = 1.5;
update l set id = '30 days' where id = '1 mon';
update m set id = '{"a": 1}' where id <> 'null';
update k set id.y = 'b';

--# blanks_at_the_end
--@ source
create table t (id int primary key, a bpchar, b char(5), c char(5));
--@ target
create table t (id int primary key, a bpchar, b char(5), c text);
--@ round
insert into t values (1, 'x  ', 'x', 'x'), (2, ' ', '', '');
--@ round
update t set a = 'y   ', b = 'yy', c = 'yy' where id = 1;
insert into t values (3, 'z  ', 'z', 'z');

--# extension_types
-- 002_types: hstore, and a key of citext
--@ needs: (select count(*) = 2 from pg_extension where extname in ('citext', 'hstore'))
--@ both
create table t (id public.citext primary key, h public.hstore, hs public.hstore[]);
--@ round
insert into t values ('Abc', 'a=>1,b=>NULL', '{"x=>1"}'), ('d', '', null);
--@ round
update t set h = h || 'c=>3' where id = 'abc';
update t set id = 'ABC' where id = 'abc';
delete from t where id = 'D';
insert into t values ('D', null, null);
--@ round
update t set id = 'abc' where id = 'abc';
update t set h = null;

--# toasted_values
-- test_decoding toast, 100_bugs
--@ both
create table t (id int primary key, big text, other text, n int);
alter table t alter big set storage external;
--@ source
create function long(int, int) returns text language sql as $$ select string_agg(md5((i * $1)::text), '') from
    generate_series(1, $2) i $$;
--@ round
insert into t values (1, long(1, 3000), long(2, 200), 1), (2, long(3, 10), long(4, 9000), 1);
--@ round
update t set n = 2;
update t set n = 3, other = 'short' where id = 2;
update t set id = 10 where id = 1;
update t set big = big || 'x' where id = 10;
delete from t where id = 2;

--# odd_names
-- Slony testtabnames: quotes, dots, StudlyCaps
--@ both
create table "Studly.Caps" ("select" int primary key, "a""b" text, "c.d" int, "%s" text, "é ü" int, "new" int,
  "{}" int);
--@ round
insert into "Studly.Caps" values (1, 'q''\"%s', 2, '%(x)s {}', 3, 4);
insert into "Studly.Caps" values (2);
--@ round
update "Studly.Caps" set "a""b" = null, "%s" = '%%' where "select" = 1;
delete from "Studly.Caps" where "select" = 2;
