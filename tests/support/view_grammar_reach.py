"""Shapes where a change must not be followed over rows that need not be there: negated, padded, or further inside."""

from __future__ import annotations

REACH = {
    "inner_condition_of_outer": """select i.id, i.grp from item i where exists (
                                     select from fact f where f.k = i.k and not exists (
                                       select from part p where p.k = i.k and f.qty > i.grp))""",
    "inner_condition_first": """select i.id, i.grp from item i where exists (
                                  select from fact f where not exists (
                                    select from part p where p.k = i.k and f.qty > i.grp) and f.k = i.k)""",
    "condition_in_sibling": """select i.id, f.label from item i join fact f on f.k = i.k
                                where not exists (select from dim d where d.k = f.qty)
                                  and (f.qty > 3 or exists (select from part p where p.region = i.grp
                                                               and i.grp = f.grp))""",
    "not_exists_of_two": """select i.id, d.k as dim from item i cross join dim d
                             where not exists (select from fact f where f.k = i.k and f.grp = d.grp)""",
    "not_exists_of_chain": """select i.id, d.k as dim from item i join part p on p.k = i.k
                                 join dim d on d.grp = p.region
                               where not exists (select from fact f where f.k = i.id and f.grp = d.k)""",
    "exists_of_two": """select i.id, d.k as dim from item i cross join dim d
                         where exists (select from fact f where f.k = i.k and f.grp = d.grp)""",
    "scalar_of_two": """select i.id, d.k as dim, (select count(*) from fact f where f.k = i.k and f.grp = d.grp) as n
                          from item i cross join dim d""",
    "left_of_two": """select i.id, d.k as dim, f.label from item i cross join dim d
                        left join fact f on f.k = i.k and f.grp = d.grp""",
    "left_condition_of_kept": """select i.id, d.name, f.label from item i join dim d on d.k = i.k
                                   left join fact f on f.k = i.k and d.grp = i.grp""",
    "left_of_left": """select i.id, p.n, f.label, d.name from item i left join part p on p.k = i.k
                         left join fact f on f.grp = p.region left join dim d on d.k = f.qty and d.grp = i.grp""",
    "linked_by_the_negated": """select i.id from item i where exists (
                                  select from fact f where not exists (
                                    select from part p where p.k = i.k and p.region = f.grp))""",
}
