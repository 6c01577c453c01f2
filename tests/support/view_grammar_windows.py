"""Shapes with window functions that have no PARTITION BY: only rows near a change, or behind it, change with it."""

from __future__ import annotations

WINDOWS = {
    "lag": """select id, k, lag(k) over (order by id) as before, lead(note, 2, '-') over (order by id) as after
                from item""",
    "lag_nullable": """select id, k, lag(id) over (order by k, id) as l, lead(id, 2) over (order by k desc, id) as r
                         from item""",
    "lag_nulls_first": """select k, id, lag(id, 3) over w as l, lead(id) over w as r from item
                          window w as (order by k nulls first, id)""",
    "lag_nulls_last": """select note, grp, lag(note) over (order by grp desc nulls last, id) as before from item
                          where flag or k > 2""",
    "lag_key_hidden": "select note, lag(note) over (order by amount, id) as before from item",
    "lag_of_bag": "select qty, lag(qty) over (order by label, qty) as before from fact",
    "lag_of_part": """select n, lag(n) over (order by id, region) as l, lead("Name") over (order by id, region) as r
                        from part""",
    "lag_pk_mode": "select k, name, lag(name, 2) over (order by k) as before from dim",
    "lag_by_float": "select ratio, id, lag(id) over (order by ratio, id) as before from item",
    "lag_by_enum": "select mood, lead(code) over (order by mood desc, id, region) as after from part",
    "lag_by_text": "select note, id, lag(id) over (order by note desc, id) as before from item where id % 3 <> 1",
    "lag_by_expression": "select id, lag(id) over (order by coalesce(k, 0) % 3, id) as before from item",
    "lag_by_day": """select id, amount - lag(amount) over (order by date_trunc('day', at at time zone 'UTC'), id)
                       as more from item""",
    "lag_distinct": "select distinct lag(k) over (order by id) as before from item",
    "lag_limit": "select id, lag(k) over (order by id) as before from item order by id limit 5",
    "lag_of_exists": """select i.id, lag(i.k) over (order by i.id) as before from item i
                         where exists (select from fact f where f.k = i.k and f.qty > 1)""",
    "lag_with_scalar": """select i.id, lag((select max(f.qty) from fact f where f.k = i.k)) over (order by i.id)
                            as before from item i""",
    "lag_after_constant": """select id, lag(id) over (order by k, id) as before from item
                              where k >= (select min(v) from few)""",
    "moving": """select id, sum(amount) over (order by id rows between 3 preceding and current row) as s,
                        max(k) over (order by id rows between 1 preceding and 2 following) as m,
                        count(*) filter (where flag) over (order by id rows 2 preceding) as flags from item""",
    "moving_aside": """select id, min(k) over (order by id rows between 4 preceding and 2 preceding) as low,
                              string_agg(note, ',') over (order by id rows between 1 following and 2 following) as next,
                              first_value(k) over (order by id rows between 2 preceding and 2 following
                                                     exclude current row) as first from item""",
    "moving_floats": "select id, avg(ratio) over (order by id rows between 2 preceding and 1 following) as r from item",
    "moving_of_bag": "select k, sum(qty) over (order by k, qty rows between 2 preceding and current row) s from fact",
    "moving_of_join": """select i.id, f.label, f.qty, sum(f.qty) over (
                           order by i.id, f.label, f.qty rows between 1 preceding and 1 following) as s
                           from item i join fact f on f.k = i.k""",
    "moving_of_left_join": """select i.id, d.name, lag(d.name) over (order by i.id, d.k) as before
                                from item i left join dim d on d.k = i.k""",
    "moving_beside_partition": """select k, id, lag(id) over (order by k, id) as before,
                                         count(*) over (partition by k) as n,
                                         row_number() over (partition by grp, k order by id) as place from item""",
    "moving_of_union": """select id, k, lag(id) over (order by k, id) as before from item where flag
                          union all select v, id, lead(v) over (order by id) from few""",
    "months": """select grp, count(*) as n, lag(count(*)) over (order by grp) as before,
                        avg(sum(qty)) over (order by grp rows between 1 preceding and 1 following) as mean
                   from fact group by grp""",
    "months_having": """select date_trunc('day', at at time zone 'UTC') as day, sum(amount) as amount,
                               sum(amount) - lag(sum(amount)) over (order by date_trunc('day', at at time zone 'UTC'))
                                 as more
                          from item group by 1 having count(*) > 1""",
    "months_of_join": """select coalesce(d.name, '?') || '!' as name, max(f.qty) as top,
                                lead(max(f.qty)) over (order by coalesce(d.name, '?') desc) as next
                           from fact f left join dim d on d.k = f.k group by coalesce(d.name, '?')""",
    "running": """select id, row_number() over (order by id) as place, sum(k) over (order by id) as total,
                         lag(k) over (order by id) as before from item""",
    "running_nulls_first": """select k, id, row_number() over w as place, sum(id) over (
                                w rows between unbounded preceding and 2 following) as ahead
                                from (select k, id from item) i window w as (order by k nulls first, id)""",
    "running_ahead": """select k, id, sum(id) over (order by k, id rows between unbounded preceding and 2 following)
                          as s from item""",
    "running_down": """select k, id, sum(id) over (order by k desc nulls last, id desc rows between 1 preceding
                                                     and unbounded following) as s from item""",
    "running_remaining": """select id, sum(k) over (order by id rows between 1 preceding and unbounded following)
                              as rest from item""",
    "running_key_hidden": "select k, count(*) over (order by grp, k) as n from item",
    "ranks": """select k, qty, rank() over (order by qty desc) as place, dense_rank() over (order by qty desc) as nth
                  from fact""",
    "ranks_within": """select id, place from (select id, rank() over (order by amount desc nulls last) as place
                        from item) r where place <= 4""",
    "running_months": """select grp, sum(sum(qty)) over (order by grp) as total, row_number() over (order by grp) as nth
                           from fact group by grp""",
    "range_offset": "select k, sum(qty) over (order by k range between 1 preceding and current row) as s from fact",
    "range_peers": """select k, qty, count(*) over (order by k range between current row and current row) as n,
                             sum(qty) over (order by k, grp groups current row) as q from fact""",
    "islands": """select min(id) as low, max(id) as high, k, count(*) as n from (
                    select id, k, id - row_number() over (order by id) as island from item where k is not null) i
                   group by island, k""",
    "steps_by_group": """select grp, sum(step) as way from (
                           select grp, k - lag(k) over (order by id) as step from item) s group by grp""",
    "sessions": """select id, grp, sum(begins) over (order by id) as session from (
                     select id, grp, case when id - lag(id) over (order by id) < 3 then 0 else 1 end as begins
                       from item) s""",
    "in_lag": "select id from item where k in (select lag(k) over (order by id) from item where grp = 2)",
    "join_of_lag": """select f.label, l.before from fact f
                        join (select k, lag(name) over (order by k) as before from dim) l on l.k = f.k""",
    "ntile_of_all": "select id, ntile(3) over (order by id) as third, count(*) over () as n from item",
}
