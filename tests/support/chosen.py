"""All that was chosen for queues, captured tables and consumers, and what capture makes of it, to be compared."""

from __future__ import annotations

import json
import re
from typing import Any

import psycopg

# Columns here are chosen or follow from what was; a new one is compared by itself.
TABLES = (
    *(
        "queue",
        "captured_table",
        "subscription",
        "subscription_table",
        "subscription_messages",
        "subscription_pause",
        "subscription_pace",
    ),
    *("consumer", "member", "retry_limit", "published_sequence", "view"),
)

# Not chosen, but a tick that max_bytes has left behind.
STATE = {"queue": {"retain_after"}}

Rows = list[dict[str, Any]]


def chosen(connection: psycopg.Connection[Any]) -> dict[str, Rows]:
    """The rows of these tables, with columns of captured tables by their names: numbers change in a dump."""
    found = connection.execute(
        """select ct.relid::regclass::text, jsonb_object_agg(a.attnum, a.attname) from gdq.captured_table ct
             join pg_attribute a on a.attrelid = ct.relid and a.attnum > 0 and not a.attisdropped group by 1"""
    )
    names: dict[str, dict[str, str]] = dict(found.fetchall())
    rows: dict[str, Rows] = {}
    for table in TABLES:
        query = f'select to_jsonb(r) from gdq.{table} r order by to_jsonb(r)::text collate "C"'
        rows[table] = [row[0] for row in connection.execute(query.encode())]
    for row in rows["captured_table"]:
        columns = names[row["relid"]]
        for name, value in row.items():
            if name.endswith("_attnums") and value is not None:
                row[name] = [columns[str(number)] for number in value]
        if row["row_filter"] is not None:
            kept = row["row_filter"]
            kept["parts"] = [columns[str(part)] if isinstance(part, int) else part for part in kept["parts"]]
            kept["columns"] = {columns[number]: column for number, column in kept["columns"].items()}
    return rows


def always_alike(rows: dict[str, Rows]) -> list[str]:
    """Columns that have one value in all rows, so that nobody could tell whether it was kept; tables without a row."""
    return [table for table in TABLES if not rows[table]] + [
        f"{table}.{column}"
        for table in ("queue", "captured_table", "subscription")
        for column in rows[table][0].keys() - STATE.get(table, set())
        if len({json.dumps(row[column]) for row in rows[table]}) == 1
    ]


def capture_of(connection: psycopg.Connection[Any]) -> list[tuple[str, ...]]:
    """Triggers, functions and logs of all captured tables, without the numbers that a rebase draws anew."""
    functions = """select ct.relid::regclass::text, q.queue_name, tg.tgname, tg.tgenabled, tg.tgtype, p.proconfig,
                          p.prosrc, pg_get_userbyid(p.proowner)
                     from gdq.captured_table ct join gdq.queue q using (queue_id)
                     join pg_trigger tg on tg.tgrelid = ct.relid and tg.tgname ~ format('^!gdq_\\d+_%s_', q.queue_id)
                     join pg_proc p on p.oid = tg.tgfoid"""
    logs = """select ct.relid::regclass::text, q.queue_name, s.slot, s.pair, c.relpersistence, c.reloptions,
                     array(select format('%s %s', a.attname, format_type(a.atttypid, a.atttypmod))
                             from pg_attribute a where a.attrelid = c.oid and a.attnum > 0 order by 1)
                from gdq.captured_table ct join gdq.queue q using (queue_id) join gdq.log_segment s
                  on s.version_id = gdq.current_version(ct.table_id) join pg_class c on c.oid = s.segment"""
    rows = connection.execute(functions.encode()).fetchall() + connection.execute(logs.encode()).fetchall()
    return sorted(tuple(re.sub(r"\d{5,}|(?<=_v)\d+|(?<=same_)\d+", "N", str(value)) for value in row) for row in rows)
