"""An Apache Iceberg table as the target of a view, by the library pyiceberg: no Spark, no jar.

The position is a property of the snapshot that moved it, in the same commit as the files. A commit is for the snapshot
that was read and fails if the table has another by then. The library's own retries would commit onto the other one, so
they are switched off.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

import pyarrow as pa
from pyarrow import fs
from pyiceberg import exceptions
from pyiceberg.catalog import Catalog, MetastoreCatalog, load_catalog
from pyiceberg.exceptions import (
    CommitFailedException,
    NamespaceAlreadyExistsError,
    NoSuchNamespaceError,
    NoSuchTableError,
    TableAlreadyExistsError,
)
from pyiceberg.io.pyarrow import PyArrowFileIO, parquet_file_to_data_file, pyarrow_to_schema, schema_to_pyarrow
from pyiceberg.manifest import DataFile as IcebergFile
from pyiceberg.schema import Schema
from pyiceberg.table import Table, Transaction
from pyiceberg.table.snapshots import Operation, Snapshot
from sqlalchemy.exc import SQLAlchemyError

from gdq.consumers.lake.columns import EvolvedColumn, with_numbers
from gdq.consumers.lake.data_files import DataFile, remove_data_files
from gdq.consumers.lake.files import ArrowDifference, RewrittenDataFiles, evolved, rewrite_data_files
from gdq.consumers.lake.iceberg_columns import can_evolve, evolve_columns
from gdq.consumers.lake.iceberg_expiry import expire_snapshots, remove_unused_files
from gdq.consumers.lake.table import ICEBERG_CATALOG, OwnedLakeTable
from gdq.consumers.views.signals import Diverged
from gdq.consumers.views.target import StoredPosition, TargetState
from gdq.errors import GdqError, RefreshConflict
from gdq.object_store import error_line, s3_environment, store_hint

ICEBERG_STATE_KEY = "gdq.position"
_OWNER = "gdq.source"
# Branches that Spark writes onto (consumers/spark/lake_iceberg.py).
ICEBERG_BRANCH = "gdq_refresh_"
_PROPERTIES = {
    "write.metadata.delete-after-commit.enabled": "true",
    "write.metadata.previous-versions-max": "100",
}


class IcebergLake(OwnedLakeTable):
    """The Iceberg table `name` as the target of one view."""

    @property
    def library_errors(self) -> tuple[type[Exception], ...]:
        listed = [one for one in vars(exceptions).values() if isinstance(one, type) and issubclass(one, Exception)]
        return (*listed, SQLAlchemyError, pa.ArrowException)

    def state(self) -> TargetState:
        with self.opened() as (catalog, table):
            if table is None and isinstance(catalog, MetastoreCatalog):
                _reach_warehouse(catalog)  # others have a server that gives the right to the store with a table
            return self.state_of(table)

    def commit(self, change: ArrowDifference, stored: StoredPosition | None, new: StoredPosition) -> int:
        def attempt() -> int:
            with self.opened(make=change.kind == "full") as (catalog, table):
                self.check(self.state_of(table), stored, change.kind)
                return self._change(table or self.create(catalog, change.schema), change, new)

        return self.commit_onto(CommitFailedException, attempt)

    def schema(self) -> pa.Schema:
        with self.opened() as (_, table):
            if table is None:
                raise Diverged(f"{self.name} is gone")
            return _columns(table)

    def file_schema(self, schema: pa.Schema) -> pa.Schema:
        with self.opened() as (_, table):
            if table is None:
                return with_numbers(schema, range(1, len(schema) + 1))
            if has_iceberg_columns(table, schema):
                return with_numbers(schema, [table.schema().find_field(name).field_id for name in schema.names])
            first = table.metadata.last_column_id + 1
            return with_numbers(schema, range(first, first + len(schema)))

    def evolve(
        self, columns: Sequence[EvolvedColumn], stored: StoredPosition, new: StoredPosition, *, adopt: bool = False
    ) -> None:
        def attempt() -> int:
            with self.opened() as (_, table):
                self.check(self.state_of(table), stored, "full" if adopt else "signed")
                if table is None:
                    raise Diverged(f"{self.name} is gone")
                if adopt or not can_evolve(_columns(table), columns):
                    return self._change(table, evolved(self.scan, columns), new)
                table.metadata.properties["commit.retry.num-retries"] = "0"
                transaction = table.transaction()
                evolve_columns(transaction, _columns(table), columns)
                self._commit(transaction, table, [], RewrittenDataFiles([], [], 0, 0), new.text)
                return 0

        self.commit_onto(CommitFailedException, attempt)

    def scan(self) -> Iterator[pa.RecordBatch]:
        with self.opened() as (_, table):
            if table is None:
                raise Diverged(f"{self.name} is gone")
            schema = _columns(table)
            for batch in table.scan().to_arrow_batch_reader():
                yield from pa.Table.from_batches([batch]).cast(schema).to_batches()

    def sweep(self) -> None:
        """Remove leftover branches; old snapshots and their files are for the table's owner to expire."""
        with self.opened() as (_, table):
            left = [] if table is None else [name for name in table.refs() if name.startswith(ICEBERG_BRANCH)]
            if table is None or not left:
                return
            # a conflict does no harm: the next sweep removes the branches
            with suppress(CommitFailedException):
                changes = table.manage_snapshots()
                for name in left:
                    changes = changes.remove_branch(name)
                changes.commit()

    def expire(self, keep: float) -> None:
        with self.opened() as (_, table):
            current = None if table is None else table.current_snapshot()
            # a compaction by others is not the view's commit: the position is in a snapshot before it
            if table is None or current is None or not _properties(current).get(ICEBERG_STATE_KEY):
                return
            # a conflict does no harm: the next time removes them
            with suppress(CommitFailedException):
                if expire_snapshots(table, keep):
                    remove_unused_files(table.refresh(), keep, _system)

    def beside(self) -> tuple[fs.FileSystem, str] | None:
        where = self.name.iceberg[0]
        if where.startswith("/"):
            return super().beside()
        with _named_catalog(where) as catalog:
            return _warehouse(catalog)

    def drop(self) -> None:
        with self.opened() as (catalog, table):
            if catalog is not None and table is not None:
                catalog.purge_table(self.name.iceberg[1])

    @contextmanager
    def opened(self, *, make: bool = False) -> Iterator[tuple[Catalog | None, Table | None]]:
        """The catalog and the table, each None if missing; GdqError if the table is not this view's."""
        where, name = self.name.iceberg
        folder = Path(where) if where.startswith("/") else None
        if folder is not None and not make and not (folder / ICEBERG_CATALOG).exists():
            yield None, None
            return
        if folder is None:
            catalog = _named_catalog(where)
        else:
            folder.mkdir(parents=True, exist_ok=True)
            catalog = load_catalog(
                "gdq", type="sql", uri=f"sqlite:///{folder / ICEBERG_CATALOG}", warehouse=folder.as_uri()
            )
        with catalog:
            try:
                table = catalog.load_table(name)
            except (NoSuchTableError, NoSuchNamespaceError):
                yield catalog, None
                return
            if table.properties.get(_OWNER) != self.source:
                raise self.foreign_error()
            yield catalog, table

    def create(self, catalog: Catalog | None, schema: pa.Schema) -> Table:
        """Create the table, without a snapshot."""
        if catalog is None:
            raise Diverged(f"{self.name} is gone")
        name = self.name.iceberg[1]
        with suppress(NamespaceAlreadyExistsError):
            catalog.create_namespace(name.rpartition(".")[0])
        properties = _PROPERTIES | {_OWNER: self.source, "comment": f"gdq: target of {self.owner}"}
        try:
            return catalog.create_table(name, schema, properties=properties)
        except TableAlreadyExistsError as error:
            raise RefreshConflict(f"{self.name} was made by another meanwhile") from error

    def state_of(self, table: Table | None) -> TargetState:
        """The state of the view's table; `table` is None if there is no table."""
        foreign = None
        if table is None:
            return TargetState(None)
        snapshot = table.current_snapshot()
        if snapshot is None:
            return TargetState(None)
        while snapshot is not None:
            foreign = foreign or self._altered(table, snapshot)
            text = _properties(snapshot).get(ICEBERG_STATE_KEY)
            if text == "":
                return TargetState(None)  # killed at the first load
            if text is not None and (stored := StoredPosition.parse(text)).source == self.source:
                return TargetState(stored, foreign)
            if snapshot.summary is None or snapshot.summary.operation != Operation.REPLACE:
                operation = "a commit" if snapshot.summary is None else snapshot.summary.operation.value
                foreign = f"{operation} in snapshot {snapshot.snapshot_id} of {self.name}"
            parent = snapshot.parent_snapshot_id
            snapshot = None if parent is None else table.snapshot_by_id(parent)
        return self.lost(foreign or f"the snapshots of {self.name} no longer hold its position")

    def _altered(self, table: Table, snapshot: Snapshot) -> str | None:
        """What has changed since a snapshot although it made no snapshot itself: partitions, and columns by number.

        A column that is dropped and added again, or has swapped its name, has the same name and other values.
        """
        if table.spec().fields:
            return f"{self.name} has partitions"
        then = next((one for one in table.metadata.schemas if one.schema_id == snapshot.schema_id), None)
        if then is None or _numbered(then) != _numbered(table.schema()):
            return f"the columns of {self.name} are others than in snapshot {snapshot.snapshot_id}"
        return None

    def _change(self, table: Table, change: ArrowDifference, new: StoredPosition) -> int:
        # a setting of this object only, not of the table
        table.metadata.properties["commit.retry.num-retries"] = "0"
        system, folder = _system(table, f"{table.location()}/data")
        system.create_dir(folder, recursive=True)
        known = self._files(table, all_go=change.kind == "full")
        transaction = table.transaction()
        if change.kind == "full":
            _set_columns(transaction, table, change.schema)
            with transaction.update_spec() as spec:
                for part in table.spec().fields:
                    spec.remove_field(part.name)
        else:
            change = change.arranged(_columns(table).names)
            if not has_iceberg_columns(table, change.schema):
                raise Diverged(f"the columns of {self.name} are others")
        now = transaction.table_metadata.schema()
        schema = with_numbers(change.schema, [now.find_field(name).field_id for name in change.schema.names])
        done = rewrite_data_files(system, folder, list(known), change, schema)
        try:
            self._commit(transaction, table, [known[file] for file in done.removed], done, new.text)
        except CommitFailedException:
            remove_data_files(system, done.added)
            raise
        return done.deleted + done.inserted

    def _commit(
        self,
        transaction: Transaction,
        table: Table,
        removed: list[IcebergFile],
        done: RewrittenDataFiles,
        position: str,
    ) -> None:
        root, local = table.location(), _system(table, table.location())[1]
        with transaction.update_snapshot(snapshot_properties={ICEBERG_STATE_KEY: position}).overwrite() as producer:
            for old in removed:
                producer.delete_data_file(old)
            for file in done.added:
                where = root + file.path.removeprefix(local)
                producer.append_data_file(parquet_file_to_data_file(table.io, transaction.table_metadata, where))
        transaction.commit_transaction()

    def _files(self, table: Table, *, all_go: bool) -> dict[DataFile, IcebergFile]:
        """The data files; Diverged if another writer's delete files apply to them, unless `all_go`."""
        found = {}
        for task in table.scan().plan_files():
            if task.delete_files and not all_go:
                raise Diverged(f"{self.name} has rows deleted by another")
            file = task.file
            _, path = _system(table, file.file_path)
            found[DataFile(path, file.file_size_in_bytes, file.record_count)] = file
        return found


