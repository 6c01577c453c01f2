"""Shapes of views over a small schema, each a query that a refresh has to follow."""

from __future__ import annotations

import re
from dataclasses import dataclass

from tests.support.view_grammar_reach import REACH
from tests.support.view_grammar_whole import WHOLE
from tests.support.view_grammar_windows import WINDOWS

TABLES = ("item", "fact", "dim", "part", "few")

# item has a key, fact has none and holds rows twice, dim is captured in mode pk, part is partitioned, few is emptied
# now and then. All columns but the keys may be NULL; columns k and grp are what shapes join and group by.
SCHEMA = (
    "create type mood as enum ('sad', 'calm', 'glad')",
    """create table item (id int primary key, grp int, k int, amount numeric(10,2), flag bool, ratio float8, note text,
                         doc json, at timestamptz)""",
    "create table fact (k int, grp int, label text, qty int, price numeric, tags int[], props jsonb)",
    "create table dim (k int primary key, grp int, name text, extra text, mood mood)",
    """create table part (id int, region int, k int, n bigint, "Name" text, mood mood, code char(3),
                         primary key (id, region)) partition by list (region)""",
    "create table part_0 partition of part for values in (0)",
    "create table part_1 partition of part for values in (1, 2)",
    "create table few (id int primary key, v int)",
    "create index on item (k)",
    "create index on fact (k)",
    "create index on part (k)",
)

CAPTURE = (
    "select gdq.add_table('q', 'item')",
    "select gdq.add_table('q', 'fact')",
    "select gdq.add_table('q', 'dim', mode => 'pk', include => '{grp,name,mood}')",
    "select gdq.add_table('q', 'part')",
    "select gdq.add_table('q', 'few', granularity => 'statement')",
)


@dataclass(frozen=True, slots=True)
class Shape:
    """One view. `incremental`: it must be refreshed from changes; `base`: the shape whose target the query reads.

    A query names the target of its base as `target`.
    """

    query: str
    incremental: bool = True
    base: str | None = None

    @property
    def tables(self) -> list[str]:
        """The tables of the schema that it reads, those of its base among them."""
        query = self.query + (" " + SHAPES[self.base].query if self.base else "")
        return [name for name in TABLES if re.search(rf"\b{name}\b", query)]


_ROWS = {
    "projection": "select id, note, amount * 2 as double, upper(note) || '!' as loud from item",
    "filter": "select id, grp, flag from item where grp > 2 or note is null",
    "star": "select * from part where k is not null",
    "bag": "select label, qty, price from fact",
    "json_bag": "select k, doc from item",
    "case_of_row": """select id, case when flag then 'yes' when not flag then 'no' else '?' end as said,
                             coalesce(note, 'none') as note from item where k between 2 and 6""",
    "keyed_log": "select k, name, mood from dim where name is distinct from 'b'",
    "own_key": """select k as key, name, upper(extra) || '!' as extra from dim
                   where extra is distinct from 'b' order by k""",
    "key_hidden_pk_mode": "select name, grp from dim",
    "union_all": "select k, note as what from item where k > 1 union all select k, label from fact",
    "union_all_twice": "select k from fact union all select k from fact where qty > 2 union all select k from part",
}

