"""A Delta Lake table as the target of a view, by the library deltalake: no Spark, no jar.

Each commit for the view stores its position in the commit info, and its number in the table's state, as an application
transaction; both or none. A commit is for one version of the table and fails if that version is taken. So a position
checked before the commit is still valid at the commit. Commits by Spark (consumers/spark/lake_delta.py) store the same
in their userMetadata, and the version that they were computed onto.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any, cast
from urllib.parse import unquote

import pyarrow as pa
import pyarrow.parquet as pq
from deltalake import CommitProperties, DeltaTable, Schema, Transaction, write_deltalake
from deltalake.exceptions import CommitFailedError, DeltaError, TableNotFoundError
from deltalake.transaction import AddAction, RemoveAction, create_table_with_add_actions
from pyarrow import fs

from gdq.consumers.lake.columns import EvolvedColumn, stored_names, with_columns
from gdq.consumers.lake.data_files import FILE_BYTES, DataFile, remove_data_files
from gdq.consumers.lake.files import ArrowDifference, RewrittenDataFiles, evolved, rewrite_data_files
from gdq.consumers.lake.object_store import require_conditional_put
from gdq.consumers.lake.table import OwnedLakeTable
from gdq.consumers.views.signals import Diverged
from gdq.consumers.views.target import StoredPosition, TargetState
from gdq.errors import GdqError
from gdq.object_store import find_system, plain_http

# The key of the view's mark in a commit.
DELTA_STATE_KEY = "gdq"

# Commits of others that do not change rows.
_HARMLESS = {
    *("OPTIMIZE", "VACUUM START", "VACUUM END", "SET TBLPROPERTIES", "UNSET TBLPROPERTIES", "COMPUTE STATS"),
}
# Reader features that do not change the content of data files.
_FEATURES = {"timestampNtz", "vacuumProtocolCheck", "v2Checkpoint"}
_HISTORY = 20
_REFUSED_HINT = (
    "Remove what was set on the table (delta.appendOnly, constraints), or drop the view and create it again."
)


@dataclass(frozen=True, slots=True)
class FoundDelta:
    """The table at one version, its state, and `number`, the number of the view's last commit."""

    table: DeltaTable | None
    number: int
    state: TargetState


