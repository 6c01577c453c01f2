"""Logical replication slots, the other source of changes: a queue's batches and events, and views that a slot feeds.

Calls the client library in gdq, and slot/views also consumers.views; consumers.compare and consumers.refresh call it.
Bytes go from replication to pgoutput, assembly (whole transactions), events or rows, and source (batches).
"""
