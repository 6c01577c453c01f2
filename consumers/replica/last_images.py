"""A table's net change by the numbers of its changes: of each key the last image, without adding images up.

    number  transaction  change                    staged: the row with note 'c', paired, as the key had a row before
    11      700          update, note 'a' to 'b'
    15      702          update, note 'b' to 'c'

Who changes a row waits for whoever has changed it before, so changes of one key by several transactions have the order
of their numbers. Those of one transaction may not: a trigger's own update of a row is logged before the update that
fired it. Only two changes say themselves which came first, an insert and an update, or an update and a delete. A key
with other changes of one transaction is in doubt, and netted_sql() adds up its table's images.
"""

from __future__ import annotations

from typing import Any

from psycopg import Connection

from gdq.consumers.replica.changes import tells_pairs
from gdq.consumers.replica.table import ReplicaTable
from gdq.sql_text import quote

# True if numbers tell the order of each key's changes since a snapshot: the key is that of a unique index that no two
# rows break for a while, and no part of it is NULL. The index is older than the snapshot: the number of the transaction
# that made it is completed from its last 32 bits by the present number, as the server does.
_NUMBERS_TELL = """
select exists (
  select from pg_index i, pg_snapshot_xmax(pg_current_snapshot()) x, cast(x::text as bigint) n
   where i.indrelid = %s::oid and i.indisunique and i.indimmediate and i.indisvalid
     and i.indpred is null and i.indexprs is null
     and n + ((i.xmin::text::bigint - n + 2147483648) & 4294967295) - 2147483648
         < pg_snapshot_xmin(%s::pg_snapshot)::text::bigint
     and array(select a.attname::text from pg_attribute a
                where a.attrelid = i.indrelid and a.attnum = any (i.indkey[0:i.indnkeyatts - 1]) and a.attnotnull
                order by 1) = array(select k from unnest(%s::text[]) k order by 1))"""


def numbers_tell(source: Connection[Any], relid: int, table: ReplicaTable, since: str) -> bool:
    """True if last_images_sql() reads a table's changes since a snapshot right; `relid`: its oid in the source.

    Keys must be equal in the source as in the target, so that the source tells which rows are pairs.
    """
    if not tells_pairs(table):
        return False
    key = [column.name for column in table.columns if column.is_key]
    return source.execute(_NUMBERS_TELL, [relid, since, key], prepare=True).fetchone() == (True,)


def last_images_sql(table: ReplicaTable, log_rows: str, after: int | None) -> str:
    """SELECT of a table's net change, as netted_sql() gives it, but for the old rows of pairs, which are left out.

    A row without is_new stands for a key in doubt. `log_rows`: of one version, with their transactions.
    `after`: the number of the last TRUNCATE among them; earlier changes are part of what it emptied.
    """
    numbered = list(enumerate(table.columns, 1))
    key = ", ".join(f"c{place}" for place, column in numbered if column.is_key)
    listed = ", ".join(f"c{place}" for place, _ in numbered)
    # only the last image of a key is given its form for the target
    values = ", ".join(f"c{place}" if column.is_key else column.logged(f"c{place}") for place, column in numbered)
    # a row whose columns are all of the key is no other one if it was there before
    change = "came or was" if any(c.settable for _, c in numbered) else "came is distinct from was"
    return f"""select case when doubt then null else came end, {values}, came and was
      from (select {listed}, came, first_value(went) over w as was, lead(ev_id) over w is null as last,
                   (ev_txid = lag(ev_txid) over w
                     and not (lag(came) over w and went and came is distinct from lag(went) over w)
                    or ev_txid = lag(ev_txid, 2) over w) is true as doubt
              from ({_key_changes_sql(table, log_rows, after)}) as change
            window w as (partition by {key} order by ev_id rows unbounded preceding)) as placed
     where doubt or last and ({change})"""


def _key_changes_sql(table: ReplicaTable, log_rows: str, after: int | None) -> str:
    """SELECT of what happened to each key: one row for a log row, or two where an update moved a row to another key.

    It has ev_id, ev_txid, the columns, came (a row with the key is there since), went (one was there before). The log
    rows are read a second time for the updates that moved a row: few columns decide, and it costs less than a join.
    """
    numbered = list(enumerate(table.columns, 1))
    keys = [column for column in table.columns if column.is_key]
    # no image has a key that is NULL: this is cheaper to ask than what was done
    new, old = f"d.{quote(keys[0].new)} is not null", f"d.{quote(keys[0].old)} is not null"
    moved = " or ".join(f"d.{quote(c.old)} is distinct from d.{quote(c.new)}" for c in keys)
    later = "true" if after is None else f"d.ev_id > {after}"
    values, left = [], []
    for place, column in numbered:
        last = f"d.{quote(column.new)}"
        if column.is_key:
            last = f"(case when {new} then {last} else d.{quote(column.old)} end)"
        values.append(f"{column.logged(last) if column.is_key else last} as c{place}")
        left.append(f"{column.logged(f'd.{quote(column.old)}')} as c{place}" if column.is_key else f"null as c{place}")
    return f"""select d.ev_id, d.ev_txid, {", ".join(values)}, {new} as came,
                      {old} and not ({new} and ({moved})) as went
                 from ({log_rows}) as d where {later}
                union all
               select d.ev_id, d.ev_txid, {", ".join(left)}, false, true
                 from ({log_rows}) as d where {new} and {old} and ({moved}) and {later}"""
