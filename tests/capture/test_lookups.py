"""Work of capture that is done once for a table, not once for each row of a catalog."""

from __future__ import annotations

import pytest

from tests.support.server import Database

pytestmark = pytest.mark.server

_CALLS = "select coalesce(sum(calls), 0) from pg_stat_xact_user_functions where schemaname = 'gdq' and funcname = %s"


@pytest.mark.parametrize(
    ("statement", "function", "most"),
    [
        ("select gdq.add_table('q', 't')", "capture_function", 60),
        ("alter table captured add column extra int", "capture_function", 60),
        ("alter table captured add column extra int", "era_of", 60),
        ("alter table captured owner to current_user", "capture_function", 60),
        ("select count(gdq.check_owners(part => 1))", "capture_function", 60),
        ("select count(*) from gdq.doctor()", "capture_function", 600),
    ],
)
def test_a_lookup_is_not_done_for_each_row_of_a_catalog(db: Database, statement: str, function: str, most: int) -> None:
    """With pg_proc joined to a volatile function the function is called for each of its 3,000 rows or more."""
    with db.connect() as connection:
        connection.execute("select gdq.create_queue('q')")
        connection.execute("create table captured (id int primary key)")
        connection.execute("create table t (id int primary key)")
        for number in range(30):
            connection.execute(f"create table t{number} (id int primary key)")
            connection.execute(f"select gdq.add_table('q', 't{number}')")
        connection.execute("select gdq.add_table('q', 'captured')")
        with db.connect("su") as su:
            su.execute(f"alter database {db.name} set track_functions = 'all'")
    with db.connect() as connection, connection.transaction():
        connection.execute(statement)
        (calls,) = connection.execute(_CALLS, [function]).fetchone() or (0,)
    assert calls <= most
