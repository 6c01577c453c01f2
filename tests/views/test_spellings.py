"""Groups whose equal values are written differently show a spelling that some row has."""

from __future__ import annotations

import random

import pytest

from gdq.consumers.refresh.refresher import Refresher
from tests.support.server import Database
from tests.support.spark import make_shop

TABLE = "create table price (id int primary key, amount numeric, took interval, ratio float8, tags text)"
QUERIES = {
    "scales": "select scale(amount) as scale, count(*) as n, sum(id) as ids from price group by amount",
    "texts": "select took::text as took, ratio::text as ratio, count(*) as n from price group by took, ratio",
    "inner": "select amount::text as amount, count(*) as n from (select id, amount from price) as p group by amount",
    "first": "select amount::text as amount, count(*) from price group by amount order by 2 desc, price.amount limit 1",
    "lists": "select tags, count(*) from (select string_to_array(tags, ',') as tags from price) as p group by tags",
}
# After each the rows of a group have one spelling, so the query can give no other.
STEPS = (
    "delete from price where id = 1",
    "insert into price values (4, 7, '1 day', 2, 'a,b'), (5, 7.00, '24:00', 2, 'b'); delete from price where id = 4",
    "update price set amount = 1.000, took = '1 day', ratio = '-0', tags = 'a' where id = 2",
    "delete from price where id = 5",
)


@pytest.mark.long
@pytest.mark.server
def test_groups_show_a_spelling_that_is_there(db: Database) -> None:
    rows = "(1, 1.0, '1 day', '-0', 'a,b'), (2, 1.00, '24:00', '0', 'a,b'), (3, 2.5, '2 days', '1', null)"
    for shop in make_shop(db, [TABLE, f"insert into price values {rows}"]):
        shop.capture("price")
        for name, query in QUERIES.items():
            shop.view(name, query, engine="postgres")
        with Refresher(db.dsn) as refresher:
            for name in QUERIES:
                refresher.refresh(name)
            for step in STEPS:
                shop.execute(step)
                for name, query in QUERIES.items():
                    result = refresher.refresh(name)
                    assert result.action == "delta", (name, step, result.reason)
                    found = shop.execute(f"select t::text from public.{name} as t order by 1")
                    assert found == shop.execute(f"select q::text from ({query}) as q order by 1"), (name, step)


SPELLED = {
    "v_union": "select took, doc from a union select took, doc from b",
    "v_from": "select d.took, x.id from (select distinct took from a) d join b x on x.k = 1",
    "v_doc": "select d.doc, x.id from (select distinct doc from a) d join b x on x.k = 1",
    "v_left": "select a.id, b.doc from a left join (select distinct took, doc from b) b on b.took = a.took",
    "v_distinct": "select distinct doc, took from a",
}


@pytest.mark.long
def test_another_spelling_is_no_foreign_change(db: Database) -> None:
    """Rows that went are found by their values when the target shows another spelling: no full load is paid."""
    draw = random.Random(5)
    columns = "(id int primary key, k int, took interval, doc jsonb)"
    for shop in make_shop(db, [f"create table a {columns}", f"create table b {columns}"]):
        shop.capture("a")
        shop.capture("b")
        for name, query in SPELLED.items():
            shop.view(name, query, engine="postgres")
        with Refresher(db.dsn) as refresher:
            shop.check(refresher, SPELLED)
            for _ in range(25):
                for _ in range(draw.randint(1, 4)):
                    table, number = draw.choice("ab"), draw.randint(1, 9)
                    took = draw.choice(("'1 day'", "'24:00'", "'2 days'", "'1 day 24:00'", "null"))
                    doc = draw.choice(("'1'", "'1.0'", "'[1.00]'", "'[1]'", "null"))
                    shop.execute(f"delete from {table} where id = {number}")
                    if draw.random() < 0.7:
                        shop.execute(f"insert into {table} values ({number}, {number % 2}, {took}, {doc})")
                results = shop.check(refresher, SPELLED)
                assert {result.action for result in results.values()} <= {"delta", "none"}, results


# PostgreSQL prints each of these in more than one way, or by another name than the user wrote.
PRINTED = {
    "in_list": "select id, tags from price where code in ('a', 'b')",
    "not_in": "select id from price where code not in ('a', 'b')",
    "case_in": "select id, case when code in ('a', 'c') then 1 else 0 end as n from price",
    "by_code": "select code, count(*) as n from price group by code having code in ('a', 'b')",
    "substring_call": "select id, substring(tags, 1, 2) as part from price",
    "substring_from": "select id, substring(tags from 2 for 1) as part from price",
    "substr": "select id, substr(tags, 2) as part from price",
    "left_right": "select id, left(tags, 1) as l, right(tags, 1) as r from price",
    "overlay": "select id, overlay(tags placing 'x' from 1 for 1) as o, position('a' in tags) as p from price",
    "trim": "select id, trim(both 'a' from tags) as t, btrim(tags, 'b') as b, ltrim(tags, 'a') as l from price",
    "strings": "select id, strpos(tags, 'b') as p, char_length(tags) as n, lpad(tags, 5, '-') as q, tags ~ 'b' as r, "
    "split_part(tags, 'b', 1) as s, initcap(tags) as i, ascii(tags) as a, repeat(tags, 2) as t from price",
    "numbers": "select id, ceil(id / 2.0) as c, floor(id / 2.0) as f, power(id, 2) as p, log(id) as l, sign(id) as s, "
    "trunc(id / 3.0, 2) as t, div(id, 2) as d, id % 2 as m, round(id / 3.0, 1) as r, abs(-id) as a from price",
    "bytes": "select id, decode(md5(code), 'hex') as b, encode(sha256(tags::bytea), 'hex') as h from price",
    "arrays": "select id, array_length(string_to_array(tags, 'b'), 1) as n, array_append(array[id], 1) as a, "
    "array_position(array[code::text], 'a') as p from price",
    "documents": "select id, jsonb_build_object('a', id) #>> '{a}' as a, to_jsonb(tags) as j, "
    "jsonb_extract_path_text('{\"k\": 1}', 'k') as k from price",
    "dates": "select id, date_part('year', '2024-02-29'::date + id) as y, make_date(2024, 2, id) as d, "
    "extract(dow from '2024-02-29'::date + id) as w, '2024-02-29'::timestamp + make_interval(days => id) as t "
    "from price",
    "aggregates": "select code, stddev_samp(id) as s, var_pop(id) as v, bit_or(id) as b, every(id > 0) as e, "
    "bool_or(id > 2) as o, array_agg(id order by id) as a, string_agg(tags, ',' order by id) as t "
    "from price group by code",
}


@pytest.mark.long
def test_text_that_is_printed_in_two_ways_is_followed(db: Database) -> None:
    setup = "create table price (id int primary key, code varchar(8), tags text)"
    for shop in make_shop(db, [setup, "insert into price values (1, 'a', 'abc'), (2, 'c', 'bca'), (3, null, null)"]):
        shop.capture("price")
        for name, query in PRINTED.items():
            shop.view(name, query, engine="postgres")
        with Refresher(db.dsn) as refresher:
            shop.check(refresher, PRINTED)
            shop.execute(
                "update price set code = 'b', tags = 'aab' where id = 2; insert into price values (4, 'a', 'a')"
            )
            results = shop.check(refresher, PRINTED)
            assert {result.action for result in results.values()} == {"delta"}, results
