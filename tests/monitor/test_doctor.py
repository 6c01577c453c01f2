"""What the doctor finds, that a sound queue has nothing, and what it mends."""

from __future__ import annotations

import contextlib
import json
import re
from datetime import timedelta

import psycopg
import pytest

from gdq.embedded.server import EmbeddedServer
from gdq.monitor.doctor import Finding, Repair, doctor, fix
from tests.support.events import Tap, drain
from tests.support.programs import gdq

NOW = timedelta(0)
EVENT_TRIGGERS = ("!gdq_ddl", "!gdq_drop", "!gdq_rewrite", "!gdq_capture_role")


@pytest.fixture
def shop(tap: Tap) -> Tap:
    """A plain table, one with partitions, and one in mode pk, all with changes."""
    tap.write(
        "create table item (id int primary key, name text)",
        "create table part (id int primary key) partition by list (id)",
        "create table part_1 partition of part for values in (1)",
        "create table tag (id int primary key, name text)",
    )
    tap.add("shop.item")
    tap.add("shop.part")
    tap.add("shop.tag", mode="pk")
    tap.write("insert into item values (1, 'a')", "insert into part values (1)", "insert into tag values (1, 'a')")
    drain(tap.db)
    return tap


def found(tap: Tap, patience: timedelta = timedelta(minutes=1)) -> list[Finding]:
    """What the doctor finds; and that nothing escapes it because it looks closely only at suspect tables."""
    findings = doctor(tap.owner, patience=patience)
    if tap.owner.execute("select gdq.busy_relations() = '{}'").fetchone() == (True,):
        query = "select f.code, f.cause from gdq.captured_table t, gdq.table_findings(t.table_id) f"
        assert set(tap.owner.execute(query)) <= {(finding.code, finding.cause) for finding in findings}
    return findings


def codes(findings: list[Finding]) -> list[str]:
    return [finding.code for finding in findings]


def trigger(tap: Tap, table: str, op: str) -> str:
    row = tap.owner.execute("select format('!gdq_%%s_1_%%s', %s::regclass::oid, %s::text)", [table, op]).fetchone()
    assert row
    return f'"{row[0]}"'


def unseen(tap: Tap, *statements: str) -> None:
    """Run statements as a superuser while the event triggers are off: gdq does not notice."""
    with tap.db.connect("su") as su:
        for name in EVENT_TRIGGERS:
            su.execute(f'alter event trigger "{name}" disable'.encode())
        for statement in statements:
            su.execute(statement.encode())
        for name in EVENT_TRIGGERS:
            su.execute(f'alter event trigger "{name}" enable always'.encode())


def mend(tap: Tap) -> list[Repair]:
    """gdq doctor --fix as a superuser."""
    with tap.db.connect("su") as su:
        return list(fix(su, doctor(su)))


def test_nothing_is_wrong_with_a_sound_queue(shop: Tap) -> None:
    shop.write(
        "alter table item add column more int",
        "alter table part add column more int",
        "create table part_2 partition of part for values in (2)",
        f"alter table item disable trigger {trigger(shop, 'shop.item', 'i')}",
        f"alter table item enable trigger {trigger(shop, 'shop.item', 'i')}",
        "insert into part values (2, 2)",
    )
    shop.owner.execute("update gdq.queue set rotation_period = '1 microsecond'")
    for _ in range(10):
        shop.owner.execute("select gdq.maintain()")
    drain(shop.db)
    assert found(shop) == []
    shop.owner.execute("select gdq.set_activity(table_id, 'cooling') from gdq.captured_table")
    shop.owner.execute("update gdq.event_ring set current_slot = (current_slot + 1) % 3")
    assert found(shop) == []
    done = gdq("doctor", dsn=shop.db.dsn)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


