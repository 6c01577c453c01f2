"""gdq works alike whatever somebody has set by ALTER DATABASE or ALTER ROLE."""

from __future__ import annotations

import secrets
from collections.abc import Iterator
from typing import Any

import psycopg
import pytest
from psycopg import sql

from gdq.embedded.server import EmbeddedServer
from tests.support.hostile import Scenario
from tests.support.literals import hazardous_literals
from tests.support.server import Database

pytestmark = pytest.mark.server

# Settings that are hostile together; each gets a database of its own.
PROFILES: dict[str, dict[str, str]] = {
    "formats": {
        "DateStyle": "SQL, DMY",
        "IntervalStyle": "iso_8601",
        "extra_float_digits": "-15",
        "bytea_output": "escape",
        "TimeZone": "Asia/Kolkata",
        "xmlbinary": "hex",
        "xmloption": "document",
    },
    "other formats": {
        "DateStyle": "German, DMY",
        "IntervalStyle": "sql_standard",
        "extra_float_digits": "0",
        "TimeZone": "<+0530>-5:30",
        "lc_messages": "C",
        "client_encoding": "LATIN1",
        "default_text_search_config": "german",
    },
    "verbose formats": {
        "DateStyle": "Postgres, MDY",
        "IntervalStyle": "postgres_verbose",
        "extra_float_digits": "3",
        "synchronous_commit": "off",
        "client_min_messages": "debug1",
        "application_name": "theirs",
    },
    "parser": {
        "standard_conforming_strings": "off",
        "backslash_quote": "off",
        "escape_string_warning": "on",
        "quote_all_identifiers": "on",
        "transform_null_equals": "on",
        "array_nulls": "off",
        "check_function_bodies": "off",
        "row_security": "off",
    },
    "search_path": {
        "search_path": "evil, public, pg_catalog",
        "plpgsql.variable_conflict": "use_variable",
        "plpgsql.extra_warnings": "all",
        "plpgsql.extra_errors": "all",
        "plpgsql.print_strict_params": "on",
        "plpgsql.check_asserts": "off",
        "default_tablespace": "",
    },
    "planner": {
        "jit": "on",
        "jit_above_cost": "0",
        "jit_inline_above_cost": "0",
        "jit_optimize_above_cost": "0",
        "plan_cache_mode": "force_generic_plan",
        "geqo_threshold": "2",
        "from_collapse_limit": "1",
        "join_collapse_limit": "1",
        "work_mem": "64kB",
        "temp_buffers": "100",
        "constraint_exclusion": "off",
        "cursor_tuple_fraction": "1",
    },
    "parallel": {
        "debug_parallel_query": "on",
        "force_parallel_mode": "on",
        "parallel_setup_cost": "0",
        "parallel_tuple_cost": "0",
        "min_parallel_table_scan_size": "0",
        "min_parallel_index_scan_size": "0",
        "parallel_leader_participation": "off",
        "max_parallel_workers_per_gather": "4",
        "plan_cache_mode": "force_custom_plan",
        "plpgsql.variable_conflict": "use_column",
        "enable_partitionwise_join": "on",
        "enable_partitionwise_aggregate": "on",
        "stats_fetch_consistency": "snapshot",
        "restrict_nonsystem_relation_kind": "view, foreign-table",
    },
    "no plans": {
        **{
            f"enable_{name}": "off"
            for name in (
                *("async_append", "bitmapscan", "gathermerge", "hashagg", "hashjoin", "incremental_sort"),
                *("indexscan", "indexonlyscan", "material", "memoize", "mergejoin", "nestloop", "parallel_append"),
                *("partition_pruning", "presorted_aggregate", "seqscan", "sort", "tidscan", "group_by_reordering"),
            )
        },
        "geqo": "off",
    },
    "serializable": {"default_transaction_isolation": "serializable", "default_transaction_deferrable": "on"},
    "repeatable read": {"default_transaction_isolation": "repeatable read"},
    "timeouts": {
        # less than many steps take, more than a session's first statement on a busy machine
        "statement_timeout": "300ms",
        "lock_timeout": "1ms",
        "idle_in_transaction_session_timeout": "20ms",
        "transaction_timeout": "300ms",
    },
}

# These profiles end sessions that the test hands over.
NOT_HANDED = ("timeouts",)

# What everybody else's path finds before pg_catalog.
_EVIL = """
create schema evil;
grant usage on schema evil to public;
create function evil.fail(pg_catalog.text, pg_catalog.text) returns pg_catalog.bool language plpgsql as
  $f$ begin raise exception 'the operator of another schema was called'; end $f$;
create operator evil.= (leftarg = pg_catalog.text, rightarg = pg_catalog.text, function = evil.fail);
create function evil.now() returns pg_catalog.timestamptz language plpgsql as
  $f$ begin raise exception 'the function of another schema was called'; end $f$;
create table evil.pg_class (relname pg_catalog.name);
create domain evil.text as pg_catalog.text check (false);
create domain evil.regclass as pg_catalog.text check (false);
"""


