"""Lake tables as targets of views: Delta, Iceberg and Parquet, written without Spark, and the engine that fills them.

It calls the kernel consumers.views; open_lake() in lake.open is the door, and knows the formats.
"""
