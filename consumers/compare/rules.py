"""Rules for expected differences between the events of a queue and of a slot that saw the same changes.

gdq.consumers.compare.comparison explains differences by RULES only. `python -m gdq.consumers.compare.rules` prints
their table for docs/slot-or-queue.md. gdq's slots use the output plugin pgoutput; the rules for other plugins are for
readers who come from these.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from psycopg import Connection

from gdq.qualified_sql import qualified
from gdq.shown import Shown
from gdq.source import Event

SLOT_PLUGINS = ("pgoutput", "test_decoding", "wal2json")
_NO_ROOT = ("test_decoding", "wal2json")
NO_NUMBERS = ("NaN", "Infinity", "-Infinity")

_FACTS = qualified("""
    select pg_catalog.format('%%I.%%I', n.nspname, c.relname), c.relreplident::text,
           array(select a.attname::text from pg_catalog.pg_index i
                   join pg_catalog.pg_attribute a on a.attrelid = i.indrelid
                    and a.attnum = any ((i.indkey::int2[])[0:i.indnkeyatts - 1])
                  where i.indrelid = c.oid and case when c.relreplident = 'd' then i.indisprimary
                                                   when c.relreplident = 'i' then i.indisreplident end),
           array(select a.attname::text from pg_catalog.pg_attribute a
                  where a.attrelid = c.oid and a.attgenerated <> '' and not a.attisdropped),
           exists (select from pg_catalog.pg_trigger t
                    where t.tgrelid = c.oid and t.tgenabled = 'A' and pg_catalog.starts_with(t.tgname, '!gdq_')),
           (select pg_catalog.format('%%I.%%I', s.nspname, r.relname)
              from pg_catalog.pg_class r join pg_catalog.pg_namespace s on s.oid = r.relnamespace
             where c.relispartition and r.oid = pg_catalog.pg_partition_root(c.oid)),
           array(select a.attname::text from pg_catalog.pg_attribute a
                  where a.attrelid = c.oid and not a.attisdropped
                    and a.atttypid = any (array['float4', 'float8', 'numeric']::pg_catalog.regtype[]::oid[]))
      from pg_catalog.pg_class c join pg_catalog.pg_namespace n on n.oid = c.relnamespace
     where c.oid = any (%s::pg_catalog.regclass[]::pg_catalog.oid[])""")


@dataclass(frozen=True, slots=True)
class RuleTable:
    """A table's data for the rules: replica identity, generated columns, triggers.

    `identity`: pg_class.relreplident, full for an unknown table. `always`: its triggers fire in replica role too.
    `root`: a partition's partitioned table. `fractions`: the columns of type float4, float8 and numeric.
    """

    identity: str = "f"
    identity_columns: tuple[str, ...] = ()
    generated: frozenset[str] = frozenset()
    always: bool = False
    root: str | None = None
    fractions: frozenset[str] = frozenset()

    def identity_of(self, event: Event) -> dict[str, Any] | None:
        """The key by which a slot's event names the row: that of the replica identity if it is an index."""
        image = (event.old if event.new is None else event.new) or {}
        if self.identity != "i" or not set(self.identity_columns) <= image.keys():
            return event.key
        return {name: image[name] for name in self.identity_columns}


def rule_tables(connection: Connection[Any], tables: Sequence[str]) -> dict[str, RuleTable]:
    """The RuleTable of each table, by its name in events; the server's error for an unknown table."""
    rows = connection.execute(_FACTS, [list(tables)]).fetchall()
    return {
        name: RuleTable(identity, tuple(columns), frozenset(generated), always, root, frozenset(fractions))
        for name, identity, columns, generated, always, root, fractions in rows
    }


@dataclass(frozen=True, slots=True, repr=False)
class Mismatch(Shown):
    """One difference between the events of both paths, with the rule that explains it; without a rule it is an error.

    `what`: "missing in slot", "missing in queue", "table", "key", "old" and "new" (images, in `columns`), "id", "xid",
    "time", "origin", "order of one key", "order in a transaction" or "order of transactions". `xid` has 32 bits.
    `alone`: for a missing event, True if that side has no change of the table in the transaction at all.
    """

    _shown = "what xid table key columns rule"

    what: str
    xid: int
    table: str | None
    key: dict[str, Any] | None
    queue: Event | None
    slot: Event | None
    columns: tuple[str, ...] = ()
    alone: bool = False
    rule: str | None = None

    def __str__(self) -> str:
        event = self.queue or self.slot
        op = event.op if event else ""
        columns = f" ({', '.join(self.columns)})" if self.columns else ""
        because = f": {self.rule}" if self.rule else ""
        return f"transaction {self.xid}, {op} of {self.table}, key {self.key}: {self.what}{columns}{because}"


