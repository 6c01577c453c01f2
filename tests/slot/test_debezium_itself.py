"""gdq's records beside those of a running Debezium that reads the same changes, field by field."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psycopg
import pytest

from gdq.consumer import register_consumer
from gdq.consumers.slot.slot import create_slot, drop_slot
from tests.slot.test_debezium import TYPES, consumed
from tests.support.server import Database

pytestmark = [pytest.mark.server, pytest.mark.long]

VERSION = "3.2.0.Final"  # docs/from-debezium.md names it
SLOT = "debezium_itself"
ABSENT = "__debezium_unavailable_value"

# What Debezium gives where gdq does not follow it, with decimal.handling.mode=string: docs/from-debezium.md names them.
OTHERWISE: dict[tuple[str, str], Any] = {
    ("numeric", "NaN"): "NAN",
    ("date", "infinity"): -2147472692,
    ("integer[]", "{{1},{2}}"): [None, None],
    ("integer[]", "[0:1]={1,2}"): [1, 2],
    ("box[]", "{(1,1),(0,0)}"): "left out",
}

POM = f"""<project xmlns="http://maven.apache.org/POM/4.0.0"><modelVersion>4.0.0</modelVersion>
<groupId>gdq</groupId><artifactId>debezium</artifactId><version>1</version><dependencies>
<dependency><groupId>io.debezium</groupId><artifactId>debezium-embedded</artifactId><version>{VERSION}</version></dependency>
<dependency><groupId>io.debezium</groupId><artifactId>debezium-connector-postgres</artifactId>
<version>{VERSION}</version></dependency></dependencies></project>
"""

# Runs Debezium with the properties of standard input, and prints each record as a line of JSON.
JAVA = """
import io.debezium.engine.*;
import io.debezium.engine.format.*;
import java.util.*;

public class Envelopes {
    public static void main(String[] arguments) throws Exception {
        var properties = new Properties();
        properties.load(System.in);
        var format = KeyValueHeaderChangeEventFormat.of(Json.class, Json.class, Json.class);
        DebeziumEngine.create(format).using(properties).notifying(Envelopes::print)
            .using((ok, message, error) -> System.err.println(message + ": " + error)).build().run();
    }