def test_nothing_is_wrong_with_options_of_capture(shop: Tap) -> None:
    with shop.db.connect("su") as su:
        su.execute("create table public.bulk (id int primary key, name text) partition by list (id)")
        su.execute("create table public.bulk_1 partition of public.bulk for values in (1)")
        su.execute("create table public.kept (id int primary key, name text)")
        su.execute("create table public.plain (id int primary key, name text)")
        for table in ("bulk", "bulk_1", "kept", "plain"):
            su.execute(f"alter table public.{table} owner to gdq_owner".encode())
    shop.add("public.bulk", granularity="statement")
    shop.add("public.kept", operations=["insert", "update"], always=True, origin=True, pin_search_path=True)
    shop.add("public.plain", format="json")
    shop.write("alter table item add column more int")
    shop.owner.execute("alter table public.plain add column more int")
    assert found(shop) == []
    unseen(shop, f"alter table public.kept enable trigger {trigger(shop, 'public.kept', 'i')}")
    [finding] = found(shop)
    assert (finding.code, "not enabled ALWAYS" in finding.cause) == ("trigger_disabled", True)
    assert [repair.done for repair in mend(shop)] == [True]
    assert codes(found(shop)) == ["resync"]


BREAKS = {
    "trigger_disabled": "alter table shop.item disable trigger {i}",
    "trigger_touched": "alter table shop.item disable trigger {i} ;; alter table shop.item enable trigger {i}",
    "trigger_missing": "drop trigger {i} on shop.item",
    "trigger_renamed": "alter trigger {i} on shop.item rename to zz",
    "partition_not_captured": "drop trigger {part_t} on shop.part_1",
    "columns_changed": "alter table shop.item add column more int",
    "capture_function": "alter function gdq_log.{function}() owner to gdq_owner",
    "capture_function, replaced": "create or replace function gdq_log.{function}() returns trigger"
    " language plpgsql security definer as 'begin return null; end'",
    "capture_function, dropped": "drop function gdq_log.{function}() cascade",
}


@pytest.mark.parametrize("broken", BREAKS)
def test_what_came_off_unseen_is_found_and_mended(shop: Tap, broken: str) -> None:
    names = {"i": trigger(shop, "shop.item", "i"), "part_t": trigger(shop, "shop.part", "t")}
    (oid,) = shop.owner.execute("select 'shop.item'::regclass::oid").fetchone() or (0,)
    statements = BREAKS[broken].format(function=f"t{oid}_q1_i", **names).split(" ;; ")
    unseen(shop, *statements)
    code = broken.partition(",")[0]
    findings = [finding for finding in found(shop) if finding.code == code]
    assert findings
    table = "shop.part" if code == "partition_not_captured" else "shop.item"
    assert {(finding.severity, finding.object) for finding in findings} == {("error", table)}
    repairs = mend(shop)
    assert repairs
    assert all(repair.done for repair in repairs), repairs
    assert codes(found(shop)) == ["resync"]  # until the consumer has passed it
    shop.write("insert into item (id, name) values (2, 'b')", "truncate part_1")
    events = shop.events()
    assert "resync" in [event.op for event in events]
    assert [event.op for event in events if event.op in ("insert", "truncate")] == ["insert", "truncate"]
    assert found(shop) == []


def test_row_security_that_was_allowed(shop: Tap) -> None:
    shop.write("create table kept (id int primary key)", "alter table kept enable row level security")
    shop.add("shop.kept", allow_rls=True)
    shop.write("alter table kept add column more int", "alter table tag enable row level security")
    assert [(finding.code, finding.object) for finding in found(shop)] == [("row_security", "shop.tag")]


def test_who_disabled_a_trigger(shop: Tap) -> None:
    unseen(shop, f"alter table shop.item disable trigger {trigger(shop, 'shop.item', 'u')}")
    [finding] = found(shop)
    row = shop.owner.execute("select max(xmin::text::bigint) from pg_trigger where tgenabled = 'D'").fetchone()
    assert row
    assert f"by transaction {row[0]}" in finding.cause


