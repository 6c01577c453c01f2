"""Makes each file NAME.sql of a folder the view NAME, and refreshes the views, each after those that it reads.

    python apply_views.py FOLDER --queue shop [--schema public]

A file holds a SELECT, in which {{ ref('other') }} stands for the target of another file's view. A view whose SQL has
changed is dropped with its target and loaded anew, and so are those that read it. A view that has no file stays. Run it
at each deployment; `gdq refresh --follow` keeps the views fresh in between.
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
from collections.abc import Collection, Mapping
from graphlib import CycleError, TopologicalSorter
from pathlib import Path
from typing import Any

import psycopg

import gdq

REF = re.compile(r"\{\{\s*ref\('(\w+)'\)\s*\}\}")


def read_folder(folder: Path) -> dict[str, str]:
    """The SQL of each view, those that others read first; SystemExit if that cannot be."""
    files = {path.stem: path.read_text(encoding="utf-8") for path in sorted(folder.glob("*.sql"))}
    if not files:
        raise SystemExit(f"{folder}: no .sql file there")
    reads = {name: REF.findall(text) for name, text in files.items()}
    for name, others in reads.items():
        for other in others:
            if other not in files:
                raise SystemExit(f"{folder / name}.sql: ref('{other}') names no file of the folder")
    try:
        return {name: files[name] for name in TopologicalSorter(reads).static_order()}
    except CycleError as error:
        raise SystemExit(f"{folder}: these views read each other: {', '.join(error.args[1])}") from None


def create(connection: psycopg.Connection[Any], name: str, sql: str, queue: str, schema: str) -> bool:
    """Create a view unless the same one is there; True if it is new. DuplicateObject if it has another definition."""
    query = REF.sub(rf"{schema}.\1", sql)
    # in no transaction of the caller's: the view's consumer begins at a tick, which must come before any write
    return gdq.create_view(connection, name, queue, query, f"{schema}.{name}") is not None


def changed_views(
    connection: psycopg.Connection[Any], views: Mapping[str, str], known: Collection[str], queue: str, schema: str
) -> list[str]:
    """The known views with another definition than their files, and those that read them, in order."""
    changed: list[str] = []
    for name, sql in views.items():
        if name not in known:
            continue
        if any(other in changed for other in REF.findall(sql)):
            changed.append(name)
            continue
        try:
            create(connection, name, sql, queue, schema)
        except (psycopg.errors.DuplicateObject, gdq.PlanError):
            changed.append(name)
    return changed


def main() -> None:
    """Create and refresh the views; an error is one line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--queue", required=True)
    parser.add_argument("--schema", default="public", help="where the targets are")
    options = parser.parse_args()
    views = read_folder(options.folder)
    read = {other for sql in views.values() for other in REF.findall(sql)}
    with gdq.connect(autocommit=True) as connection, gdq.Refresher() as refresher:
        known = {view.view_name for view in gdq.view_info(connection)}
        changed = changed_views(connection, views, known, options.queue, options.schema)
        for name in reversed(changed):
            # the command drops the target too
            subprocess.run([sys.executable, "-m", "gdq", "drop-view", name], check=True)
        for name, sql in views.items():
            create(connection, name, sql, options.queue, options.schema)
            result = refresher.refresh(name)
            print(f"{name}: {result.action}, {result.rows_changed} rows changed in {result.seconds:.1f} s")
            target = f"{options.schema}.{name}"
            captured = {table.table_name for table in gdq.table_info(connection, options.queue)}
            # the dropped target may still be listed
            if name in read and (name in changed or target not in captured):
                gdq.add_table(connection, options.queue, target)


if __name__ == "__main__":
    try:
        main()
    except gdq.GdqError as error:
        raise SystemExit(f"error: {error}") from None
    except psycopg.Error as error:
        raise SystemExit(f"error: {error.diag.message_primary or error}") from None
