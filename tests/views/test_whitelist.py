"""The server's tree of a view decides whether the planner may take it apart: what is not listed is loaded in full."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import pytest
from sqlglot import exp

from gdq.consumers.refresh.refresher import Refresher, RefreshResult
from gdq.errors import PlanError
from gdq.plan import postgres as plan_postgres
from gdq.plan import query as plan_query
from gdq.plan import whitelist
from gdq.view import query_reading
from gdq.view.view import EngineChoice, explain_view
from tests.support.server import Database
from tests.support.spark import QUEUE, Shop, make_shop

STATEMENTS = [
    "create type pair as (x int, y text)",
    "create domain small as int check (value < 1000)",
    "create domain of_name as regclass; create type named as (names of_name[])",
    """create table t (id int primary key, g int, v int, s text, c numeric(10,2), f float8, iv interval, j jsonb,
                       a int[], ts timestamp, p pair, d small, names named)""",
    "create table u (id int primary key, g int, v int, p pair)",
    "create table w (id int primary key, g int)",
    "create aggregate my_sum(int) (sfunc = int4pl, stype = int, initcond = '0')",
    *(f"select gdq.add_table('{QUEUE}', '{table}')" for table in ("t", "u", "w")),
    """insert into t select i, i % 3, i, 's' || i % 4, i * 1.5, i * 0.1, i * interval '1 hour',
                            jsonb_build_object('a', i % 3), array[i, i % 2],
                            timestamp '2026-01-01' + i * interval '1 day', row(i % 2, null)::pair, i
         from generate_series(1, 12) i""",
    "insert into u select i, nullif(i % 4, 0), i * 2, row(null, i % 3)::pair from generate_series(1, 9) i",
    "insert into w select i, i % 5 from generate_series(1, 6) i",
]

CHANGES = [
    "insert into t (id, g, v, p) values (20, 1, 4, row(null, 'a')), (21, null, 4, row(null, null)), (22, 9, 1, null)",
    "update t set v = v + 10 where id in (1, 4); update u set g = 2, p = row(5, null) where id = 3",
    "delete from t where id in (2, 20); insert into u values (30, 1, 7, row(null, 'a')); delete from w where id = 1",
    "update t set g = 2 where id = 22; update t set p = row(7, 'x') where p is null; delete from u where id in (30, 2)",
    "insert into w values (40, 2), (41, 9); update u set p = row(null, null) where id = 4; delete from t where g = 9",
    "delete from t; delete from u where id > 1",
    "insert into t (id, g, v, p) values (50, 1, 4, row(null, 'a')); insert into u values (50, 2, 8, row(null, 'a'))",
]

# What the planner took apart in another way than the server: wrong, and said to be incremental.
MISREAD = {
    "aggregate_of_user": "select g, my_sum(v) as s from t group by g",
    "aggregate_of_user_having": "select g from t group by g having my_sum(v) > 3",
    "aggregate_of_user_distinct": "select distinct g, my_sum(v) as s from t group by g",
    "aggregate_of_user_outer": "select t.g, my_sum(u.v) as s from t left join u on u.id = t.id group by t.g",
    "aggregate_of_user_from": "select s, count(*) as n from (select g, my_sum(v) as s from t group by g) x group by s",
    "aggregate_of_user_total": "select my_sum(v) as s from t",
    "aggregate_of_user_window": "select id, my_sum(v) over (partition by g order by id) as s from t",
    "aggregate_in_order": "select 1 as one from t order by count(*)",
    "aggregate_of_outer_query": "select (select sum(t.v) from u where u.id = 1) as s from t",
    "having": "select 1 as one from t having true",
    "having_false": "select 1 as one from t having 1 > 2",
    "having_from": "select x.one, u.id from (select 1 as one from t having true) x join u on u.id = x.one",
    "having_union": "select 1 as one from t having true union all select id from u",
    "ties": "select g, count(*) as n from t group by g order by n desc fetch first 2 rows with ties",
    "ties_from": """select x.g, w.id from (select g, count(*) as n from t group by g order by n, g
                                             fetch first 1 row with ties) x join w on w.g = x.g""",
    "right_using": """select count(*) as n, t.g from t right join u using (g) join w using (g) group by t.g""",
    "right_using_rows": "select t.id, u.id as u, w.id as w from t right join u using (g) join w using (g)",
    "natural_right": """select count(*) as n from (select g, id as t from t) t natural right join
                          (select g, id as u from u) u natural join (select g, id as w from w) w""",
    "right_in_parentheses": """select w.id, count(*) as n from (t right join u using (g)) join w using (g)
                                 group by w.id""",
    "set_in_order": "select id from t order by generate_series(1, v % 3)",
    "set_of_group": "select g, unnest(array_agg(v)) as v from t group by g",
    "empty_group": "select count(*) as n from t group by ()",
    "sample": "select id from t tablesample bernoulli (50) repeatable (1)",
}

# Keys of a composite type: a value with a field that is NULL is neither NULL nor NOT NULL.
COMPOSITE = {
    "groups": "select p, count(*) as n, max(v) as v from t group by p",
    "counts": "select g, count(p) as n from t group by g",
    "counts_all": "select count(p) as n from t",
    "distinct": "select distinct p from t",
    "windows": "select id, p, row_number() over (partition by p order by id) as n from t",
    "outer": "select t.id, u.id as u from t left join u on u.p = t.p",
    "outer_other": "select t.id, u.id as u, u.p from u left join t on u.p = t.p",
    "exists": "select t.id from t where exists (select from u where u.p = t.p)",
    "missing": "select t.id from t where t.p not in (select u.p from u)",
    "union": "select p from t union select p from u",
    "shown": "select p, id from t where exists (select from u where u.p = t.p)",
}

# Each entry of the list with a query that needs it.
LISTED = {
    "QUERY": "select id from t",
    "TARGETENTRY": "select id from t",
    "SORTGROUPCLAUSE": "select g, count(*) as n from t group by g",
    "GROUPINGSET": "select g, count(*) as n from t group by rollup (g)",
    "GROUPINGFUNC": "select g, grouping(g) as x, count(*) as n from t group by rollup (g)",
    "FROMEXPR": "select id from t",
    "RANGETBLREF": "select id from t",
    "RANGETBLENTRY": "select id from t",
    "RTEPERMISSIONINFO": "select id from t",
    "RANGETBLFUNCTION": "select t.id, n from t, generate_series(1, 3) n",
    "ALIAS": "select id from t",
    "JOINEXPR": "select t.id, u.id as u from t join u on u.g = t.g",
    "SETOPERATIONSTMT": "select g from t union select g from u",
    "COMMONTABLEEXPR": "with x as (select g from t) select x.g from x",
    "WINDOWCLAUSE": "select id, rank() over (partition by g order by v) as n from t",
    "WINDOWFUNC": "select id, rank() over (partition by g order by v) as n from t",
    "AGGREF": "select g, count(*) as n from t group by g",
    "VAR": "select id from t",
    "CONST": "select id, 1 as one from t",
    "PARAM": "select id from t where g in (select g from u)",
    "FUNCEXPR": "select id, lower(s) as s from t",
    "NAMEDARGEXPR": "select id, make_interval(days => id) as d from t",
    "OPEXPR": "select id + 1 as id from t",
    "DISTINCTEXPR": "select id from t where g is distinct from v",
    "NULLIFEXPR": "select id, nullif(g, v) as g from t",
    "SCALARARRAYOPEXPR": "select id from t where g in (1, 2)",
    "BOOLEXPR": "select id from t where not (g = 1 and v = 2)",
    "SUBLINK": "select id from t where exists (select from u where u.g = t.g)",
    "SUBSCRIPTINGREF": "select id, a[1] as a from t",
    "FIELDSELECT": "select id, (p).x as x from t",
    "RELABELTYPE": "select id, s::varchar as s from t",
    "COERCEVIAIO": "select id, v::text as v from t",
    "ARRAYCOERCEEXPR": "select id, a::bigint[] as a from t",
    "COERCETODOMAIN": "select id, v::small as v from t",
    "CASEEXPR": "select id, case when g = 1 then 2 end as g from t",
    "CASEWHEN": "select id, case when g = 1 then 2 end as g from t",
    "CASETESTEXPR": "select id, case g when 1 then 2 end as g from t",
    "ARRAYEXPR": "select id, array[g, v] as a from t",
    "ROWEXPR": "select id, row(g, s)::pair as p from t",
    "ROWCOMPAREEXPR": "select id from t where (g, v) < (1, 2)",
    "COALESCEEXPR": "select id, coalesce(g, v) as g from t",
    "MINMAXEXPR": "select id, greatest(g, v) as g from t",
    "NULLTEST": "select id from t where g is null",
    "BOOLEANTEST": "select id from t where (g > 1) is true",
}
# Nodes of later versions alone.
LATER = {"RTEPERMISSIONINFO": 16}

FIXED = [
    "concat(s, g, c, f, iv, ts)", "concat_ws('-', s, v)", "format('%s-%s', s, id)", "s || id", "id || s",
    "to_char(c, '9990.99')", "to_char(ts, 'YYYY-MM-DD')", "jsonb_build_object('a', id, 'b', s)", "to_jsonb(c)",
    "array_to_string(a, ',')", "json_build_array(id, ts)::text", "quote_literal(s)", "concat(p)", "to_jsonb(p)",
    "concat(ts::timestamptz)", "jsonb_build_object('a', ts at time zone 'UTC')",
]  # fmt: skip
MOVING = [
    "to_char(c, '9D9')", "to_char(c, 'L9')", "to_char(c, s)", "to_char(ts, 'TMMonth')", "now()", "random()",
    "current_date", "id::oid::regclass::text", "array[id::oid::regtype]::text || 'x'",
    "array[id::oid::regproc]::text[]", "row(id, id::oid::regrole)::text", "names::text", "'t'::regclass::varchar",
    "age(ts)", "age(ts::timestamptz)", "concat(id::oid::regclass)", "to_jsonb(names)",
    "row_to_json(row(id::oid::regclass))::text", "s::date",
    "to_date(s, s)", "to_number(s, '9D9')", "pg_typeof(id)::text", "pg_column_compression(s)", "pg_column_size(s)",
    "to_tsvector(s)",
]  # fmt: skip


@pytest.fixture
def shop(db: Database) -> Iterator[Shop]:
    yield from make_shop(db, STATEMENTS)


def strategy(shop: Shop, query: str) -> str:
    return explain_view(shop.connection, QUEUE, query, engine="postgres").strategy


def forget_plans() -> None:
    """Plan and read queries anew."""
    query_reading._known.clear()
    plan_postgres._plan.cache_clear()
    plan_postgres._plan_changes.cache_clear()


def churned(shop: Shop, views: dict[str, str], engine: EngineChoice) -> list[dict[str, RefreshResult]]:
    """Make the views, change the tables, and find each view equal to its query after every refresh."""
    named = {f"v_{name}": query for name, query in views.items()}
    for name, query in named.items():
        shop.view(name, query, engine=engine)
    results = []
    with Refresher(shop.db.dsn) as refresher:
        for change in ["", *CHANGES]:
            shop.execute(change)
            results.append({name.removeprefix("v_"): found for name, found in shop.check(refresher, named).items()})
    return results


@pytest.mark.long
def test_misread_views_are_right(shop: Shop) -> None:
    churned(shop, MISREAD, "postgres")


def test_full_join_by_a_column_that_its_own_side_pads(db: Database) -> None:
    """A row of that side without a match has the key NULL, and comes and goes with changes of other keys."""
    draw = random.Random(3)
    columns = "(id int primary key, g int, h int)"
    filled = "select i, i % 3, i % 4 from generate_series(1, 7) i"
    statements = [f"create table a {columns}", f"create table b {columns}", f"insert into a {filled}"]
    statements += [f"insert into b {filled}", f"select gdq.add_table('{QUEUE}', 'a'), gdq.add_table('{QUEUE}', 'b')"]
    views = {"v": "select x1.id, x3.id as b from a x1 full join (b x3 left join a x4 on x3.h = x4.h) on x1.h = x4.g"}
    for shop in make_shop(db, statements):
        shop.view("v", views["v"], engine="postgres")
        with Refresher(db.dsn) as refresher:
            for _ in range(12):
                shop.check(refresher, views)
                number, h = draw.randint(1, 9), draw.choice(("null", "1", "2", "4"))
                shop.execute(f"delete from a where id = {number}")
                shop.execute(f"insert into a values ({number}, {draw.randint(0, 3)}, {h})")


@pytest.mark.long
def test_composite_keys(shop: Shop) -> None:
    results = churned(shop, COMPOSITE, "postgres")
    assert {result[name].action for result in results[1:3] for name in ("groups", "distinct", "outer")} == {"delta"}


@pytest.mark.long
@pytest.mark.spark
@pytest.mark.usefixtures("spark", "closed_sockets")
@pytest.mark.filterwarnings("ignore:unclosed <socket:ResourceWarning")
@pytest.mark.parametrize("views", [MISREAD, COMPOSITE], ids=["misread", "composite"])
def test_on_spark(shop: Shop, views: dict[str, str]) -> None:
    names = ["aggregate_of_user", "having_union", "ties", "right_using", "set_in_order", "groups", "distinct", "outer"]
    churned(shop, {name: views[name] for name in names if name in views}, "spark")


def test_codes(shop: Shop) -> None:
    codes = {
        "aggregate_of_user": "not-listed",
        "ties": "not-listed",
        "set_in_order": "not-listed",
        "aggregate_in_order": "read-otherwise",
    }
    for name, code in codes.items():
        plan = explain_view(shop.connection, QUEUE, MISREAD[name], engine="postgres")
        assert (plan.strategy, str(plan).count(f"[{code}]") > 0) == ("full", True), name


def test_every_entry_is_needed(shop: Shop, monkeypatch: pytest.MonkeyPatch) -> None:
    """A query is loaded in full when the entry that it needs is taken off the list."""
    version = shop.connection.info.server_version // 10000
    assert LISTED.keys() == whitelist.NODES.keys()
    nodes = whitelist.NODES
    for kind, query in LISTED.items():
        assert strategy(shop, query) != "full", kind
        query_reading._known.clear()
        with monkeypatch.context() as patch:
            patch.setattr(whitelist, "NODES", {name: entry for name, entry in nodes.items() if name != kind})
            assert (strategy(shop, query) == "full") == (version >= LATER.get(kind, 0)), kind
        query_reading._known.clear()


@pytest.mark.parametrize(
    ("node", "value", "query"),
    [
        (("RANGETBLENTRY", "rtekind"), "1", "select x.id from (select id from t) x"),
        (("RANGETBLENTRY", "rtekind"), "3", "select t.id, n from t, generate_series(1, 3) n"),
        (("RANGETBLENTRY", "rtekind"), "5", "select t.id from t join (values (1)) x (n) on x.n = t.g"),
        (("JOINEXPR", "jointype"), "1", "select t.id from t left join u on u.id = t.id"),
        (("SUBLINK", "subLinkType"), "4", "select id, (select max(v) from u where u.g = t.g) as m from t"),
        (("SUBLINK", "subLinkType"), "6", "select id, array(select v from u where u.g = t.g order by v) as m from t"),
        (("SETOPERATIONSTMT", "op"), "3", "select g from t except select g from u"),
        (("AGGREF", "aggkind"), "o", "select g, percentile_disc(0.5) within group (order by v) as m from t group by g"),
        (("QUERY", "limitOption"), "0", "select id from t"),
    ],
)
def test_every_value_is_needed(
    shop: Shop, monkeypatch: pytest.MonkeyPatch, node: tuple[str, str], value: str, query: str
) -> None:
    assert strategy(shop, query) != "full"
    query_reading._known.clear()
    words = {known: word for known, word in whitelist.VALUES[node].items() if known != value}
    monkeypatch.setattr(whitelist, "VALUES", whitelist.VALUES | {node: words})
    assert strategy(shop, query) == "full"
    query_reading._known.clear()


def test_comparing_the_readings_is_needed(shop: Shop, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without it a planner that takes USING for the column of the first table follows a join by the wrong column."""
    query = MISREAD["right_using"]
    assert strategy(shop, query) != "full"

    def first(self: Any, node: exp.Expr, joins: object, name: str) -> str:
        leaves = [self._query.leaves[one.alias] for one in plan_query._leaf_nodes(node)]
        return next((leaf.alias for leaf in leaves if name in leaf.columns), "")

    monkeypatch.setattr(plan_query._Namer, "_source", first)
    forget_plans()
    assert strategy(shop, query) == "full"
    forget_plans()
    monkeypatch.setattr(query_reading, "meaning", lambda _: None)
    monkeypatch.setattr(query_reading, "server_facts", lambda _: None)
    monkeypatch.setattr(query_reading, "planner_facts", lambda _: None)
    assert strategy(shop, query) != "full"
    forget_plans()


