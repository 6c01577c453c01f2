"""What has been hard for readers of changes, as tables and statements that a queue and a slot both watch.

The behaviours are those that the tests of other systems look for: test_decoding, subscriptions, wal2json, pglogical,
Debezium, Materialize and Slony. Each scenario has a schema of its own, named like it.
"""

from __future__ import annotations

from tests.support.slot_scenarios_rows import ROWS
from tests.support.slot_scenarios_transactions import TRANSACTIONS

SCENARIOS = (*ROWS, *TRANSACTIONS)
