"""`make lint`: pgspot over the very SQL that install and uninstall run.

PS003, a SECURITY DEFINER function without a search_path, is left to test_hijack.py, which names the few that go without
for speed. pgspot still reads their bodies as what they are, so an unqualified name in one of them is found. A body that
its parser does not know (an assignment to a field of a row) passes only where the function pins its search_path.
"""

from __future__ import annotations

import argparse
import sys
from typing import Any

from pglast.parser import ParseError
from pgspot import visitors
from pgspot.state import Counter, State

from gdq.installer import install

_read_body = visitors.visit_plpgsql


def _visit_plpgsql(state: Any, node: Any) -> None:
    try:
        _read_body(state, node)
    except ParseError:
        if not state.searchpath_secure:
            raise


def main() -> int:
    visitors.visit_plpgsql = _visit_plpgsql
    # a procedure with settings may not commit; tests/install/test_qualified.py reads the names in them
    told = "INOUT action pg_catalog.text,INOUT reason pg_catalog.text"
    counts = "INOUT rows_changed bigint,INOUT delta_rows bigint"
    results = "INOUT rows_changed bigint,INOUT results pg_catalog.jsonb"
    free = [
        # runs the caller's commands with the caller's search_path
        "gdq.apply_ddl(queue text,ddl text,tables regclass[])",
        f"gdq.refresh(view pg_catalog.text,load boolean,{told},{counts},INOUT kind pg_catalog.text)",
        f"gdq.refresh_group(group_name pg_catalog.text,load boolean,{results})",
    ]
    options = {"ignore": ["PS003"], "ignore_lang": [], "sql_fn": [], "proc_without_search_path": free}
    clean = True
    for name, script in (("install", install.install_script()), ("uninstall", install.uninstall_script())):
        counter = Counter(argparse.Namespace(summary_only=False, plpgsql=True, **options))
        visitors.visit_sql(State(counter), script, toplevel=True)
        if not counter.is_clean():
            print(f"pgspot: {counter} in the SQL of gdq {name} --sql")
            clean = False
    return 0 if clean else 1


if __name__ == "__main__":
    sys.exit(main())
