"""The comparison of what consumers and views have with the audit table: lost, doubled, invented, out of order."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import Any

import psycopg

from tests.campaign.recovery import lake_rows
from tests.campaign.stage import FAR_VIEWS, LAKE_VIEWS, VIEWS, Stage

TRUTH = """
create temp table truth as
  select v.kind, v.label, min(a.tbl) as tbl, count(*) as n
    from app.audit a cross join lateral (values ('b', a.born), ('d', a.died)) v(kind, label)
   where v.label is not null group by 1, 2"""
FOUND = """
  with found as (
    select v.kind, v.label, count(*) as n
      from {} s cross join lateral (values ('b', s.born), ('d', s.died)) v(kind, label)
     where v.label is not null group by 1, 2)
  select coalesce(sum(greatest(t.n - coalesce(f.n, 0), 0)) filter (where t.label is not null), 0)::bigint,
         coalesce(sum(greatest(f.n - t.n, 0)) filter (where t.label is not null), 0)::bigint,
         coalesce(sum(f.n) filter (where t.label is null), 0)::bigint
    from {} t full join found f on f.kind = t.kind and f.label = t.label"""
UNORDERED = """select count(*) from {0} b join {0} d on d.died = b.born where d.n < b.n"""


@dataclass(frozen=True)
class Verdict:
    """What one consumer or view has, beside the truth: numbers of versions or rows."""

    name: str
    lost: int
    doubled: int
    invented: int
    unordered: int = 0

    @property
    def right(self) -> bool:
        return not (self.lost or self.doubled or self.invented or self.unordered)


def committed_changes(su: psycopg.Connection[Any]) -> int:
    row = su.execute("select count(*) from app.audit").fetchone()
    assert row
    return int(row[0])


def judge(stage: Stage, *, slot: bool) -> list[Verdict]:
    """The verdicts on all consumers and views. `slot`: the slot's reader is still there; else its truth was kept."""
    with stage.connect() as su:
        su.execute("set work_mem = '256MB'")
        su.execute(TRUTH.encode())
        su.execute("create temp table slot_truth as select * from truth where tbl = 'item'")
        if not slot:
            su.execute("truncate slot_truth")
            su.execute(
                TRUTH.replace("create temp table truth as", "insert into slot_truth")
                .replace("app.audit", "seen.slot_audit")
                .encode()
            )
        _fetch_far(stage, su)
        found = [_audit_itself(su)]
        for name, table, truth in (
            ("same", "seen.same", "truth"),
            ("far", "far", "truth"),
            ("crew", "seen.crew", "truth"),
            ("slot", "seen.slot", "slot_truth"),
        ):
            counts = su.execute(FOUND.format(table, truth).encode()).fetchone()
            assert counts
            row = su.execute(UNORDERED.format(table).encode()).fetchone() if name in ("same", "slot") else (0,)
            assert row
            found.append(Verdict(name, counts[0], counts[1], counts[2], row[0]))
        found.append(_compare_rows("mirror", su, "select id, region, label, prev from app.part", su, "seen.part"))
        with psycopg.connect(stage.target_dsn, autocommit=True) as there:
            for view, (_, query) in VIEWS.items():
                if view in LAKE_VIEWS:
                    rows = Counter(tuple(map(str, row.values())) for row in lake_rows(stage, view, {}))
                    expected = Counter(tuple(map(str, row)) for row in su.execute(query.encode()))
                    found.append(_verdict(view, expected, rows))
                else:
                    found.append(_compare_rows(view, su, query, there if view in FAR_VIEWS else su, f"views.{view}"))
    return found


def _audit_itself(su: psycopg.Connection[Any]) -> Verdict:
    """Whether the audit agrees with the tables: versions born and not dead are there."""
    tables = " union all ".join(f"select label from app.{table}" for table in ("acct", "item", "part"))
    query = f"""
      with alive as (select label from truth group by label having count(*) filter (where kind = 'd') = 0),
           there as ({tables})
      select count(*) filter (where t.label is null), 0, count(*) filter (where a.label is null)
        from alive a full join there t on t.label = a.label"""
    counts = su.execute(query.encode()).fetchone()
    assert counts
    return Verdict("audit beside the tables", *counts)


def _fetch_far(stage: Stage, su: psycopg.Connection[Any]) -> None:
    su.execute("create temp table far (n bigint, tbl text, born bigint, died bigint)")
    with (
        psycopg.connect(stage.target_dsn, autocommit=True) as there,
        there.cursor().copy("copy seen.far to stdout") as source,
        su.cursor().copy("copy far from stdin") as into,
    ):
        for data in source:
            into.write(data)


def _compare_rows(
    name: str, su: psycopg.Connection[Any], query: str, where: psycopg.Connection[Any], table: str
) -> Verdict:
    expected = Counter(text for (text,) in su.execute(f"select row(q.*)::text from ({query}) q".encode()))
    columns = ", ".join(
        column.name for column in su.execute(f"select * from ({query}) q limit 0".encode()).description or ()
    )
    found = Counter(text for (text,) in where.execute(f"select row({columns})::text from {table}".encode()))
    return _verdict(name, expected, found)


def _verdict(name: str, expected: Counter[Any], found: Counter[Any]) -> Verdict:
    lost = sum((expected - found).values())
    more = found - expected
    doubled = sum(number for row, number in more.items() if expected[row])
    return Verdict(name, lost, doubled, sum(more.values()) - doubled)
