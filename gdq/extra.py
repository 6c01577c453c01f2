"""The extras of gdq: which Python package each brings, and an error that names the one to install."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

_EXTRAS = {
    "sqlglot": "views",
    "pyarrow": "arrow",
    "adbc_driver_manager": "arrow",
    "adbc_driver_postgresql": "arrow",
    "pyspark": "spark",
    "deltalake": "lake",
    "pyiceberg": "lake",
    "obstore": "lake",
    "prometheus_client": "metrics",
    "urllib3": "http",
    "nats": "nats",
    "confluent_kafka": "kafka",
    "fastavro": "avro",
}


def missing_extra(error: BaseException) -> str | None:
    """The extra of gdq that brings the module that could not be imported; None for other errors."""
    return _EXTRAS.get((error.name or "").partition(".")[0]) if isinstance(error, ModuleNotFoundError) else None


@contextlib.contextmanager
def extra_named() -> Iterator[None]:
    """Say in a ModuleNotFoundError which extra of gdq brings the package; also a decorator."""
    try:
        yield
    except ModuleNotFoundError as error:
        extra = missing_extra(error)
        if extra is None:
            raise
        package = str(error.name).partition(".")[0]
        message = f"this needs the Python package {package}: pip install 'gdq[{extra}]'"
        raise ModuleNotFoundError(message, name=error.name) from error
