"""A queue of row changes inside PostgreSQL, and the consumers that read it.

    with gdq.Consumer(dsn, "orders", "mirror") as consumer:
        for batch in consumer.batches():
            for event in batch.events():
                print(event.op, event.table, event.new)

Importing gdq loads nothing but this file; a name loads its module when it is first used.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from gdq.batch import Batch
    from gdq.conninfo import connect
    from gdq.consumer import Consumer, register_consumer, unregister_consumer
    from gdq.errors import GdqError, ResyncRequired, StaleBatch, UnsupportedValue
    from gdq.installer.install import install, uninstall
    from gdq.member import register_member, unregister_member
    from gdq.message import Message, insert_event, insert_events
    from gdq.queue import add_table, alter_table_options, create_queue, drop_queue, force_tick, remove_table
    from gdq.retry import DeadLetter, Retry, dead_letters, purge_dead_letters, replay_dead_letters, set_retry_limit
    from gdq.source import BatchSource, Event, Position, SourceBatch

__version__ = "0.1.0"

__all__ = [
    "Batch",
    "BatchSource",
    "Consumer",
    "DeadLetter",
    "Event",
    "GdqError",
    "Message",
    "Position",
    "ResyncRequired",
    "Retry",
    "SourceBatch",
    "StaleBatch",
    "UnsupportedValue",
    "add_table",
    "alter_table_options",
    "connect",
    "create_queue",
    "dead_letters",
    "drop_queue",
    "force_tick",
    "insert_event",
    "insert_events",
    "install",
    "purge_dead_letters",
    "register_consumer",
    "register_member",
    "remove_table",
    "replay_dead_letters",
    "set_retry_limit",
    "uninstall",
    "unregister_consumer",
    "unregister_member",
]

_MODULES = {
    "batch": ["Batch"],
    "conninfo": ["connect"],
    "consumer": ["Consumer", "register_consumer", "unregister_consumer"],
    "errors": ["GdqError", "ResyncRequired", "StaleBatch", "UnsupportedValue"],
    "member": ["register_member", "unregister_member"],
    "message": ["Message", "insert_event", "insert_events"],
    "queue": ["add_table", "alter_table_options", "create_queue", "drop_queue", "force_tick", "remove_table"],
    "retry": ["DeadLetter", "Retry", "dead_letters", "purge_dead_letters", "replay_dead_letters", "set_retry_limit"],
    "installer.install": ["install", "uninstall"],
    "source": ["BatchSource", "Event", "Position", "SourceBatch"],
}
_MODULE_OF = {name: module for module, names in _MODULES.items() for name in names}


def __getattr__(name: str) -> Any:
    if name not in _MODULE_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_MODULE_OF[name]}"), name)