class DeltaLake(OwnedLakeTable):
    """The Delta table `name` as the target of one view."""

    @property
    def application(self) -> str:
        """The application id of the view's transactions in the table."""
        return f"gdq:{self.source}"

    @property
    def library_errors(self) -> tuple[type[Exception], ...]:
        return DeltaError, pa.ArrowException

    def state(self) -> TargetState:
        return self.find().state

    def commit(self, change: ArrowDifference, stored: StoredPosition | None, new: StoredPosition) -> int:
        def attempt() -> int:
            found = self.find()
            self.check(found.state, stored, change.kind)
            try:
                return self._load(found, change, new) if change.kind == "full" else self._change(found, change, new)
            except CommitFailedError as error:
                if found.table is None or self._table().version() != found.table.version():
                    raise
                # nobody came first: the table refuses the commit, as one that may only grow does
                text = str(error).strip().splitlines()[0]
                raise GdqError(f"{self.name} refuses the commit: {text}", hint=_REFUSED_HINT) from error

        return self.commit_onto(CommitFailedError, attempt)

    def schema(self) -> pa.Schema:
        return _columns(self._present(self.find()))

    def evolve(
        self, columns: Sequence[EvolvedColumn], stored: StoredPosition, new: StoredPosition, *, adopt: bool = False
    ) -> None:
        def attempt() -> int:
            found = self.find()
            self.check(found.state, stored, "full" if adopt else "signed")
            table = self._present(found)
            there = _columns(table)
            same = [EvolvedColumn(field, field.name) for field in there]
            if (
                not adopt
                and [*columns[: len(there)]] == same
                and all(one.source is None for one in columns[len(there) :])
            ):
                write_deltalake(
                    table,
                    pa.schema([one.field for one in columns]).empty_table(),
                    mode="append",
                    schema_mode="merge",
                    commit_properties=self._properties(found.number + 1, new),
                )
                return 0
            # other changes of columns need features that few readers have: the files are written again
            self._check_features(table)
            files = self._files(table)
            return self._load(found, evolved(lambda: self._read(files, there), columns), new)

        self.commit_onto(CommitFailedError, attempt)

    def scan(self) -> Iterator[pa.RecordBatch]:
        table = self._present(self.find())
        self._check_features(table)
        return self._read(self._files(table), _columns(table))

    def _present(self, found: FoundDelta) -> DeltaTable:
        if found.table is None:
            raise Diverged(f"{self.name} is gone")
        return found.table

    def _read(self, files: Sequence[DataFile], schema: pa.Schema) -> Iterator[pa.RecordBatch]:
        system, _ = find_system(self.name.place)
        for file in files:
            with pq.ParquetFile(file.path, filesystem=system) as parquet:
                there = stored_names(parquet, schema)
                for batch in parquet.iter_batches():
                    rows = pa.Table.from_batches([batch])
                    yield from with_columns(rows, schema, there, rows.num_rows).to_batches()

    def sweep(self) -> None:
        """Do nothing: the files of a killed refresh go by VACUUM, which the table's owner runs."""

    def expire(self, keep: float) -> None:
        table = self.find().table
        if table is None:
            return
        hours = math.ceil(keep / 3600)
        # a conflict does no harm: the next time removes them
        with suppress(CommitFailedError):
            if table.vacuum(hours, dry_run=True, enforce_retention_duration=False, full=True):
                table.vacuum(hours, dry_run=False, enforce_retention_duration=False, full=True)

    def drop(self) -> None:
        if self.find().table is not None:
            system, folder = find_system(self.name.place)
            system.delete_dir(folder)

    @property
    def _options(self) -> dict[str, str] | None:
        return {"allow_http": "true"} if plain_http(self.name.place) else None

    def _table(self) -> DeltaTable:
        return DeltaTable(self.name.place, storage_options=self._options)

    def find(self) -> FoundDelta:
        """The table as it is now; GdqError if it is not this view's."""
        try:
            table = self._table()
        except TableNotFoundError:
            return FoundDelta(None, 0, TargetState(None))
        number = table.transaction_version(self.application)
        if number is None:
            raise self.foreign_error()
        return FoundDelta(table, number, self._read_state(table, number))

    def _read_state(self, table: DeltaTable, number: int) -> TargetState:
        """Find the view's last commit, and look at the later commits of others on the way.

        Commits between the view's last commit and the version that it was computed onto count as later too.
        """
        foreign = found = None
        onto = -1
        for commit in _commits(table):
            if found is not None and commit["version"] <= onto:
                break
            mark = _mark(commit)
            if found is None and mark is not None:
                if mark["number"] != number or mark["application"] != self.application:
                    break
                found = StoredPosition.parse(mark["position"])
                onto = mark.get("onto", commit["version"] - 1)
            elif commit.get("operation") not in _HARMLESS:
                foreign = f"{commit.get('operation')} in version {commit['version']} of {self.name}"
        if found is not None:
            return TargetState(found, foreign)
        return self.lost(foreign or f"the history of {self.name} no longer holds its position")

    def mark(self, number: int, new: StoredPosition) -> dict[str, Any]:
        """The mark for the view's commit of this number."""
        return {
            "application": self.application,
            "number": number,
            "owner": self.owner,
            "position": new.text,
        }

    def _properties(self, number: int, new: StoredPosition) -> CommitProperties:
        return CommitProperties(
            custom_metadata={DELTA_STATE_KEY: json.dumps(self.mark(number, new))},
            max_commit_retries=0,
            app_transactions=[Transaction(self.application, number)],
        )

    def _load(self, found: FoundDelta, change: ArrowDifference, new: StoredPosition) -> int:
        table = found.table
        if table is None and "://" in self.name.place:
            require_conditional_put(self.name.place)
        system, folder = find_system(self.name.place)
        if "://" not in self.name.place:
            system.create_dir(folder, recursive=True)
        done = rewrite_data_files(system, folder, [] if table is None else self._files(table), change)
        properties = self._properties(found.number + 1, new)
        description = f"gdq: target of {self.owner}, {self.source}"
        with self._left_on_conflict(system, done):
            if table is None:
                try:
                    create_table_with_add_actions(
                        self.name.place,
                        Schema.from_arrow(change.schema),
                        _added(system, folder, done),
                        description=description,
                        storage_options=self._options,
                        commit_properties=properties,
                    )
                except DeltaError as error:
                    if DeltaTable.is_deltatable(self.name.place, self._options):
                        raise CommitFailedError(str(error)) from error
                    raise
            elif _is_altered(table) or _columns(table) != change.schema:
                # a transaction of files alone would keep what another has given the table
                write_deltalake(
                    table,
                    pa.RecordBatchReader.from_batches(change.schema, self._read(done.added, change.schema)),
                    mode="overwrite",
                    schema_mode="overwrite",
                    partition_by=[],
                    description=description,
                    target_file_size=FILE_BYTES,
                    storage_options=self._options,
                    commit_properties=properties,
                )
                remove_data_files(system, done.added)
            else:
                table.create_write_transaction(
                    [*_added(system, folder, done)], "overwrite", table.schema(), commit_properties=properties
                )
        return done.deleted + done.inserted

    def _change(self, found: FoundDelta, change: ArrowDifference, new: StoredPosition) -> int:
        table = self._present(found)
        self._check_features(table)
        schema = _columns(table)
        change = change.arranged(schema.names)
        if schema.remove_metadata() != change.schema:
            raise Diverged(f"the columns of {self.name} are others")
        system, folder = find_system(self.name.place)
        done = rewrite_data_files(system, folder, self._files(table), change)
        now = int(time.time() * 1000)
        removed = [
            RemoveAction(file.path.removeprefix(folder + "/"), True, now, file.bytes, {}) for file in done.removed
        ]
        with self._left_on_conflict(system, done):
            table.create_write_transaction(
                [*_added(system, folder, done), *removed],
                "append",
                table.schema(),
                commit_properties=self._properties(found.number + 1, new),
            )
        return done.deleted + done.inserted

    @contextmanager
    def _left_on_conflict(self, system: fs.FileSystem, done: RewrittenDataFiles) -> Iterator[None]:
        """Delete the new files of a commit that fails."""
        try:
            yield
        except DeltaError:
            # a store may have made the commit all the same, if its first answer was lost: VACUUM knows
            if "://" not in self.name.place:
                remove_data_files(system, done.added)
            raise

    def rows(self, table: DeltaTable) -> int:
        """The number of rows in the table."""
        return sum(file.rows for file in self._files(table))

    def _check_features(self, table: DeltaTable) -> None:
        if _is_altered(table):
            what = ", ".join(sorted(_unknown_features(table))) or "partitions"
            hint = "Drop the view and create it again."
            raise GdqError(f"{self.name} has {what}, which gdq does not write", hint=hint)

    def _files(self, table: DeltaTable) -> list[DataFile]:
        _, folder = find_system(self.name.place)
        actions = pa.table(table.get_add_actions(flatten=True)).select(["path", "size_bytes", "num_records"])
        files = []
        for action in actions.to_pylist():
            path = unquote(action["path"])
            files.append(DataFile(f"{folder}/{path}", action["size_bytes"], action["num_records"] or 0))
        return files


