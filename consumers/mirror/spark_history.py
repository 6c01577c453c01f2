"""What a history gets of a table by Spark: the rows that feed and row_versions write without it, as Spark's SQL.

Columns of the table are c1, c2, ..., those that only the lake table has follow. Floats are text meanwhile, since Spark
takes 0 and -0 for one group.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import TYPE_CHECKING

import pyarrow as pa

from gdq.consumers.lake.types import LakeColumn
from gdq.consumers.mirror.feed import CAME, CHANGE_TYPES, FEED_FIELDS, TYPE
from gdq.consumers.mirror.row_versions import END, START, VERSION_FIELDS
from gdq.consumers.mirror.table import MirrorTable
from gdq.consumers.mirror.tick_changes import EVENT, TIME, VERSION
from gdq.consumers.spark.lake_merge import SparkDifference, row_image, spark_quoted
from gdq.consumers.spark.lake_types import lake_type_ddl
from gdq.consumers.views.signals import Diverged

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession


@dataclass(frozen=True, slots=True)
class SparkHistory:
    """What a history of `table` gets, computed in `session`. `there`: the lake table's rows, None before the first.

    Frames are kept until `stack` is closed. Given frames have the columns c1, c2, ... of the table with their types.
    """

    session: SparkSession
    table: MirrorTable
    there: DataFrame | None
    stack: ExitStack

    def copied(self, rows: DataFrame, tick: int) -> SparkDifference:
        """What a copy gives the lake table: all rows, or those that are others than the lake table says."""
        if self.there is None:
            return self._first(rows.selectExpr(*self._plain()), tick)
        came, live, of = self._named("came", rows.selectExpr(*self._plain())), self._live(), self._columns()
        both = f"select {of}, 1L as w from {came} union all select {of}, -w from {live}"
        return self._later(f"select {of}, {tick}L as v, sum(w) as w from ({both}) group by {of} having sum(w) <> 0")

    def changed(self, images: DataFrame, truncations: Sequence[tuple[int, int]]) -> SparkDifference:
        """What the images of a log give it; `truncations`: the events of TRUNCATEs, and their ticks.

        After the columns of the table the images have op, v (the tick), t (the time), e (the event), w (-1 or 1).
        """
        changes, of = (
            self._named("images", images.selectExpr(*self._plain(), "op", "v", "t", "e", "w")),
            self._columns(),
        )
        if not truncations:
            return self._followed(f"select * from {changes}")
        # what was there before each, and came after the one before
        part = " + ".join(f"int(e > {event})" for event, _ in truncations)
        rows = f"select {of}, 0 as part, w from {self._live()} union all select {of}, {part}, w from {changes}"
        held = f"select {of}, part, sum(w) as w from ({rows}) group by {of}, part having sum(w) > 0"
        events, ticks = (", ".join(f"{number}L" for number in some) for some in zip(*truncations, strict=True))
        return self._followed(
            f"select * from {changes} union all "
            f"select {of}, 'D', array({ticks})[part], {_now()}, array({events})[part], -1L "
            f"from (select *, explode(sequence(1, int(w))) from ({held}) where part < {len(truncations)})"
        )

    def _first(self, rows: DataFrame, tick: int) -> SparkDifference:
        """All rows of the lake table, from those of the table."""
        raise NotImplementedError

    def _later(self, netted: str) -> SparkDifference:
        """The difference for a SELECT of net changes: w equal rows came at the tick v, or -w went."""
        raise NotImplementedError

    def _followed(self, changes: str) -> SparkDifference:
        """The difference for a SELECT of images, among which are the rows that TRUNCATEs took away."""
        raise NotImplementedError

    def _live(self) -> str:
        """The rows that the lake table says the table has, each with the number w of its copies."""
        raise NotImplementedError

    def _there(self) -> DataFrame:
        assert self.there is not None
        return self.there

    @property
    def _fields(self) -> Sequence[pa.Field]:
        return [*self.table.schema, *self.table.kept]

    def _columns(self, prefix: str = "") -> str:
        return ", ".join(f"{prefix}c{number}" for number in range(1, len(self.table.columns) + 1))

    def _plain(self) -> list[str]:
        return [f"{_text(one, f'c{n}')} as c{n}" for n, one in enumerate(self.table.schema, 1)]

    def _plain_there(self) -> list[str]:
        """The same of the lake table's rows, with the columns that only the lake table has."""
        return [f"{_text(one, spark_quoted(one.name))} as c{n}" for n, one in enumerate(self._fields, 1)]

    def _kept(self) -> list[str]:
        """NULL in the columns that only the lake table has."""
        start = len(self.table.columns) + 1
        return [f"cast(null as {_text_type(one)}) as c{n}" for n, one in enumerate(self.table.kept, start)]

    def _named(self, name: str, frame: DataFrame) -> str:
        """A frame's name in the session's SQL."""
        frame.createOrReplaceGlobalTempView(f"gdq_{name}")
        return f"global_temp.gdq_{name}"

    def _written(self, rows: DataFrame, own: Sequence[pa.Field], *more: str) -> tuple[list[LakeColumn], DataFrame]:
        """The lake table's columns in its order, and rows with them as c1, c2, ...; `own`: those of the history."""
        places = {field.name: (field, _whole(field, f"c{number}")) for number, field in enumerate(self._fields, 1)}
        places |= {field.name: (field, spark_quoted(field.name)) for field in own}
        names = list(places) if self.there is None else self.there.columns
        listed = [f"{places[name][1]} as c{number}" for number, name in enumerate(names, 1)]
        return [_column(places[name][0]) for name in names], rows.selectExpr(*listed, *more)