@pytest.mark.parametrize("expression", FIXED)
def test_stable_functions_that_are_fixed(shop: Shop, expression: str) -> None:
    assert strategy(shop, f"select id, {expression} as x from t") == "incremental"


@pytest.mark.parametrize("expression", MOVING)
def test_stable_functions_that_are_not(shop: Shop, expression: str) -> None:
    with pytest.raises(PlanError) as error:
        strategy(shop, f"select id, {expression} as x from t")
    assert error.value.code == "nondeterministic"


def test_fixed_functions_are_refreshed(shop: Shop) -> None:
    columns = ", ".join(f"{expression} as c{n}" for n, expression in enumerate(FIXED))
    views = {
        "texts": f"select id, {columns} from t",
        "lists": "select g, jsonb_agg(v order by id) as v, json_agg(s order by id)::text as s from t group by g",
    }
    results = churned(shop, views, "postgres")
    assert {result["texts"].action for result in results[1:]} == {"delta", "none"}


def test_sample_without_repeatable(shop: Shop) -> None:
    with pytest.raises(PlanError, match="TABLESAMPLE") as error:
        strategy(shop, "select id from t tablesample bernoulli (50)")
    assert error.value.code == "nondeterministic"


def test_operators_that_find_no_rows(shop: Shop) -> None:
    """= of boxes compares their areas; that of citext is not PostgreSQL's own."""
    shop.execute("create table x (id int primary key, b box)")
    shop.capture("x")
    assert strategy(shop, "select x.id from x left join x y on y.b = x.b") == "full"
    if not shop.execute("select from pg_extension where extname = 'citext'"):
        return
    shop.execute("create table y (id int primary key, c citext)")
    shop.capture("y")
    assert strategy(shop, "select id, c from y") == "incremental"
    assert strategy(shop, "select c, count(*) as n from y group by c") == "full"
    assert strategy(shop, "select c from y union select c from y") == "full"


