"""Which database gdq talks to, and as whom."""

from __future__ import annotations

import psycopg
import pytest
from psycopg.conninfo import conninfo_to_dict, make_conninfo

from gdq.conninfo import connect, conninfo_of, resolve_conninfo
from tests.support.server import PASSWORD, Database


@pytest.mark.parametrize(
    ("dsn", "environ", "chosen"),
    [
        ("host=a", {"GDQ_DSN": "host=b", "DATABASE_URL": "host=c"}, "host=a"),
        (None, {"GDQ_DSN": "host=b", "DATABASE_URL": "host=c"}, "host=b"),
        (None, {"DATABASE_URL": "host=c"}, "host=c"),
        (None, {}, ""),
        ("", {"GDQ_DSN": "", "DATABASE_URL": "host=c"}, "host=c"),
        ("service=shop", {}, "service=shop"),
        ("postgresql://u@h/d", {}, "postgresql://u@h/d"),
        ("postgresql+psycopg://u@h/d", {}, "postgresql://u@h/d"),
        (None, {"DATABASE_URL": "postgres+psycopg2://u@h/d?sslmode=require"}, "postgres://u@h/d?sslmode=require"),
    ],
)
def test_precedence(dsn: str | None, environ: dict[str, str], chosen: str) -> None:
    assert resolve_conninfo(dsn, environ) == chosen


