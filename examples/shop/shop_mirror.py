"""A handler for `gdq consume shop mirror shop_mirror:apply`: it keeps a copy of the table orders, exactly once."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from psycopg import Connection

import gdq


def apply(connection: Connection[Any], events: Iterable[gdq.Event]) -> None:
    """Write the changes of a batch. gdq commits them with the batch: do not commit here."""
    for event in events:
        if event.table != "public.orders":
            continue
        # an update may change the key: the row under the old one goes
        if event.old is not None:
            connection.execute("delete from public.mirror where id = %s", [event.old["id"]])
        if event.op == "truncate":
            connection.execute("delete from public.mirror")
        if event.new is not None:
            connection.execute(
                "insert into public.mirror (id, customer, amount) values (%(id)s, %(customer)s, %(amount)s)", event.new
            )