def test_what_cannot_be_mended_is_left_and_said(shop: Tap) -> None:
    unseen(shop, "alter table shop.item set unlogged", "alter table shop.tag enable row level security")
    assert codes(found(shop)) == ["cannot_capture", "row_security"]
    [repair] = mend(shop)
    assert not repair.done
    assert "is unlogged" in repair.text
    assert codes(found(shop)) == ["capture_off", "row_security"]
    shop.write("alter table item set logged")
    [repair] = mend(shop)
    assert repair.done


def test_owner_of_gdq_may_not_drop_triggers_of_others(shop: Tap) -> None:
    unseen(shop, f"alter trigger {trigger(shop, 'shop.item', 'i')} on shop.item rename to zz")
    [finding] = [finding for finding in found(shop) if finding.code == "trigger_renamed"]
    assert not finding.fixable
    assert finding.cure == "As the owner of the table: DROP TRIGGER zz ON shop.item"


def test_partition_that_was_detached(shop: Tap) -> None:
    shop.write("alter table part detach partition part_1")
    findings = [finding for finding in found(shop) if finding.code == "trigger_left_over"]
    assert {(finding.severity, finding.object) for finding in findings} == {("warning", "shop.part_1")}
    mend(shop)
    drain(shop.db)
    assert found(shop) == []


def test_event_triggers(shop: Tap) -> None:
    with shop.db.connect("su") as su:
        su.execute('alter event trigger "!gdq_drop" disable')
        su.execute("create function public.look() returns event_trigger language plpgsql as 'begin end'")
        su.execute("create event trigger looks on ddl_command_end execute function public.look()")
        for name, tag in (("few", "CREATE VIEW"), ("some", "CREATE TABLE"), ("!few", "CREATE VIEW")):
            su.execute(
                f"create event trigger \"{name}\" on ddl_command_end when tag in ('{tag}')"
                " execute function public.look()".encode()
            )
    off, *others = found(shop)
    assert (off.severity, off.code, off.object, off.fixable) == ("error", "event_triggers_off", "!gdq_drop", False)
    assert [(other.severity, other.code, other.object) for other in others] == [
        ("note", "event_trigger_of_application", "looks"),
        ("note", "event_trigger_of_application", "some"),
    ]
    assert [repair.done for repair in mend(shop)] == [True]
    done = gdq("doctor", dsn=shop.db.dsn)
    assert (done.returncode, done.stdout.count("note: event trigger ")) == (0, 2)
    with shop.db.connect("su") as su:
        su.execute('create event trigger "!first" on sql_drop execute function public.look()')
    first = found(shop)[0]
    assert (first.severity, first.object, "before those of gdq" in first.cause) == ("warning", "!first", True)
    assert gdq("doctor", dsn=shop.db.dsn).returncode == 3


@pytest.mark.server
def test_event_triggers_switched_off_for_the_server(shop: Tap) -> None:
    with shop.db.connect("su") as su:
        if su.info.server_version < 170000:
            pytest.skip("the setting came with 17")
        su.execute("set event_triggers = off")
        [finding] = doctor(su)
    assert (finding.code, finding.cure) == ("event_triggers_off", "Set event_triggers = on.")


def test_trigger_that_fires_first(shop: Tap) -> None:
    shop.write(
        "create function look() returns trigger language plpgsql as 'begin return null; end'",
        'create trigger " first" after insert on item for each row execute function look()',
        'create trigger " before" before insert on item for each row execute function look()',
        'create trigger " each" after insert on item execute function look()',
        "create trigger last after insert on item for each row execute function look()",
    )
    [finding] = found(shop)
    assert (finding.code, finding.object) == ("trigger_outranked", "shop.item")
    assert '" first"' in finding.cause