@pytest.fixture(scope="module")
def expected(server: EmbeddedServer, template: str) -> Iterator[dict[str, Any]]:
    """What is seen with the settings that PostgreSQL begins with."""
    with EmptyDatabase(server) as database:
        yield Scenario(database, database.dsn).run()


# Both places for each profile take twice as long, and the server treats them alike. With forced workers each query
# starts some: a minute.
# What make test looks at; make test-all sets each profile in both places.
QUICK = (("search_path", "database"),)
PLACES = [
    pytest.param(profile, where, marks=[] if (profile, where) in QUICK else [pytest.mark.long])
    for profile in PROFILES
    for where in ("database", "role")
]


@pytest.mark.parametrize(("profile", "where"), PLACES)
def test_settings_change_nothing(server: EmbeddedServer, expected: dict[str, Any], profile: str, where: str) -> None:
    with EmptyDatabase(server) as database:
        _set(database, where, PROFILES[profile])
        seen = Scenario(database, database.dsn, hand_over=profile not in NOT_HANDED).run()
    for name, found in seen.items():
        if isinstance(found, dict):
            for part, events in found.items():
                assert events == expected[name][part], (name, part)
        else:
            assert found == expected[name], name


class EmptyDatabase:
    """A database without gdq, in which others have made what everybody finds before pg_catalog."""

    def __init__(self, server: EmbeddedServer) -> None:
        self.server = server
        self.name = f"test_{secrets.token_hex(6)}"

    def __enter__(self) -> Database:
        with psycopg.connect(self.server.conninfo(), autocommit=True) as su:
            su.execute(
                sql.SQL("create database {} owner gdq_owner template template0").format(sql.Identifier(self.name))
            )
        database = Database(self.server, self.name)
        with database.connect("su") as su:
            su.execute(_EVIL)
        return database

    def __exit__(self, *_: object) -> None:
        with psycopg.connect(self.server.conninfo(), autocommit=True) as su:
            su.execute(sql.SQL("drop database {} with (force)").format(sql.Identifier(self.name)))


def _set(database: Database, where: str, settings: dict[str, str]) -> None:
    command = (
        "alter database {} set {} = {}" if where == "database" else "alter role gdq_owner in database {} set {} = {}"
    )
    with psycopg.connect(database.server.conninfo(), autocommit=True) as su:
        known = {name for (name,) in su.execute("select name from pg_settings")}
        for name, value in settings.items():
            if name in known or "." in name:
                listed = name in ("search_path", "restrict_nonsystem_relation_kind", "DateStyle")
                to = sql.SQL(", ").join(map(sql.Literal, value.split(", "))) if listed else sql.Literal(value)
                su.execute(sql.SQL(command).format(sql.Identifier(database.name), sql.Identifier(*name.split(".")), to))


# SQL calls these once for each row or message; apply_ddl() runs DDL of the caller under the caller's settings.
_UNPINNED = {
    *("refresh", "refresh_group"),  # they commit, which a procedure with settings may not; what they call is pinned
    *("apply_ddl", "event_triggers_on", "insert_event", "insert_events"),
    *("row_fits", "row_is_whole", "row_has_all", "segment_is", "table_name"),
}
_PINNED = {
    *("jit=off", "array_nulls=on", "bytea_output=hex", "extra_float_digits=1", "quote_all_identifiers=off"),
    *("intervalstyle=postgres", "standard_conforming_strings=on", "transform_null_equals=off", "datestyle=iso, ymd"),
}


def test_functions_that_others_call_pin_their_settings(db: Database) -> None:
    with db.connect() as connection:
        rows = connection.execute(
            "select p.proname, p.proconfig from pg_proc p where p.pronamespace = 'gdq'::regnamespace"
            " and (p.prorettype = 'event_trigger'::regtype"
            "      or exists (select from aclexplode(p.proacl) a where a.grantee <> p.proowner))"
        ).fetchall()
    assert len(rows) > 80
    without = {name for name, settings in rows if not {one.lower() for one in settings or []} >= _PINNED}
    assert without == _UNPINNED


def test_hazardous_literals() -> None:
    plain = r"""select 'a', E'\d', "b\c", 'x''\d', e'y' '\d' -- '\d'"""
    assert [literal for _, literal in hazardous_literals(plain)] == [r"'x''\d'", r"'\d'"]
    assert list(hazardous_literals("select E'a'\n  '\\\\d', $re$^'\\d$re$")) == []
