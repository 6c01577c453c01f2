"""SQL of a view, run as the view's owner in a session of another role, which the SQL cannot leave.

    owned = OwnerSql(connection, "analyst")
    owned.run("insert into public.totals select ...")

SET ROLE alone would not hold a function of the owner's: it may say RESET ROLE and have the session's rights. Inside a
SECURITY DEFINER function PostgreSQL refuses that. So such SQL runs in two temporary functions that belong to the owner.
Before these return they look at what could run the owner's code outside of them: the functions themselves, prepared
statements, cursors that outlive the transaction. PostgreSQL before 18 runs deferred triggers as the role that commits:
check_left() refuses them.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from typing import Any

from psycopg import Connection, sql

from gdq.call import scalar
from gdq.errors import GdqError
from gdq.qualified_sql import qualified
from gdq.sql_text import PIN_TRANSACTION, quote, raw

# What a later statement of the session could meet: all of it is as it was before the owner's code ran.
_KEPT = qualified("""(select coalesce(string_agg(k, ',' order by k collate pg_catalog."C"), '')
      from (select p.oid::text || ' ' || p.xmin::text || ' ' || p.ctid::text from pg_catalog.pg_proc p
             where p.pronamespace = pg_my_temp_schema() and starts_with(p.proname::text, 'gdq_')
            union all
            select s.name || ' ' || s.prepare_time::text from pg_catalog.pg_prepared_statements s where s.from_sql
            union all
            select c.name from pg_catalog.pg_cursors c where c.is_holdable) as found(k))""")

# types with their schema: code that has run before may have set another search_path
_BODY = f"""
declare
  kept pg_catalog.text := {_KEPT};
  done pg_catalog.int8 := 0;
begin
  STATEMENT
  if {_KEPT} operator(pg_catalog.<>) kept then
    raise insufficient_privilege using message =
      'code of the view left a function, a prepared statement or a cursor behind that would run with other rights';
  end if;
  RETURN
end"""

_RUN = _BODY.replace("STATEMENT", "execute statement; get diagnostics done = row_count;").replace(
    "RETURN", "return done;"
)
_ROWS = _BODY.replace("STATEMENT", "return query execute statement;").replace("RETURN", "return;")

_COLUMNS = qualified("""
select a.attname::text, a.atttypid::bigint, format_type(a.atttypid, a.atttypmod),
       coalesce((select format(' collate %I.%I', n.nspname, o.collname)
                   from pg_catalog.pg_collation o join pg_catalog.pg_namespace n on n.oid = o.collnamespace
                  where o.oid = a.attcollation and o.collname <> 'default'), '')
  from pg_catalog.pg_attribute a
 where a.attrelid = 'pg_temp.gdq_columns'::pg_catalog.regclass order by a.attnum""")

_DEFERRED = qualified("""
select format('%s of %s', quote_ident(t.tgname), t.tgrelid::regclass)
  from pg_catalog.pg_locks l join pg_catalog.pg_trigger t on t.tgrelid = l.relation
 where l.pid = pg_backend_pid() and l.locktype = 'relation' and l.mode = 'RowExclusiveLock' and t.tgdeferrable
   and (not t.tgisinternal
        or exists (select from pg_catalog.pg_constraint x where x.oid = t.tgconstraint and x.contype = 'x'))
   and current_setting('server_version_num')::int < 180000
 limit 1""")


@dataclass(frozen=True, slots=True)
class OwnerSql:
    """Runs SQL of a view in the open transaction of `connection`, as `role`; None: as the session's own role.

    With a role the transaction must have begun with gdq.view.table_schema.apply_view_settings().
    """

    connection: Connection[Any]
    role: str | None

    def run(self, statement: str) -> int:
        """Execute a statement; returns the number of affected rows."""
        if self.role is None:
            return self.connection.execute(raw(statement)).rowcount
        call = f"select pg_temp.{_name('run', self.role)}(%s::pg_catalog.text)"
        return int(scalar(self.connection, call, statement))

    def rows(self, query: str) -> list[tuple[Any, ...]]:
        """All rows of a SELECT."""
        return self.connection.execute(raw(self.select(query))).fetchall()

    def changed(self, statement: str, columns: str) -> tuple[Any, ...]:
        """The one row, of these columns with their types, of a SELECT that changes rows in its WITH."""
        if self.role is not None:
            statement = f"select r.* from {self._call(statement)} as r({columns})"
        (row,) = self.connection.execute(raw(statement)).fetchall()
        return tuple(row)

    def value(self, query: str) -> Any:
        """The first column of a SELECT's first row; None if it has no row."""
        return scalar(self.connection, raw(self.select(query)))

    def explain(self, query: str) -> Any:
        """The plan of a SELECT, as EXPLAIN (FORMAT JSON) gives it; the planner may call immutable functions."""
        statement = f"explain (format json) {query}"
        if self.role is not None:
            statement = f"select r.plan from {self._call(statement)} as r(plan pg_catalog.json)"
        plan = scalar(self.connection, raw(statement))
        return json.loads(plan) if isinstance(plan, str) else plan

    def cost(self, query: str) -> float:
        """The cost of a SELECT, as the server estimates it."""
        return float(self.explain(query)[0]["Plan"]["Total Cost"])

    def select(self, query: str) -> str:
        """A SELECT of the same rows whose code runs as the role, for any session with functions_sql(), or for COPY."""
        if self.role is None:
            return query
        listed = ", ".join(f"{quote(name)} {kind}{collation}" for name, _, kind, collation in self._columns(query))
        return f"select r.* from {self._call(query)} as r({listed})"

    def columns(self, query: str) -> list[tuple[str, int, str]]:
        """Name, type oid and type with typmod of each column of a SELECT, of which nothing is executed."""
        return [(name, number, kind) for name, number, kind, _ in self._columns(query)]

    def _call(self, statement: str) -> str:
        assert self.role is not None
        return f"pg_temp.{_name('rows', self.role)}({sql.Literal(statement).as_string(None)}::pg_catalog.text)"

    def _columns(self, query: str) -> list[tuple[str, int, str, str]]:
        self.run(f"create temp view gdq_columns as {query}")
        found = self.connection.execute(_COLUMNS).fetchall()
        self.run("drop view pg_temp.gdq_columns")
        return found


