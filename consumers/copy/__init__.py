"""Copies of tables, or of parts of them, in another PostgreSQL or in files: whole at one snapshot, or in chunks.

Calls consumers.lake, consumers.views, gdq.typed and the top modules of gdq; the loop of a replica and the command line
call it.
"""
