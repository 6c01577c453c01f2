"""Tables and statements of all kinds, some drawn at random, for comparing a queue with a slot."""

from __future__ import annotations

import random
from typing import Any

import psycopg

from tests.capture.test_types import SAMPLES
from tests.support.server import Database
from tests.support.slot_pair import Compared, Pair, run

SCHEMA = [
    "create table item (id int primary key, name text, flag bool, ratio float8, n bigint)",
    """create table child (id int primary key, note text,
         item_id int references item on update cascade on delete cascade)""",
    "create table other (id int primary key, item_id int references item on delete set null)",
    "create table big (id int primary key, body text, n int)",
    "alter table big alter body set storage external",
    "create table leaf (id int primary key, body text) partition by range (id)",
    "create table leaf_1 partition of leaf for values from (0) to (50)",
    "create table leaf_2 partition of leaf for values from (50) to (1000)",
    "create table doubled (id int primary key, n int, twice int generated always as (n * 2) stored)",
    "create table side (id int generated always as identity primary key, what text)",
    "create table noted (id int primary key, n int)",
    """create function note() returns trigger language plpgsql as $$ begin
         insert into side (what) values (new.id::text); return new; end $$""",
    "create trigger note before insert or update on noted for each row execute function note()",
    "create table loose (a int, b text)",
]


TABLES = ("item", "child", "other", "big", "leaf", "doubled", "side", "noted")


LEAVES = ("leaf_1", "leaf_2")


# Has no replica identity, so that its updates would fail if it were published.
LOOSE = "loose"


def types_table(connection: psycopg.Connection[Any]) -> str:
    """The statement of a table with a column of each type that the server has."""
    known = {name for (name,) in connection.execute("select typname from pg_type where typcategory <> 'P'")}
    kinds = [name for name, sample in SAMPLES.items() if sample is not None and name in known]
    columns = [f"c_{name} {_qualified(connection, name)}" for name in kinds]
    return f"create table typed (id int primary key, {', '.join(columns)}, c_array int[], c_texts text[][])"


def _qualified(connection: psycopg.Connection[Any], name: str) -> str:
    query = "select format('%%I.%%I', typnamespace::regnamespace, typname) from pg_type where typname = %s"
    found = connection.execute(query, [name]).fetchone()
    assert found
    return str(found[0])


def fill_types(connection: psycopg.Connection[Any]) -> None:
    """A row of samples, one of NULLs, changed and deleted."""
    query = "select attname from pg_attribute where attrelid = 'typed'::regclass and attname like 'c\\_%'"
    names = [name for (name,) in connection.execute(query) if name[2:] in SAMPLES]
    columns = ", ".join(names)
    values = [SAMPLES[name[2:]] for name in names]
    marks = ", ".join(["%s"] * len(names))
    connection.execute(f"insert into typed (id, {columns}) values (1, {marks})".encode(), values)
    connection.execute("insert into typed (id, c_array, c_texts) values (2, '{1,null,3}', '{{a,\"b c\"},{NULL,\"\"}}')")
    connection.execute("insert into typed (id, c_float8, c_float4) values (3, '-0', 'NaN'), (4, 'Infinity', 1e-40)")
    assignments = ", ".join(f"{name} = %s" for name in names)
    connection.execute(f"update typed set {assignments} where id = 2".encode(), values)
    connection.execute("delete from typed where id = 1")