def _named_catalog(name: str) -> Catalog:
    """The catalog that pyiceberg's configuration names, with what the environment says of S3 unless it says so too."""
    catalog = load_catalog(name)
    lacking = {key: value for key, value in s3_environment().items() if f"s3.{key}" not in catalog.properties}
    if not lacking:
        return catalog
    catalog.close()
    return load_catalog(name, **{f"s3.{key}": value for key, value in lacking.items()})


def _warehouse(catalog: Catalog) -> tuple[fs.FileSystem, str] | None:
    """The folder that a catalog has its tables in; None if its server gives each table a place, and the right to it."""
    warehouse = catalog.properties.get("warehouse", "")
    if not warehouse or not isinstance(catalog, MetastoreCatalog):
        return None
    scheme, host, path = PyArrowFileIO.parse_location(warehouse)
    return PyArrowFileIO(catalog.properties).fs_by_scheme(scheme, host), path.rstrip("/")


def _reach_warehouse(catalog: Catalog) -> None:
    """GdqError if a catalog has its tables in an object store that cannot be reached: no table of it says so yet."""
    warehouse = catalog.properties.get("warehouse", "")
    scheme, host, path = PyArrowFileIO.parse_location(warehouse)
    if not host or scheme in ("file", "hdfs", "viewfs"):
        return
    try:
        system = PyArrowFileIO(catalog.properties).fs_by_scheme(scheme, host)
        # a store refuses a listing in its own words, as it does not the question for one object
        system.get_file_info(fs.FileSelector(path, allow_not_found=True))
        found = system.get_file_info(host)
    except OSError as error:
        raise GdqError(f"{warehouse}: {error_line(error)}", hint=store_hint(warehouse)) from error
    if found.type == fs.FileType.NotFound:
        raise GdqError(f"{warehouse}: there is no bucket {host}", hint=store_hint(warehouse))