def test_replication(shop: Tap, server: EmbeddedServer) -> None:
    with shop.db.connect("su") as su:
        su.execute("create publication everything for all tables")
        su.execute("create publication few for table shop.item")
        su.execute("create publication logs for tables in schema gdq_log")
        su.execute(f"alter role app in database {shop.db.name} set session_replication_role = replica".encode())
        su.execute(f"select pg_create_logical_replication_slot('{shop.db.name}', 'pgoutput')".encode())
        with contextlib.ExitStack() as stack:
            su.execute(
                f"create subscription {shop.db.name} connection '{server.conninfo(dbname=shop.db.name)}'"
                " publication few with (create_slot = false, enabled = false, copy_data = false)".encode()
            )
            stack.callback(su.execute, f"drop subscription {shop.db.name}".encode())
            assert [(finding.code, finding.object) for finding in found(shop)] == [
                ("subscription_target", "shop.item"),
                ("publication_ships_logs", "everything"),
                ("publication_ships_logs", "logs"),
                ("replica_role", f"role app in database {shop.db.name}"),
            ]


def test_ticker_and_consumers(shop: Tap) -> None:
    shop.owner.execute("select gdq.register_consumer('q', 'new')")
    shop.write("insert into item values (2, 'b')")
    shop.owner.execute("select gdq.force_tick('q')")
    with shop.owner.transaction(force_rollback=True):  # one that asks, and fails each time
        assert shop.owner.execute("select batch_id from gdq.next_batch('q', 'new')").fetchone() is not None
    assert found(shop) == []
    seen = {finding.code: finding for finding in found(shop, NOW)}
    assert seen.keys() == {"consumer_lagging", "consumer_never_seen"} | ({"ticker_silent"} & seen.keys())
    assert (seen["consumer_never_seen"].object, seen["consumer_lagging"].object) == ("new", "c")
    assert "has finished no batch since" in seen["consumer_never_seen"].cause
    shop.owner.execute("update gdq.tick set created_at = created_at - interval '1 hour'")
    seen = {finding.code: finding for finding in found(shop)}
    assert seen.keys() == {"consumer_lagging", "ticker_silent"}
    cause = seen["consumer_lagging"].cause
    assert re.match("consumer c of queue q is (1 h|59 min [0-9]+ s), 1 event and [0-9]+ [a-zA-Z]+ behind", cause), cause
    assert re.match("queue q has had no tick for (1 h|59 min [0-9]+ s), ", seen["ticker_silent"].cause)
    drain(shop.db)
    assert found(shop) == []


def test_the_consumer_of_a_view_is_told_as_the_view(shop: Tap) -> None:
    """What cures it is a refresh; the command names its own commands."""
    view = "select gdq.create_view('total', 'q', 'select id from shop.item', 'public.total', '{shop.item}', '{}')"
    shop.owner.execute(view.encode())
    [finding] = [one for one in found(shop, NOW) if one.object == "view:total"]
    assert finding.cause.startswith("view total of queue q was registered ")
    assert finding.cure == "Refresh it: gdq refresh. If it is not needed: gdq.drop_view()."
    shown = gdq("doctor", "--patience", "0", dsn=shop.db.dsn).stdout
    assert "  cure: Refresh it: gdq refresh. If it is not needed: gdq drop-view.\n" in shown
    assert "gdq." not in shown


@pytest.mark.parametrize(
    ("span", "text"),
    [
        ("-1 s", "0 s"), ("59.9 s", "59 s"), ("1 min", "1 min"), ("61 s", "1 min 1 s"), ("3661 s", "1 h 1 min"),
        ("24 h", "1 d"), ("400 d 1 h", "400 d 1 h"), (None, None),
    ],
)  # fmt: skip
def test_spans_of_time(shop: Tap, span: str | None, text: str | None) -> None:
    assert shop.owner.execute("select gdq.span_text(%s::interval)", [span]).fetchone() == (text,)


