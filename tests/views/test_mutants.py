"""What keeps views exact is tested: each part of it that is left out makes a view wrong."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace

import psycopg
import pytest

from gdq.consumers.refresh.refresher import Refresher
from gdq.consumers.views import compiled_delta, compiled_steps, computation, few_statement, netting, state_parts
from gdq.plan import delta as plan_incremental
from gdq.plan import extreme as plan_extreme
from gdq.plan import filter as plan_filter
from gdq.plan import group_sums as plan_sums
from gdq.plan import postgres as plan_postgres
from gdq.plan import query as plan_query
from gdq.plan import relation_sql as plan_relations
from gdq.plan.table import UsedTable
from gdq.view.view import create_view, set_view_audit
from tests.support.server import Database

QUERIES = {
    "joined": "select l.id, r.id as other from l join r on r.k = l.k",
    "padded": "select l.k, r.id from l left join r on r.k = l.k",
    "groups": "select k, max(id) as last from l group by k",
    "extremes": "select min(id) as low, max(id) as top from l",
    "without": "select l.id from l where not exists (select from r where r.k = l.k)",
    "unmatched": "select l.id from l left join r on r.k = l.k where r.id is null or r.id > 100",
    "sums": "select k, count(*) as n, sum(id) as ids from l group by k",
    "within": """select r.id, s.n, s.ids from r
                   join (select k, count(*) as n, sum(id) as ids from l group by k) s using (k)""",
    "copies": "select k from l",
    "first": "select id, k from l order by id limit 2",
}
# Deleted on both sides at once, NULL keys, rows changed twice and back.
CHANGES = [
    "delete from l where id = 1; delete from r where k = 1",
    "insert into l values (20, null), (21, 2); insert into r values (20, 2), (21, null)",
    "update l set k = 3 where id = 2; update l set k = 2 where id = 2; update l set k = 4 where id = 2",
    "insert into r values (30, 4); delete from r where id = 30; insert into r values (30, 3)",
    "update l set k = null where id = 3; update r set k = 3 where k is null",
    "delete from l where k is null",
    "delete from r where id = 5",
    "insert into l select i, 7 from generate_series(40, 200) i",
    "delete from l where id < 150",
    "insert into l values (1, 2)",
]

Mutation = Callable[[pytest.MonkeyPatch], None]


def without_sign(patch: pytest.MonkeyPatch) -> None:
    """The join of two deltas is added instead of taken off."""
    healthy = plan_incremental.DeltaPlanner.step
    patch.setattr(
        plan_incremental.DeltaPlanner,
        "step",
        lambda self, sql, *value: healthy(self, sql.replace('-("t', '("t'), *value),
    )


def without_null(patch: pytest.MonkeyPatch) -> None:
    """NULL is no key."""
    for module in (plan_incremental, plan_relations):
        patch.setattr(module, "among_keys", lambda expression, keys: f"{expression} = any ({keys})")


def without_netting(patch: pytest.MonkeyPatch) -> None:
    """Each image of a row that was changed twice counts by itself, only once."""
    healthy = netting.netted_images_sql

    def netted_once(table: UsedTable, images: str, *, exact: bool) -> str:
        net = healthy(table, images, exact=exact)
        return re.sub(r'sum\("__gdq_weight"\)( over \(partition by __image\))?', 'max("__gdq_weight")\\1', net)

    for module in (computation, compiled_delta, few_statement):
        patch.setattr(module, "netted_images_sql", netted_once)


def with_new_as_old(patch: pytest.MonkeyPatch) -> None:
    """What there was is taken to be what there is."""
    healthy = plan_relations.RelationSql._table
    patch.setattr(plan_relations.RelationSql, "_table", lambda self, name, _: healthy(self, name, "new"))


def with_padded_rows_left_out(patch: pytest.MonkeyPatch) -> None:
    """Rows that keep others from being padded are taken for ones that do not matter."""
    healthy = plan_query.joins_of
    patch.setattr(plan_filter, "joins_of", lambda tree: (replace(join, kind="inner") for join in healthy(tree)))


def with_extremes_that_stay(patch: pytest.MonkeyPatch) -> None:
    """A least value that went is not looked up anew."""
    healthy = plan_extreme.extreme_after
    patch.setattr(plan_extreme, "extreme_after", lambda *names: healthy(*names).replace("w < 0", "false"))


def with_groups_that_stay(patch: pytest.MonkeyPatch) -> None:
    """The state keeps what it knows of a group without rows."""
    healthy = state_parts.state_parts
    kept = lambda *args: {name: part for name, part in healthy(*args).items() if name != "gdq_emptied"}  # noqa: E731
    patch.setattr(few_statement, "state_parts", kept)


def with_one_of_each(patch: pytest.MonkeyPatch) -> None:
    """Equal rows that come together come once."""
    healthy = few_statement.FewStatement._target_parts
    patch.setattr(
        few_statement.FewStatement,
        "_target_parts",
        lambda self, *args: {
            name: part.replace("generate_series(1, net)", "generate_series(1, 1)")
            for name, part in healthy(self, *args).items()
        },
    )


def with_null_keys_that_stay(patch: pytest.MonkeyPatch) -> None:
    """Rows of the key NULL are not replaced."""
    patch.setattr(compiled_steps, "_among", lambda column, keys: f"{column} = any ({keys})")


def with_few_first_rows(patch: pytest.MonkeyPatch) -> None:
    """A state that has too few rows left is not filled anew."""
    patch.setattr(few_statement, "short_sql", lambda _: "false")


def with_sums_that_were(patch: pytest.MonkeyPatch) -> None:
    """The sums of a group inside a query are taken to have been what they are."""
    patch.setattr(plan_sums.GroupSums, "before", lambda _self, now, _changes: f"select * from {now}")


@contextmanager
def mutated(mutation: Mutation | None) -> Iterator[None]:
    plan_postgres._plan.cache_clear()
    plan_postgres._plan_changes.cache_clear()
    with pytest.MonkeyPatch.context() as patch:
        if mutation is not None:
            mutation(patch)
        yield
    plan_postgres._plan.cache_clear()
    plan_postgres._plan_changes.cache_clear()


def wrong_views(db: Database) -> set[str]:
    """The views that differ from their query after some refresh, or cannot be refreshed from changes."""
    found = set()
    with db.connect() as connection, Refresher(db.dsn) as refresher:
        connection.execute("create table l (id int primary key, k int); create table r (id int primary key, k int)")
        connection.execute("select gdq.create_queue('q'); select gdq.add_table('q', 'l'), gdq.add_table('q', 'r')")
        connection.execute("insert into l select i, i from generate_series(1, 5) i; insert into r select * from l")
        for name, query in QUERIES.items():
            create_view(connection, name, "q", query, f"public.{name}", engine="postgres")
            set_view_audit(connection, name, 0)  # an audit would refuse what a mutant makes
            refresher.refresh(name)
        for change in CHANGES:
            connection.execute(f"begin; {change}; commit")
            for name, query in QUERIES.items():
                try:
                    action: str = refresher.refresh(name).action
                except psycopg.Error:
                    action = "failed"
                rows = connection.execute(
                    f"(({query}) except all table {name}) union all (table {name} except all ({query}))"
                ).fetchall()
                if rows or action not in ("delta", "none"):
                    found.add(name)
    return found


def test_healthy_views_are_exact(db: Database) -> None:
    with mutated(None):
        assert wrong_views(db) == set()


@pytest.mark.long
@pytest.mark.parametrize(
    ("mutation", "victim"),
    [
        (with_extremes_that_stay, "extremes"),
        (without_sign, "joined"),
        (without_null, "padded"),
        (without_netting, "joined"),
        (with_new_as_old, "without"),
        (with_padded_rows_left_out, "unmatched"),
        (with_groups_that_stay, "sums"),
        (with_sums_that_were, "within"),
        (with_one_of_each, "copies"),
        (with_null_keys_that_stay, "groups"),
        (with_few_first_rows, "first"),
    ],
    ids=lambda value: value if isinstance(value, str) else value.__name__,
)
def test_each_part_is_needed(db: Database, mutation: Mutation, victim: str) -> None:
    with mutated(mutation):
        assert victim in wrong_views(db)