def test_libpq_variables_count_last(empty_db: Database, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("GDQ_DSN", "DATABASE_URL"):
        monkeypatch.delenv(name, raising=False)
    for name, value in conninfo_to_dict(empty_db.dsn).items():
        monkeypatch.setenv({"dbname": "PGDATABASE"}.get(name, f"PG{name.upper()}"), str(value))
    with connect() as connection:
        assert connection.info.dbname == empty_db.name


@pytest.mark.parametrize("dsn", ["host=a nonsense", "nonsense=a", "postgresql://[::1/"])
def test_what_libpq_cannot_parse_is_an_error(dsn: str) -> None:
    with pytest.raises(psycopg.ProgrammingError):
        resolve_conninfo(dsn, {})


@pytest.mark.parametrize(
    "dsn",
    [
        "host=h password=XY XYZ",
        "host=h password='XY XYZ",
        "postgresql://u:XYZ%@h/d",
        "postgresql://u:XY@XYZ@h/d",
        "postgresql://u:XYZ/XY@h/d",
        "postgresql://u:12/XYZ@h/d",
        "postgresql://u:XY:XYZ/7@h/d",
        "postgresql://u:XYZ@[h/d",
    ],
)
def test_no_part_of_a_password_is_shown(dsn: str) -> None:
    """A password whose character ends it, as libpq reads the string, is refused before a message can show its rest."""
    for given, environ in ((dsn, {}), (None, {"DATABASE_URL": dsn})):
        with pytest.raises(psycopg.ProgrammingError, match=r"the connection string.* cannot be read") as caught:
            resolve_conninfo(given, environ)
        assert "XY" not in str(caught.value)
    assert "in DATABASE_URL" in str(caught.value)


def test_what_lacks_an_equals_sign_is_told() -> None:
    """As where a database's name alone is given, as psql takes it."""
    with pytest.raises(psycopg.ProgrammingError, match=r'cannot be read: missing "=" after \.\.\. in') as caught:
        resolve_conninfo("shop", {})
    assert "dbname=NAME" in caught.value.__notes__[0]


@pytest.mark.parametrize("dsn", ["host=h port=54x2", "host=h,g port=5432,-1", "postgresql://u@h:54x2/d"])
def test_a_malformed_port_is_named(dsn: str) -> None:
    """libpq would say that the host cannot be resolved."""
    with pytest.raises(psycopg.ProgrammingError, match="cannot be read: its port is no number"):
        resolve_conninfo(dsn, {})


def test_a_malformed_pgport_is_named() -> None:
    """Where it counts: a string or a service may name a port of its own."""
    wrong = {"PGPORT": "54x2"}
    for given, environ in (("host=h", wrong), (None, wrong), (None, wrong | {"GDQ_DSN": "postgresql://h/d"})):
        with pytest.raises(psycopg.ProgrammingError, match=r"^PGPORT is no number"):
            resolve_conninfo(given, environ)
    for given, environ in (
        ("port=5433", wrong),
        ("service=s", wrong),
        ("", wrong | {"PGSERVICE": "s"}),
        ("", {"PGPORT": ""}),
        ("", {"PGPORT": "5432,5433"}),
    ):
        assert resolve_conninfo(given, environ) == given


def test_passwords_with_any_character_are_read_if_encoded() -> None:
    uri = "postgresql://u:%40%2F%3A%25%3F@h:5433,g:5434/d?user=a@b"
    assert conninfo_to_dict(resolve_conninfo(uri, {}))["password"] == "@/:%?"


def test_application_name_tells_the_story_unless_the_user_has_one(empty_db: Database) -> None:
    with connect(empty_db.dsn, application_name="gdq:orders/mirror") as connection:
        assert connection.info.parameter_status("application_name") == "gdq:orders/mirror"
    with connect(f"{empty_db.dsn} application_name=mine") as connection:
        assert connection.info.parameter_status("application_name") == "mine"


def test_transactions_are_read_committed_whatever_the_role_prefers(empty_db: Database) -> None:
    with connect(f"{empty_db.dsn} options='-c default_transaction_isolation=serializable'") as connection:
        row = connection.execute("show transaction_isolation").fetchone()
        assert row == ("read committed",)


def test_a_second_connection_goes_to_the_same_database(empty_db: Database) -> None:
    with connect(empty_db.dsn) as connection:
        assert conninfo_to_dict(conninfo_of(connection))["password"] == PASSWORD
        with psycopg.connect(conninfo_of(connection)) as second:
            assert (second.info.dbname, second.info.user) == (connection.info.dbname, connection.info.user)


def test_a_second_connection_leads_to_the_same_of_several_servers(empty_db: Database) -> None:
    at = conninfo_to_dict(empty_db.dsn)
    several = make_conninfo("", **{**at, "host": f"/nowhere,{at['host']},/elsewhere", "port": f"1,{at['port']},2"})
    with connect(several) as connection:
        again = conninfo_to_dict(conninfo_of(connection))
    assert (again["host"], again["port"]) == (at["host"], at["port"])


@pytest.mark.server
@pytest.mark.parametrize(
    "timeout",
    ["statement_timeout", "idle_session_timeout", "transaction_timeout", "idle_in_transaction_session_timeout"],
)
def test_a_timeout_that_no_session_survives(empty_db: Database, timeout: str) -> None:
    """Of a role or database, it is off in gdq's sessions, even if it is shorter than the time to say so."""
    with empty_db.connect("su") as su:
        if not su.execute("select from pg_settings where name = %s", [timeout]).rowcount:
            pytest.skip(f"this PostgreSQL has no {timeout}")
        su.execute(f"alter database {empty_db.name} set {timeout} = 1".encode())
    for _ in range(20):
        with connect(empty_db.dsn) as connection:
            assert connection.execute("select current_setting(%s) from pg_sleep(0.01)", [timeout]).fetchone() == ("0",)
            connection.execute("select pg_sleep(0.01)")
    with connect(make_conninfo(empty_db.dsn, options=f"-c {timeout}=5min")) as connection:  # the user's own stays
        assert connection.execute("select current_setting(%s)", [timeout]).fetchone() == ("5min",)


@pytest.mark.server
def test_an_error_ends_no_session(empty_db: Database) -> None:
    with empty_db.connect("su") as su:
        su.execute(f"alter database {empty_db.name} set exit_on_error = on".encode())
    with connect(empty_db.dsn, autocommit=True) as connection:
        with pytest.raises(psycopg.errors.DivisionByZero):
            connection.execute("select 1 / 0")
        assert connection.execute("select 1").fetchone() == (1,)
