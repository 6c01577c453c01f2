"""`gdq compare`: a queue and a slot beside each other on a user's own tables, their costs, delays and differences.

Calls consumers.slot and the client library in gdq; only the command line calls it. run.py is where a comparison begins.
"""
