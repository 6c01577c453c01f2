"""`gdq relay` to a web hook: what arrives, in which order, and what becomes of events that the hook does not take."""

from __future__ import annotations

import signal
import socket
import threading
from pathlib import Path

import pytest

import gdq as library
from tests.relay.conftest import Hook, always, due, open_hook, relay, retries, sent_all, write
from tests.support.programs import gdq, start_gdq
from tests.support.server import Database
from tests.support.waiting import until

pytestmark = pytest.mark.server


def test_each_event_is_a_request(shop: Database, hook: Hook) -> None:
    write(shop, "insert into orders values (1, 7, 'é')", "update orders set note = 'b'", "delete from orders")
    relay(shop, f"{hook.url}/in/{{schema}}.{{table}}/{{op}}/{{key}}", "--set", "header.Authorization=Bearer x")
    paths = [path for path, _, _ in hook.requests]
    assert paths == ["/in/public.orders/insert/1", "/in/public.orders/update/1", "/in/public.orders/delete/1"]
    headers = [headers for _, headers, _ in hook.requests]
    assert {one["Authorization"] for one in headers} == {"Bearer x"}
    assert {one["Content-Type"] for one in headers} == {"application/json"}
    assert {one["Gdq-Key"] for one in headers} == {"1"}
    ids = [one["Idempotency-Key"] for one in headers]
    assert len(set(ids)) == 3
    with shop.connect() as connection:
        era = library.position(connection, "q", "c").split("/")[1]
    assert ids[0] == f"q/{era}/{hook.taken[0]['id']}/insert"
    assert [(body["op"], body["old"], body["new"]) for body in hook.taken] == [
        ("insert", None, {"id": 1, "customer": 7, "note": "é"}),
        ("update", {"id": 1, "customer": 7, "note": "é"}, {"id": 1, "customer": 7, "note": "b"}),
        ("delete", {"id": 1, "customer": 7, "note": "b"}, None),
    ]
    relay(shop, hook.url)
    assert len(hook.taken) == 3


def test_only_the_key_that_fails_waits(shop: Database, hook: Hook) -> None:
    """Its later events wait behind the first one, in order, also those of later batches; no other key waits."""
    hook.answer = lambda body: 500 if body["key"]["id"] == 1 else 204
    write(shop, "insert into orders values (1), (2)", "update orders set note = 'a'")
    relay(shop, hook.url)
    assert sorted(hook.keys()) == [2, 2]
    write(shop, "update orders set note = 'b'")
    relay(shop, hook.url)
    assert sorted(hook.keys()) == [2, 2, 2]
    assert [key for key, _ in retries(shop)] == [1, 1, 1]
    first, *others = [reason or "" for _, reason in retries(shop)]
    assert first == "HTTP 500: answer 500"
    assert all(reason.startswith("waits for event ") for reason in others)
    hook.answer = always(204)
    while retries(shop):
        due(shop)
        relay(shop, hook.url)
    assert [body["new"]["note"] for body in hook.taken if body["key"]["id"] == 1] == [None, "a", "b"]


def test_an_event_that_waits_is_not_nearer_to_its_end(shop: Database, hook: Hook) -> None:
    """Only the event that is tried becomes a dead letter; those behind it are sent then."""
    write(shop, "select gdq.set_retry_limit('q', 'c', 2)")
    hook.answer = lambda body: 500 if body["op"] == "insert" else 204
    write(shop, "insert into orders values (1)", "update orders set note = 'a'", "update orders set note = 'b'")
    relay(shop, hook.url)
    while retries(shop):
        due(shop)
        relay(shop, hook.url)
    assert [body["new"]["note"] for body in hook.taken] == ["a", "b"]
    assert sum(body["op"] == "insert" for _, _, body in hook.requests) == 3
    with shop.connect() as connection:
        assert [(one.op, one.reason) for one in library.dead_letters(connection, "q", "c")] == [
            ("insert", "HTTP 500: answer 500")
        ]


def test_a_body_that_the_hook_refuses_is_given_up(shop: Database, hook: Hook) -> None:
    hook.answer = lambda body: 422 if body["new"]["note"] == "bad" else 204
    write(shop, "insert into orders values (1, 1, 'bad')", "update orders set note = 'good'")
    relay(shop, hook.url)
    assert [body["new"]["note"] for body in hook.taken] == ["good"]
    with shop.connect() as connection:
        assert [one.reason for one in library.dead_letters(connection, "q")] == ["HTTP 422: answer 422"]
    assert retries(shop) == []