_JOINS = {
    "join": "select i.id, f.label, f.qty from item i join fact f on f.k = i.k",
    "join_of_bags": """select f.label, p."Name", f.qty * p.n as product from fact f, part p
                        where f.k = p.k and f.qty + p.n > 3""",
    "join_using": """select k, i.id, p.id as part_id from item i join part p using (k) where i.grp is not null""",
    "join_pk_mode": "select i.id, d.name, d.grp from item i join dim d on d.k = i.k",
    "join_three": """select i.id, d.name, f.qty from item i join dim d on d.k = i.k join fact f on f.k = d.k
                      where f.qty > 1""",
    "join_four": """select i.id, f.label, d.name, p.n from item i, fact f, dim d, part p
                     where i.k = f.k and f.k = d.k and p.k = d.k""",
    "join_on_two": "select i.id, f.label from item i join fact f on f.k = i.k and f.grp = i.grp",
    "join_null_safe": "select i.id, f.label from item i join fact f on f.grp is not distinct from i.grp",
    "join_expression": "select i.id, p.id as part_id from item i join part p on p.k = i.k + 1",
    "join_unequal": "select i.id, w.v from item i join few w on i.k < w.v",
    "cross_join": "select w.id, d.name from few w cross join dim d",
    "self_join": "select a.id, b.id as other from item a join item b on b.k = a.grp and b.id <> a.id",
    "self_join_of_bag": "select a.label, b.label as other from fact a join fact b on b.k = a.k and a.qty < b.qty",
    "left_join": "select i.id, i.note, f.label from item i left join fact f on f.k = i.k",
    "left_join_key_hidden": "select i.note, f.qty from item i left join fact f on f.k = i.k",
    "left_join_where": """select i.id, f.label, f.qty from item i left join fact f on f.k = i.k
                           where f.qty is null or f.qty > 2""",
    "left_join_where_strict": "select i.id, f.label from item i left join fact f on f.k = i.k where f.qty = 2",
    "left_join_anti": "select i.id, i.note from item i left join fact f on f.k = i.k where f.k is null",
    "left_join_on_more": """select i.id, f.label from item i left join fact f on f.k = i.k and f.qty > 3 and i.flag""",
    "left_join_chain": """select i.id, d.name, f.qty from item i left join dim d on d.k = i.k
                            left join fact f on f.grp = d.grp""",
    "left_join_of_join": """select i.id, x.label from item i left join (fact x join dim d on d.k = x.k)
                              on x.k = i.k and d.grp = i.grp""",
    "right_join": 'select f.label, p.id, p."Name" from part p right join fact f on p.k = f.k',
    "full_join": "select i.note, f.label from item i full join fact f on f.k = i.k",
    "full_join_selected": "select i.k, d.k as dim_k, d.name from item i full join dim d on d.k = i.k",
    "full_join_coalesce": """select coalesce(i.k, f.k) as k, count(i.id) as items, count(f.qty) as facts
                               from item i full join fact f on f.k = i.k group by coalesce(i.k, f.k)""",
}

_SEMI_JOINS = {
    "exists": "select i.id, i.note from item i where exists (select 1 from fact f where f.k = i.k and f.qty > 2)",
    "exists_in_bag": "select f.label, f.qty from fact f where exists (select * from part p where p.k = f.k)",
    "exists_unequal": "select i.id from item i where exists (select 1 from fact f where f.k = i.k and f.qty > i.grp)",
    "exists_or": "select i.id from item i where exists (select 1 from fact f where f.k = i.k) or i.note is null",
    "in": "select i.id, i.k from item i where i.k in (select f.k from fact f where f.qty > 3)",
    "in_of_two": "select i.id from item i where (i.k, i.grp) in (select f.k, f.grp from fact f)",
    "not_exists": "select i.id, i.note from item i where not exists (select 1 from fact f where f.k = i.k)",
    "not_exists_two": """select i.id from item i where not exists (select 1 from fact f where f.k = i.k and f.qty > 2)
                            and exists (select 1 from dim d where d.k = i.k)""",
    "not_in": "select i.id, i.k from item i where i.k not in (select f.k from fact f where f.qty > 4)",
    "not_in_not_null": """select i.id, i.k from item i
                           where i.k not in (select f.k from fact f where f.qty > 2 and f.k is not null)""",
    "exists_in_select": "select i.id, exists (select 1 from fact f where f.k = i.k) as has from item i",
}

