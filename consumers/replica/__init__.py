"""`gdq replicate`: keeps tables of another PostgreSQL database equal to captured tables, batch by batch.

It calls consumers.views and the client library in gdq; only the command line calls it. Start reading at replica.py.
"""