def test_a_changed_key_waits_for_both(shop: Database, hook: Hook) -> None:
    """A row that takes the key of another comes after that one's events, and before later ones of its own."""
    hook.answer = lambda body: 500 if (body["key"]["id"], body["op"]) == (1, "insert") else 204
    write(shop, "insert into orders values (1)", "update orders set id = 2", "update orders set note = 'a'")
    write(shop, "insert into orders values (1, 1, 'anew'), (3, 1, null)")
    relay(shop, hook.url)
    assert hook.keys() == [3]
    hook.answer = always(204)
    while retries(shop):
        due(shop)
        relay(shop, hook.url)
    assert [(b["op"], b["key"]["id"]) for b in hook.taken[1:3]] == [("insert", 1), ("update", 2)]
    assert sorted((b["op"], b["key"]["id"]) for b in hook.taken[3:]) == [("insert", 1), ("update", 2)]


def test_truncate_waits_for_all_rows_of_its_table(shop: Database, hook: Hook) -> None:
    hook.answer = lambda body: 500 if body["op"] == "insert" and body["key"]["id"] == 1 else 204
    write(shop, "insert into orders values (1), (2)", "truncate orders", "insert into orders values (3)")
    relay(shop, hook.url)
    assert hook.keys() == [2]
    hook.answer = always(204)
    with shop.connect() as connection:
        while library.retry_info(connection, "q", "c"):
            due(shop)
            relay(shop, hook.url)
    assert [(body["op"], body["key"]) for body in hook.taken[1:]] == [
        ("insert", {"id": 1}),
        ("truncate", None),
        ("insert", {"id": 3}),
    ]


def test_a_key_of_other_columns(shop: Database, hook: Hook) -> None:
    """Orders of one customer are in order with each other; a move to another customer stands in both rows."""
    hook.answer = lambda body: 500 if body["key"]["id"] == 1 and body["op"] == "insert" else 204
    write(shop, "insert into orders values (1, 7)", "insert into orders values (2, 8)")
    write(shop, "update orders set customer = 7 where id = 2", "insert into orders values (3, 8), (4, 9)")
    relay(shop, f"{hook.url}/{{key}}", "--key", "public.orders=customer")
    assert sorted(hook.keys()) == [2, 4]
    assert {path for path, _, _ in hook.requests} == {"/7", "/8", "/9"}
    assert [key for key, _ in retries(shop)] == [1, 2, 3]
    done = gdq("relay", "q", "c", hook.url, "--once", "--key", "public.orders=other", dsn=shop.dsn)
    assert done.returncode == 1
    assert "has no value of other for its key" in done.stderr


def test_messages_have_the_key_that_they_name(shop: Database, hook: Hook) -> None:
    write(shop, """select gdq.insert_event('q', 'paid', '{"order": 7}'::jsonb, 'order-7')""")
    write(shop, "select gdq.insert_event('q', 'note', 'text')")
    relay(shop, f"{hook.url}/{{type}}/{{key}}", "--form", "cloudevents")
    (path, headers, body), (other, _, note) = sorted(hook.requests, key=lambda one: one[0], reverse=True)
    assert (path, other) == ("/paid/order-7", "/note/")
    assert headers["Content-Type"] == "application/cloudevents+json"
    assert headers["Idempotency-Key"] == body["id"]
    assert (body["specversion"], body["type"], body["partitionkey"]) == ("1.0", "paid", "order-7")
    assert (body["data"], note["data"]) == ({"order": 7}, "text")
    assert "partitionkey" not in note


def test_forms(shop: Database, hook: Hook) -> None:
    write(shop, "insert into orders values (1, 7, 'a')", "update orders set id = 2")
    relay(shop, hook.url, "--form", "debezium")
    assert [body["op"] for body in hook.taken] == ["c", "d", "c"]
    assert [headers["Gdq-Key"] for _, headers, _ in hook.requests] == ['{"id": 1}', '{"id": 1}', '{"id": 2}']
    assert hook.requests[1][1]["__debezium.newkey"] == '{"id": 2}'
    assert len({headers["Idempotency-Key"] for _, headers, _ in hook.requests}) == 3
    write(shop, "delete from orders")
    relay(shop, hook.url, "--form", "cloudevents")
    event = hook.taken[-1]
    assert (event["type"], event["subject"], event["partitionkey"]) == ("gdq.delete", "public.orders", "2")
    assert event["source"] == f"/gdq/{shop.name}/q"
    assert event["data"]["old"] == {"id": 2, "customer": 7, "note": "a"}


