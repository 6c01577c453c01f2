"""The schema registry: gives each schema its number, by the API of Confluent's."""

from __future__ import annotations

import json
from collections.abc import Mapping
from urllib.parse import quote

from gdq.consumers.relay.http_client import HttpClient, shown_answer
from gdq.consumers.relay.sink import Settings
from gdq.errors import GdqError, SinkUnavailable

_CONTENT_TYPE = "application/vnd.schemaregistry.v1+json"


class Registry:
    """Registers schemas, each once for a subject, and keeps the numbers. Settings: those of HttpClient.

    `read_only`: schemas are looked up alone, for a registry that others fill.
    """

    def __init__(self, url: str, given: Mapping[str, str], *, read_only: bool = False) -> None:
        if not url.startswith(("http://", "https://")):
            raise GdqError(f"{url!r} is no address of a schema registry", hint="Such as http://host:8081.")
        self._client = HttpClient(url.rstrip("/"), Settings("the registry", given))
        self._read_only = read_only
        self._numbers: dict[tuple[str, str], int] = {}

    def number(self, subject: str, schema: str) -> int:
        """The number of a schema, registered as the newest version of a subject unless it has it.

        SinkUnavailable if the registry does not answer, or refuses: because the schema does not go with the versions
        that are there, as it asks, or for want of a right; if it is only read, because it does not have the schema.
        """
        found = self._numbers.get((subject, schema))
        if found is None:
            found = self._numbers[subject, schema] = self._ask(subject, schema)
        return found

    def _ask(self, subject: str, schema: str) -> int:
        from urllib3 import exceptions  # noqa: PLC0415 (of an extra)

        url = f"{self._client.url}/subjects/{quote(subject, safe='')}{'' if self._read_only else '/versions'}"
        body = json.dumps({"schema": schema}).encode()
        try:
            answer = self._client.request("POST", url, body, {"Content-Type": _CONTENT_TYPE, "Accept": _CONTENT_TYPE})
        except exceptions.HTTPError as error:
            raise SinkUnavailable(f"schema registry unreachable: {error}") from error
        try:
            found = json.loads(answer.data)["id"] if answer.status == 200 else None
        except (ValueError, TypeError, KeyError):
            found = None
        if self._read_only and answer.status == 404:
            raise SinkUnavailable(f"the schema registry lacks a schema of {subject}; have it registered: {schema}")
        if not isinstance(found, int):
            raise SinkUnavailable(f"the schema registry refuses a schema of {subject}: {shown_answer(answer)}")
        return found
