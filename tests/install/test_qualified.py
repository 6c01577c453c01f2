"""Names in gdq's SQL have a schema wherever a session's search_path is not gdq's own.

PostgreSQL takes an operator or function of any schema in the path whose argument types fit better than those of
pg_catalog's: in a session with the path of an application, `net > 0` may be somebody else's code.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pglast
import pytest
from psycopg import sql

from gdq.embedded.server import EmbeddedServer
from gdq.qualified_sql import qualified
from tests.capture.test_hijack import OURS, WITHOUT_PATH, make_shapes
from tests.install.test_hostile_settings import EmptyDatabase
from tests.support.events import Tap
from tests.support.hostile import VIEWS, Scenario
from tests.support.qualified import body_statements, names_without_schema, unqualified, watched_statements
from tests.support.server import Database


@pytest.mark.parametrize(
    ("statement", "found"),
    [
        ("select a from pg_catalog.unnest($1::pg_catalog.text[]) a where a operator(pg_catalog.=) 'x = f(1)'", []),
        ("select gdq.f(x => 1), a::int, extract(epoch from b), coalesce(c, d)", []),
        ("select a > 1", [">"]),
        ("select f(1), coalesce(a, 'f(')", ["f"]),
        ("select a in (1, 2), nullif(a, 1), a between 1 and 2", ["in", "nullif", "between"]),
        ("select case a when 1 then 2 end, a is distinct from b, a like 'x'", ["case", "is distinct from", "like"]),
        ("select from x.a join x.b using (k) where k in (select 1)", ["using", "in"]),
        ("select a::text, b::x.c collate d", ["text", "d"]),
        ("with q as (select 1) select from q, r", ["r"]),
        ("declare c cursor for select - a", ["-"]),
        ("set local search_path = pg_catalog; select 1", []),
        ("set local search_path = pg_catalog, pg_temp; select a = 1", []),
        ("set local search_path = public; select a = 1", ["="]),
        ("select p from pg_catalog.pg_backend_pid() p(pid)", []),
    ],
)
def test_what_is_found(statement: str, found: list[str]) -> None:
    assert sorted(unqualified(statement)) == sorted(found)


@pytest.mark.parametrize(
    ("text", "written"),
    [
        ("select count(*), a.*, b from t", "select pg_catalog.count(*), a.*, b from t"),
        ("select *, f(1) * -2 from t", "select *, pg_catalog.f(1) operator(pg_catalog.*) -2 from t"),
        ("select 'a = f(b)', \"x = y\"", "select 'a = f(b)', \"x = y\""),
        ("select a->>'b' = any (%s)", "select a operator(pg_catalog.->>) 'b' operator(pg_catalog.=) any (%s)"),
        ("select %s::text[], %s::int[], a::x.y", "select %s::pg_catalog.text[], %s::int[], a::x.y"),
        ("select from gdq.f(a => %(a)s) t(b, c)", "select from gdq.f(a => %(a)s) t(b, c)"),
        (
            "update g.t set a = 1, b = c + 1 where d = 2",
            "update g.t set a = 1, b = c operator(pg_catalog.+) 1 where d operator(pg_catalog.=) 2",
        ),
        ("select -a, (b)::oid", "select operator(pg_catalog.-) a, (b)::pg_catalog.oid"),
        ("select a operator(pg_catalog.=) b", "select a operator(pg_catalog.=) b"),
    ],
)
def test_qualified(text: str, written: str) -> None:
    assert re.sub(" +", " ", qualified(text)) == written


@pytest.mark.parametrize(
    "text",
    [
        "select a in (1)",
        "select nullif(a, b)",
        "select a like 'b'",
        "select a is not distinct from b",
        "select case a when 1 then 2 end",
        "select from a join b using (c)",
        "select a between 1 and 2",
        "select cast(a as text)",
        "select $$a$$",
    ],
)
def test_what_cannot_be_qualified(text: str) -> None:
    with pytest.raises(ValueError, match=r"search_path|no SQL"):
        qualified(text)


def _texts() -> Iterator[tuple[str, str]]:
    """The SQL in calls of qualified(), with where it stands; what is put into it is taken for a name."""
    for path in [*Path("gdq").rglob("*.py"), *Path("consumers").rglob("*.py")]:
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "qualified":
                parts = node.args[0].values if isinstance(node.args[0], ast.JoinedStr) else [node.args[0]]
                text = "".join(str(part.value) if isinstance(part, ast.Constant) else "g.x" for part in parts)
                yield f"{path}:{node.lineno}", text


def _tree(text: str) -> str:
    """The parser's tree of a text, without pg_catalog as a schema."""
    tree = repr(pglast.parse_sql(text))
    return re.sub(r"\(<String sval='pg_catalog'>, (<String sval='[^']*'>),?\)", r"(\1,)", tree)


def test_qualified_text_means_the_same() -> None:
    """OPERATOR(...) binds alike for all operators: a = b + c would become (a = b) + c."""
    different, loose, seen = [], [], 0
    for place, text in _texts():
        plain = re.sub(r"%(\(\w+\))?s", "$1", text).replace("%%", "%")
        written = qualified(plain)
        try:
            before = _tree(plain)
        except pglast.parser.ParseError:
            continue  # names of pieces stand where the grammar has none; the test of what is sent sees the whole
        seen += 1
        if _tree(written) != before:
            different.append(place)
        loose += [(place, name) for name in unqualified(written) if name != "x"]
    assert (different, loose) == ([], [])
    assert seen > 60