@pytest.mark.parametrize(
    "status", [503, pytest.param(401, marks=pytest.mark.long), pytest.param(429, marks=pytest.mark.long)]
)
def test_a_hook_that_takes_nothing(shop: Database, hook: Hook, status: int) -> None:
    """Nothing is put aside, and nothing that was taken is sent again when the hook is back."""
    hook.answer = lambda body: 204 if body["op"] == "insert" else status
    hook.headers = {"Retry-After": "0"}
    write(shop, "insert into orders values (1)", "update orders set note = 'a'")
    process = start_gdq("relay", "q", "c", hook.url, dsn=shop.dsn)
    try:
        until(lambda: len(hook.requests) > 3, "more tries")
        assert retries(shop) == []
        hook.answer = always(204)
        until(lambda: len(hook.taken) == 2, "the second event")
    finally:
        process.send_signal(signal.SIGTERM)
        _, errors = process.communicate()
    assert process.returncode == 0, errors
    assert [body["op"] for body in hook.taken] == ["insert", "update"]
    assert f"web hook takes nothing: HTTP {status}" in errors


def test_a_hook_that_is_down(shop: Database) -> None:
    """With --once one line; without, the command waits for it, and its consumer holds no transaction meanwhile."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    write(shop, "insert into orders values (1)")
    address = f"http://127.0.0.1:{port}/"
    done = gdq("relay", "q", "c", address, "--once", dsn=shop.dsn)
    assert done.returncode == 1
    assert done.stderr.startswith("Error: web hook unreachable: ")
    assert len(done.stderr.splitlines()) == 1
    process = start_gdq("relay", "q", "c", address, dsn=shop.dsn)
    try:
        assert process.stderr
        assert "web hook unreachable" in process.stderr.readline()
        with shop.connect("su") as su:
            query = "select from pg_stat_activity where application_name = 'gdq:q/c' and state <> 'idle'"
            until(lambda: not su.execute(query).rowcount, "the end of the transaction")
        with open_hook(port) as hook:
            until(lambda: hook.taken, "the event")
    finally:
        process.send_signal(signal.SIGTERM)
        process.communicate()


def test_a_relay_that_is_killed_sends_again_what_it_had_not_finished(shop: Database, hook: Hook) -> None:
    """The same records, with the same identity."""
    hang = threading.Event()
    hook.answer = lambda body: 204 if body["op"] == "insert" else hang.wait(60) or 204
    write(shop, "insert into orders values (1)", "update orders set note = 'a'")
    process = start_gdq("relay", "q", "c", hook.url, dsn=shop.dsn)
    until(lambda: len(hook.requests) == 2, "the second request")
    process.kill()
    process.communicate()
    hang.set()
    relay(shop, hook.url)
    seen = [(headers["Idempotency-Key"], body) for _, headers, body in hook.requests]
    assert [body["op"] for _, body in seen] == ["insert", "update", "insert", "update"]
    assert seen[:2] == seen[2:]


def test_a_lost_connection_to_the_server(shop: Database, hook: Hook) -> None:
    """What the hook has taken is not sent again by the same process."""
    hang = threading.Event()
    hook.answer = lambda body: 204 if body["op"] == "insert" else hang.wait(60) and 204
    write(shop, "insert into orders values (1)", "update orders set note = 'a'")
    process = start_gdq("relay", "q", "c", hook.url, dsn=shop.dsn)
    try:
        until(lambda: len(hook.requests) == 2, "the second request")
        with shop.connect("su") as su:
            query = "select pg_terminate_backend(pid) from pg_stat_activity where application_name = 'gdq:q/c'"
            su.execute(query)
        hang.set()
        until(lambda: sent_all(shop), "the end of the batch")
    finally:
        process.send_signal(signal.SIGTERM)
        _, errors = process.communicate()
    assert "connected again" in errors
    assert [body["op"] for _, _, body in hook.requests] == ["insert", "update"]


def test_a_hook_that_is_slow(shop: Database, hook: Hook) -> None:
    """One key that gets no answer waits alone; if none gets one, the hook counts as unavailable."""
    hang = threading.Event()
    hook.answer = lambda body: hang.wait(60) and 204 if body["key"]["id"] == 1 else 204
    write(shop, "insert into orders select generate_series(1, 20)")
    relay(shop, hook.url, "--set", "timeout=0.5", "--set", "concurrency=4")
    assert retries(shop) == [(1, "no answer in time")]
    hook.answer = lambda _: hang.wait(60) and 204
    write(shop, "update orders set note = 'a' where id > 1")
    options = ("--set", "timeout=0.5", "--set", "concurrency=4", "--once")
    done = gdq("relay", "q", "c", hook.url, *options, dsn=shop.dsn)
    hang.set()
    assert (done.returncode, done.stderr) == (1, "Error: web hook does not answer in time\n")
    assert [key for key, _ in retries(shop)] == [1]


def test_redirects_are_not_followed(shop: Database, hook: Hook) -> None:
    hook.answer = always(302)
    hook.headers = {"Location": f"{hook.url}/elsewhere"}
    write(shop, "insert into orders values (1)")
    relay(shop, hook.url)
    assert [path for path, _, _ in hook.requests] == ["/"]
    assert retries(shop) == [(1, "HTTP 302: answer 302")]


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        (["ftp://host/"], "Error: no sink for 'ftp://host/'"),
        (["http:///x"], "Error: 'http:///x' is no URL: it names no host"),
        (["http://{table}/x"], "Error: a URL may have places after its host only"),
        (["http://h/{tabel}"], "Error: unknown place {tabel} in http://h/{tabel}"),
        (["http://h/", "--set", "timout=1"], "Error: http has no setting timout"),
        (["http://h/", "--set", "timeout=soon"], "Error: setting timeout of http must be a number from 0.001 on"),
    ],
)
def test_what_is_wrong_is_said_in_a_line(shop: Database, arguments: list[str], line: str) -> None:
    done = gdq("relay", "q", "c", *arguments, dsn=shop.dsn)
    assert done.returncode == 1
    assert done.stderr.startswith(line)
    assert "Traceback" not in done.stderr


def test_settings_come_from_a_file(shop: Database, hook: Hook, tmp_path: Path) -> None:
    (tmp_path / "hook.txt").write_text("# secret\nheader.X-Token = abc=\n\ntimeout = 3\n")
    write(shop, "insert into orders values (1)")
    relay(shop, hook.url, "--settings", str(tmp_path / "hook.txt"))
    assert hook.requests[0][1]["X-Token"] == "abc="


PACKAGE = """
import gdq

