"""Apache Spark: the data sources `gdq` and `gdq_stage`, and the engines that compute views with it.

It calls consumers.lake and the kernel consumers.views; consumers.refresh.engines is the one module that calls it.
"""
