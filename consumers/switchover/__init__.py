"""`gdq switchover`: the application's writes moved from the source of a replica to its target, and back.

It calls consumers.replica, consumers.table_compare and the client library in gdq; only the command line calls it. Start
reading at switch.py.
"""
