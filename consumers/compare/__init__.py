"""`gdq compare`: measures costs, delays and differences of a queue and a slot on a user's own tables.

Calls consumers.slot and the client library in gdq; only the command line calls it. Start reading at run.py.
"""
