"""Shapes of views that depend on all rows of a query, on LATERAL, and on what reads no table."""

from __future__ import annotations

WHOLE = {
    "total_of_text": "select string_agg(note, ',' order by note) as notes, count(distinct k) as ks from item",
    "total_statistics": "select stddev(k) as dev, variance(amount) as var, sum(qty) as q from item join fact using (k)",
    "total_having": "select max(v) as top, min(v) as low from few having count(*) > 1",
    "total_of_null": "select max(id) as last, min(note) as first, bool_or(flag) as some from item where k = 2",
    "total_extremes": "select max(k) - min(k) as span, max(f.qty) as top, avg(qty) as mean from fact f where f.grp > 1",
    "total_of_left_join": "select min(i.note) as first, max(f.label) as last from item i left join fact f on f.k = i.k",
    "bool_of_group": """select grp, bool_and(flag) as every, bool_or(flag) as some, every(k > 2) as high
                          from item group by grp""",
    "bool_filter": "select k, bool_or(qty > 2) filter (where label = 'a') as some from fact group by k",
    "bool_having": "select grp, count(*) as n from item group by grp having bool_and(k is not null)",
    "join_of_total": "select f.label, f.qty from fact f join (select max(v) as top from few) t on f.qty <= t.top",
    "limit_of_bag": "select label, qty from fact order by qty desc nulls last, label limit 3 offset 1",
    "limit_of_join": "select i.id, f.qty from item i join fact f on f.k = i.k order by f.qty, i.id limit 4",
    "limit_of_groups": "select grp, max(note) as last from item group by grp order by max(note), grp limit 2",
    "limit_of_scalar": """select i.id, (select max(f.qty) from fact f where f.k = i.k) as top from item i
                           order by i.id limit 6""",
    "join_of_limit": "select i.id, w.v from item i join (select id, v from few order by id limit 2) w on w.v = i.k",
    "exists_uncorrelated": "select id, note from item where exists (select 1 from few where v > 2)",
    "not_exists_uncorrelated": "select label from fact where not exists (select from few where v = 1) and qty > 1",
    "scalar_of_all": "select id, (select max(v) from few) as top from item where k > 2",
    "scalar_of_all_grouped": """select k, count(*) as n, sum(qty) as qty from fact
                                 where qty >= (select min(v) from few) group by k""",
    "scalar_in_group": "select k, max(label) as last, (select count(*) from few) as n from fact group by k",
    "scalar_row": "select id from item where k = (select v from few order by id limit 1)",
    "having_of_all": "select k, max(qty) as top from fact group by k having max(qty) > (select max(v) from few)",
    "in_or": "select id from item where k in (select v from few) or note is null",
    "all_of_all": "select id from item where k > all (select v from few where v is not null)",
    "lateral_left": """select i.id, s.n, s.top from item i left join lateral (
                         select count(*) as n, max(f.qty) as top from fact f where f.k = i.k) s on true""",
    "lateral_top": """select i.grp, best.label, best.qty from item i left join lateral (
                        select f.label, f.qty from fact f where f.k = i.k and f.qty > 1
                         order by f.qty desc, f.label limit 2) best on best.qty < 5""",
    "lateral_of_two": """select d.k, x.id, y.n from dim d cross join lateral (
                           select i.id, i.grp from item i where i.k = d.k order by i.id limit 2) x
                           cross join lateral (select count(*) as n from fact f where f.grp = x.grp) y""",
    "lateral_within": """select d.k, x.id, x.n from dim d cross join lateral (
                           select i.id, y.n from item i cross join lateral (
                             select count(*) as n from fact f where f.k = i.k) y
                            where i.grp = d.grp order by i.id desc limit 2) x""",
    "lateral_union": """select d.k, u.v from dim d cross join lateral (
                          select i.id as v from item i where i.k = d.k
                          union select f.qty from fact f where f.k = d.k) u""",
    "lateral_row": "select i.id, r.twice from item i cross join lateral (select i.k * 2 as twice) r where r.twice > 4",
    "lateral_grouped": """select i.grp, sum(s.n) as n from item i cross join lateral (
                            select count(*) as n from fact f where f.k = i.k) s group by i.grp""",
    "lateral_uncorrelated": "select i.id, s.v from item i cross join lateral (select v from few where v > 1) s",
    "values_kept": """select v.word, i.id from (values (1, 'one'), (2, 'two'), (null, 'none')) v (k, word)
                        left join item i on i.k = v.k""",
    "values_between": """select i.id, f.qty, v.word from item i
                           join (values (1, 'a'), (3, 'b')) v (k, word) on v.k = i.k
                           left join fact f on f.label = v.word""",
    "values_in": "select id, k from item where (k, grp) in (values (1, 2), (2, 3), (4, 1))",
    "series_counted": """select s.n, count(i.id) as items from generate_series(1, 4) s (n)
                           left join item i on i.k = s.n group by s.n""",
    "unnest_ordinality": """select f.label, t.tag, t.place from fact f
                              left join unnest(f.tags) with ordinality t (tag, place) on true""",
    "unnest_grouped": "select t.tag, count(*) as n, sum(f.qty) as q from fact f, unnest(f.tags) t (tag) group by t.tag",
    "unnest_joined": """select i.id, t.tag, d.name from item i join fact f on f.k = i.k
                          cross join unnest(f.tags) t (tag) left join dim d on d.k = t.tag""",
}
