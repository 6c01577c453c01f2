"""Spools: the batches of a consumer as Parquet files, written once, for any number of readers.

`gdq spool` writes them; gdq.open_spool() reads them without the server.
"""