@dataclass(frozen=True, slots=True)
class Rule:
    """An expected difference: the value on each side, the reason, a function that recognises it, and the plugins."""

    name: str
    queue: str
    slot: str
    why: str
    explains: Callable[[Mismatch, RuleTable], bool]
    plugins: tuple[str, ...] = SLOT_PLUGINS


def _every(what: str) -> Callable[[Mismatch, RuleTable], bool]:
    """Recognises all differences in `what`."""
    return lambda found, _: found.what == what


def _xid(found: Mismatch, _: RuleTable) -> bool:
    return bool(found.what == "xid" and found.queue and found.slot and found.queue.xid % 2**32 == found.slot.xid)


def _time(found: Mismatch, _: RuleTable) -> bool:
    queue, slot = found.queue, found.slot
    return bool(found.what == "time" and queue and slot and (queue.time <= slot.time or slot.origin))


def _old_image(found: Mismatch, table: RuleTable) -> bool:
    queue, slot = found.queue, found.slot
    if found.what != "old" or table.identity == "f" or queue is None or slot is None or queue.old is None:
        return False
    if any(column in (slot.old or {}) or column not in queue.old for column in found.columns):
        return False
    new = queue.new or {}
    key_sent = queue.op == "delete" or any(queue.old.get(c) != new.get(c) for c in table.identity_columns)
    return not (key_sent and set(found.columns) & set(table.identity_columns))


def _key(found: Mismatch, table: RuleTable) -> bool:
    queue, slot = found.queue, found.slot
    if found.what != "key" or table.identity != "i" or queue is None or slot is None:
        return False
    return (slot.key or {}).keys() == set(table.identity_columns) and slot.key == table.identity_of(queue)


def _unchanged_value(found: Mismatch, table: RuleTable) -> bool:
    queue, slot = found.queue, found.slot
    if found.what != "new" or table.identity == "f" or queue is None or slot is None or queue.op != "update":
        return False
    old, new = queue.old or {}, queue.new or {}
    return all(
        column not in (slot.new or {}) and isinstance(new.get(column), str) and old.get(column) == new[column]
        for column in found.columns
    )


def _generated(found: Mismatch, table: RuleTable) -> bool:
    slot = found.slot
    if found.what not in ("old", "new") or slot is None:
        return False
    image = (slot.old if found.what == "old" else slot.new) or {}
    return all(column in table.generated and column not in image for column in found.columns)


def _ddl(found: Mismatch, _: RuleTable) -> bool:
    return bool(found.what == "missing in slot" and found.queue and found.queue.op == "ddl")


def _message(found: Mismatch, _: RuleTable) -> bool:
    event = found.queue or found.slot
    return bool(found.what.startswith("missing") and event and event.op == "message")


def _replica_role(found: Mismatch, table: RuleTable) -> bool:
    # An apply worker writes in this role with an origin. Changes of a session that only sets the role look like lost
    # changes, so they are an error.
    slot = found.slot
    return bool(found.what == "missing in queue" and slot and slot.origin and found.alone and not table.always)


def _null_in_old(found: Mismatch, table: RuleTable) -> bool:
    queue, slot = found.queue, found.slot
    if found.what != "old" or table.identity != "f" or queue is None or slot is None or queue.old is None:
        return False
    return all(c in queue.old and queue.old[c] is None and c not in (slot.old or {}) for c in found.columns)


def _no_number(found: Mismatch, table: RuleTable) -> bool:
    queue, slot = found.queue, found.slot
    if found.what not in ("old", "new") or queue is None or slot is None:
        return False
    ours, theirs = (queue.old, slot.old) if found.what == "old" else (queue.new, slot.new)
    return all(
        column in table.fractions
        and (ours or {}).get(column) in NO_NUMBERS
        and column in (theirs or {})
        and (theirs or {})[column] is None
        for column in found.columns
    )


def _truncated_partition(found: Mismatch, table: RuleTable) -> bool:
    slot = found.slot
    return bool(found.what == "missing in queue" and slot and slot.op == "truncate" and table.root)