_AGGREGATES = {
    "sums": """select grp, count(*) as n, count(k) as ks, sum(amount) as amount, avg(amount) as mean, sum(k) as k
                 from item group by grp""",
    "sums_of_bag": "select k, grp, count(*) as n, sum(qty) as qty from fact group by k, grp",
    "sums_any_scale": "select grp, sum(price) as price, avg(price) as mean, count(price) as n from fact group by grp",
    "sums_of_floats": "select grp, sum(ratio) as ratio, avg(ratio) as mean from item group by grp",
    "min_max": "select grp, min(amount) as low, max(amount) as high, min(note) as first from item group by grp",
    "count_distinct": "select grp, count(distinct k) as ks, sum(distinct qty) as qty from fact group by grp",
    "statistics": """select grp, stddev(amount) as dev, variance(k) as var, corr(k, id) is null as alone,
                            bool_and(flag) as every, bool_or(flag) as some from item group by grp""",
    "string_agg": """select grp, string_agg(note, ',' order by note, id) as notes, array_agg(k order by id) as ks
                       from item group by grp""",
    "percentile": """select grp, percentile_disc(0.5) within group (order by qty) as middle,
                            mode() within group (order by label) as common from fact group by grp""",
    "aggregate_filter": """select grp, count(*) filter (where flag) as flags, sum(amount) filter (where k > 3) as high
                             from item group by grp""",
    "aggregate_case": """select k, sum(case when qty > 2 then qty else 0 end) as high,
                                sum(case when label = 'a' then 1 end) as a from fact group by k""",
    "aggregate_where": "select grp, count(*) as n from item where flag and note <> 'b' group by grp",
    "aggregate_expressions": """select grp, sum(amount) / nullif(count(*), 0) as mean, max(k) - min(k) as span,
                                       coalesce(sum(k), 0) * 2 as twice from item group by grp""",
    "group_by_expression": """select mod(k, 3) as rest, coalesce(label, '-') as label, count(*) as n
                                from fact group by mod(k, 3), coalesce(label, '-')""",
    "group_key_hidden": "select count(*) as n, max(qty) as qty from fact group by grp",
    "group_without_aggregate": "select grp, k from item group by grp, k",
    "group_pk_mode": "select grp, count(*) as n, max(name) as name from dim group by grp",
    "group_of_join": """select d.name, count(*) as n, sum(f.qty) as qty from fact f join dim d on d.k = f.k
                         group by d.name""",
    "group_of_left_join": """select i.grp, count(*) as n, count(f.k) as facts from item i left join fact f on f.k = i.k
                              group by i.grp""",
    "group_by_primary_key": """select i.id, i.note, count(f.k) as facts from item i left join fact f on f.k = i.k
                                group by i.id""",
    "group_of_union_all": """select k, count(*) as n from (select k from item union all select k from fact) u
                              group by k""",
    "rollup": "select grp, k, count(*) as n from fact group by rollup (grp, k)",
    "having": "select grp, k, count(*) as n from fact group by grp, k having count(*) > 2 or sum(qty) = 4",
    "having_hidden": "select k from fact group by k having max(price) > 1 and k is not null",
    "total": "select count(*) as n, sum(amount) as amount, max(id) as last, avg(k) as k from item",
    "total_of_few": "select count(*) as n, sum(v) as v, max(v) as top, bool_and(v > 1) as above from few",
    "total_of_join": "select count(*) as n, sum(f.qty) as qty from item i join fact f on f.k = i.k where i.flag",
}

_GROUPING_SETS = {
    "rollup_recomputed": """select grp, k, min(id) as low, count(distinct note) as notes from item
                              group by rollup (grp, k)""",
    "cube": """select grp, k, count(*) as n, sum(qty) as q, grouping(grp, k) as g from fact group by cube (grp, k)
                 having count(*) > 1""",
    "grouping_sets_of_join": """select i.grp, f.label, sum(f.qty) as q, count(*) as n
                                  from item i join fact f on f.k = i.k
                                 group by grouping sets ((i.grp), (f.label), (i.grp), ())""",
    "grouping_sets_from": """select d.name, s.grp, s.n from dim d join (
                               select grp, k, count(*) as n from item group by grouping sets ((grp, k), (k))) s
                               on s.k = d.k""",
    "grouping_of_few": "select v, count(*) as n, max(id) as last from few group by rollup (v)",
    "grouping_of_few_kept": "select v, count(*) as n, sum(v) as s from few group by rollup (v) having count(*) < 9",
    "grouping_of_left_join": """select i.grp, coalesce(f.label, '-') as label, count(f.k) as n from item i
                                  left join fact f on f.k = i.k group by i.grp, rollup (coalesce(f.label, '-'))""",
    "grouping_of_nothing": "select count(*) as n, sum(v) as s from few group by ()",
}

_SETS = {
    "distinct": "select distinct grp, k from fact",
    "distinct_of_join": "select distinct f.label, d.name from fact f join dim d on d.k = f.k",
    "distinct_on": "select distinct on (grp) grp, id, note from item order by grp, id desc",
    "union": "select k, grp from item union select k, grp from fact",
    "union_of_three": "select k from fact where qty > 1 union select k from item union select k from dim",
    "except": "select k, grp from item except select k, grp from fact",
    "intersect": "select k, grp from item intersect select k, grp from fact",
    "except_all": "select k, grp from fact except all select k, grp from item",
    "intersect_all": "select k, grp from fact intersect all select k, grp from item",
    "union_then_except": "(select k from item union all select k from part) except select k from fact where qty > 1",
}

