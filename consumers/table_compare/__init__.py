"""`gdq compare-tables` and `gdq repair-tables`: tables of two databases compared row by row, and made equal.

Calls consumers.replica, consumers.copy, consumers.views and the client library in gdq; only the command line calls it.
Start reading at compare.py.
"""
