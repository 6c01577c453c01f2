"""Old snapshots of an Iceberg table, and the files that none of the others needs."""

from __future__ import annotations

from collections.abc import Callable
from datetime import UTC, datetime, timedelta

from pyarrow import fs
from pyiceberg.table import Table

# Where a file is, and in which file system, for its location in the metadata.
FindFile = Callable[[Table, str], tuple[fs.FileSystem, str]]


def expire_snapshots(table: Table, keep: float) -> bool:
    """Remove the snapshots that are older than `keep` seconds, but the present one; False if there are none."""
    table.metadata.properties["commit.retry.num-retries"] = "0"
    until = (datetime.now(UTC) - timedelta(seconds=keep)).timestamp() * 1000
    current = table.current_snapshot()
    named = {ref.snapshot_id for ref in table.metadata.refs.values()} | {current.snapshot_id if current else None}
    old = [one.snapshot_id for one in table.snapshots() if one.timestamp_ms < until and one.snapshot_id not in named]
    if old:
        table.maintenance.expire_snapshots().by_ids(old).commit()
    return bool(old)


def remove_unused_files(table: Table, keep: float, find: FindFile) -> None:
    """Delete data files and manifests that no snapshot has, and that are older than `keep` seconds.

    Those of expired snapshots, and those that a killed writer has left.
    """
    used = _used(table)
    until = datetime.now(UTC) - timedelta(seconds=keep)
    system, root = find(table, table.location())
    paths = {find(table, path)[1] for path in used}
    for folder, suffix in (("data", ".parquet"), ("metadata", ".avro")):
        selector = fs.FileSelector(f"{root}/{folder}", allow_not_found=True, recursive=True)
        for info in system.get_file_info(selector):
            if info.is_file and info.path.endswith(suffix) and info.path not in paths and info.mtime < until:
                system.delete_file(info.path)


def _used(table: Table) -> set[str]:
    """The files that the table's snapshots are made of."""
    found, manifests = set[str](), set[str]()
    for snapshot in table.snapshots():
        found.add(snapshot.manifest_list)
        for manifest in snapshot.manifests(table.io):
            if manifest.manifest_path not in manifests:
                manifests.add(manifest.manifest_path)
                entries = manifest.fetch_manifest_entry(table.io, discard_deleted=True)
                found.update(entry.data_file.file_path for entry in entries)
    return found | manifests
