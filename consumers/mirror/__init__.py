"""Mirrors: captured tables kept equal as Delta, Iceberg or Parquet tables, which this process writes without a JVM.

Mirror in mirror.mirror is the door. It calls consumers.lake for the tables, and is a consumer of the queue.
"""
