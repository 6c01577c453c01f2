"""Changes of a table whose log leaves out large values that updates leave as they were (unchanged "omit").

    key 1: n 5, doc 'x'  ->  n 6, doc left out      update
    key 1: n 6, doc 'x'  ->  n 6, doc 'y'           update
    staged: key 1: n 6, doc 'y'

An old and a new image of a column that both lack would add up to nothing. So each column that updates may leave out is
added up by itself, for each key, and the others together: what remains of one is its value before and after, and
nothing remains of a value that is as it was. That one is taken from the row in the target, or from the key's dead
letter, which is newer. An update that changes the key leaves nothing out.
"""

from __future__ import annotations

from collections.abc import Sequence

from gdq.consumers.replica.changes import STAGE, found_sql, netted_sql, same_key, tells_pairs
from gdq.consumers.replica.policy import DIFFERING, Answer, Kind
from gdq.consumers.replica.table import ReplicaTable
from gdq.consumers.replica.table_apply import TableApplier
from gdq.consumers.views.change_source import NEW_OPS, OLD_OPS
from gdq.errors import GdqError
from gdq.sql_text import literal, quote, raw

# Conflicts after which the target has no row that could be another than the source's.
_NO_ROW: tuple[Kind, ...] = ("update_missing", "delete_missing")


def check_answers(table: ReplicaTable, answers: dict[Kind, Answer]) -> None:
    """GdqError if conflicts would be settled by old rows, or leave rows whose values later changes are filled with."""
    asked = [kind for kind in answers if kind in DIFFERING]
    kept = [kind for kind, answer in answers.items() if kind not in _NO_ROW and answer.action not in ("error", "apply")]
    if table.omits and (asked or kept):
        raise GdqError(
            f"table {table.name} is captured without large values that updates leave as they were, which the answer to "
            f"its conflict {(asked or kept)[0]} needs",
            hint="Answer error or apply by --on-conflict, or capture the table with unchanged both or once.",
        )


def added_up_sql(table: ReplicaTable, log_rows: str, after: int | None, *, whole: bool) -> str:
    """SELECT of a table's net change from all images, as netted_sql() has it, also where the log lacks values."""
    return netted_parts_sql(table, log_rows, after) if table.omits else netted_sql(table, log_rows, after, whole=whole)


def netted_parts_sql(table: ReplicaTable, log_rows: str, after: int | None) -> str:
    """SELECT of a table's net change as netted_sql() gives it, and the places of the values that are as they were.

    `after`: the number of the last TRUNCATE among the log rows.
    """
    numbered = list(enumerate(table.columns, 1))
    keys = [place for place, column in numbered if column.is_key]
    omitted = [place for place, column in numbered if column.omitted]
    others = [place for place, column in numbered if not (column.is_key or column.omitted)]
    key = ", ".join(f"c{place}" for place in keys)
    images = ", ".join(
        column.logged(f"(case when s.w < 0 then d.{quote(column.old)} else d.{quote(column.new)} end)")
        + f" as c{place}"
        for place, column in numbered
    )
    known = ", ".join(
        f"{literal(column.name)} <> all (coalesce(d.ev_unchanged, '{{}}')) as k{place}"
        for place, column in numbered
        if column.omitted
    )
    # part 0: the columns that are always logged; others: one that may be left out, by its place
    sets = [f"({', '.join(f'c{place}' for place in [*keys, *others])})", *(f"({key}, c{n}, k{n})" for n in omitted)]
    part = " ".join(f"when grouping(k{place}) = 0 then {place}" for place in omitted)
    listed = ", ".join(f"c{place}" for place, _ in numbered)
    later = "" if after is None else f" and d.ev_id > {after}"
    parts = f"""
        select {listed}, sum(w) as net, case {part} else 0 end as part
          from (select s.w, {images}, {known} from ({log_rows}) as d, (values (-1), (1)) as s(w)
                 where case when s.w < 0 then d.ev_op in {OLD_OPS} else d.ev_op in {NEW_OPS} end{later}) as image
         group by grouping sets ({", ".join(sets)})
        having sum(w) <> 0 and {" and ".join(f"coalesce(k{place}, true)" for place in omitted)}"""
    values = ", ".join(
        f"c{place}"
        if column.is_key
        else f"(array_agg(c{place}) filter (where net > 0 and part = {place if column.omitted else 0}))[1] as c{place}"
        for place, column in numbered
    )
    left = ", ".join(f"case when not bool_or(part = {n if n in omitted else 0}) then {n} end" for n in others + omitted)
    paired = f"count(*) over (partition by {key}) > 1" if tells_pairs(table) else "null::boolean"
    return f"""select came, {listed}, {paired}, case when came then left_out end
      from (select net > 0 as came, {values}, nullif(array_remove(array[{left}], null), '{{}}')::smallint[] as left_out
              from ({parts}) as parts group by {key}, net > 0) as netted"""


def fill_left_out(tables: TableApplier, table: ReplicaTable) -> None:
    """Fill in the staged values that are as they were; left_out goes on naming those of the target's own rows.

    GdqError if a row is to be inserted, or put aside, of which a value is not known.
    """
    if not table.omits:
        return
    target = tables.target
    if (held := tables.letters.keys_sql(table)) is not None:
        filled = _filled(table, [column.stored("d.remote") for column in table.columns])
        target.execute(
            raw(
                f"update {STAGE} s set {filled}, left_out = null "
                f"from ({held}) p join gdq_target.replica_dead_letter d on d.dead_letter_id = p.letter "
                f"where s.left_out is not null and d.remote is not null and {same_key(table, 's', 'p')}"
            )
        )
    filled = _filled(table, [column.travelling(f"t.{quote(column.name)}") for column in table.columns])
    found = found_sql(table)
    target.execute(raw(f"update {STAGE} s set {filled} from {table.target} t where s.left_out is not null and {found}"))
    gone = f"not exists (select from {table.target} t where {found})"
    lacking = f"select from {STAGE} s where s.left_out is not null and {gone}"
    inserts = tables.answers(table)["update_missing"].action in ("apply", "newest")
    if not inserts and tables.policies.on_error != "dead-letter":
        # the conflict stops the replica, or the row is passed over
        lacking += f" and not exists (select from {STAGE} o where not o.is_new and {same_key(table, 'o', 's')})"
    if number := target.execute(raw(lacking)).rowcount:
        raise GdqError(
            f"table {table.name} of the target lacks {number} rows, of which the log has not all values, as updates "
            "left them as they were",
            hint=f"Copy the table again: gdq replicate ... --copy-again '{table.name}'",
        )


def _filled(table: ReplicaTable, values: Sequence[str]) -> str:
    """What is set in a staged row s to take those values that it leaves out."""
    places = [place for place, column in enumerate(table.columns, 1) if not column.is_key]
    return ", ".join(f"c{n} = case when {n} = any (s.left_out) then {values[n - 1]} else s.c{n} end" for n in places)