class SparkFeed(SparkHistory):
    """What a change feed gets."""

    __slots__ = ()

    def _first(self, rows: DataFrame, tick: int) -> SparkDifference:
        stamped = rows.selectExpr("*", *_stamp("'insert'", f"{tick}L", _now(), "0L"))
        return SparkDifference("full", *self._written(stamped, FEED_FIELDS))

    def _later(self, netted: str) -> SparkDifference:
        each = self.session.sql(f"select *, explode(sequence(1, int(abs(w)))) from ({netted})")
        return self._appended(each, _stamp("if(w < 0, 'delete', 'insert')", "v", _now(), "0L"))

    def _followed(self, changes: str) -> SparkDifference:
        kinds = " ".join(f"when op = '{op}' and w = {w} then '{kind}'" for (op, w), kind in CHANGE_TYPES.items())
        return self._appended(self.session.sql(changes), _stamp(f"case {kinds} end", "v", "t", "e"))

    def _live(self) -> str:
        of, came = self._columns(), ", ".join(f"'{kind}'" for kind in CAME)
        weight = f"if({TYPE} in ({came}), 1L, -1L) as w"
        rows = self._named("there", self._there().selectExpr(*self._plain_there(), weight))
        return f"(select {of}, sum(w) as w from {rows} group by {of} having sum(w) <> 0)"

    def _appended(self, rows: DataFrame, stamp: Sequence[str]) -> SparkDifference:
        written = self._written(rows.selectExpr("*", *self._kept(), *stamp), FEED_FIELDS)
        return SparkDifference("append", *written)


class SparkVersions(SparkHistory):
    """What a history of the rows' versions gets."""

    __slots__ = ()

    def _first(self, rows: DataFrame, tick: int) -> SparkDifference:
        opened = rows.selectExpr("*", f"{tick}L as {START}", f"cast(null as bigint) as {END}")
        return SparkDifference("full", *self._written(opened, VERSION_FIELDS))

    def _followed(self, changes: str) -> SparkDifference:
        of = f"{self._columns()}, v"
        return self._later(f"select {of}, sum(w) as w from ({changes}) group by {of} having sum(w) <> 0")

    def _live(self) -> str:
        return f"(select {self._columns()}, 1L as w from {self._held()})"

    def _held(self) -> str:
        """The versions that hold, from v on."""
        return self._named("held", self._there().where(f"{END} is null").selectExpr(*self._plain_there(), f"{START} v"))

    def _later(self, netted: str) -> SparkDifference:
        """The versions that end and those that begin: of equal rows the oldest ends first.

        So the first row that came is that which went first, and so on. Diverged if a row went that was not there.
        """
        of, width = self._columns(), len(self.table.columns)
        kept = "".join(f", c{n}" for n in range(width + 1, len(self._fields) + 1))
        change = self.session.sql(netted).persist()
        self.stack.callback(change.unpersist)
        net, nulls = self._named("net", change), "".join(f", {one}" for one in self._kept())
        same = " and ".join(f"a.c{n} <=> b.c{n}" for n in range(1, width + 1))
        placed = f"row_number() over (partition by {of} order by v) as n"
        went = f"select {of}, v, explode(sequence(1, int(-w))) from {net} where w < 0"
        came = (
            f"select a.*, true as old from {self._held()} a left semi join {net} b on b.w < 0 and {same} union all "
            f"select {of}{nulls}, v, false from (select *, explode(sequence(1, int(w))) from {net} where w > 0)"
        )
        values = ", ".join(f"coalesce(a.c{n}, b.c{n}) as c{n}" for n in range(1, width + 1))
        pairs = (
            f"select {values}{kept}, a.v as {START}, b.v as {END}, coalesce(old, false) as old, "
            f"b.v is not null and (a.v is null or a.v >= b.v) as lost "
            f"from (select *, {placed} from ({came})) a full join (select *, {placed} from ({went})) b "
            f"on {same} and a.n = b.n"
        )
        signs = f"case when not old then array(1L) when {END} is null then array() else array(-1L, 1L) end"
        signed = f"select {of}{kept}, {START}, if(w < 0, null, {END}) as {END}, w, lost"
        grouped = f"{of}{kept}, {START}, {END}"
        rows = self.session.sql(
            f"select {grouped}, sum(w) as w, max(lost) as lost from "
            f"({signed} from (select *, explode({signs}) as w from ({pairs}))) group by {grouped}"
        )
        columns, written = self._written(rows, VERSION_FIELDS, "w", "lost")
        found = written.selectExpr("*", row_image(len(columns))).persist()
        self.stack.callback(found.unpersist)
        if found.where("lost").take(1):
            raise Diverged("a row that went was not there")
        return SparkDifference("signed", columns, found)


def _column(field: pa.Field) -> LakeColumn:
    return LakeColumn(field.name, "text", field.type, "{c}")


def _text(field: pa.Field, name: str) -> str:
    return f"cast({name} as string)" if pa.types.is_floating(field.type) else name


def _text_type(field: pa.Field) -> str:
    return "string" if pa.types.is_floating(field.type) else lake_type_ddl(_column(field))


def _whole(field: pa.Field, name: str) -> str:
    return f"cast({name} as {lake_type_ddl(_column(field))})" if pa.types.is_floating(field.type) else name


def _now() -> str:
    return f"timestamp '{datetime.now(UTC):%Y-%m-%d %H:%M:%S.%f}+00:00'"


def _stamp(*values: str) -> list[str]:
    """Expressions for the columns of a feed besides those of the table."""
    return [f"{value} as {name}" for value, name in zip(values, (TYPE, VERSION, TIME, EVENT), strict=True)]