def test_a_name_that_no_table_can_have_is_refused(shop: Shop) -> None:
    for name in ("ctid", "tableoid", "xmin"):
        with pytest.raises(PlanError) as error:
            strategy(shop, f"select id, v as {name} from t")
        assert error.value.code == "system-column-name"


def test_no_columns(shop: Shop) -> None:
    shop.execute(f"create table empty (); select gdq.add_table('{QUEUE}', 'empty')")
    for query in ("select from t", "select from empty", "table empty"):
        with pytest.raises(PlanError) as error:
            strategy(shop, query)
        assert error.value.code == "no-column"
    views = {
        "v_count": "select count(*) as n from empty",
        "v_rows": "select 1 as one from empty",
        "v_if": "select id from t where exists (select from empty)",
    }
    for name, query in views.items():
        shop.view(name, query, engine="postgres")
    with Refresher(shop.db.dsn) as refresher:
        for change in ("", "insert into empty default values; delete from t where id < 3", "insert into t values (90)"):
            shop.execute(change)
            shop.check(refresher, views)


def test_casts_to_text_do_not_follow_the_session(shop: Shop) -> None:
    query = "select id, f::text as f, iv::text as iv, s::bytea::text as s, interval '1 day -02:00'::text as c from t"
    hostile = "set intervalstyle = sql_standard; set extra_float_digits = -15; set bytea_output = escape"
    plain = shop.execute(f"{query} order by id")
    shop.execute(hostile)
    shop.view("v", query, engine="postgres")
    with Refresher(shop.db.dsn) as refresher:
        refresher.refresh("v")
        assert shop.execute("select * from public.v order by id") == plain