def test_functions_name_what_they_use(tap: Tap) -> None:
    """Those without a search_path of their own all names; the others what is not in pg_catalog."""
    make_shapes(tap)
    tap.owner.execute("select gdq.insert_event('q', 'kind', 'text'::text)")
    known = {
        kind: {name for (name,) in tap.owner.execute(query.encode())}
        for kind, query in {
            "relation": "select relname from pg_class where relnamespace = 'pg_catalog'::regnamespace",
            "function": "select proname from pg_proc where pronamespace = 'pg_catalog'::regnamespace",
            "type": "select typname from pg_type where typnamespace = 'pg_catalog'::regnamespace",
            "operator": "select oprname from pg_operator where oprnamespace = 'pg_catalog'::regnamespace",
            "collation": "select collname from pg_collation where collnamespace = 'pg_catalog'::regnamespace",
        }.items()
    }
    known["operator"] |= {
        "in",
        "nullif",
        "like",
        "is distinct from",
        "is not distinct from",
        "between",
        "case",
        "using",
    }
    transition = ("gdq_old", "gdq_new")  # the trigger's own, found before any table
    rows = tap.owner.execute(
        f"select split_part(p.oid::regprocedure::text, '(', 1), p.prosrc, pg_get_functiondef(p.oid) from pg_proc p"
        f" where p.pronamespace in {OURS}".encode()
    ).fetchall()
    found: dict[str, list[str]] = {}
    generated = 0
    for name, _, definition in rows:
        bare = WITHOUT_PATH.fullmatch(name) is not None
        generated += name.startswith("gdq_log.")
        for statement in body_statements(definition):
            for kind, used in names_without_schema(statement):
                if used not in transition and (bare or used not in known[kind]):
                    found.setdefault(name, []).append(f"{kind} {used}")
    assert found == {}
    assert generated > 40


def test_a_name_that_loses_its_schema_is_found(tap: Tap) -> None:
    """The test above can fail."""
    tap.write("create table t (id int primary key, v text)")
    tap.add("shop.t", where="v = 'x'")
    query = r"select pg_get_functiondef(oid) from pg_proc where proname ~ '^t\d+_q\d+_u' limit 1"
    (definition,) = tap.owner.execute(query.encode()).fetchone() or ("",)
    places = [
        match.span() for match in re.finditer(r"(?i)operator\(pg_catalog\.([^)]*)\)|pg_catalog\.(?=\w+\()", definition)
    ]
    assert len(places) > 5
    for start, end in places:
        piece = re.sub(r"(?i)operator\(pg_catalog\.([^)]*)\)|pg_catalog\.", r"\1", definition[start:end])
        mutant = f"{definition[:start]}{piece}{definition[end:]}"
        assert any(unqualified(statement) for statement in body_statements(mutant)), definition[start - 20 : end + 20]


@pytest.mark.long
@pytest.mark.server
def test_all_that_is_sent(server: EmbeddedServer, template: str) -> None:
    """Every command and reader, in sessions with the path of an application."""
    with EmptyDatabase(server) as database:
        set_path(database)
        with watched_statements() as sent:
            Scenario(database, database.dsn).run()
    assert sent.seen > 2000
    # the user's own query means what it means in the user's session
    own = {f"create temp view gdq_check as {query}" for query in VIEWS.values()}
    assert {text: names for text, names in sent.loose.items() if text not in own} == {}


@pytest.mark.long
@pytest.mark.server
def test_all_that_is_sent_for_slots(db: Database) -> None:
    set_path(db)
    with db.connect("su") as su, watched_statements() as sent:
        su.execute("create table public.t (id int primary key, v text); create table public.w (id int primary key)")
        su.execute("alter table public.t replica identity full")
        su.execute("alter table public.t owner to gdq_owner; alter table public.w owner to gdq_owner")
        run = Scenario(db, db.su_dsn).gdq
        run("create-queue", "q")
        run("add-table", "q", "public.t")
        query = "select v, count(*) as n from public.t group by v"
        run("create-view", "sums", "--queue", "q", "--sql", "-", "--target", "public.sums", stdin=query)
        run("create-slot", "q", "c", "public.t")
        run("create-slot", "q", "sums")
        run("refresh", "sums", "--source", "slot")
        su.execute("insert into public.t values (1, 'a'), (2, 'b'); update public.t set v = 'c' where id = 1")
        for more in ((), ("--format", "debezium")):
            run("consume", "q", "c", "--source", "slot", "--once", *more)
        run("refresh", "sums", "--source", "slot")
        run("slots")
        run("compare", "--tables", "public.w", "--seconds", "1")
        run("drop-slot", "q", "sums")
        run("drop-slot", "q", "c")
        run("drop-view", "sums")
    assert sent.seen > 300
    assert {text: names for text, names in sent.loose.items() if query not in text} == {}


def set_path(database: Database) -> None:
    with database.connect("su") as su:
        su.execute("create schema if not exists evil")
        su.execute(sql.SQL("alter database {} set search_path = evil, public").format(sql.Identifier(database.name)))