def fixed() -> list[str]:
    """Statements that the drawn ones do not have."""
    return [
        "insert into item select i, 'n' || i, i % 2 = 0, i / 4.0, i from generate_series(1, 40) i",
        "insert into child select i, 'c', i from generate_series(1, 20) i",
        "insert into other select i, 10 + i from generate_series(1, 20) i",
        "update item set id = id + 1000 where id = 1",
        "delete from item where id in (2, 3, 15)",
        """merge into item i using (values (4, 'm'), (5, null), (900, 'new')) v(id, name) on i.id = v.id
           when matched and v.name is null then delete
           when matched then update set name = v.name
           when not matched then insert (id, name) values (v.id, v.name)""",
        "insert into item (id, n) values (6, 1), (901, 2) on conflict (id) do update set n = excluded.n",
        "insert into item (id, n) values (6, 9) on conflict do nothing",
        """with gone as (delete from item where id = 7 returning *), made as
           (insert into item select id + 2000, name from gone returning id) update noted set n = 1 where id < 0""",
        """with a as (update item set n = 70 where id = 8 returning id), b as (insert into big values (99, 'b', 1))
           insert into leaf select id, 'cte' from a""",
        """begin; insert into item (id) values (3000); savepoint s; insert into item (id) values (3001); rollback to s;
           savepoint t; update item set n = 3 where id = 3000; release t; commit""",
        "begin; insert into item (id) values (9999); rollback",
        "begin; update item set n = -1 where id = 9; insert into leaf values (3, 'two'); prepare transaction 'gdq_two'",
        "insert into item (id) values (4000)",
        "commit prepared 'gdq_two'",
        "begin; delete from item where id = 10; prepare transaction 'gdq_gone'",
        "rollback prepared 'gdq_gone'",
        "insert into leaf select i, 'l' || i from generate_series(10, 20) i",
        "update leaf set id = id + 100 where id between 10 and 13",
        "update leaf set body = body || '!'",
        "delete from leaf where id > 112",
        "insert into big select i, repeat(md5(i::text), 200), i from generate_series(1, 5) i",
        "update big set n = n + 1",
        "update big set body = repeat('y', 9000) where id = 1",
        "update big set id = id + 50 where id < 3",
        "delete from big where id = 3",
        "insert into doubled (id, n) select i, i from generate_series(1, 4) i",
        "update doubled set n = n + 1",
        "delete from doubled where id = 1",
        "insert into noted select i, i from generate_series(1, 4) i",
        "select gdq.insert_event('q', 'hello', '{\"a\": 1}')",
        "select pg_logical_emit_message(true, 'hello', 'it')",
        "alter table item add added int",
        "update item set added = n where id % 2 = 0",
        """begin; insert into item (id, added) values (5000, 1); alter table item add late text;
           update item set late = 'x' where id = 5000; commit""",
        "alter table item drop added",
        "alter table item rename late to later",
        "update item set later = 'y' where id in (5000, 901)",
        """begin; savepoint s; alter table item add undone int; insert into item (id) values (5001); rollback to s;
           insert into item (id) values (5002); commit""",
        """begin; update noted set n = 5 where id = 1; update noted set n = 6 where id = 1;
           delete from noted where id = 1; commit""",
        "begin; update noted set n = 7 where id = 2; update noted set n = 8 where id = 2; commit",
        "begin; insert into noted values (9, 1); update noted set n = 2 where id = 9; commit",
        "update noted set n = 9 where id = 2",
        "delete from child where id > 10",
        "truncate big, doubled",
        "insert into big values (1, 'again', 1)",
        "truncate leaf",
        "insert into leaf values (60, 'again')",
        "insert into loose values (1, 'x'), (1, 'x'), (2, null)",
        "update loose set b = 'y' where a = 1",
        "delete from loose where a = 2",
    ]


def drawn(seed: int, count: int) -> list[str]:
    """Small transactions on few keys, so that each key changes often."""
    rng = random.Random(seed)
    statements = []
    for _ in range(count):
        parts = [_change(rng) for _ in range(rng.choice([1, 1, 2, 4]))]
        if rng.random() < 0.2:
            parts[1:1] = ["savepoint s", _change(rng), rng.choice(["rollback to s", "release s"])]
        statements.append("; ".join(["begin", *parts, "rollback" if rng.random() < 0.1 else "commit"]))
    return statements


def _change(rng: random.Random) -> str:
    key, n = rng.randint(6000, 6012), rng.randint(0, 9)
    return rng.choice(
        [
            f"insert into item (id, n) values ({key}, {n}) on conflict (id) do update set n = excluded.n",
            f"insert into item (id, n) select {key}, {n} where not exists (select from item where id = {key})",
            f"update item set n = {n} where id between {key} and {key + 2}",
            f"""update item set id = {key + 20 * n} where id = {key} and not exists
               (select from item where id = {key + 20 * n})""",
            f"delete from item where id = {key}",
            f"insert into leaf values ({key % 90}, 'd') on conflict (id) do update set body = leaf.body || {n}",
            f"""update leaf set id = {key % 90} where id = {(key + 40) % 90} and not exists
               (select from leaf where id = {key % 90})""",
            f"update big set n = {n} where id = 1",
        ]
    )


def interleaved(db: Database) -> None:
    """The first to change commits last."""
    with db.connect(autocommit=False) as one, db.connect() as two:
        one.execute("insert into item (id) values (7000)")
        two.execute("insert into item (id) values (7001)")
        one.execute("insert into item (id) values (7002)")


def applied(db: Database) -> None:
    """What an apply worker does: in replica role, with an origin."""
    with db.connect("su") as su:
        name = f"{db.name}far"
        su.execute("select pg_replication_origin_create(%s)", [name])
        su.execute("select pg_replication_origin_session_setup(%s)", [name])
        su.execute("set session_replication_role = replica")
        run(
            su, ["begin; select pg_replication_origin_xact_setup('0/1', now()); insert into side (what) values ('far')"]
        )
        su.execute("commit")
        su.execute("set session_replication_role = origin")
        run(su, ["begin; select pg_replication_origin_xact_setup('0/2', now())"])
        run(su, ["insert into item (id) values (7100); commit"])
        su.execute("select pg_replication_origin_session_reset()")
        su.execute("select pg_replication_origin_drop(%s)", [name])


def copied(owner: psycopg.Connection[Any]) -> None:
    with owner.cursor() as cursor, cursor.copy("copy item (id, name) from stdin") as copy:
        for number in range(8000, 8030):
            copy.write_row([number, "copied"])


def worked(pair: Pair, seed: int) -> dict[str, Compared]:
    with pair.db.connect() as owner, pair.db.connect("su") as su:
        run(owner, fixed())
        copied(owner)
        fill_types(owner)
        run(owner, drawn(seed, 40))
        interleaved(pair.db)
        applied(pair.db)
        su.execute("select 1")
    return pair.outcomes()