def _no_identity(found: Mismatch, table: RuleTable) -> bool:
    queue = found.queue
    nothing = table.identity != "f" and not table.identity_columns
    return bool(found.what == "missing in slot" and queue and queue.op in ("update", "delete") and nothing)


RULES: tuple[Rule, ...] = (
    Rule(
        "order of transactions",
        "by first change",
        "by commit",
        "the queue numbers a change when it is made, the slot sends a transaction when it has ended",
        _every("order of transactions"),
    ),
    Rule(
        "order in a transaction",
        "by end of statement",
        "by row",
        "triggers fire when their statement ends, after the writes of its BEFORE triggers; the changes of one key keep "
        "their order",
        _every("order in a transaction"),
    ),
    Rule(
        "`id`",
        "number of the change",
        "place in the write-ahead log; rows of one COPY may share it",
        "each path gives numbers of its own",
        _every("id"),
    ),
    Rule("`xid`", "64 bits", "32 bits", "output plugins send no epoch", _xid),
    Rule(
        "`time`",
        "the time of the change",
        "the time of the commit, at the replication origin if there is one",
        "the write-ahead log has no time of a change",
        _time,
    ),
    Rule(
        "`key`",
        "the primary key",
        "with REPLICA IDENTITY USING INDEX the columns of that index, else the primary key",
        "the write-ahead log has the columns of the replica identity",
        _key,
        ("pgoutput",),
    ),
    Rule(
        "`old` of an update or delete",
        "the whole row",
        "the whole row with REPLICA IDENTITY FULL (of the partitioned table itself, too); else the old key where it "
        "changed",
        "the write-ahead log has no more",
        _old_image,
    ),
    Rule(
        "`new` of an update",
        "the whole row",
        "the row without large values that the update did not change, unless `old` has them",
        "the server does not write these values to its log again",
        _unchanged_value,
    ),
    Rule("generated columns", "their values", "none", "publications leave them out", _generated, ("pgoutput",)),
    Rule("DDL", "`ddl` events", "none: later rows have other columns", "the write-ahead log has no DDL", _ddl),
    Rule(
        "messages",
        "`gdq.insert_event`",
        "`pg_logical_emit_message`: prefix as `type`, content as `data` (`\\x...`, with `encoding`, if no text)",
        "each path has messages of its own",
        _message,
    ),
    Rule(
        "`origin`",
        "the setting `gdq.origin` of the writer's session",
        "the replication origin",
        "each path has origins of its own",
        _every("origin"),
    ),
    Rule(
        "writes of a session in replica role",
        "only tables captured with `--always`",
        "all",
        "triggers do not fire in this role",
        _replica_role,
    ),
    Rule(
        "`table` of a partition's row",
        "the partitioned table",
        "the partition",
        "only a publication sends changes under the name of the root",
        # only changes of a partition and of its root are paired; another table's change is a missing event
        _every("table"),
        _NO_ROOT,
    ),
    Rule(
        "TRUNCATE of a partitioned table",
        "one event",
        "one more for each partition",
        "the write-ahead log names the root and all partitions",
        _truncated_partition,
        _NO_ROOT,
    ),
    Rule(
        "NULL in `old` with REPLICA IDENTITY FULL",
        "NULL",
        "the column is left out",
        "test_decoding prints no NULL in old rows",
        _null_in_old,
        ("test_decoding",),
    ),
    Rule(
        "NaN and Infinity in float4, float8 and numeric",
        "text",
        "NULL",
        "JSON has no such numbers",
        _no_number,
        ("wal2json",),
    ),
    Rule(
        "update or delete of a table without replica identity",
        "as for any table",
        "none",
        "wal2json leaves them out with a warning; a publication would refuse the statement",
        _no_identity,
        ("wal2json",),
    ),
)


def rules_of(plugin: str) -> tuple[Rule, ...]:
    """The rules for a slot with this output plugin."""
    return tuple(rule for rule in RULES if plugin in rule.plugins)


def rules_markdown() -> str:
    """The table of docs/slot-or-queue.md."""
    lines = ["| | queue | slot | why | output plugins |", "|---|---|---|---|---|"]
    for rule in RULES:
        plugins = "all" if rule.plugins == SLOT_PLUGINS else ", ".join(rule.plugins)
        lines.append(f"| {rule.name} | {rule.queue} | {rule.slot} | {rule.why} | {plugins} |")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    print(rules_markdown(), end="")
