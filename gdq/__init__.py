"""A queue of row changes inside PostgreSQL, and the consumers that read it.

    with gdq.Consumer(dsn, "orders", "mirror") as consumer:
        for batch in consumer.batches():
            for event in batch.events():
                print(event.op, event.table, event.new)

The names in `gdq.__all__` are the public ones, with the programs in gdq.consumers and what gdq.alembic and gdq.django
hold for these tools; the modules that hold them, and all else, are private and change without notice. The file
`__init__.pyi` beside this one lists the names. A name loads its module when it is first used, so `import gdq` is quick.
"""

from __future__ import annotations

import importlib
import re
from pathlib import Path
from typing import Any

__version__ = "0.1.0"

_STUB = Path(__file__).with_suffix(".pyi").read_text(encoding="utf-8")
_MODULE_OF = {name: module for module, name in re.findall(r"^from (\S+) import (\w+) as ", _STUB, re.MULTILINE)}

__all__ = sorted(_MODULE_OF, key=lambda name: (name.islower(), name))  # noqa: PLE0605 (classes first)


def __getattr__(name: str) -> Any:
    if name not in _MODULE_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(_MODULE_OF[name]), name)
