"""Places of files, in a folder or in an object store that a URI names: their file systems, and what errors say.

Credentials, region and endpoint of a store come from the environment, by the names that its own tools use.
"""

from __future__ import annotations

import os
import re
from functools import lru_cache
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from gdq.errors import GdqError

if TYPE_CHECKING:
    from pyarrow import fs

_S3 = ("s3", "s3a")
_S3_HINT = (
    "Credentials, region and endpoint of S3 come from the environment: AWS_ACCESS_KEY_ID, AWS_SECRET_ACCESS_KEY, "
    "AWS_REGION, AWS_ENDPOINT_URL."
)
_COLOURS = re.compile(r"\x1b\[[0-9;]*m")
_S3_ERROR = re.compile(r"<Code>(.*?)</Code>\s*<Message>(.*?)</Message>", re.DOTALL)


def find_system(place: str) -> tuple[fs.FileSystem, str]:
    """The file system of a URI or of an absolute path, and the path in it."""
    if "://" in place:
        return _find_store(place)
    from pyarrow import fs  # noqa: PLC0415 (an extra)

    return fs.LocalFileSystem(), place


def require_bucket(place: str) -> None:
    """GdqError if the bucket of a URI does not exist, where a listing would be empty."""
    from pyarrow import fs  # noqa: PLC0415

    system, path = find_system(place)
    bucket = path.partition("/")[0]
    if system.get_file_info(bucket).type == fs.FileType.NotFound:
        raise GdqError(f"{place}: there is no bucket {bucket}", hint=store_hint(place))


def plain_http(place: str) -> bool:
    """True if the environment has an endpoint without TLS for the store of a URI."""
    return urlsplit(place).scheme in _S3 and s3_environment().get("endpoint", "").startswith("http://")


def s3_environment() -> dict[str, str]:
    """The endpoint and the region of S3 that the environment names; what it does not name is not there."""
    names = {"endpoint": ("AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL"), "region": ("AWS_REGION", "AWS_DEFAULT_REGION")}
    found = {key: next(filter(None, map(os.environ.get, some)), "") for key, some in names.items()}
    return {key: value for key, value in found.items() if value}


def error_line(error: Exception) -> str:
    """What an error of a library says, as one line; of what a store of S3 said, its own words."""
    text = _COLOURS.sub("", str(error)).partition("\nDebug source:")[0].strip() or type(error).__name__
    if said := _S3_ERROR.search(text):
        return f"{said[2].rstrip('.')} ({said[1]})"
    first, *causes = text.splitlines()
    return ": ".join([first, *(one.strip(" ↳") for one in causes if one.lstrip().startswith("↳"))])


def store_hint(place: str) -> str | None:
    """What to look at after an error of the store of a place; None if it is no store that is known."""
    return _S3_HINT if urlsplit(place).scheme in _S3 else None


@lru_cache(maxsize=64)
def _find_store(uri: str) -> tuple[fs.FileSystem, str]:
    from pyarrow import fs  # noqa: PLC0415

    system, path = fs.FileSystem.from_uri(uri)
    return system, str(path)