@pytest.mark.parametrize("activity", ["busy", "quiet"])
def test_index_that_is_behind(shop: Tap, activity: str) -> None:
    shop.owner.execute("select gdq.set_activity(table_id, %s) from gdq.captured_table", [activity])
    shop.owner.execute(
        "insert into gdq_log.t1_v1_s0 (ev_id, ev_txid, row_name)"
        " select 0, 3, repeat(md5(g::text), 50) from generate_series(1, 25000) g"
    )
    assert [(finding.code, finding.fixable) for finding in found(shop)] == [("index_behind", True)]
    assert [repair.done for repair in mend(shop)] == [True]
    assert found(shop) == []


def test_numbers_that_run_out_and_dead_rows(shop: Tap) -> None:
    with shop.db.connect("su") as su:
        su.execute("select setval('gdq.table_version_version_id_seq', 9223372036854775000)")
        su.execute(
            "insert into gdq.consumer (consumer_name) select g from generate_series(1, 10100) g;"
            "delete from gdq.consumer where consumer_name <> 'c'; select pg_stat_force_next_flush()"
        )
    seen = {finding.code: (finding.severity, finding.object) for finding in found(shop)}
    assert seen == {
        "sequence_near_end": ("error", "gdq.table_version_version_id_seq"),
        "dead_rows": ("warning", "gdq.consumer"),
    }


def test_mending_does_not_make_writers_wait(shop: Tap) -> None:
    """A long writer holds the table: others get through meanwhile, and capture is off on record until it ends."""
    unseen(shop, f"drop trigger {trigger(shop, 'shop.item', 'u')} on shop.item")
    with shop.db.connect("app", autocommit=False) as writer:
        writer.execute("insert into item values (2, 'b')")
        shop.app.execute("set statement_timeout = '10 min'")
        [repair] = mend(shop)
        assert not repair.done
        shop.write("insert into item values (3, 'c')")
        assert codes(found(shop)) == ["capture_off"]
        writer.rollback()
    shop.owner.execute("select gdq.maintain()")
    assert codes(found(shop)) == ["resync"]


def test_ddl_under_way_is_not_waited_for(shop: Tap) -> None:
    with shop.db.connect("app", autocommit=False) as ddl:
        ddl.execute("alter table item add column more int; truncate part; lock table tag")
        shop.owner.execute("set statement_timeout = '10 min'")
        assert "check_failed" not in codes(found(shop))
        ddl.rollback()


def test_command(shop: Tap) -> None:
    unseen(shop, f"drop trigger {trigger(shop, 'shop.item', 'u')} on shop.item")
    done = gdq("doctor", "q", dsn=shop.db.dsn)
    assert done.returncode == 3
    assert done.stdout.splitlines()[0].startswith("error: a capture trigger of shop.item was dropped")
    assert done.stdout.splitlines()[1].startswith("  cure: gdq doctor --fix")
    parsed = json.loads(gdq("doctor", "--json", dsn=shop.db.dsn).stdout)
    assert [(finding["code"], finding["fixable"]) for finding in parsed] == [("trigger_missing", True)]
    done = gdq("doctor", "--fix", dsn=shop.db.dsn)
    assert done.returncode == 3
    assert done.stderr == "captured shop.item again; that changes may be missing is recorded\n"
    assert "[resync]" in done.stdout
    drain(shop.db)
    assert gdq("doctor", "--fix", dsn=shop.db.dsn).returncode == 0
    with pytest.raises(psycopg.errors.UndefinedObject):
        doctor(shop.owner, "none")


def test_partitions_are_listed_once_for_a_table(shop: Tap) -> None:
    """Not once for each trigger: doctor took over a minute with 2,000 partitions."""
    shop.write("create table many (id int primary key) partition by range (id)")
    shop.write(*(f"create table many_{i} partition of many for values from ({i}) to ({i + 1})" for i in range(30)))
    shop.add("shop.many")
    with shop.db.connect("su", autocommit=False) as su:
        su.execute("set local track_functions = 'pl'")
        su.execute("select gdq.doctor()")
        query = "select calls from pg_stat_xact_user_functions where schemaname = 'gdq' and funcname = 'partition_oids'"
        calls = su.execute(query).fetchall()
    assert calls
    assert calls[0][0] < 30