    private static void print(ChangeEvent<String, String> record) {
        var headers = new StringJoiner(",", "{", "}");
        for (Header<?> header : record.headers())
            headers.add('"' + header.getKey() + "\\":" + header.getValue());
        System.out.printf("{\\"key\\":%s,\\"value\\":%s,\\"headers\\":%s}%n", record.key(), record.value(), headers);
    }
}
"""


@pytest.fixture(scope="session")
def program(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """The command that runs Debezium; Maven fetches it where it is not there yet."""
    for name in ("mvn", "javac"):
        if shutil.which(name) is None:
            pytest.skip(f"Debezium cannot be run: there is no {name}")
    folder = tmp_path_factory.mktemp("debezium")
    (folder / "pom.xml").write_text(POM)
    (folder / "Envelopes.java").write_text(JAVA)
    command = ["mvn", "-q", "-B", "dependency:build-classpath", "-Dmdep.outputFile=classpath"]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False, timeout=600)
    if done.returncode:
        pytest.skip(f"Maven cannot fetch Debezium {VERSION}")
    return ["java", "-cp", (folder / "classpath").read_text().strip(), os.fspath(folder / "Envelopes.java")]


@contextmanager
def debezium(db: Database, program: list[str], log: Path) -> Iterator[subprocess.Popen[str]]:
    """Debezium at work on the database, in the publication of queue q."""
    properties = {
        "name": "itself",
        "connector.class": "io.debezium.connector.postgresql.PostgresConnector",
        "offset.storage": "org.apache.kafka.connect.storage.MemoryOffsetBackingStore",
        "plugin.name": "pgoutput",
        "snapshot.mode": "no_data",
        "publication.name": "gdq_q",
        "publication.autocreate.mode": "disabled",
        "slot.name": SLOT,
        "topic.prefix": "q",
        "skipped.operations": "none",
        "decimal.handling.mode": "string",
        "database.hostname": "127.0.0.1",
        "database.port": db.server.port,
        "database.user": "postgres",
        "database.password": db.server.password,
        "database.dbname": db.name,
    } | {f"{what}.converter.schemas.enable": "false" for what in ("key", "value", "header")}
    with log.open("w") as errors, db.connect("su") as su:
        process = subprocess.Popen(
            program, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=errors, text=True, encoding="utf-8"
        )
        stopper = threading.Timer(120, process.kill)  # reading its output ends then, too
        stopper.start()
        assert process.stdin
        assert process.stdout
        try:
            process.stdin.write("".join(f"{name}={value}\n" for name, value in properties.items()))
            process.stdin.close()
            slot = "select from pg_replication_slots where slot_name = %s"
            while not su.execute(f"{slot} and active", [SLOT]).rowcount:
                assert process.poll() is None, log.read_text()
                time.sleep(0.1)
            yield process
        finally:
            stopper.cancel()
            process.kill()
            process.wait()
            process.stdout.close()
            while su.execute(f"{slot} and active", [SLOT]).rowcount:
                time.sleep(0.1)
            drop = "select pg_drop_replication_slot(slot_name) from pg_replication_slots where slot_name = %s"
            su.execute(drop, [SLOT])


def records_to_end(process: subprocess.Popen[str]) -> list[dict[str, Any]]:
    """What Debezium prints up to the message `end`, without the headers that tell its own names."""
    found: list[dict[str, Any]] = []
    assert process.stdout
    for line in process.stdout:
        if not line.startswith('{"key":'):
            continue
        record = json.loads(line)
        headers = {n: v for n, v in record.pop("headers").items() if not n.startswith("__debezium.context.")}
        if ((record["value"] or {}).get("message") or {}).get("prefix") == "end":
            return found
        found.append(record | ({"headers": headers} if headers else {}))
    raise AssertionError("Debezium ended before the message did come")


CHANGES = """
    insert into item values (1, 10);
    update item set n = 11;
    update item set id = 2;
    alter table item add column later int;
    delete from item;
    truncate item;
    insert into keyed select 1, 1, string_agg(md5(i::text), '') from generate_series(1, 300) i;
    update keyed set n = 2;
    update keyed set id = 5;
    delete from keyed;
    insert into uniq values (1, 1);
    update uniq set b = 2;
    delete from uniq;
    insert into bare values (5);
    select pg_logical_emit_message(true, 'mail', 'hé');
    select pg_logical_emit_message(true, 'bytes', '\\xff00'::bytea);
    select pg_logical_emit_message(false, 'now', 'x');
    select pg_logical_emit_message(true, 'end', '')"""


@pytest.fixture
def owner(db: Database) -> Iterator[psycopg.Connection[Any]]:
    """Tables of each replica identity and one of all types, in queue and slot."""
    columns = ", ".join(f"c{number} {type_}" for number, (type_, _, _) in enumerate(TYPES))
    tables = ["public.item", "public.keyed", "public.uniq", "public.bare", 'public."Types"']
    with db.connect() as owner, db.connect("su") as su:
        owner.execute("create domain positive as bigint check (value > 0); create type mood as enum ('glad')")
        owner.execute("create table item (id int primary key, n bigint); alter table item replica identity full")
        owner.execute("create table keyed (id int primary key, n int, big text)")
        owner.execute("alter table keyed alter big set storage external")
        owner.execute("create table uniq (a int not null, b int); create unique index uniq_a on uniq (a)")
        owner.execute("alter table uniq replica identity using index uniq_a")
        owner.execute("create table bare (n int); alter table bare replica identity full")
        owner.execute(f'create table "Types" (id int primary key, {columns})'.encode())
        owner.execute("select gdq.create_queue('q')")
        for table in tables:
            owner.execute("select gdq.add_table('q', %s)", [table])
        register_consumer(owner, "q", "c")
        create_slot(su, "q", "c", tables)
        yield owner
        drop_slot(su, "q", "c")


def like(theirs: Any, ours: Any) -> Any:
    """Debezium's value with what gdq leaves out left out: columns that were not sent, the time of printing."""
    if not isinstance(theirs, dict) or not isinstance(ours, dict):
        return theirs
    value = dict(theirs)
    for image in ("before", "after"):
        if isinstance(value.get(image), dict):
            mine = ours[image] or {}
            value[image] = {n: v for n, v in value[image].items() if n in mine or v not in (None, ABSENT)}
    source = value["source"]
    value["source"] = source | {
        "version": ours["source"]["version"],
        "sequence": f"[null,{json.loads(source['sequence'])[1]!r}]".replace("'", '"'),
    }
    return value | {name: ours[name] for name in ("ts_ms", "ts_us", "ts_ns") if name in value}


def test_says_what_debezium_says(
    db: Database, owner: psycopg.Connection[Any], program: list[str], tmp_path: Path
) -> None:
    marks = ", ".join(["%s"] * len(TYPES))
    with debezium(db, program, tmp_path / "log") as process:
        owner.execute(f'insert into "Types" values (1, {marks})'.encode(), [text for _, text, _ in TYPES])
        for statement in CHANGES.split(";\n"):
            owner.execute(statement.encode())
        theirs = records_to_end(process)
    slot = [r for r in consumed(db, "slot", "--tombstones") if (r["key"] or {}).get("prefix") != "end"]
    queue = consumed(db, "queue", "--tombstones")
    row = theirs[0]["value"]["after"]
    for number, (type_, text, ours) in enumerate(TYPES):
        wanted = OTHERWISE.get((type_, text), ours)
        assert (type_, text, repr(row.pop(f"c{number}", "left out"))) == (type_, text, repr(wanted))
    assert row == {"id": 1}

    # a slot tells the same moment for all that comes of one transaction, and the moment of reading outside of them
    now = next(number for number, record in enumerate(slot) if record["key"] == {"prefix": "now"})
    for name in ("ts_ms", "ts_us", "ts_ns"):
        slot[now]["value"]["source"][name] = theirs[now]["value"]["source"][name]
    assert len(theirs) == len(slot) > 20
    for their, our in zip(theirs[1:], slot[1:], strict=True):
        assert their | {"value": like(their["value"], our["value"])} == our
        if their["value"]:
            assert set(their["value"]) == set(our["value"])

    # by the queue the same, where the slot has whole rows
    for table in ("item", "bare"):
        mine = [brief(record) for record in queue if of_table(record, table)]
        assert mine == [brief(record) for record in theirs if of_table(record, table)]


def of_table(record: dict[str, Any], table: str) -> bool:
    return bool(record["value"] and record["value"]["source"]["table"] == table)


def brief(record: dict[str, Any]) -> tuple[Any, ...]:
    value = record["value"]
    return record["key"], value["op"], value["before"], value["after"], record.get("headers")