_WINDOWS = {
    "row_number": "select id, grp, row_number() over (partition by grp order by id) as place from item",
    "window_sum": """select k, qty, label, sum(qty) over (partition by k order by qty, label) as sofar,
                            count(*) over (partition by k) as n from fact""",
    "window_lag": """select k, qty, lag(qty) over w as before, first_value(label) over w as first
                       from fact window w as (partition by k order by qty, label, price)""",
    "window_of_join": """select i.id, f.label, rank() over (partition by i.grp order by f.qty, i.id) as place
                           from item i join fact f on f.k = i.k""",
    "window_of_group": """select grp, k, count(*) as n, rank() over (partition by grp order by count(*) desc) as place
                            from fact group by grp, k""",
    "top_of_group": """select k, qty, label from (
                         select k, qty, label, row_number() over (partition by k order by qty desc, label, price) as p
                           from fact) ranked where p <= 2""",
    "top_of_all": "select id, amount from item order by amount desc nulls last, id limit 5",
    "top_lateral": """select i.id, best.label, best.qty from item i cross join lateral (
                        select f.label, f.qty from fact f where f.k = i.k order by f.qty desc, f.label limit 1) best""",
}

_QUERIES = {
    "scalar": "select i.id, (select max(f.qty) from fact f where f.k = i.k) as top from item i",
    "scalar_count": "select f.label, (select count(*) from item i where i.k = f.k) as n from fact f",
    "scalar_of_row": "select i.id, (select d.name from dim d where d.k = i.k) as name from item i",
    "scalar_in_where": """select i.id, i.amount from item i
                           where i.amount > (select avg(j.amount) from item j where j.grp = i.grp)""",
    "scalar_uncorrelated": "select i.id from item i where i.k > (select avg(j.k) from item j)",
    "cte": "with hot as (select k, qty from fact where qty > 2) select i.id, h.qty from item i join hot h on h.k = i.k",
    "cte_twice": """with s as (select grp, sum(qty) as q from fact group by grp)
                    select a.grp, a.q, b.q as next from s a left join s b on b.grp = a.grp + 1""",
    "group_of_group": """select n, count(*) as groups, min(k) as first
                           from (select k, count(*) as n from fact group by k) s group by n""",
    "join_of_group": """select i.id, i.note, s.q from item i
                          join (select k, sum(qty) as q from fact group by k) s on s.k = i.k""",
    "left_join_of_group": """select i.id, coalesce(s.q, 0) as q from item i
                               left join (select k, sum(qty) as q from fact group by k) s on s.k = i.k""",
    "from_subquery": """select id, twice from (select id, k * 2 as twice, flag from item where note is not null) s
                         where flag or twice > 6""",
    "filter_of_distinct": "select k, grp from (select distinct k, grp from fact) s where grp > 1",
    "view_of_view": "select grp, n from target where n > 3",
    "view_of_view_join": "select i.id, t.n, t.amount from item i join target t on t.grp = i.grp",
    "view_of_view_group": "select k, count(*) as n, sum(qty) as qty from target where k is not null group by k",
}