class Sink:
    def __init__(self, address, settings):
        self.file, self.forget = address.removeprefix("lines://"), "forget" in settings

    def send(self, lanes):
        for lane in lanes:
            for record in lane:
                with open(self.file, "a") as file:
                    file.write(record.place("{table} {key}", str) + "\\n")
                if not self.forget:
                    yield record, gdq.Retry("three") if record.key == "3" else None

    def close(self):
        pass
"""


def test_a_sink_of_another_package(shop: Database, tmp_path: Path) -> None:
    (tmp_path / "lines_sink.py").write_text(PACKAGE)
    info = tmp_path / "lines_sink-1.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: lines-sink\nVersion: 1\n")
    (info / "entry_points.txt").write_text("[gdq.sinks]\nlines = lines_sink:Sink\n")
    write(shop, "insert into orders values (1), (3)")
    arguments = ("relay", "q", "c", f"lines://{tmp_path}/sent", "--once")
    root = Path(library.__file__).parent.parent
    env = {"PYTHONPATH": f"{root}:{tmp_path}"}
    assert gdq(*arguments, dsn=shop.dsn, env=env).returncode == 0
    assert (tmp_path / "sent").read_text() == "orders 1\norders 3\n"
    assert retries(shop) == [(3, "three")]
    write(shop, "insert into orders values (4)")
    done = gdq(*arguments, "--set", "forget=1", dsn=shop.dsn, env=env)
    assert done.returncode == 1
    assert done.stderr.startswith("Error: the sink has not told what became of record q/")


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        (["--form", "avro", "--registry", "http://h"], "Error: the form avro needs a receiver with topics\n"),
        (["--form", "avro"], "Error: --form avro needs --registry URL\n"),
        (["--registry", "http://h"], "Error: --registry and --as-text need --form avro\n"),
        (["--form", "avro", "--registry", "h:1"], "Error: 'h:1' is no address of a schema registry\n"),
    ],
)
def test_what_is_wrong_with_a_form_is_said_in_a_line(shop: Database, arguments: list[str], line: str) -> None:
    done = gdq("relay", "q", "c", "http://127.0.0.1:1/", *arguments, dsn=shop.dsn)
    assert done.returncode in (1, 2)
    assert line in done.stderr
    assert "Traceback" not in done.stderr