def _unknown_features(table: DeltaTable) -> set[str]:
    return set(table.protocol().reader_features or ()) - _FEATURES


def _is_altered(table: DeltaTable) -> bool:
    """True if another has given the table partitions, or features that files depend on."""
    return bool(_unknown_features(table) or table.metadata().partition_columns)


def _columns(table: DeltaTable) -> pa.Schema:
    return pa.schema(table.schema().to_arrow())


def _added(system: fs.FileSystem, folder: str, done: RewrittenDataFiles) -> list[AddAction]:
    """The new files as a commit names them."""
    now = int(time.time() * 1000)
    return [
        AddAction(file.path.removeprefix(folder + "/"), file.bytes, {}, now, True, _statistics(system, file))
        for file in done.added
    ]


def _mark(commit: Mapping[str, Any]) -> dict[str, Any] | None:
    """The view's mark in a commit; None in a commit of others."""
    text = commit.get(DELTA_STATE_KEY)
    if text is None and str(commit.get("userMetadata")).startswith(f'{{"{DELTA_STATE_KEY}":'):
        return cast("dict[str, Any]", json.loads(commit["userMetadata"])[DELTA_STATE_KEY])
    return None if text is None else cast("dict[str, Any]", json.loads(text))


def _commits(table: DeltaTable) -> Iterator[dict[str, Any]]:
    """The commits that the log still holds, newest first."""
    some = table.history(_HISTORY)
    yield from some
    if len(some) == _HISTORY:
        yield from table.history()[_HISTORY:]


def _statistics(system: fs.FileSystem, file: DataFile) -> str:
    """Statistics for readers to skip files: null counts, and ranges of integers and dates, which are never rounded."""
    metadata = pq.read_metadata(file.path, filesystem=system)
    schema = metadata.schema.to_arrow_schema()
    found: dict[str, dict[str, Any]] = {"minValues": {}, "maxValues": {}, "nullCount": {}}
    for number, column in enumerate(schema):
        parts = [metadata.row_group(group).column(number).statistics for group in range(metadata.num_row_groups)]
        if any(part is None or not part.has_null_count for part in parts):
            continue
        found["nullCount"][column.name] = sum(part.null_count for part in parts)
        known = [part for part in parts if part.has_min_max]
        simple = pa.types.is_integer(column.type) or pa.types.is_date(column.type)
        if simple and known and all(part.has_min_max or part.null_count == part.num_values for part in parts):
            with suppress(TypeError, ValueError):
                found["minValues"][column.name] = min(part.min for part in known)
                found["maxValues"][column.name] = max(part.max for part in known)
    return json.dumps({"numRecords": file.rows, **found}, default=str)
