"""Whoever creates a table that matches a rule has it captured, and gets none of his code run as the owner of gdq."""

from __future__ import annotations

import psycopg
import pytest

from tests.support.events import Tap
from tests.support.guarded import maintain
from tests.support.server import PASSWORD
from tests.support.traps import set_better_traps, set_traps, sprung

TRAP = """
    create table shop.{0} (id pg_catalog.int4 not null primary key, name evil.text, n evil.int4 default 'x',
        t public.trap);
    create table shop.{0}_parted (id evil.int8, name evil.text) partition by list (((id)));
    create table shop.{0}_part partition of shop.{0}_parted for values in ('1');
    create table shop.{0}_child (more evil.bool) inherits (shop.{0});
    create table shop.{0}_like (like shop.{0} including all);
    insert into shop.{0} (id, name) values (1, 'a'), (2, 'b');
    create table shop.{0}_as as select * from shop.{0};
"""


def test_no_code_of_the_creator_runs_as_the_owner_of_gdq(tap: Tap) -> None:
    """Domains with checks, casts, operators and temporary tables named as the catalogs, under rules of every kind."""
    set_traps(tap.db)
    set_better_traps(tap.db)
    options = {"filtered*": '{"where": "id > 0"}', "keyed*": '{"mode": "pk", "include": ["name"]}', "*": "{}"}
    for name, given in options.items():
        tap.owner.execute("select gdq.add_new_tables('q', %s, '{}', %s)", [[f"shop.{name}"], given])
    for name in ("pg_class", "captured_table", "new_table_rule", "pg_event_trigger_ddl_commands"):
        tap.app.execute(f"create temp table {name} (x int)".encode())
    tap.app.execute("set search_path = evil, pg_temp, pg_catalog")
    for name in ("filtered", "keyed", "plain"):
        tap.app.execute(TRAP.format(name).encode())
    maintain(tap)
    captured = {name for (name,) in tap.owner.execute("select table_name from gdq.table_info('q')")}
    assert captured >= {"shop.filtered", "shop.keyed", "shop.plain", "shop.plain_parted", "shop.plain_child"}
    inserted = [event.tbl for event in tap.events() if event.op == "insert"]
    # keyed is a resync: its child has no key
    assert inserted == ["shop.filtered"] * 2 + ["shop.plain"] * 2
    assert sprung(tap.db) == []
    # it can fail: of these tables a trap springs for whoever runs such code himself
    tap.write("truncate evil.trace", "insert into shop.plain (id, name) values (3, 'c')")
    assert tap.app.execute("select from evil.trace").rowcount > 0


def test_who_may_make_rules(tap: Tap) -> None:
    calls = ("add_new_tables('q', '{shop.*}')", "remove_new_tables('q')", "capture_wanted(1, 'pg_class', 1)")
    for role in ("gdq_consumer", "gdq_reader", None):
        with tap.db.connect("su") as su:
            if role:
                su.execute(f"grant {role} to app".encode())
            try:
                for call in (*calls, "take_short_turn()", "capture_created()"):
                    with pytest.raises(psycopg.errors.InsufficientPrivilege):
                        tap.app.execute(f"select gdq.{call}".encode())
            finally:
                if role:
                    su.execute(f"revoke {role} from app".encode())


def test_the_events_of_a_new_table_do_not_reach_who_may_not_read_it(tap: Tap) -> None:
    """A consumer without administrator's rights, of all tables of the queue, stops rather than read or skip."""
    tap.owner.execute("select gdq.add_new_tables('q', '{shop.*}')")
    with tap.db.connect("su") as su:
        su.execute(f"create role reader login password '{PASSWORD}'; grant gdq_consumer to reader".encode())
        try:
            with psycopg.connect(tap.db.server.conninfo("reader", tap.db.name, PASSWORD), autocommit=True) as mirror:
                mirror.execute("select gdq.register_consumer('q', 'mirror')")
                tap.write("create table secret (id int)", "insert into secret values (1)")
                tap.owner.execute("select gdq.force_tick('q')")
                with pytest.raises(psycopg.errors.InsufficientPrivilege, match=r"shop\.secret"):
                    mirror.execute("select gdq.next_batch('q', 'mirror')")
                tap.write("grant select on secret to reader; grant usage on schema shop to reader")
                batch = mirror.execute("select batch_id, token from gdq.next_batch('q', 'mirror')").fetchone()
                assert mirror.execute("select op from gdq.get_batch(%s, %s)", batch).fetchall() == [("insert",)]
        finally:
            su.execute("drop owned by reader; drop role reader")
