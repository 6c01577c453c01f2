"""Lake tables as targets of views, without Spark: Delta, Iceberg and Parquet files, all made of one rewriter of files.

Calls consumers.views and gdq; consumers.spark and consumers.refresh call it.
"""
