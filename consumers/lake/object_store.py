"""Puts into an object store that overwrite nothing, which keep two writers of a lake table apart."""

from __future__ import annotations

import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress

from obstore.exceptions import AlreadyExistsError, BaseError
from obstore.store import ObjectStore, from_url

from gdq.errors import GdqError
from gdq.object_store import error_line, plain_http

# What a put raises where something is.
ObjectExists = AlreadyExistsError


def put_new(place: str, path: str, data: bytes) -> None:
    """Make an object below a URI; ObjectExists if there is one, which stays as it is. Other errors are OSError."""
    with _store(place) as store:
        store.put(path, data, mode="create")


def require_conditional_put(place: str) -> None:
    """GdqError if the store overwrites an object although it shall not: a commit could overwrite another's."""
    path = f"_gdq/put-{uuid.uuid4()}"
    put_new(place, path, b"1")
    try:
        with suppress(ObjectExists):
            put_new(place, path, b"2")
            raise GdqError(
                f"the object store of {place} overwrites what is there although it is asked not to (If-None-Match), so "
                "that of two commits one would be lost",
                hint="Take a store with conditional puts.",
            )
    finally:
        with _store(place) as store:
            store.delete(path)


@contextmanager
def _store(place: str) -> Iterator[ObjectStore]:
    try:
        yield from_url(place, client_options={"allow_http": plain_http(place)})
    except ObjectExists:
        raise
    except BaseError as error:
        raise OSError(error_line(error)) from error