# What the names mean, and types that are not kept in the log as they are or compare in ways of their own.
_NAMES_AND_TYPES = {
    "cte_hides_table": """with item as (select k, qty from fact where qty > 1)
                          select d.name, item.qty from dim d join item on item.k = d.k""",
    "alias_of_another_table": "select item.label, fact.id from fact item join item fact on fact.k = item.k",
    "outer_column": "select id, note from item where exists (select 1 from fact where qty = id or k = id)",
    "quoted_names": """select "P"."Name" as "Name", "P".n as "N", count(*) as "count(*)" from part "P"
                        group by "P"."Name", "P".n""",
    "star_of_join": "select i.*, d.name from item i join dim d on d.k = i.k",
    "natural_join": "select k, id, name from (select id, k from item) i natural join (select k, name from dim) d",
    "odd_names": """select n as "two  spaces", "Name" as "a ""quoted"" 'name'" from part where n > 1""",
    "group_by_position": "select grp, k as key, count(*) as n from fact group by 1, 2",
    "group_by_alias": "select coalesce(k, -1) as key, count(*) as n from fact group by key",
    "join_enum": "select p.id, d.name from part p join dim d on d.mood = p.mood",
    "group_by_enum": "select mood, count(*) as n, max(mood) as most from part group by mood",
    "group_by_array": "select tags, count(*) as n from fact group by tags",
    "group_by_char": "select code, count(*) as n, min(id) as id from part group by code",
    "group_by_float": "select ratio, count(*) as n from item group by ratio",
    "group_by_numeric": "select price, count(*) as n, sum(qty) as qty from fact group by price",
    "group_by_day": """select date_trunc('day', at at time zone 'UTC') as day, count(*) as n from item group by 1""",
    "distinct_jsonb": "select distinct props, tags from fact",
    "join_numeric": "select i.id, f.qty from item i join fact f on f.price = i.amount",
    "join_bigint": "select i.id, p.id as part_id from item i join part p on p.n = i.k",
    "left_join_lower": "select i.id, f.label, f.qty from item i left join fact f on lower(f.label) = lower(i.note)",
    "join_coalesce": "select i.id, f.label from item i join fact f on coalesce(f.k, 0) = coalesce(i.k, 0)",
    "join_values": """select i.id, v.word from item i join (values (1, 'one'), (2, 'two'), (2, 'zwei')) v (k, word)
                        on v.k = i.k""",
    "unnest": "select f.k, t.tag from fact f cross join unnest(f.tags) as t (tag)",
    "series": "select i.id, s.n from item i cross join generate_series(1, i.k) as s (n)",
}

_MIXED = {
    "group_of_both_sides": """select i.grp, f.label, count(*) as n from item i join fact f on f.k = i.k
                               group by i.grp, f.label""",
    "group_by_nullable_side": """select f.label, count(*) as n, count(f.k) as ks from item i
                                   left join fact f on f.k = i.k group by f.label""",
    "max_of_left_join": """select i.grp, max(f.qty) as top, count(distinct f.label) as labels from item i
                             left join fact f on f.k = i.k and f.label <> 'b' group by i.grp""",
    "group_of_full_join": """select i.grp, f.grp as other, count(*) as n from item i full join fact f on f.k = i.k
                              group by i.grp, f.grp""",
    "right_join_using": """select d.k, f.label, p.id from fact f right join dim d using (k) join part p using (k)""",
    "full_join_of_three": """select i.id, f.qty, p.n from item i full join fact f on f.k = i.k
                               full join part p on p.k = f.k""",
    "left_join_itself": "select a.id, b.id as parent, b.note from item a left join item b on b.id = a.k",
    "left_join_distinct": "select distinct i.grp, f.label from item i left join fact f on f.k = i.k",
    "exists_of_join": """select i.id from item i
                          where exists (select 1 from fact f join dim d on d.grp = f.grp where f.k = i.k)""",
    "exists_within_exists": """select i.id from item i where exists (
                                 select 1 from fact f where f.k = i.k and not exists (
                                   select 1 from part p where p.k = f.k and p.n = f.qty))""",
    "exists_on_nullable_side": """select i.id, f.label from item i left join fact f on f.k = i.k
                                   where not exists (select 1 from dim d where d.grp = f.grp)""",
    "exists_after_group": """select f.grp, count(*) as n from fact f
                              where exists (select 1 from item i where i.k = f.k and i.flag) group by f.grp""",
    "exists_in_case": """select f.grp, sum(case when exists (select 1 from item i where i.k = f.k) then 1 else 0 end)
                                as known from fact f group by f.grp""",
    "in_union": "select id from item where k in (select k from fact where qty > 3 union select k from part)",
    "in_limit": """select i.id from item i left join dim d on d.k = i.k
                    where i.k in (select k from fact order by k desc nulls last, qty, label limit 4)""",
    "in_window": """select id from item where k in (select last_value(k) over (partition by grp order by k
                      rows between unbounded preceding and unbounded following) from fact)""",
    "in_group": "select id, k from item where k in (select k from fact group by k having count(*) > 3)",
    "all_of": "select i.id from item i where i.k >= all (select f.qty from fact f where f.grp = i.grp)",
    "count_in_where": "select i.id from item i where (select count(*) from fact f where f.k = i.k) = 0",
    "scalar_of_group": """select f.grp, count(*) as n, (select max(i.id) from item i where i.grp = f.grp) as last
                            from fact f group by f.grp""",
    "scalar_in_having": """select f.k, sum(f.qty) as qty from fact f group by f.k
                           having sum(f.qty) > (select count(*) from item i where i.k = f.k)""",
    "scalar_nested": """select i.id, (select sum((select count(*) from part p where p.k = f.k)) from fact f
                                       where f.grp = i.grp) as parts from item i""",
    "distinct_filter": """select grp, count(distinct label) filter (where qty > 1) as labels, max(qty) filter
                            (where label is null) as nameless from fact group by grp""",
    "union_all_of_groups": """select 'item' as what, grp, count(*) as n from item group by grp
                              union all select 'fact', grp, count(*) from fact group by grp""",
    "except_of_groups": """select grp, count(*) as n from item group by grp
                           except select grp, count(*) from fact group by grp""",
    "union_of_join": """select i.id, f.label from item i join fact f on f.k = i.k
                        union select id, note from item where grp = 1""",
    "join_of_groups": """select a.k, a.n, b.q from (select k, count(*) as n from item group by k) a
                           full join (select k, sum(qty) as q from fact group by k) b on b.k = a.k""",
    "join_of_union": """select d.name, u.v from dim d
                          join (select k, grp as v from item union all select k, qty from fact) u on u.k = d.k""",
    "join_of_distinct": "select i.id from item i join (select distinct k, grp from fact) f using (k, grp)",
    "group_of_window": """select k, max(place) as last from (
                            select k, row_number() over (partition by k order by qty, label) as place from fact) w
                           group by k""",
    "window_of_left_join": """select i.id, f.qty, sum(f.qty) over (partition by f.grp) as total from item i
                                left join fact f on f.k = i.k""",
    "window_expression": """select id, ntile(2) over (partition by coalesce(k, 0) % 3 order by id) as half from item""",
    "two_windows": """select id, row_number() over (partition by grp order by id) as a,
                             row_number() over (partition by k order by id) as b from item""",
    "window_of_all": "select id, count(*) over () as n, rank() over (order by k) as place from item",
    "distinct_window": "select distinct k, count(*) over (partition by k) as n from fact",
    "cross_join_total": "select i.id, t.n from item i cross join (select count(*) as n, max(v) as v from few) t",
    "lateral_group": """select d.k, d.name, s.n, s.q from dim d cross join lateral (
                          select count(*) as n, sum(f.qty) as q from fact f where f.k = d.k) s""",
    "limit_in_subquery": """select k, count(*) as n from (select k from fact order by k, qty, label limit 10) f
                             group by k""",
    "recursive": """with recursive up (id, top) as (
                      select id, id from item where k is null
                      union select i.id, up.top from item i join up on i.k = up.id)
                    select id, top from up""",
    "where_false": "select f.grp, count(*) as n from fact f where f.qty > 100 or f.k in (7, 8) group by f.grp",
}