def _numbered(schema: Schema) -> list[tuple[int, str, str, bool]]:
    return [(field.field_id, field.name, str(field.field_type), field.required) for field in schema.fields]


def _set_columns(transaction: Transaction, table: Table, schema: pa.Schema) -> None:
    """Change the table's columns to those of `schema`, in the same commit, unless they are equal."""
    if has_iceberg_columns(table, schema):
        return
    numbered = [field.with_metadata({"PARQUET:field_id": str(n)}) for n, field in enumerate(schema, 1)]
    with transaction.update_schema(allow_incompatible_changes=True) as update:
        for old in table.schema().fields:
            update.delete_column(old.name)
        for new in pyarrow_to_schema(pa.schema(numbered)).fields:
            update.add_column(new.name, new.field_type)


def has_iceberg_columns(table: Table, schema: pa.Schema) -> bool:
    """True if the table has these columns in this order."""
    return bool(_columns(table) == schema)


def _columns(table: Table) -> pa.Schema:
    return _small(schema_to_pyarrow(table.schema(), include_field_ids=False))


def _small(schema: pa.Schema) -> pa.Schema:
    """The schema with string and binary in place of large_string and large_binary."""
    small = {pa.large_string(): pa.string(), pa.large_binary(): pa.binary()}
    return pa.schema([pa.field(field.name, small.get(field.type, field.type)) for field in schema])


def _properties(snapshot: Snapshot) -> dict[str, str]:
    return {} if snapshot.summary is None else snapshot.summary.additional_properties


def _system(table: Table, location: str) -> tuple[fs.FileSystem, str]:
    """The file system of a location, and the path in that file system."""
    scheme, host, path = PyArrowFileIO.parse_location(location)
    io = table.io if isinstance(table.io, PyArrowFileIO) else PyArrowFileIO(table.io.properties)
    return io.fs_by_scheme(scheme, host), path
