"""The canonical SQL of a view: as PostgreSQL itself prints it, every name resolved and every star spelled out."""

from __future__ import annotations

import logging
import re
from typing import Any

import psycopg
import sqlglot
from psycopg import Connection, sql
from sqlglot import exp
from sqlglot.errors import SqlglotError

from gdq.call import scalar
from gdq.errors import PlanError
from gdq.plan.query import Dialect, parse, render
from gdq.sql_text import quote, raw

# What a parse tree names functions by, and what has no function of its own but depends on the moment or the session.
_FUNCTION = re.compile(r":(?:funcid|opfuncid|aggfnoid|winfnoid) (\d+)")
_TEXT_CAST = re.compile(r"\{COERCEVIAIO .*?:resulttype (\d+)")
_RELATION = re.compile(r":relid (\d+)")
_MOMENT = re.compile(r"\{SQLVALUEFUNCTION|\{NEXTVALUEEXPR|\{CURRENTOFEXPR")


def canonical(connection: Connection[Any], query: str) -> str:
    """The canonical SQL of `query`, checked; nothing is left behind in the database.

    PlanError for what is no single SELECT, for functions that may give another value each time, and for SQL that the
    planner's parser does not read as PostgreSQL does; psycopg.Error for wrong SQL.
    """
    _refuse_others(query)
    with connection.transaction(force_rollback=True):
        text, tree = _printed(connection, query.strip().rstrip(";"))
        _refuse_catalogs(connection, tree)
        _refuse_volatile(connection, tree)
        try:
            read = parse(text)
            if read.find(exp.Lock):
                raise PlanError("locking", "a view locks no rows", hint="Leave FOR UPDATE or FOR SHARE out.")
            rendered = render(read)
            connection.execute("drop view pg_temp.gdq_check")
            again, _ = _printed(connection, rendered)
        except (SqlglotError, psycopg.Error) as error:
            raise PlanError("expression", f"the planner cannot read the view's SQL: {_first_line(error)}") from error
        if again != text:
            raise PlanError(
                "expression",
                "an expression of the view is not read as PostgreSQL reads it",
                hint=f"PostgreSQL: {' '.join(text.split())} planner: {' '.join(again.split())}",
            )
    return " ".join(text.split()) if "'" not in text and '"' not in text else text


def tables_of(text: str) -> list[str]:
    """The tables that canonical SQL reads, quoted and qualified, each once."""
    found = parse(text).find_all(exp.Table)
    return list(dict.fromkeys(f"{quote(table.db)}.{quote(table.name)}" for table in found if table.db))


def _refuse_others(query: str) -> None:
    """PlanError unless the text is one SELECT; set operations and WITH are."""
    # sqlglot prints a warning for what it keeps as an opaque command; that is refused here anyway.
    logger = logging.getLogger("sqlglot")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        statements = [found for found in sqlglot.parse(query, dialect=Dialect) if found is not None]
    except SqlglotError as error:
        line = str(error).splitlines()[0] if str(error) else "unreadable"
        raise PlanError("syntax", f"the view's SQL cannot be read: {line}") from error
    finally:
        logger.setLevel(level)
    if len(statements) != 1:
        raise PlanError("several-statements", f"a view is one SELECT, not {len(statements)} statements")
    if not isinstance(statements[0], exp.Query):
        raise PlanError("not-a-select", f"a view is a SELECT, not {statements[0].key.upper()}")


def _printed(connection: Connection[Any], query: str) -> tuple[str, str]:
    """What pg_get_viewdef() prints for a query, without the search_path, and its parse tree."""
    try:
        connection.execute(sql.SQL("create temp view gdq_check as {}").format(raw(query)))
    except psycopg.errors.DuplicateColumn as error:
        raise PlanError("duplicate-column", f"the view has two columns of one name: {_first_line(error)}") from error
    with connection.transaction(force_rollback=True):
        connection.execute("set local search_path = pg_catalog")
        text = scalar(connection, "select pg_catalog.pg_get_viewdef('pg_temp.gdq_check'::regclass)")
        rule = "select ev_action::text from pg_catalog.pg_rewrite where ev_class = 'pg_temp.gdq_check'::regclass"
        tree = scalar(connection, rule)
    return str(text).strip().rstrip(";"), str(tree)


def _refuse_catalogs(connection: Connection[Any], tree: str) -> None:
    """PlanError when the parse tree reads a table of the server itself, which no queue captures."""
    query = """select c.oid::regclass::text from pg_catalog.pg_class c
                where c.oid = any (%s::oid[]) and c.oid < 16384 limit 1"""
    found = connection.execute(query, [_RELATION.findall(tree)]).fetchone()
    if found is not None:
        raise PlanError("unknown-table", f"table {found[0]} cannot be captured")


def _refuse_volatile(connection: Connection[Any], tree: str) -> None:
    """PlanError when the parse tree holds a function that is not immutable."""
    if _MOMENT.search(tree):
        raise PlanError("nondeterministic", "the view depends on the moment or the session", hint="Write the value.")
    functions = [int(number) for number in _FUNCTION.findall(tree)]
    casts = [int(number) for number in _TEXT_CAST.findall(tree)]
    query = """select pg_catalog.format('%%s', p.oid::regprocedure) from pg_catalog.pg_proc p
                where p.provolatile <> 'i'
                  and (p.oid = any (%s::oid[])
                       or p.oid in (select t.typinput from pg_catalog.pg_type t where t.oid = any (%s::oid[])))
                limit 1"""
    found = connection.execute(query, [functions, casts]).fetchone()
    if found is not None:
        raise PlanError(
            "nondeterministic",
            f"{found[0]} is not immutable: it may give another value each time",
            hint="Use immutable functions only; for a timestamptz write AT TIME ZONE with a zone.",
        )


def _first_line(error: Exception) -> str:
    return str(error).strip().splitlines()[0]
