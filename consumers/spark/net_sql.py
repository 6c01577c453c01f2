"""A table's changes with one row for each key and transaction, which the last row's ev_id puts in order: images="net".

    ev_id  transaction  change                         rows
    11     700          update of 1, 'b' to 'c'        update_postimage 1 'c', ev_id 12
    12     700          update of 1, 'a' to 'b'
    15     702          update of the key 1 to 2       delete 1, ev_id 15; insert 2, ev_id 15

Who changes a key waits for the transaction that has changed it before, so the last numbers of two transactions are in
the order of their commits. Within one they are not: the update of a row by its own trigger, 11, is logged before the
update that fired it, 12. So the images of a transaction are added up, of which only what remains was ever to be seen.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from psycopg import Connection

from gdq.consumers.spark.table_sql import segment_bytes
from gdq.consumers.views.change_source import NEW_OPS, OLD_OPS, LogColumn
from gdq.errors import GdqError
from gdq.qualified_sql import qualified
from gdq.sql_text import quote

# Each part reads the whole log and takes the transactions that are its own.
_PARTS_MAX = 8

# True if the table has a unique index over these columns that no two rows break for a while, and none of them is NULL.
_KEY_IS_SOUND = qualified("""
select exists (
  select from pg_catalog.pg_index i
   where i.indrelid = %s::pg_catalog.regclass and i.indisunique and i.indimmediate and i.indisvalid
     and i.indpred is null and i.indexprs is null
     and array(select a.attname::text from pg_catalog.pg_attribute a
                where a.attrelid = i.indrelid and a.attnum = any (i.indkey[0:i.indnkeyatts - 1]) and a.attnotnull
                order by 1) = array(select k from pg_catalog.unnest(%s::text[]) k order by 1))""")

# The values of these types that PostgreSQL takes for one, Spark does, too: 0 and -0. Of others it may not.
_COMPARED = ("real", "double precision")


def check_netted(connection: Connection[Any], table: str, columns: Sequence[LogColumn]) -> None:
    """GdqError unless numbers tell the order of each key's changes, and every change has all values."""
    option = 'the option images="net" of the data source gdq'
    key = [column.name for column in columns if column.is_key]
    if connection.execute(_KEY_IS_SOUND, [table, key]).fetchone() != (True,):
        lacks = f"has none for its key ({', '.join(key)})" if key else "has no key"
        raise GdqError(f"{option} needs a unique index that is not deferrable: {table} {lacks}")
    if any(column.omitted for column in columns):
        raise GdqError(f"{option} needs all values of each change: updates of {table} leave some out (unchanged)")


def net_changes_sql(rows: str, columns: Sequence[LogColumn]) -> str:
    """Log rows in the form of signed_form_sql(), with one row for each key and transaction at most.

    It is the last image of the key's row, or if the row went the image that it had before; none if nothing remains.
    """
    numbered = list(enumerate(columns, 1))
    images = [(n, *(f"d.{quote(c.image(new) or '')}" for new in (False, True))) for n, c in numbered]
    values = ", ".join(f"case when s.w < 0 then {old} else {new} end as c{n}" for n, old, new in images)
    key = ", ".join(f"c{n}" if c.type in _COMPARED else f'c{n}::text collate "C"' for n, c in numbered if c.is_key)
    image = f"row({', '.join(f'c{n}' for n, _ in numbered)})::text"
    listed = ", ".join(f"c{n} as {quote(c.name)}" for n, c in numbered)
    # an image of a transaction's only change of a key needs no adding up
    return f"""(select case when net < 0 then 'delete' when least_net < 0 then 'update_postimage' else 'insert' end
              as _change_type, ev_txid as _commit_version, ev_time as _commit_timestamp, last_id as ev_id, {listed}
         from (select o.*, min(net) over k as least_net,
                      row_number() over (partition by ev_txid, {key} order by w desc, ev_id desc) as place
                 from (select n.*, case when several then sum(w) over (partition by ev_txid, {key},
                                     case when several then {image} collate "C" end) else w end as net
                         from (select i.*, max(ev_id) over k as last_id,
                                      min(ev_id) over k <> max(ev_id) over k as several
                                 from (select s.w, d.ev_id, d.ev_txid, d.ev_time, {values}
                                         from ({rows}) as d, (values (-1), (1)) as s(w)
                                        where case when s.w < 0 then d.ev_op in {OLD_OPS} else d.ev_op in {NEW_OPS} end
                                      ) as i window k as (partition by ev_txid, {key})) as n) as o
                where net <> 0 and sign(net) = w window k as (partition by ev_txid, {key})) as p
        where place = 1)"""


def split_transactions(connection: Connection[Any], queue: str, table: str, rows: str, bytes_each: int) -> list[str]:
    """The SELECT of log_rows_sql() in parts of whole transactions, of about `bytes_each` or more."""
    size = sum(segment_bytes(connection, queue, table, rows).values())
    parts = min(size // bytes_each + 1, _PARTS_MAX)
    if parts == 1:
        return [rows]
    return [f"select * from ({rows}) as t where t.ev_txid % {parts} = {part}" for part in range(parts)]