# These depend on every row of a table, or on whether any is NULL, or are not taken apart: they may be loaded in full.
_MAY_BE_FULL = {
    "all_of",
    "json_bag",
    "full_join_of_three",
    "group_by_array",
    "in_window",
    "outer_column",
    "recursive",
    "two_windows",
    "window_of_all",
    "ntile_of_all",
    "join_unequal",
    "cross_join",
    "exists_or",
    "not_in",
    "total_of_text",
    "total_statistics",
}
_BASES = {"view_of_view": "sums", "view_of_view_join": "sums", "view_of_view_group": "window_sum"}

# The log of dim lacks the column extra.
REFUSED = {
    "select extra from dim": "pk-columns-missing",
    "select k, extra, rank() over (partition by extra order by k) as n from dim": "pk-columns-missing",
    "select extra, count(*) as n from dim group by extra": "pk-columns-missing",
    "select i.id from item i left join dim d on d.k = i.k and d.extra = i.note": "pk-columns-missing",
    "select id, random() as r from item": "nondeterministic",
    "select id from item where at < now()": "nondeterministic",
    "select i.id from item i join pg_class c on c.relname = i.note": "unknown-table",
    "select id from item where note in (select tablename from pg_tables)": "unknown-table",
}

# families that have a module of their own
_OWN = (REACH, WHOLE, WINDOWS)

SHAPES = {
    name: Shape(query, name not in _MAY_BE_FULL, _BASES.get(name))
    for family in (
        *(_ROWS, _JOINS, _SEMI_JOINS, _AGGREGATES, _GROUPING_SETS, _SETS, _WINDOWS, _QUERIES, _NAMES_AND_TYPES, _MIXED),
        *_OWN,
    )
    for name, query in family.items()
}