def act_as(connection: Connection[Any], role: str) -> None:
    """Make the functions of OwnerSql in the open transaction, if the session lacks them; `role` is the current role."""
    names = [_name("run", role), _name("rows", role)]
    query = qualified("""
        select count(*) from pg_catalog.pg_proc p
         where p.pronamespace = pg_my_temp_schema() and p.proname = any (%s::text[]) and p.prosecdef
           and pg_get_userbyid(p.proowner)::text = %s and p.proconfig is null and p.prosrc = any (%s::text[])
           and p.proargtypes::text = 'pg_catalog.text'::pg_catalog.regtype::oid::text
           and p.prolang = (select l.oid from pg_catalog.pg_language l where l.lanname = 'plpgsql')""")
    if scalar(connection, query, names, role, [_RUN, _ROWS]) != len(names):
        for statement in functions_sql(role):
            connection.execute(raw(statement))


def functions_sql(role: str) -> list[str]:
    """Statements that make the functions of OwnerSql, for a session whose current role is `role`."""
    return [
        f"create or replace function pg_temp.{_name(kind, role)}(statement pg_catalog.text) returns {result} "
        f"language plpgsql security definer as {sql.Literal(body).as_string(None)}"
        for kind, result, body in (("run", "pg_catalog.int8", _RUN), ("rows", "setof pg_catalog.record", _ROWS))
    ]


def check_left(connection: Connection[Any], role: str) -> None:
    """End the role's part of a transaction that commits; GdqError if the commit could run code of the role.

    Deferred triggers run at the commit, up to PostgreSQL 17 as the role that commits.
    """
    connection.execute(raw(f"set local role to default; {PIN_TRANSACTION}"))
    found = scalar(connection, _DEFERRED)
    if found is not None:
        raise GdqError(
            f"trigger {found} is deferrable: it could run at the commit, with rights that {role} does not have",
            hint=f"Refresh as {role}, make the trigger NOT DEFERRABLE, or use PostgreSQL 18.",
        )


def _name(kind: str, role: str) -> str:
    # one session may act for several owners, each with functions of its own
    return f"gdq_{kind}_{hashlib.sha256(role.encode()).hexdigest()[:16]}"
