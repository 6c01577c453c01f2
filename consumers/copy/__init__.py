"""Copies of tables, or of parts of them, at a snapshot: to another PostgreSQL, and to files.

Calls consumers.lake, consumers.views, gdq.typed and the top modules of gdq; the loop of a replica and the command line
call it.
"""
