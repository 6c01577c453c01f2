"""The folders of loads in chunks, in `_gdq_load` beside the lake tables: one for each table that a mirror loads."""

from __future__ import annotations

import hashlib
from contextlib import suppress
from dataclasses import dataclass

from pyarrow import fs

from gdq.consumers.lake.open import open_lake
from gdq.consumers.lake.table import LakeTable
from gdq.errors import GdqError
from gdq.object_store import error_line, store_hint
from gdq.view.lake_name import LakeName, lake_name

_FOLDER = "_gdq_load"


@dataclass(frozen=True, slots=True)
class LoadFolder:
    """A folder with the files of one load."""

    system: fs.FileSystem
    path: str

    def remove(self) -> None:
        """Delete the folder, if it is there."""
        with suppress(FileNotFoundError):
            self.system.delete_dir(self.path)


@dataclass(frozen=True, slots=True)
class LoadFolders:
    """The folders of the loads of one mirror, which is known by its `mark`, into the tables of `target`."""

    target: str
    mark: str

    def of(self, name: LakeName, lake: LakeTable) -> LoadFolder | None:
        """The folder for the load of one table; None in a catalog that does not say where its tables are."""
        found = lake.beside()
        if found is None:
            return None
        system, path = found
        return LoadFolder(system, f"{path}/{_FOLDER}/{name.place.rpartition('/')[2]}{self._ending}")

    def remove_all(self) -> None:
        """Delete what loads of the mirror have left, of whatever table; GdqError if the place cannot be reached."""
        some = lake_name(f"{self.target}/schema.table")
        assert some is not None
        found = open_lake(some, "the mirror", self.mark).beside()
        if found is None:
            return
        system, path = found
        try:
            for info in system.get_file_info(fs.FileSelector(f"{path}/{_FOLDER}", allow_not_found=True)):
                if info.type == fs.FileType.Directory and info.base_name.endswith(self._ending):
                    LoadFolder(system, info.path).remove()
        except OSError as error:
            raise GdqError(f"{path}/{_FOLDER}: {error_line(error)}", hint=store_hint(self.target)) from error

    @property
    def _ending(self) -> str:
        return f"-{hashlib.sha256(self.mark.encode()).hexdigest()[:12]}"
