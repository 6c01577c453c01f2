"""Expressions as people write them, of which the server's catalog says that every refresh gives them the same value."""

from __future__ import annotations

import random
from collections.abc import Iterator

import pytest

from gdq.consumers.refresh.refresher import Refresher
from tests.support.server import Database
from tests.support.spark import QUEUE, Shop, make_shop

pytestmark = pytest.mark.server

STATEMENTS = [
    # refreshes run in sessions with another zone
    "set timezone = 'America/New_York'",
    "create type mood as enum ('sad', 'calm', 'glad')",
    "create domain word as varchar(10) check (value <> 'z')",
    "create domain small as int",
    "create type pair as (x int, at timestamptz)",
    """create table x (id int primary key, i int, t text, vc varchar(10), ch char(3), w word, s small, m mood, d date,
                       ts timestamp, tz timestamptz, n numeric(10,2), iv interval, words varchar[], moods mood[],
                       cash money, p pair)""",
    f"select gdq.add_table('{QUEUE}', 'x')",
]
EXPRESSIONS = """
    vc in ('a', 'b') | vc not in ('a', 'b') | vc = any (array['a', 'b']) | vc = any ('{a,b}'::varchar[])
    vc = any (array['a', 'b']::varchar[]) | ch in ('a', 'bc') | ch = any (array['a', 'b']) | ch || vc | ch::text
    w in ('a', 'b') | w || 'x' | s in (1, 2) | s + 1 | m in ('sad', 'calm') | m = any (array['sad', 'glad']::mood[])
    m::text | case vc when 'a' then 1 when 'b' then 2 end | case ch when 'a' then 1 else 2 end | 'a' = any (words)
    (vc, i) in (('a', 1), ('b', 2)) | vc::char(2) | t::varchar(1) | coalesce(vc, ch, w, 'none') | vc ^@ 'a'
    n ^ 2 | |/ abs(n)::float8 | d in ('2024-01-01', '2024-06-01') | date_trunc('month', d)
    date_trunc('month', d)::date | date_trunc('day', tz) | date_trunc('hour', tz, 'Asia/Tokyo')
    tz::date | tz::timestamp | extract(hour from tz)
    date_part('dow', tz) | tz + interval '1 day' | tz - interval '1 month' | tz > d | tz >= ts | age(d, '2024-01-01')
    ts::timestamptz | (d, d + 1) overlaps (date '2024-01-01', date '2024-02-01') | tz in ('2024-01-01', '2024-06-01')
    to_char(d, 'YYYY-MM') | to_char(tz, 'YYYY-MM-DD HH24') | to_char(iv, 'HH24:MI') | to_char(i, 'FM000')
    to_date('2024-02-' || (1 + i % 20), 'YYYY-MM-DD') | to_timestamp('2024 03', 'YYYY MM') | to_number('1' || i, '99')
    concat(t, i, d, tz, m, w, p, cash) | concat_ws(' ', vc, ch, moods) | format('%s %s %L', m, tz, w) | t || m | t || tz
    array_to_string(moods, ',') | jsonb_build_object('m', m, 'tz', tz, 's', s, 'p', p) | to_jsonb(m) | to_jsonb(moods)
    row_to_json(row(i, tz, m))::text | to_jsonb(p) | cash::numeric | quote_nullable(tz)
"""
QUERIES = {
    "v_month": "select date_trunc('month', d)::date as month, count(*) as n, sum(n) as total from x group by 1",
    "v_day": "select tz::date as day, to_char(tz, 'HH24') as hour, count(*) as n from x group by 1, 2",
    "v_words": "select vc, count(*) filter (where vc in ('a', 'b')) as n, sum(n) as n2 from x "
    "where ch in ('a', 'b', 'c') or w = any (array['a', 'b']) group by vc having vc in ('a', 'b', 'c')",
    "v_lists": "select m, jsonb_agg(tz order by id) as times, json_agg(row(i, m) order by id)::text as rows from x "
    "group by m",
    "v_days": "select g::date as day, count(x.id) as n from generate_series('2024-01-01'::timestamptz, '2024-01-20', "
    "'1 day') g left join x on x.tz::date = g::date group by 1",
}  # fmt: skip


@pytest.fixture
def shop(db: Database) -> Iterator[Shop]:
    yield from make_shop(db, STATEMENTS)


def random_row(draw: random.Random, number: int) -> str:
    """A row of the table as VALUES."""
    word = draw.choice(("'a'", "'b'", "'c'", "null"))
    moment = f"timestamp '2024-01-01' + {draw.randint(0, 400)} * interval '1 hour'"
    parts = [
        str(number), str(draw.randint(0, 9)), "'t'", word, draw.choice(("'a'", "'b'", "'bc'", "null")), word,
        str(draw.randint(0, 3)), draw.choice(("'sad'", "'calm'", "'glad'", "null")), f"({moment})::date", moment,
        f"({moment})::timestamptz", str(draw.randint(0, 99)), f"{draw.randint(1, 40)} * interval '1 hour'",
        "array['a', 'x']", "array['sad', 'glad']::mood[]", "'1.5'::money", f"row(1, {moment})::pair",
    ]  # fmt: skip
    return f"({', '.join(parts)})"


def churn(shop: Shop, draw: random.Random) -> None:
    """Add, change and remove some rows."""
    for _ in range(draw.randint(1, 6)):
        number = draw.randint(1, 25)
        shop.execute(f"delete from x where id = {number}")
        if draw.random() < 0.8:
            shop.execute(f"insert into x values {random_row(draw, number)}")


def test_what_the_catalog_says_is_fixed(shop: Shop) -> None:
    listed = [one.strip() for line in EXPRESSIONS.strip().splitlines() for one in line.split(" | ")]
    shown = ", ".join(f"{expression} as c{n}" for n, expression in enumerate(listed))
    views = QUERIES | {"v_all": f"select id, {shown} from x where vc in ('a', 'b', 'c') or vc is null"}
    draw = random.Random(4)
    churn(shop, draw)
    for name, query in views.items():
        shop.view(name, query, engine="postgres")
    with Refresher(shop.db.dsn) as refresher:
        shop.check(refresher, views)
        for _ in range(6):
            churn(shop, draw)
            results = shop.check(refresher, views)
            assert {result.action for result in results.values()} <= {"delta", "none"}, results


def test_a_label_that_is_renamed(shop: Shop) -> None:
    """The text of an enum is its label."""
    shop.execute(f"insert into x values {random_row(random.Random(1), 1)}; update x set m = 'sad'")
    views = {"v_text": "select id, m::text as m from x", "v_json": "select id, to_jsonb(moods) as m from x"}
    for name, query in views.items():
        shop.view(name, query, engine="postgres")
    with Refresher(shop.db.dsn) as refresher:
        shop.check(refresher, views)
        shop.execute("alter type mood rename value 'sad' to 'blue'")
        results = shop.check(refresher, views)
        assert {result.action for result in results.values()} == {"full"}
